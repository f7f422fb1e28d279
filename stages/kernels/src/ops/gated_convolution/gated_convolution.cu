// The convolution module between its matrix products: gated linear unit, depthwise convolution over time, batch
// normalisation and SiLU. h (B, T, 2C) holds values and gates; frames at or past a length have the value 0. All else is
// (B, T, C).
//
// h, the convolution's result and the gradient of y are of one type: f32, or bf16 where products are in bf16.
//
// A block has 32 channels and FRAMES frames of one sequence, which is a chunk. Its threads are 32 channels wide; thread
// `lane` of a channel has every eighth frame.

#define FRAMES 32
// Kernels of up to so many taps find their input in shared memory.
#define MOST_TAPS 65
#define LANES (THREADS / 32)
// Rows that a thread asks for before it waits for the first.
#define ROWS_TOGETHER 4

struct Chunk {
    int sequence, first, channel, lane;
    // Row of the sequence's first frame.
    u64 row;
};

DEVICE Chunk chunk_of(int time) {
    int chunks = (time + FRAMES - 1) / FRAMES;
    int sequence = blockIdx.y / chunks;
    return {sequence, (int)(blockIdx.y % chunks) * FRAMES, (int)(blockIdx.x * 32 + threadIdx.x % 32),
            (int)(threadIdx.x / 32), (u64)sequence * time};
}

// The gated value of a frame; 0 outside of the sequence's valid frames.
template <class T>
DEVICE float gated(const T* h, int channels, u64 row, int channel, int t, int length) {
    bool inside = t >= 0 && t < length;
    // Read in any case, so that the frames before and behind it need not wait.
    const T* here = h + (row + (inside ? t : 0)) * 2 * channels + channel;
    float value = wide(here[0]), gate = wide(here[channels]);
    return inside ? value * sigmoid(gate) : 0.0f;
}

// Sum over the lanes of a channel, given to all of them.
DEVICE double lanes_sum(double value, double* scratch) {
    BARRIER();
    scratch[threadIdx.x] = value;
    BARRIER();
    double sum = scratch[threadIdx.x % 32];
    for (int lane = 1; lane < LANES; lane++) sum += scratch[lane * 32 + threadIdx.x % 32];
    return sum;
}

// The convolution of the gated values. With `moments` (chunks, 2, C) also the sums of a chunk's results and of their squares.
template <class T>
DEVICE void gate_and_convolve(const T* h, const u32* lengths, const float* weight, const float* bias, T* out,
                              double* moments, int time, int channels, int taps) {
    SHARED(float, tile, (FRAMES + MOST_TAPS - 1) * 32);
    SHARED(double, scratch, THREADS);
    Chunk at = chunk_of(time);
    int length = lengths[at.sequence] < (u32)time ? lengths[at.sequence] : time;
    int before = at.first - taps / 2;
    bool inside = at.channel < channels;
    auto value = [=](int t) { return gated(h, channels, at.row, at.channel, t, length); };
    if (taps <= MOST_TAPS) {
        UNROLL(4)
        for (int frame = at.lane; frame < FRAMES + taps - 1; frame += LANES)
            tile[frame * 32 + threadIdx.x % 32] = inside ? value(before + frame) : 0.0f;
        BARRIER();
    }
    double sum = 0, squares = 0;
    for (int frame = at.lane; inside && frame < FRAMES && at.first + frame < time; frame += LANES) {
        float result = bias ? bias[at.channel] : 0.0f;
        for (int tap = 0; tap < taps; tap++) {
            float x = taps <= MOST_TAPS ? tile[(frame + tap) * 32 + threadIdx.x % 32] : value(before + frame + tap);
            result = fmaf(weight[at.channel * taps + tap], x, result);
        }
        T stored;
        narrow(stored, result);
        out[(at.row + at.first + frame) * channels + at.channel] = stored;
        // Statistics are those of what is normalised.
        result = wide(stored);
        sum += (double)result;
        squares += (double)result * (double)result;
    }
    if (!moments) return;
    sum = lanes_sum(sum, scratch);
    squares = lanes_sum(squares, scratch);
    if (at.lane == 0 && inside) {
        moments[(u64)(2 * blockIdx.y) * channels + at.channel] = sum;
        moments[(u64)(2 * blockIdx.y + 1) * channels + at.channel] = squares;
    }
}

KERNEL(gated_convolution, (const float* h, const u32* lengths, const float* weight, const float* bias, float* out,
                           double* moments, int time, int channels, int taps)) {
    gate_and_convolve(h, lengths, weight, bias, out, moments, time, channels, taps);
}

KERNEL(gated_convolution_of_bf16, (const bf16* h, const u32* lengths, const float* weight, const float* bias, bf16* out,
                                   double* moments, int time, int channels, int taps)) {
    gate_and_convolve(h, lengths, weight, bias, out, moments, time, channels, taps);
}

// Sums over all chunks of one row of `partial` (chunks, 2, C), given to all lanes of the channel.
template <class T>
DEVICE double chunks_sum(const T* partial, int chunks, int channels, int which, int channel, double* scratch) {
    double sum = 0;
    if (channel < channels)
        for (int chunk = threadIdx.x / 32; chunk < chunks; chunk += LANES)
            sum += (double)partial[(u64)(2 * chunk + which) * channels + channel];
    return lanes_sum(sum, scratch);
}

// Factor and offset of a channel's normalisation.
struct Affine {
    float factor, offset;
};

DEVICE Affine affine_of(float mean, float inverse, float weight, float bias) {
    double factor = (double)weight * (double)inverse;
    return {(float)factor, (float)((double)bias - (double)mean * factor)};
}

// silu((x - mean) / deviation * weight + bias), with the statistics of all rows, from `moments` (chunks, 2, C), which are
// kept, and with them the running ones moved towards them; or without moments with the running ones. A block has 32
// channels and `per_block` rows.
template <class T>
DEVICE void normalise_and_activate(const T* x, const double* moments, const float* running_mean,
                                   const float* running_variance, const float* weight, const float* bias, float* out,
                                   bf16* out_bf16, float* mean, float* inverse, float* moved_mean, float* moved_variance,
                                   int rows, int channels, int chunks, int per_block, double epsilon, double momentum,
                                   double unbiased) {
    SHARED(double, scratch, THREADS);
    int channel = blockIdx.x * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    bool inside = channel < channels;
    double exact = 0, variance = 1;
    if (moments) {
        exact = chunks_sum(moments, chunks, channels, 0, channel, scratch) / rows;
        variance = chunks_sum(moments, chunks, channels, 1, channel, scratch) / rows - exact * exact;
        if (variance < 0) variance = 0;
    } else if (inside) {
        exact = (double)running_mean[channel];
        variance = (double)running_variance[channel];
    }
    if (!inside) return;
    float centre = (float)exact, scale = (float)(1.0 / sqrt(variance + epsilon));
    if (blockIdx.y == 0 && lane == 0) {
        mean[channel] = centre;
        inverse[channel] = scale;
        if (moments) {
            double kept = 1.0 - momentum;
            moved_mean[channel] = (float)(kept * (double)running_mean[channel] + momentum * exact);
            moved_variance[channel] = (float)(kept * (double)running_variance[channel] + momentum * variance * unbiased);
        }
    }
    Affine by = affine_of(centre, scale, weight[channel], bias[channel]);
    u64 first = (u64)blockIdx.y * per_block, end = first + per_block < (u64)rows ? first + per_block : rows;
    for (u64 row = first + lane; row < end; row += ROWS_TOGETHER * LANES) {
        float here[ROWS_TOGETHER];
        UNROLL(ROWS_TOGETHER)
        for (int i = 0; i < ROWS_TOGETHER; i++)
            here[i] = row + i * LANES < end ? wide(x[(row + i * LANES) * channels + channel]) : 0.0f;
        UNROLL(ROWS_TOGETHER)
        for (int i = 0; i < ROWS_TOGETHER; i++) {
            float z = here[i] * by.factor + by.offset;
            if (row + i * LANES < end) put(out, out_bf16, (row + i * LANES) * channels + channel, z * sigmoid(z));
        }
    }
}

KERNEL(normalise_batch, (const float* x, const double* moments, const float* running_mean, const float* running_variance,
                         const float* weight, const float* bias, float* out, bf16* out_bf16, float* mean, float* inverse,
                         float* moved_mean, float* moved_variance, int rows, int channels, int chunks, int per_block,
                         double epsilon, double momentum, double unbiased)) {
    normalise_and_activate(x, moments, running_mean, running_variance, weight, bias, out, out_bf16, mean, inverse,
                           moved_mean, moved_variance, rows, channels, chunks, per_block, epsilon, momentum, unbiased);
}

KERNEL(normalise_batch_of_bf16, (const bf16* x, const double* moments, const float* running_mean,
                                 const float* running_variance, const float* weight, const float* bias, float* out,
                                 bf16* out_bf16, float* mean, float* inverse, float* moved_mean, float* moved_variance,
                                 int rows, int channels, int chunks, int per_block, double epsilon, double momentum,
                                 double unbiased)) {
    normalise_and_activate(x, moments, running_mean, running_variance, weight, bias, out, out_bf16, mean, inverse,
                           moved_mean, moved_variance, rows, channels, chunks, per_block, epsilon, momentum, unbiased);
}

// Sums over the rows of a chunk, (chunks, 2, C): of dz (x - mean) and of dz, where dz is the gradient of what comes before
// SiLU. A block has 32 channels and `per_block` rows.
template <class T>
DEVICE void sums_of_chunk(const T* x, const float* mean, const float* inverse, const float* weight, const float* bias,
                          const T* dy, float* partial, int rows, int channels, int per_block) {
    SHARED(double, scratch, THREADS);
    int channel = blockIdx.x * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    bool inside = channel < channels;
    float along = 0, sum = 0;
    if (inside) {
        float centre = mean[channel];
        Affine by = affine_of(centre, inverse[channel], weight[channel], bias[channel]);
        u64 first = (u64)blockIdx.y * per_block, end = first + per_block < (u64)rows ? first + per_block : rows;
        for (u64 row = first + lane; row < end; row += ROWS_TOGETHER * LANES) {
            float here[ROWS_TOGETHER], slope[ROWS_TOGETHER];
            UNROLL(ROWS_TOGETHER)
            for (int i = 0; i < ROWS_TOGETHER; i++) {
                bool there = row + i * LANES < end;
                u64 at = (there ? row + i * LANES : row) * channels + channel;
                here[i] = wide(x[at]);
                slope[i] = there ? wide(dy[at]) : 0.0f;
            }
            UNROLL(ROWS_TOGETHER)
            for (int i = 0; i < ROWS_TOGETHER; i++) {
                if (row + i * LANES >= end) break;
                float dz = slope[i] * silu_slope(here[i] * by.factor + by.offset);
                along += dz * (here[i] - centre);
                sum += dz;
            }
        }
    }
    double all_along = lanes_sum((double)along, scratch), all = lanes_sum((double)sum, scratch);
    if (lane == 0 && inside) {
        partial[(u64)(2 * blockIdx.y) * channels + channel] = (float)all_along;
        partial[(u64)(2 * blockIdx.y + 1) * channels + channel] = (float)all;
    }
}

KERNEL(normalise_batch_sums, (const float* x, const float* mean, const float* inverse, const float* weight,
                              const float* bias, const float* dy, float* partial, int rows, int channels,
                              int per_block)) {
    sums_of_chunk(x, mean, inverse, weight, bias, dy, partial, rows, channels, per_block);
}

KERNEL(normalise_batch_sums_of_bf16, (const bf16* x, const float* mean, const float* inverse, const float* weight,
                                      const float* bias, const bf16* dy, float* partial, int rows, int channels,
                                      int per_block)) {
    sums_of_chunk(x, mean, inverse, weight, bias, dy, partial, rows, channels, per_block);
}

// The way back to h. `sums` (chunks, 2, C) are those of normalise_batch_sums; with `of_batch` the statistics were those of
// the rows. Gradients of the normalisation's weight and bias, `d_norm` (2, C), are whole; those of the convolution's, (chunks
// of frames, C taps) and (chunks of frames, C), are of each chunk; either may be left out.
template <class T>
DEVICE void go_back(const T* h, const u32* lengths, const T* x, const float* mean, const float* inverse,
                    const float* norm_weight, const float* norm_bias, const T* dy, const float* sums, const float* weight,
                    float* d_norm, float* d_weight, float* d_bias, float* out, bf16* out_bf16, int batch, int time,
                    int channels, int taps, int chunks, int of_batch) {
    SHARED(float, values, (FRAMES + MOST_TAPS - 1) * 32);
    SHARED(float, slopes, (FRAMES + MOST_TAPS - 1) * 32);
    SHARED(double, scratch, THREADS);
    Chunk at = chunk_of(time);
    int channel = at.channel, column = threadIdx.x % 32;
    bool inside = channel < channels;
    double along = chunks_sum(sums, chunks, channels, 0, channel, scratch);
    double sum = chunks_sum(sums, chunks, channels, 1, channel, scratch);
    float centre = inside ? mean[channel] : 0.0f, scale = inside ? inverse[channel] : 0.0f;
    Affine by = {0.0f, 0.0f};
    if (inside) by = affine_of(centre, scale, norm_weight[channel], norm_bias[channel]);
    float of_weight = (float)(along * (double)scale), rows = (float)((u64)batch * time);
    float level = of_batch ? (float)sum / rows : 0.0f, tilt = of_batch ? of_weight * scale / rows : 0.0f;
    if (blockIdx.y == 0 && at.lane == 0 && inside) {
        d_norm[channel] = of_weight;
        d_norm[channels + channel] = (float)sum;
    }
    int length = lengths[at.sequence] < (u32)time ? lengths[at.sequence] : time;
    int half = taps / 2, before = at.first - half;
    auto value = [=](int t) { return gated(h, channels, at.row, channel, t, length); };
    // Gradient of the convolution's result at a frame.
    auto slope = [=](int t) {
        bool there = t >= 0 && t < time;
        u64 place = (at.row + (there ? t : 0)) * channels + channel;
        float here = wide(x[place]), dz = wide(dy[place]) * silu_slope(here * by.factor + by.offset);
        return there ? by.factor * (dz - level - (here - centre) * tilt) : 0.0f;
    };
    bool kept = taps <= MOST_TAPS;
    if (kept) {
        UNROLL(4)
        for (int frame = at.lane; frame < FRAMES + taps - 1; frame += LANES) {
            values[frame * 32 + column] = inside ? value(before + frame) : 0.0f;
            slopes[frame * 32 + column] = inside ? slope(before + frame) : 0.0f;
        }
        BARRIER();
    }
    if (!inside) return;
    // Both by the distance from the frame `before`.
    auto value_at = [=](int frame) { return kept ? values[frame * 32 + column] : value(before + frame); };
    auto slope_at = [=](int frame) { return kept ? slopes[frame * 32 + column] : slope(before + frame); };
    int frames = time - at.first < FRAMES ? time - at.first : FRAMES;
    for (int frame = at.lane; frame < frames; frame += LANES) {
        u64 place = (at.row + at.first + frame) * 2 * channels + channel;
        float d_value = 0, d_gate = 0;
        if (at.first + frame < length) {
            float d = 0;
            for (int tap = 0; tap < taps; tap++)
                d = fmaf(weight[channel * taps + tap], slope_at(frame + 2 * half - tap), d);
            float s = sigmoid(wide(h[place + channels]));
            d_value = d * s;
            d_gate = d * wide(h[place]) * s * (1.0f - s);
        }
        put(out, out_bf16, place, d_value);
        put(out, out_bf16, place + channels, d_gate);
    }
    for (int tap = at.lane; d_weight && tap < taps; tap += LANES) {
        float d = 0;
        for (int frame = 0; frame < frames; frame++) d += value_at(frame + tap) * slope_at(frame + half);
        d_weight[((u64)blockIdx.y * channels + channel) * taps + tap] = d;
    }
    if (d_bias && at.lane == 0) {
        float d = 0;
        for (int frame = 0; frame < frames; frame++) d += slope_at(frame + half);
        d_bias[(u64)blockIdx.y * channels + channel] = d;
    }
}

KERNEL(gated_convolution_backward, (const float* h, const u32* lengths, const float* x, const float* mean,
                                    const float* inverse, const float* norm_weight, const float* norm_bias,
                                    const float* dy, const float* sums, const float* weight, float* d_norm,
                                    float* d_weight, float* d_bias, float* out, bf16* out_bf16, int batch, int time,
                                    int channels, int taps, int chunks, int of_batch)) {
    go_back(h, lengths, x, mean, inverse, norm_weight, norm_bias, dy, sums, weight, d_norm, d_weight, d_bias, out,
            out_bf16, batch, time, channels, taps, chunks, of_batch);
}

KERNEL(gated_convolution_backward_of_bf16, (const bf16* h, const u32* lengths, const bf16* x, const float* mean,
                                            const float* inverse, const float* norm_weight, const float* norm_bias,
                                            const bf16* dy, const float* sums, const float* weight, float* d_norm,
                                            float* d_weight, float* d_bias, float* out, bf16* out_bf16, int batch,
                                            int time, int channels, int taps, int chunks, int of_batch)) {
    go_back(h, lengths, x, mean, inverse, norm_weight, norm_bias, dy, sums, weight, d_norm, d_weight, d_bias, out,
            out_bf16, batch, time, channels, taps, chunks, of_batch);
}
