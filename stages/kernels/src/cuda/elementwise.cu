// Element-wise passes.

KERNEL(add_in_place, (float* sum, const float* x, u64 n)) {
    u64 i = element();
    if (i < n) sum[i] += x[i];
}

KERNEL(scale_in_place, (float* x, float factor, u64 n)) {
    u64 i = element();
    if (i < n) x[i] *= factor;
}

KERNEL(blend_in_place, (float* sum, const float* x, float share, u64 n)) {
    u64 i = element();
    if (i < n) sum[i] += share * (x[i] - sum[i]);
}

// x + factor * drop(y); without x, factor * drop(y).
KERNEL(residual, (const float* x, const float* y, float* out, float factor, u64 key, u64 threshold, u64 n)) {
    u64 i = element();
    if (i >= n) return;
    float kept = keeps(key, threshold, i) ? factor * y[i] : 0.0f;
    out[i] = x ? x[i] + kept : kept;
}

KERNEL(silu, (const float* h, float* out, bf16* out_bf16, float factor, u64 key, u64 threshold, u64 n)) {
    u64 i = element();
    if (i < n) put(out, out_bf16, i, keeps(key, threshold, i) ? h[i] * sigmoid(h[i]) * factor : 0.0f);
}

KERNEL(silu_backward, (const float* h, const float* dy, float* out, bf16* out_bf16, float factor, u64 key,
                       u64 threshold, u64 n)) {
    u64 i = element();
    if (i < n) put(out, out_bf16, i, keeps(key, threshold, i) ? dy[i] * silu_slope(h[i]) * factor : 0.0f);
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
