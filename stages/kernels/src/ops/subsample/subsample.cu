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

// Bands that a thread goes over: it reads weights once for them, and each input for all outputs of the same frame.
#define STRIP 8

// What a thread computes: one channel of a few bands of a frame, (B, T, F, C).
struct Strip {
    int channel, first, end, t;
    u64 b;
    // Place of the first element.
    u64 at;
};

DEVICE Strip strip_of(u32 i, int time, int bands, int channels) {
    int strips = (bands + STRIP - 1) / STRIP;
    u32 place = i / (u32)channels, frame = place / (u32)strips;
    Strip strip;
    strip.channel = i - place * channels;
    strip.first = (place - frame * strips) * STRIP;
    strip.end = strip.first + STRIP < bands ? strip.first + STRIP : bands;
    strip.b = frame / (u32)time;
    strip.t = frame - (u32)strip.b * time;
    strip.at = ((u64)frame * bands + strip.first) * channels + strip.channel;
    return strip;
}

KERNEL(subsample_first, (const float* x, const float* weight, const float* bias, const u32* input_lengths,
                         const u32* lengths, float* out, int n, int time, int bands, int channels)) {
    u64 i = element();
    if (i >= (u64)n) return;
    Strip strip = strip_of((u32)i, (time + 1) / 2, (bands + 1) / 2, channels);
    u64 at = strip.at;
    if ((u32)strip.t >= lengths[strip.b]) {
        for (int f = strip.first; f < strip.end; f++, at += channels) out[at] = 0.0f;
        return;
    }
    float weights[9], inputs[9], offset = bias[strip.channel];
    int valid = input_lengths[strip.b];
    for (int k = 0; k < 9; k++) weights[k] = weight[strip.channel * 9 + k];
    for (int k = 2; k < 9; k += 3) inputs[k] = first_input(x, strip.b, strip.t, strip.first, k - 2, time, bands, valid);
    for (int f = strip.first; f < strip.end; f++, at += channels) {
        // What was the highest band is the lowest one.
        for (int k = 0; k < 9; k += 3) inputs[k] = inputs[k + 2];
        for (int k = 1; k < 9; k++)
            if (k % 3 != 0) inputs[k] = first_input(x, strip.b, strip.t, f, k, time, bands, valid);
        float sum = offset;
        for (int k = 0; k < 9; k++) sum = fmaf(weights[k], inputs[k], sum);
        out[at] = relu(sum);
    }
}

// Sums over rows of taps + 1 values for each channel, as `partial_sums` has them of columns (10, C): block (x, y) has 32 channels
// and chunk y. `add(row, channel, sums)` adds the values of a row to a thread's ten sums.
template <class Add>
DEVICE void tap_sums(int rows, int channels, int chunk, float* partial, float* scratch, Add add) {
    int channel = blockIdx.x * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    int first = blockIdx.y * chunk, end = first + chunk < rows ? first + chunk : rows;
    float sums[10] = {};
    if (channel < channels)
        for (int row = first + lane; row < end; row += THREADS / 32) add(row, channel, sums);
    for (int k = 0; k < 10; k++) {
        scratch[threadIdx.x] = sums[k];
        BARRIER();
        if (lane == 0 && channel < channels) {
            float total = scratch[threadIdx.x];
            for (int other = 1; other < THREADS / 32; other++) total += scratch[other * 32 + threadIdx.x];
            partial[((u64)blockIdx.y * 10 + k) * channels + channel] = total;
        }
        BARRIER();
    }
}

// Columns (10, C): the nine taps, and the bias. Rows are the places (B, T', F') of the output.
KERNEL(subsample_first_weights, (const float* x, const float* dz, const u32* input_lengths, float* partial, int rows,
                                 int time, int bands, int channels, int chunk)) {
    SHARED(float, scratch, THREADS);
    int time_out = (time + 1) / 2, bands_out = (bands + 1) / 2;
    tap_sums(rows, channels, chunk, partial, scratch, [=](int row, int channel, float* sums) {
        int f = row % bands_out, t = row / bands_out % time_out, b = row / bands_out / time_out;
        int valid = input_lengths[b];
        if ((u32)t >= ((u32)valid + 1) / 2) return;
        float d = dz[(u64)row * channels + channel];
        for (int k = 0; k < 9; k++) sums[k] += d * first_input(x, b, t, f, k, time, bands, valid);
        sums[9] += d;
    });
}

// x (B, T, F, C), weight (C, 1, 3, 3).
KERNEL(subsample_depthwise, (const float* x, const float* weight, const float* bias, const u32* lengths, float* out,
                             int n, int time, int bands, int channels)) {
    u64 i = element();
    if (i >= (u64)n) return;
    Strip strip = strip_of((u32)i, (time + 1) / 2, (bands + 1) / 2, channels);
    u64 at = strip.at;
    if ((u32)strip.t >= lengths[strip.b]) {
        for (int f = strip.first; f < strip.end; f++, at += channels) out[at] = 0.0f;
        return;
    }
    float weights[9], inputs[9], offset = bias[strip.channel];
    // Of the frames of the three taps in time, the first band.
    const float* frames[3];
    for (int k = 0; k < 9; k++) weights[k] = weight[strip.channel * 9 + k];
    for (int kt = 0; kt < 3; kt++) {
        int ti = input_index(strip.t, kt, time);
        frames[kt] = ti < 0 ? nullptr : x + (strip.b * time + ti) * bands * channels + strip.channel;
        inputs[3 * kt + 2] = frames[kt] && strip.first > 0 ? frames[kt][(u64)(2 * strip.first - 1) * channels] : 0.0f;
    }
    for (int f = strip.first; f < strip.end; f++, at += channels) {
        float sum = offset;
        bool last = 2 * f + 1 < bands;
        // All are asked for before the first is waited for; in place of a frame that is not there, the middle one, which is.
        for (int kt = 0; kt < 3; kt++) {
            const float* frame = frames[kt] ? frames[kt] : frames[1];
            float* taps = inputs + 3 * kt;
            taps[0] = taps[2];
            taps[1] = frame[(u64)(2 * f) * channels];
            taps[2] = frame[(u64)(last ? 2 * f + 1 : 2 * f) * channels];
        }
        for (int kt = 0; kt < 3; kt++) {
            const float* taps = inputs + 3 * kt;
            if (!frames[kt]) continue;
            if (f > 0) sum = fmaf(weights[3 * kt], taps[0], sum);
            sum = fmaf(weights[3 * kt + 1], taps[1], sum);
            if (last) sum = fmaf(weights[3 * kt + 2], taps[2], sum);
        }
        out[at] = sum;
    }
}

// Gradient with respect to the input before its ReLU, whose result is x. An even band is reached by the middle tap of one output, an
// odd one by the others of two.
KERNEL(subsample_depthwise_dx, (const float* x, const float* weight, const float* dy, float* out, int n, int time,
                                int bands, int channels)) {
    u64 i = element();
    if (i >= (u64)n) return;
    int time_out = (time + 1) / 2, bands_out = (bands + 1) / 2;
    Strip strip = strip_of((u32)i, time, bands, channels);
    u64 at = strip.at;
    float weights[9], below[3], above[3];
    const float* frames[3];
    for (int k = 0; k < 9; k++) weights[k] = weight[strip.channel * 9 + k];
    for (int kt = 0; kt < 3; kt++) {
        int to = output_index(strip.t, kt, time_out);
        frames[kt] = to < 0 ? nullptr : dy + (strip.b * time_out + to) * bands_out * channels + strip.channel;
        above[kt] = frames[kt] ? frames[kt][(u64)(strip.first / 2) * channels] : 0.0f;
    }
    // It begins with an even band.
    for (int f = strip.first; f < strip.end; f += 2) {
        bool more = f / 2 + 1 < bands_out, two = f + 1 < strip.end;
        float even = 0.0f, odd = 0.0f;
        // All are asked for before the first is waited for.
        float lower = x[at], upper = x[two ? at + channels : at];
        for (int kt = 0; kt < 3; kt++) {
            below[kt] = above[kt];
            above[kt] = frames[kt] && more ? frames[kt][(u64)(f / 2 + 1) * channels] : 0.0f;
        }
        for (int kt = 0; kt < 3; kt++) {
            if (!frames[kt]) continue;
            even = fmaf(weights[3 * kt + 1], below[kt], even);
            if (more) odd = fmaf(weights[3 * kt], above[kt], odd);
            odd = fmaf(weights[3 * kt + 2], below[kt], odd);
        }
        out[at] = lower > 0.0f ? even : 0.0f;
        at += channels;
        if (two) out[at] = upper > 0.0f ? odd : 0.0f;
        at += channels;
    }
}

// Columns (10, C), rows as above.
KERNEL(subsample_depthwise_weights, (const float* x, const float* dy, float* partial, int rows, int time, int bands,
                                     int channels, int chunk)) {
    SHARED(float, scratch, THREADS);
    int time_out = (time + 1) / 2, bands_out = (bands + 1) / 2;
    tap_sums(rows, channels, chunk, partial, scratch, [=](int row, int channel, float* sums) {
        float d = dy[(u64)row * channels + channel];
        int f = row % bands_out, t = row / bands_out % time_out, b = row / bands_out / time_out;
        for (int k = 0; k < 9; k++) {
            int ti = input_index(t, k / 3, time), fi = input_index(f, k % 3, bands);
            if (ti >= 0 && fi >= 0) sums[k] += d * x[(((u64)b * time + ti) * bands + fi) * channels + channel];
        }
        sums[9] += d;
    });
}

// A number of z (B, T, F * C), which has `n` of them: whether it is within its sequence's length, and its channel.
struct Spot {
    bool valid;
    u32 channel;
};

DEVICE Spot spot_of(u64 i, const u32* lengths, u64 n, int time, int row, int channels) {
    // Divisions in 32 bits take a fifth of the instructions.
    if (n >> 32) {
        u64 frame = i / row;
        return {frame % time < lengths[frame / time], (u32)(i % channels)};
    }
    u32 frame = (u32)i / (u32)row, b = frame / (u32)time;
    return {frame - b * (u32)time < lengths[b], (u32)i % (u32)channels};
}

// relu(z + bias) in place for z (B, T, F * C), zero at or past each length.
KERNEL(bias_relu, (float* z, const float* bias, const u32* lengths, u64 n, int time, int row, int channels)) {
    write_elements(z, nullptr, n, [=](u64 i, float* four) {
        read_elements(z, i, n, four);
        if (channels % 4 == 0) {
            // All four are of one frame, in channels beside each other.
            Spot spot = spot_of(i, lengths, n, time, row, channels);
            for (int at = 0; at < 4; at++) four[at] = spot.valid ? relu(four[at] + bias[spot.channel + at]) : 0.0f;
            return;
        }
        for (int at = 0; at < 4; at++) {
            if (i + at >= n) continue;
            Spot spot = spot_of(i + at, lengths, n, time, row, channels);
            four[at] = spot.valid ? relu(four[at] + bias[spot.channel]) : 0.0f;
        }
    });
}

KERNEL(relu_backward, (const float* y, const float* dy, float* out, u64 n)) {
    write_elements(out, nullptr, n, [=](u64 i, float* four) {
        float result[4];
        read_elements(y, i, n, result);
        read_elements(dy, i, n, four);
        for (int at = 0; at < 4; at++) four[at] = result[at] <= 0.0f ? 0.0f : four[at];
    });
}
