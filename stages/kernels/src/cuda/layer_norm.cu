// Layer normalisation: one block for each row.

KERNEL(layer_norm, (const float* x, const float* weight, const float* bias, float* out, float* statistics, int d)) {
    SHARED(float, scratch, THREADS + 16);
    u64 row = blockIdx.x;
    x += row * d;
    out += row * d;
    float sum = 0;
    for (int i = threadIdx.x; i < d; i += THREADS) sum += x[i];
    float mean = block_sum(sum, scratch) / d;
    float squares = 0;
    for (int i = threadIdx.x; i < d; i += THREADS) squares += (x[i] - mean) * (x[i] - mean);
    float inverse = 1.0f / sqrtf(block_sum(squares, scratch) / d + 1e-5f);
    if (threadIdx.x == 0) {
        statistics[2 * row] = mean;
        statistics[2 * row + 1] = inverse;
    }
    for (int i = threadIdx.x; i < d; i += THREADS) out[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
}

KERNEL(layer_norm_dx, (const float* x, const float* statistics, const float* weight, const float* dy,
                       const float* residual, float* out, int d)) {
    SHARED(float, scratch, THREADS + 16);
    u64 row = blockIdx.x, start = row * d;
    float mean = statistics[2 * row], inverse = statistics[2 * row + 1];
    float sum = 0, along = 0;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float scaled = dy[start + i] * weight[i];
        sum += scaled;
        along += scaled * (x[start + i] - mean);
    }
    sum = block_sum(sum, scratch) / d;
    along = block_sum(along, scratch) * inverse / d;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float normal = (x[start + i] - mean) * inverse;
        float around = residual ? residual[start + i] : 0.0f;
        out[start + i] = around + inverse * (dy[start + i] * weight[i] - sum - normal * along);
    }
}

// Columns 0 to d: gradient of the weight; d to 2d: of the bias.
KERNEL(layer_norm_weights, (const float* x, const float* statistics, const float* dy, float* partial, int rows, int d,
                            int chunk)) {
    SHARED(float, scratch, THREADS);
    partial_sums(rows, 2 * d, chunk, partial, scratch, [=](int row, int column) {
        if (column >= d) return dy[(u64)row * d + column - d];
        u64 at = (u64)row * d + column;
        return dy[at] * ((x[at] - statistics[2 * row]) * statistics[2 * row + 1]);
    });
}
