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
