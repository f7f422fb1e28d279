// Depthwise convolution over time, channels last: x (B, T, C), weight (C, 1, taps).

// With `flip`, the gradient with respect to x.
KERNEL(depthwise, (const float* x, const float* weight, const float* bias, float* out, u64 n, int time, int channels,
                   int taps, int flip)) {
    u64 i = element();
    if (i >= n) return;
    int channel = i % channels;
    int t = i / channels % time;
    const float* sequence = x + (i - (u64)t * channels - channel);
    float sum = bias ? bias[channel] : 0.0f;
    for (int k = 0; k < taps; k++) {
        int at = flip ? t + taps / 2 - k : t + k - taps / 2;
        if (at >= 0 && at < time) sum = fmaf(weight[channel * taps + k], sequence[(u64)at * channels + channel], sum);
    }
    out[i] = sum;
}

// Columns (taps, C).
KERNEL(depthwise_weight, (const float* x, const float* dy, float* partial, int rows, int time, int channels, int taps,
                          int chunk)) {
    SHARED(float, scratch, THREADS);
    partial_sums(rows, taps * channels, chunk, partial, scratch, [=](int row, int column) {
        int k = column / channels, channel = column % channels;
        int at = row % time + k - taps / 2;
        if (at < 0 || at >= time) return 0.0f;
        return x[((u64)row + k - taps / 2) * channels + channel] * dy[(u64)row * channels + channel];
    });
}
