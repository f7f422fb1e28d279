// Element-wise passes.

KERNEL(add_in_place, (float* sum, const float* x, u64 n)) {
    u64 i = element();
    if (i < n) sum[i] += x[i];
}

KERNEL(scale_in_place, (float* x, float factor, u64 n)) {
    u64 i = element();
    if (i < n) x[i] *= factor;
}

// sum += share * (x - sum) of many tensors, each block for a chunk of one. Entries of `plan` are of two words.
template <class T>
DEVICE void blend(float* const* sums, const T* const* tensors, const u64* plan, int count, int chunk, float share) {
    Part part = part_of(plan, 2, count, chunk);
    float* sum = tensor_at(sums[part.tensor]);
    const T* x = tensor_at(tensors[part.tensor]);
    u64 i = part.first + threadIdx.x;
    if (by_fours(sum) && by_fours(x)) {
        UNROLL(4)
        for (u64 quad = part.first + 4 * threadIdx.x; quad + 4 <= part.end; quad += 4 * THREADS) {
            float was[4], now[4];
            read_four(sum + quad, was);
            read_four(x + quad, now);
            for (int at = 0; at < 4; at++) was[at] += times(share, now[at] - was[at]);
            write_four(sum + quad, was);
        }
        // Those behind the last four.
        i = part.end - (part.end - part.first) % 4 + threadIdx.x;
    }
    for (; i < part.end; i += THREADS) sum[i] += times(share, wide(x[i]) - sum[i]);
}

KERNEL(blend_all_f32, (float* const* sums, const float* const* tensors, const u64* plan, int count, int chunk,
                       float share)) {
    blend(sums, tensors, plan, count, chunk, share);
}

KERNEL(blend_all_bf16, (float* const* sums, const bf16* const* tensors, const u64* plan, int count, int chunk,
                        float share)) {
    blend(sums, tensors, plan, count, chunk, share);
}

// x + factor * drop(y); without x, factor * drop(y).
KERNEL(residual, (const float* x, const float* y, float* out, float factor, u64 key, u64 threshold, u64 n)) {
    u64 i = element();
    if (i >= n) return;
    float kept = keeps(key, threshold, i) ? times(factor, y[i]) : 0.0f;
    out[i] = x ? x[i] + kept : kept;
}

template <class T>
DEVICE void activate(const T* h, float* out, bf16* out_bf16, float factor, u64 key, u64 threshold, u64 n) {
    write_elements(out, out_bf16, n, [=](u64 i, float* four) {
        float x[4];
        read_elements(h, i, n, x);
        for (int at = 0; at < 4; at++)
            four[at] = keeps(key, threshold, i + at) ? x[at] * sigmoid(x[at]) * factor : 0.0f;
    });
}

KERNEL(silu, (const float* h, float* out, bf16* out_bf16, float factor, u64 key, u64 threshold, u64 n)) {
    activate(h, out, out_bf16, factor, key, threshold, n);
}

KERNEL(silu_of_bf16, (const bf16* h, float* out, bf16* out_bf16, float factor, u64 key, u64 threshold, u64 n)) {
    activate(h, out, out_bf16, factor, key, threshold, n);
}

template <class T>
DEVICE void activate_backward(const T* h, const T* dy, float* out, bf16* out_bf16, float factor, u64 key, u64 threshold,
                              u64 n) {
    write_elements(out, out_bf16, n, [=](u64 i, float* four) {
        float x[4], slope[4];
        read_elements(h, dy, i, n, x, slope);
        for (int at = 0; at < 4; at++)
            four[at] = keeps(key, threshold, i + at) ? slope[at] * silu_slope(x[at]) * factor : 0.0f;
    });
}

KERNEL(silu_backward, (const float* h, const float* dy, float* out, bf16* out_bf16, float factor, u64 key,
                       u64 threshold, u64 n)) {
    activate_backward(h, dy, out, out_bf16, factor, key, threshold, n);
}

KERNEL(silu_backward_of_bf16, (const bf16* h, const bf16* dy, float* out, bf16* out_bf16, float factor, u64 key,
                               u64 threshold, u64 n)) {
    activate_backward(h, dy, out, out_bf16, factor, key, threshold, n);
}

// y[.., c] += bias[c].
KERNEL(add_bias, (float* y, const float* bias, u64 n, int width)) {
    u64 i = element();
    if (i < n) y[i] += bias[i % width];
}

// Gated linear unit: h (B, T, 2d) to (B, T, d), frames at or past a length being 0.
KERNEL(glu, (const float* h, const u32* lengths, float* out, u64 n, int time, int d)) {
    u64 i = element();
    if (i >= n) return;
    u64 row = i / d;
    int column = i % d;
    const float* here = h + row * 2 * d;
    out[i] = row % time < lengths[row / time] ? here[column] * sigmoid(here[d + column]) : 0.0f;
}

KERNEL(glu_backward, (const float* h, const float* dy, const u32* lengths, float* out, u64 n, int time, int d)) {
    u64 i = element();
    if (i >= n) return;
    u64 row = i / d;
    int column = i % d;
    u64 at = row * 2 * d + column;
    float d_value = 0, d_gate = 0;
    if (row % time < lengths[row / time]) {
        float s = sigmoid(h[at + d]);
        d_value = dy[i] * s;
        d_gate = dy[i] * h[at] * s * (1.0f - s);
    }
    out[at] = d_value;
    out[at + d] = d_gate;
}
