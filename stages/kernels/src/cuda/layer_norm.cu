// Layer normalisation: one block for each row.

// The row of `x` normalised, by all threads of the block.
DEVICE void normalise(const float* x, const float* weight, const float* bias, float* out, bf16* out_bf16,
                      float* statistics, int d, float* scratch) {
    u64 row = blockIdx.x;
    u64 start = row * d;
    x += start;
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
    for (int i = threadIdx.x; i < d; i += THREADS)
        put(out, out_bf16, start + i, (x[i] - mean) * inverse * weight[i] + bias[i]);
}

KERNEL(layer_norm, (const float* x, const float* weight, const float* bias, float* out, bf16* out_bf16,
                    float* statistics, int d)) {
    SHARED(float, scratch, THREADS + 16);
    normalise(x, weight, bias, out, out_bf16, statistics, d, scratch);
}

// sum = x + factor * drop(y), and that normalised. A thread reads only what it has written itself.
KERNEL(add_and_norm, (const float* x, const float* y, const float* weight, const float* bias, float* sum, float* out,
                      bf16* out_bf16, float* statistics, int d, float factor, u64 key, u64 threshold)) {
    SHARED(float, scratch, THREADS + 16);
    u64 start = (u64)blockIdx.x * d;
    for (int column = threadIdx.x; column < d; column += THREADS) {
        u64 i = start + column;
        sum[i] = x[i] + (keeps(key, threshold, i) ? factor * y[i] : 0.0f);
    }
    normalise(sum, weight, bias, out, out_bf16, statistics, d, scratch);
}

// sum = x + factor * drop(y); out is the sum normalised, and next is out normalised by other parameters.
KERNEL(add_and_norm_twice, (const float* x, const float* y, const float* weight, const float* bias,
                            const float* next_weight, const float* next_bias, float* sum, float* out, float* next,
                            bf16* next_bf16, float* statistics, float* next_statistics, int d, float factor, u64 key,
                            u64 threshold)) {
    SHARED(float, scratch, THREADS + 16);
    u64 start = (u64)blockIdx.x * d;
    for (int column = threadIdx.x; column < d; column += THREADS) {
        u64 i = start + column;
        sum[i] = x[i] + (keeps(key, threshold, i) ? factor * y[i] : 0.0f);
    }
    normalise(sum, weight, bias, out, nullptr, statistics, d, scratch);
    normalise(out, next_weight, next_bias, next, next_bf16, next_statistics, d, scratch);
}

// Columns of a row that a thread has in registers.
#define COLUMNS 8

// The gradient of a row of x, given to `result(i, dx)` for each column that the thread has.
template <class Result>
DEVICE void row_gradient(int row, const float* x, const float* statistics, const float* weight, const float* dy,
                         const float* residual, int d, float* scratch, Result result) {
    u64 start = (u64)row * d;
    float mean = statistics[2 * row], inverse = statistics[2 * row + 1];
    float sum = 0, along = 0, scaled[COLUMNS], centred[COLUMNS];
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        int i = n * THREADS + threadIdx.x;
        scaled[n] = i < d ? dy[start + i] * weight[i] : 0.0f;
        centred[n] = i < d ? x[start + i] - mean : 0.0f;
    }
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        sum += scaled[n];
        along += scaled[n] * centred[n];
    }
    for (int i = COLUMNS * THREADS + threadIdx.x; i < d; i += THREADS) {
        float rest = dy[start + i] * weight[i];
        sum += rest;
        along += rest * (x[start + i] - mean);
    }
    sum = block_sum(sum, scratch) / d;
    along = block_sum(along, scratch) * inverse / d;
    auto gradient = [=](int i, float scaled, float centred) {
        float around = residual ? residual[start + i] : 0.0f;
        result(start + i, around + inverse * (scaled - sum - centred * inverse * along));
    };
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        int i = n * THREADS + threadIdx.x;
        if (i < d) gradient(i, scaled[n], centred[n]);
    }
    for (int i = COLUMNS * THREADS + threadIdx.x; i < d; i += THREADS)
        gradient(i, dy[start + i] * weight[i], x[start + i] - mean);
}

// Over the rows from `first` to `end`: columns 0 to d of `partial` are the gradient of the weight, d to 2d of the bias.
DEVICE void weight_gradients(int first, int end, const float* x, const float* statistics, const float* dy, float* partial,
                             int d) {
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float of_weight = 0, of_bias = 0;
        UNROLL(4)
        for (int row = first; row < end; row++) {
            u64 at = (u64)row * d + i;
            of_weight += dy[at] * ((x[at] - statistics[2 * row]) * statistics[2 * row + 1]);
            of_bias += dy[at];
        }
        partial[i] = of_weight;
        partial[d + i] = of_bias;
    }
}

// A block has `chunk` rows, and a row of `partial`. With `dropped` also factor * drop(out).
KERNEL(layer_norm_backward, (const float* x, const float* statistics, const float* weight, const float* dy,
                             const float* residual, float* out, float* dropped, bf16* dropped_bf16, float* partial,
                             int rows, int d, int chunk, float factor, u64 key, u64 threshold)) {
    SHARED(float, scratch, THREADS + 16);
    int first = blockIdx.x * chunk, end = first + chunk < rows ? first + chunk : rows;
    for (int row = first; row < end; row++)
        row_gradient(row, x, statistics, weight, dy, residual, d, scratch, [=](u64 at, float dx) {
            out[at] = dx;
            if (dropped || dropped_bf16) put(dropped, dropped_bf16, at, keeps(key, threshold, at) ? factor * dx : 0.0f);
        });
    weight_gradients(first, end, x, statistics, dy, partial + (u64)blockIdx.x * 2 * d, d);
}

// The way back through two normalisations, of which the second is of what the first gives: `next_dy` is the gradient of the
// second, `residual` is added to that of its input, `between`. A thread reads only what it has written itself.
KERNEL(layer_norm_backward_twice, (const float* next_x, const float* next_statistics, const float* next_weight,
                                   const float* next_dy, const float* residual, const float* x, const float* statistics,
                                   const float* weight, float* between, float* out, float* dropped, bf16* dropped_bf16,
                                   float* next_partial, float* partial, int rows, int d, int chunk, float factor,
                                   u64 key, u64 threshold)) {
    SHARED(float, scratch, THREADS + 16);
    int first = blockIdx.x * chunk, end = first + chunk < rows ? first + chunk : rows;
    for (int row = first; row < end; row++) {
        row_gradient(row, next_x, next_statistics, next_weight, next_dy, residual, d, scratch,
                     [=](u64 at, float dx) { between[at] = dx; });
        row_gradient(row, x, statistics, weight, between, nullptr, d, scratch, [=](u64 at, float dx) {
            out[at] = dx;
            put(dropped, dropped_bf16, at, keeps(key, threshold, at) ? factor * dx : 0.0f);
        });
    }
    weight_gradients(first, end, next_x, next_statistics, next_dy, next_partial + (u64)blockIdx.x * 2 * d, d);
    weight_gradients(first, end, x, statistics, between, partial + (u64)blockIdx.x * 2 * d, d);
}
