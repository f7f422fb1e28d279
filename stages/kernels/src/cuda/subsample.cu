// The strided 3x3 convolutions of the sub-sampling (stride 2, padding 1 on both axes), channels last.

// Input index of tap k at output index o, if it lies within size; otherwise -1.
DEVICE int input_index(int o, int k, int size) {
    int i = 2 * o + k - 1;
    return i < size ? i : -1;
}

// Output index that reads input index i with tap k, if there is one; otherwise -1.
DEVICE int output_index(int i, int k, int size) {
    int twice = i + 1 - k;
    return twice >= 0 && twice % 2 == 0 && twice / 2 < size ? twice / 2 : -1;
}

DEVICE float relu(float x) { return x < 0.0f ? 0.0f : x; }

// An input of the first convolution, x (B, F, T); 0 outside the axes and in padding.
DEVICE float first_input(const float* x, u64 b, int t, int f, int k, int time, int bands, int valid) {
    int ti = input_index(t, k / 3, valid < time ? valid : time), fi = input_index(f, k % 3, bands);
    return ti < 0 || fi < 0 ? 0.0f : x[(b * bands + fi) * time + ti];
}

KERNEL(subsample_first, (const float* x, const float* weight, const float* bias, const u32* input_lengths,
                         const u32* lengths, float* out, u64 n, int time, int bands, int channels)) {
    u64 i = element();
    if (i >= n) return;
    int time_out = (time + 1) / 2, bands_out = (bands + 1) / 2;
    int channel = i % channels;
    u64 place = i / channels;
    int f = place % bands_out, t = place / bands_out % time_out;
    u64 b = place / bands_out / time_out;
    if ((u32)t >= lengths[b]) {
        out[i] = 0.0f;
        return;
    }
    float sum = bias[channel];
    for (int k = 0; k < 9; k++)
        sum = fmaf(weight[channel * 9 + k], first_input(x, b, t, f, k, time, bands, input_lengths[b]), sum);
    out[i] = relu(sum);
}

// Columns (10, C): the nine taps, and the bias. Rows are the places (B, T', F') of the output.
KERNEL(subsample_first_weights, (const float* x, const float* dz, const u32* input_lengths, float* partial, int rows,
                                 int time, int bands, int channels, int chunk)) {
    SHARED(float, scratch, THREADS);
    int time_out = (time + 1) / 2, bands_out = (bands + 1) / 2;
    partial_sums(rows, 10 * channels, chunk, partial, scratch, [=](int row, int column) {
        int k = column / channels;
        int f = row % bands_out, t = row / bands_out % time_out, b = row / bands_out / time_out;
        if ((u32)t >= (input_lengths[b] + 1) / 2) return 0.0f;
        float d = dz[(u64)row * channels + column % channels];
        if (k == 9) return d;
        return d * first_input(x, b, t, f, k, time, bands, input_lengths[b]);
    });
}

// x (B, T, F, C), weight (C, 1, 3, 3).
KERNEL(subsample_depthwise, (const float* x, const float* weight, const float* bias, const u32* lengths, float* out,
                             u64 n, int time, int bands, int channels)) {
    u64 i = element();
    if (i >= n) return;
    int time_out = (time + 1) / 2, bands_out = (bands + 1) / 2;
    int channel = i % channels;
    u64 place = i / channels;
    int f = place % bands_out, t = place / bands_out % time_out;
    u64 b = place / bands_out / time_out;
    if ((u32)t >= lengths[b]) {
        out[i] = 0.0f;
        return;
    }
    float sum = bias[channel];
    for (int k = 0; k < 9; k++) {
        int ti = input_index(t, k / 3, time), fi = input_index(f, k % 3, bands);
        if (ti < 0 || fi < 0) continue;
        sum = fmaf(weight[channel * 9 + k], x[((b * time + ti) * bands + fi) * channels + channel], sum);
    }
    out[i] = sum;
}

// Gradient with respect to the input before its ReLU, whose result is x.
KERNEL(subsample_depthwise_dx, (const float* x, const float* weight, const float* dy, float* out, u64 n, int time,
                                int bands, int channels)) {
    u64 i = element();
    if (i >= n) return;
    int time_out = (time + 1) / 2, bands_out = (bands + 1) / 2;
    int channel = i % channels;
    u64 place = i / channels;
    int f = place % bands, t = place / bands % time;
    u64 b = place / bands / time;
    float sum = 0;
    for (int k = 0; k < 9; k++) {
        int to = output_index(t, k / 3, time_out), fo = output_index(f, k % 3, bands_out);
        if (to < 0 || fo < 0) continue;
        sum = fmaf(weight[channel * 9 + k], dy[((b * time_out + to) * bands_out + fo) * channels + channel], sum);
    }
    out[i] = x[i] > 0.0f ? sum : 0.0f;
}

// Columns (10, C), rows as above.
KERNEL(subsample_depthwise_weights, (const float* x, const float* dy, float* partial, int rows, int time, int bands,
                                     int channels, int chunk)) {
    SHARED(float, scratch, THREADS);
    int time_out = (time + 1) / 2, bands_out = (bands + 1) / 2;
    partial_sums(rows, 10 * channels, chunk, partial, scratch, [=](int row, int column) {
        int k = column / channels, channel = column % channels;
        float d = dy[(u64)row * channels + channel];
        if (k == 9) return d;
        int f = row % bands_out, t = row / bands_out % time_out;
        u64 b = row / bands_out / time_out;
        int ti = input_index(t, k / 3, time), fi = input_index(f, k % 3, bands);
        return ti < 0 || fi < 0 ? 0.0f : d * x[((b * time + ti) * bands + fi) * channels + channel];
    });
}

// relu(z + bias) in place for z (B, T, F * C), zero at or past each length.
KERNEL(bias_relu, (float* z, const float* bias, const u32* lengths, u64 n, int time, int row, int channels)) {
    u64 i = element();
    if (i >= n) return;
    u64 frame = i / row;
    z[i] = frame % time < lengths[frame / time] ? relu(z[i] + bias[i % channels]) : 0.0f;
}

KERNEL(relu_backward, (const float* y, const float* dy, float* out, u64 n)) {
    u64 i = element();
    if (i < n) out[i] = y[i] <= 0.0f ? 0.0f : dy[i];
}
