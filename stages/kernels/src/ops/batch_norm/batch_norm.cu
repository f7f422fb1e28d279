// Batch normalisation over rows, followed by SiLU.

// Sums in 64 bits: of x, or with a mean of (x - mean)^2.
KERNEL(column_moment, (const float* x, const float* mean, double* partial, int rows, int width, int chunk)) {
    SHARED(double, scratch, THREADS);
    partial_sums(rows, width, chunk, partial, scratch, [=](int row, int column) {
        float value = x[(u64)row * width + column];
        if (!mean) return (double)value;
        double away = (double)value - (double)mean[column];
        return away * away;
    });
}

// A column's sum over all chunks of `partial` (chunks, width), in order.
DEVICE double sum_of_chunks(const double* partial, int chunks, int width, int column) {
    double sum = partial[column];
    for (int chunk = 1; chunk < chunks; chunk++) sum += partial[(u64)chunk * width + column];
    return sum;
}

// Means over `rows` rows, in 64 bits and rounded.
KERNEL(column_mean, (const double* partial, double* exact, float* mean, int chunks, int width, int rows)) {
    int column = element();
    if (column >= width) return;
    exact[column] = sum_of_chunks(partial, chunks, width, column) / rows;
    mean[column] = (float)exact[column];
}

// From the sums of the squared distances from the rounded means: 1 / sqrt(variance + epsilon), and the running statistics
// moved by `momentum` towards those of the batch, the variance towards `unbiased` times it.
KERNEL(batch_statistics, (const double* partial, const double* exact, const float* mean, const float* running_mean,
                          const float* running_variance, float* inverse, float* moved_mean, float* moved_variance,
                          int chunks, int width, int rows, double epsilon, double momentum, double unbiased)) {
    int column = element();
    if (column >= width) return;
    // The rest of the mean is taken off.
    double rest = exact[column] - (double)mean[column];
    double variance = sum_of_chunks(partial, chunks, width, column) / rows - rest * rest;
    inverse[column] = (float)(1.0 / sqrt(variance + epsilon));
    double kept = 1.0 - momentum;
    moved_mean[column] = (float)(kept * (double)running_mean[column] + momentum * exact[column]);
    moved_variance[column] = (float)(kept * (double)running_variance[column] + momentum * variance * unbiased);
}

// From the same sums, in 64 bits: the mean of each column, its variance, and the number of rows.
KERNEL(column_moments, (const double* partial, const double* exact, const float* mean, double* moments, int chunks,
                        int width, int rows)) {
    int column = element();
    if (column > width) return;
    if (column == width) {
        moments[2 * width] = rows;
        return;
    }
    double rest = exact[column] - (double)mean[column];
    moments[column] = exact[column];
    moments[width + column] = sum_of_chunks(partial, chunks, width, column) / rows - rest * rest;
}

// The statistics of the rows behind `count` moments (count, 2 width + 1), as `batch_statistics` gives them.
KERNEL(joined_statistics, (const double* moments, const float* running_mean, const float* running_variance, float* mean,
                           float* inverse, float* moved_mean, float* moved_variance, int count, int width,
                           double epsilon, double momentum)) {
    int column = element();
    if (column >= width) return;
    u64 size = 2 * (u64)width + 1;
    double rows = 0.0, exact = 0.0, variance = 0.0;
    for (int part = 0; part < count; part++) rows += moments[part * size + 2 * width];
    for (int part = 0; part < count; part++) exact += moments[part * size + 2 * width] * moments[part * size + column];
    exact /= rows;
    for (int part = 0; part < count; part++) {
        double away = moments[part * size + column] - exact;
        variance += moments[part * size + 2 * width] * (moments[part * size + width + column] + away * away);
    }
    variance /= rows;
    double unbiased = rows / (rows > 2.0 ? rows - 1.0 : 1.0), kept = 1.0 - momentum;
    mean[column] = (float)exact;
    inverse[column] = (float)(1.0 / sqrt(variance + epsilon));
    moved_mean[column] = (float)(kept * (double)running_mean[column] + momentum * exact);
    moved_variance[column] = (float)(kept * (double)running_variance[column] + momentum * variance * unbiased);
}

KERNEL(inverse_deviation, (const float* variance, float* inverse, int width, double epsilon)) {
    int column = element();
    if (column < width) inverse[column] = (float)(1.0 / sqrt((double)variance[column] + epsilon));
}

// factor = weight * inverse, offset = bias - mean * factor: (2, width).
KERNEL(batch_norm_affine, (const float* mean, const float* inverse, const float* weight, const float* bias,
                           float* affine, int width)) {
    int column = element();
    if (column >= width) return;
    double factor = (double)weight[column] * (double)inverse[column];
    affine[column] = (float)factor;
    affine[width + column] = (float)((double)bias[column] - (double)mean[column] * factor);
}

KERNEL(normalise_silu, (const float* x, const float* affine, float* out, u64 n, int width)) {
    u64 i = element();
    if (i >= n) return;
    int column = i % width;
    float z = x[i] * affine[column] + affine[width + column];
    out[i] = z * sigmoid(z);
}

// Columns 0 to width: sum of dz (x - mean); width to 2 width: sum of dz.
KERNEL(normalise_silu_sums, (const float* x, const float* affine, const float* mean, const float* dy, float* partial,
                             int rows, int width, int chunk)) {
    SHARED(float, scratch, THREADS);
    partial_sums(rows, 2 * width, chunk, partial, scratch, [=](int row, int both) {
        int column = both < width ? both : both - width;
        u64 at = (u64)row * width + column;
        float dz = dy[at] * silu_slope(x[at] * affine[column] + affine[width + column]);
        return both < width ? dz * (x[at] - mean[column]) : dz;
    });
}

// Adds up the sums of all chunks, in order; that for the weight gets its inverse deviation. And what dx needs of both
// sums: (2, width).
KERNEL(normalise_silu_level, (const float* partial, const float* inverse, float* dw, float* db, float* level, int chunks,
                              int width, float rows, int batch_statistics)) {
    int column = element();
    if (column >= width) return;
    float of_weight = partial[column], of_bias = partial[width + column];
    for (int chunk = 1; chunk < chunks; chunk++) {
        const float* sums = partial + (u64)chunk * 2 * width;
        of_weight += sums[column];
        of_bias += sums[width + column];
    }
    of_weight *= inverse[column];
    dw[column] = of_weight;
    db[column] = of_bias;
    level[column] = batch_statistics ? of_bias / rows : 0.0f;
    level[width + column] = batch_statistics ? of_weight * inverse[column] / rows : 0.0f;
}

// What dx needs where the statistics are those of several parts, whose sums are (count, 2 width + 1): gradients of the
// weight, of the bias, and the number of rows.
KERNEL(joined_level, (const double* parts, const float* inverse, float* level, int count, int width)) {
    int column = element();
    if (column >= width) return;
    u64 size = 2 * (u64)width + 1;
    double rows = 0.0, of_weight = 0.0, of_bias = 0.0;
    for (int part = 0; part < count; part++) {
        rows += parts[part * size + 2 * width];
        of_weight += parts[part * size + column];
        of_bias += parts[part * size + width + column];
    }
    level[column] = (float)(of_bias / rows);
    level[width + column] = (float)(of_weight * (double)inverse[column] / rows);
}

KERNEL(normalise_silu_dx, (const float* x, const float* affine, const float* mean, const float* level, const float* dy,
                           float* out, u64 n, int width)) {
    u64 i = element();
    if (i >= n) return;
    int column = i % width;
    float factor = affine[column];
    float dz = dy[i] * silu_slope(x[i] * factor + affine[width + column]);
    out[i] = factor * (dz - level[column] - (x[i] - mean[column]) * level[width + column]);
}
