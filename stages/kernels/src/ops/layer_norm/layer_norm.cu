// Layer normalisation: one block for each row.

// Columns of a row that a thread has in registers: all of them in rows of up to 1024. It reads the others again, in loops that are
// not unrolled, as rows of other widths are rare.
#define COLUMNS 4

// The block's row normalised: `own` are this thread's columns of it, of which those within the row become the result, and `x`
// is the matrix that has them and the others.
DEVICE void normalise(float* own, const float* x, const float* weight, const float* bias, float* out, bf16* out_bf16,
                      float* statistics, int d, float* scratch) {
    u64 row = blockIdx.x;
    u64 start = row * d;
    x += start;
    int rest = COLUMNS * THREADS + threadIdx.x;
    float sum = 0;
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++)
        if (n * THREADS + (int)threadIdx.x < d) sum += own[n];
    UNROLL(1)
    for (int i = rest; i < d; i += THREADS) sum += x[i];
    float mean = block_sum(sum, scratch) / d;
    float squares = 0;
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++)
        if (n * THREADS + (int)threadIdx.x < d) squares += (own[n] - mean) * (own[n] - mean);
    UNROLL(1)
    for (int i = rest; i < d; i += THREADS) squares += (x[i] - mean) * (x[i] - mean);
    float inverse = 1.0f / sqrtf(block_sum(squares, scratch) / d + 1e-5f);
    if (threadIdx.x == 0) {
        statistics[2 * row] = mean;
        statistics[2 * row + 1] = inverse;
    }
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        int i = n * THREADS + threadIdx.x;
        if (i >= d) continue;
        own[n] = (own[n] - mean) * inverse * weight[i] + bias[i];
        put(out, out_bf16, start + i, own[n]);
    }
    UNROLL(1)
    for (int i = rest; i < d; i += THREADS) put(out, out_bf16, start + i, (x[i] - mean) * inverse * weight[i] + bias[i]);
}

KERNEL(layer_norm, (const float* x, const float* weight, const float* bias, float* out, bf16* out_bf16,
                    float* statistics, int d)) {
    SHARED(float, scratch, THREADS + 16);
    float own[COLUMNS];
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        int i = n * THREADS + threadIdx.x;
        own[n] = i < d ? x[(u64)blockIdx.x * d + i] : 0.0f;
    }
    normalise(own, x, weight, bias, out, out_bf16, statistics, d, scratch);
}

// The block's row of x + factor * drop(y), of which a thread gets its own columns.
template <class Y>
DEVICE void add_row(float* own, const float* x, const Y* y, float* sum, int d, float factor, u64 key, u64 threshold) {
    u64 start = (u64)blockIdx.x * d;
    float added[COLUMNS];
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        int column = n * THREADS + threadIdx.x;
        u64 i = start + (column < d ? column : 0);
        own[n] = x[i];
        added[n] = wide(y[i]);
    }
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        int column = n * THREADS + threadIdx.x;
        if (column >= d) continue;
        own[n] += keeps(key, threshold, start + column) ? factor * added[n] : 0.0f;
        sum[start + column] = own[n];
    }
    UNROLL(1)
    for (int column = COLUMNS * THREADS + threadIdx.x; column < d; column += THREADS) {
        u64 i = start + column;
        sum[i] = x[i] + (keeps(key, threshold, i) ? factor * wide(y[i]) : 0.0f);
    }
}

// sum = x + factor * drop(y), and that normalised. A thread reads only what it has written itself.
template <class Y>
DEVICE void add_and_normalise(const float* x, const Y* y, const float* weight, const float* bias, float* sum, float* out,
                              bf16* out_bf16, float* statistics, int d, float factor, u64 key, u64 threshold) {
    SHARED(float, scratch, THREADS + 16);
    float own[COLUMNS];
    add_row(own, x, y, sum, d, factor, key, threshold);
    normalise(own, sum, weight, bias, out, out_bf16, statistics, d, scratch);
}

KERNEL(add_and_norm, (const float* x, const float* y, const float* weight, const float* bias, float* sum, float* out,
                      bf16* out_bf16, float* statistics, int d, float factor, u64 key, u64 threshold)) {
    add_and_normalise(x, y, weight, bias, sum, out, out_bf16, statistics, d, factor, key, threshold);
}

KERNEL(add_and_norm_of_bf16, (const float* x, const bf16* y, const float* weight, const float* bias, float* sum,
                              float* out, bf16* out_bf16, float* statistics, int d, float factor, u64 key,
                              u64 threshold)) {
    add_and_normalise(x, y, weight, bias, sum, out, out_bf16, statistics, d, factor, key, threshold);
}

// sum = x + factor * drop(y); out is the sum normalised, and next is out normalised by other parameters.
template <class Y>
DEVICE void add_and_normalise_twice(const float* x, const Y* y, const float* weight, const float* bias,
                                    const float* next_weight, const float* next_bias, float* sum, float* out,
                                    float* next, bf16* next_bf16, float* statistics, float* next_statistics, int d,
                                    float factor, u64 key, u64 threshold) {
    SHARED(float, scratch, THREADS + 16);
    float own[COLUMNS];
    add_row(own, x, y, sum, d, factor, key, threshold);
    normalise(own, sum, weight, bias, out, nullptr, statistics, d, scratch);
    normalise(own, out, next_weight, next_bias, next, next_bf16, next_statistics, d, scratch);
}

KERNEL(add_and_norm_twice, (const float* x, const float* y, const float* weight, const float* bias,
                            const float* next_weight, const float* next_bias, float* sum, float* out, float* next,
                            bf16* next_bf16, float* statistics, float* next_statistics, int d, float factor, u64 key,
                            u64 threshold)) {
    add_and_normalise_twice(x, y, weight, bias, next_weight, next_bias, sum, out, next, next_bf16, statistics,
                            next_statistics, d, factor, key, threshold);
}

KERNEL(add_and_norm_twice_of_bf16, (const float* x, const bf16* y, const float* weight, const float* bias,
                                    const float* next_weight, const float* next_bias, float* sum, float* out,
                                    float* next, bf16* next_bf16, float* statistics, float* next_statistics, int d,
                                    float factor, u64 key, u64 threshold)) {
    add_and_normalise_twice(x, y, weight, bias, next_weight, next_bias, sum, out, next, next_bf16, statistics,
                            next_statistics, d, factor, key, threshold);
}

// Two sums that are taken together.
struct Pair {
    float sum, along;
    DEVICE_MEMBER Pair& operator+=(const Pair& other) {
        sum += other.sum;
        along += other.along;
        return *this;
    }
};

// The gradient of a row of x, given to `result(i, dx)` for each column that the thread has.
template <class G, class Result>
DEVICE void row_gradient(int row, const float* x, const float* statistics, const float* weight, const G* dy,
                         const float* residual, int d, Pair* scratch, Result result) {
    u64 start = (u64)row * d;
    float mean = statistics[2 * row], inverse = statistics[2 * row + 1];
    float scaled[COLUMNS], centred[COLUMNS], around[COLUMNS];
    Pair sums = {0.0f, 0.0f};
    float of_weight[COLUMNS];
    // Columns behind the row's end are read as its first.
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        int i = n * THREADS + threadIdx.x, column = i < d ? i : 0;
        scaled[n] = wide(dy[start + column]);
        centred[n] = x[start + column];
        of_weight[n] = weight[column];
        around[n] = residual ? residual[start + column] : 0.0f;
    }
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        bool inside = n * THREADS + (int)threadIdx.x < d;
        scaled[n] = inside ? scaled[n] * of_weight[n] : 0.0f;
        centred[n] = inside ? centred[n] - mean : 0.0f;
        sums.sum += scaled[n];
        sums.along += scaled[n] * centred[n];
    }
    UNROLL(1)
    for (int i = COLUMNS * THREADS + threadIdx.x; i < d; i += THREADS) {
        float rest = wide(dy[start + i]) * weight[i];
        sums.sum += rest;
        sums.along += rest * (x[start + i] - mean);
    }
    sums = block_sum(sums, scratch);
    float sum = sums.sum / d, along = sums.along * inverse / d;
    auto gradient = [=](int i, float scaled, float centred, float around) {
        result(start + i, around + inverse * (scaled - sum - centred * inverse * along));
    };
    UNROLL(COLUMNS)
    for (int n = 0; n < COLUMNS; n++) {
        int i = n * THREADS + threadIdx.x;
        if (i < d) gradient(i, scaled[n], centred[n], around[n]);
    }
    UNROLL(1)
    for (int i = COLUMNS * THREADS + threadIdx.x; i < d; i += THREADS)
        gradient(i, wide(dy[start + i]) * weight[i], x[start + i] - mean, residual ? residual[start + i] : 0.0f);
}

// Over the rows from `first` to `end`: columns 0 to d of `partial` are the gradient of the weight, d to 2d of the bias.
template <class G>
DEVICE void weight_gradients(int first, int end, const float* x, const float* statistics, const G* dy, float* partial,
                             int d) {
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float of_weight = 0, of_bias = 0;
        UNROLL(4)
        for (int row = first; row < end; row++) {
            u64 at = (u64)row * d + i;
            float slope = wide(dy[at]);
            of_weight += slope * ((x[at] - statistics[2 * row]) * statistics[2 * row + 1]);
            of_bias += slope;
        }
        partial[i] = of_weight;
        partial[d + i] = of_bias;
    }
}

// A block has `chunk` rows, and a row of `partial`. With `dropped` also factor * drop(out).
template <class G>
DEVICE void go_back(const float* x, const float* statistics, const float* weight, const G* dy, const float* residual,
                    float* out, float* dropped, bf16* dropped_bf16, float* partial, int rows, int d, int chunk,
                    float factor, u64 key, u64 threshold) {
    SHARED(Pair, scratch, THREADS + 16);
    int first = blockIdx.x * chunk, end = first + chunk < rows ? first + chunk : rows;
    for (int row = first; row < end; row++)
        row_gradient(row, x, statistics, weight, dy, residual, d, scratch, [=](u64 at, float dx) {
            out[at] = dx;
            if (dropped || dropped_bf16) put(dropped, dropped_bf16, at, keeps(key, threshold, at) ? factor * dx : 0.0f);
        });
    weight_gradients(first, end, x, statistics, dy, partial + (u64)blockIdx.x * 2 * d, d);
}

KERNEL(layer_norm_backward, (const float* x, const float* statistics, const float* weight, const float* dy,
                             const float* residual, float* out, float* dropped, bf16* dropped_bf16, float* partial,
                             int rows, int d, int chunk, float factor, u64 key, u64 threshold)) {
    go_back(x, statistics, weight, dy, residual, out, dropped, dropped_bf16, partial, rows, d, chunk, factor, key,
            threshold);
}

KERNEL(layer_norm_backward_of_bf16, (const float* x, const float* statistics, const float* weight, const bf16* dy,
                                     const float* residual, float* out, float* dropped, bf16* dropped_bf16,
                                     float* partial, int rows, int d, int chunk, float factor, u64 key,
                                     u64 threshold)) {
    go_back(x, statistics, weight, dy, residual, out, dropped, dropped_bf16, partial, rows, d, chunk, factor, key,
            threshold);
}

// The way back through two normalisations, of which the second is of what the first gives: `next_dy` is the gradient of the
// second, `residual` is added to that of its input, `between`. A thread reads only what it has written itself.
template <class G>
DEVICE void go_back_twice(const float* next_x, const float* next_statistics, const float* next_weight, const G* next_dy,
                          const float* residual, const float* x, const float* statistics, const float* weight,
                          float* between, float* out, float* dropped, bf16* dropped_bf16, float* next_partial,
                          float* partial, int rows, int d, int chunk, float factor, u64 key, u64 threshold) {
    SHARED(Pair, scratch, THREADS + 16);
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

KERNEL(layer_norm_backward_twice, (const float* next_x, const float* next_statistics, const float* next_weight,
                                   const float* next_dy, const float* residual, const float* x, const float* statistics,
                                   const float* weight, float* between, float* out, float* dropped, bf16* dropped_bf16,
                                   float* next_partial, float* partial, int rows, int d, int chunk, float factor,
                                   u64 key, u64 threshold)) {
    go_back_twice(next_x, next_statistics, next_weight, next_dy, residual, x, statistics, weight, between, out, dropped,
                  dropped_bf16, next_partial, partial, rows, d, chunk, factor, key, threshold);
}

KERNEL(layer_norm_backward_twice_of_bf16, (const float* next_x, const float* next_statistics, const float* next_weight,
                                           const bf16* next_dy, const float* residual, const float* x,
                                           const float* statistics, const float* weight, float* between, float* out,
                                           float* dropped, bf16* dropped_bf16, float* next_partial, float* partial,
                                           int rows, int d, int chunk, float factor, u64 key, u64 threshold)) {
    go_back_twice(next_x, next_statistics, next_weight, next_dy, residual, x, statistics, weight, between, out, dropped,
                  dropped_bf16, next_partial, partial, rows, d, chunk, factor, key, threshold);
}
