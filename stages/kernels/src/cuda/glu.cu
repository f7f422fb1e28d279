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
