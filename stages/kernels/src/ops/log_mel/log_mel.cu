// Log-mel features. `table` has `words` numbers for each utterance: the place of its first sample, its samples, the key of
// its dither (low and high half), and begin and end of each masked range, those of frames before those of bands. The bits of
// all samples follow, and places count from the beginning of the table.

// Points of the Fourier transform, at most.
#define MOST_POINTS 1024

// Sample `i` with dither: two normal values for each pair of samples, as `Noise::normal_pair` draws them.
DEVICE float dithered(const u32* samples, u64 i, u64 key, float dither) {
    if (dither == 0.0f) return float_of(samples[i]);
    u64 first = mix(key + (i / 2 * 2 + 1) * 0x9E3779B97F4A7C15ull);
    u64 second = mix(key + (i / 2 * 2 + 2) * 0x9E3779B97F4A7C15ull);
    const double unit = 1.0 / 9007199254740992.0;
    double radius = sqrt(-2.0 * log(1.0 - (double)(first >> 11) * unit));
    double angle = 6.283185307179586 * ((double)(second >> 11) * unit);
    return float_of(samples[i]) + times(dither, (float)(radius * (i % 2 == 0 ? cos(angle) : sin(angle))));
}

// Each sample less a part of the one before it: block (x, y) for 256 samples of utterance y.
KERNEL(emphasise, (const u32* table, float* out, float part, float dither, int words)) {
    const u32* entry = table + (u64)blockIdx.y * words;
    u64 i = element();
    if (i >= entry[1]) return;
    u64 key = entry[2] | (u64)entry[3] << 32;
    const u32* samples = table + entry[0];
    float sample = dithered(samples, i, key, dither);
    out[entry[0] + i] = i == 0 ? sample : sample - times(part, dithered(samples, i - 1, key, dither));
}

// A frame of an utterance: block (frame, utterance). `twiddles` holds cosine and sine of the angles 2 pi k / points, for k
// below points / 2. `bands` has three numbers for each band: its first bin, its first weight, its weights. `out` is
// (utterances, bands, frames).
KERNEL(log_mel, (const float* emphasised, const u32* table, const float* window, const double* twiddles,
                 const float* weights, const u32* bands, float* out, int points, int width, int hop, int band_count,
                 int frames, int words, float guard)) {
    SHARED(double, real, MOST_POINTS);
    SHARED(double, imaginary, MOST_POINTS);
    SHARED(float, power, MOST_POINTS / 2 + 1);
    int thread = threadIdx.x, frame = blockIdx.x;
    const u32* entry = table + (u64)blockIdx.y * words;
    out += (u64)blockIdx.y * band_count * frames + frame;
    if (frame >= (int)(entry[1] / hop)) {
        for (int band = thread; band < band_count; band += THREADS) out[(u64)band * frames] = 0.0f;
        return;
    }
    // The window is centred in the transform's input, whose middle is at sample `frame * hop`.
    int margin = (points - width) / 2, bits = 0;
    while (1 << bits < points) bits++;
    emphasised += entry[0];
    for (int i = thread; i < points; i += THREADS) {
        long long at = (long long)frame * hop + i - points / 2;
        bool inside = i >= margin && i < margin + width && at >= 0 && at < (long long)entry[1];
        int reversed = 0;
        for (int bit = 0; bit < bits; bit++) reversed |= (i >> bit & 1) << (bits - 1 - bit);
        real[reversed] = inside ? (double)(emphasised[at] * window[i - margin]) : 0.0;
        imaginary[reversed] = 0.0;
    }
    for (int half = 1; half < points; half *= 2) {
        BARRIER();
        for (int pair = thread; pair < points / 2; pair += THREADS) {
            int k = pair % half, low = pair / half * 2 * half + k, high = low + half;
            const double* twiddle = twiddles + 2 * (u64)(k * (points / 2 / half));
            double re = real[high] * twiddle[0] + imaginary[high] * twiddle[1];
            double im = imaginary[high] * twiddle[0] - real[high] * twiddle[1];
            real[high] = real[low] - re;
            imaginary[high] = imaginary[low] - im;
            real[low] += re;
            imaginary[low] += im;
        }
    }
    BARRIER();
    for (int bin = thread; bin <= points / 2; bin += THREADS) {
        // NeMo takes the root and squares it again.
        float magnitude = (float)sqrt(real[bin] * real[bin] + imaginary[bin] * imaginary[bin]);
        power[bin] = magnitude * magnitude;
    }
    BARRIER();
    for (int band = thread; band < band_count; band += THREADS) {
        const u32* of = bands + 3 * band;
        float sum = 0.0f;
        for (u32 i = 0; i < of[2]; i++) sum += weights[of[1] + i] * power[of[0] + i];
        out[(u64)band * frames] = logf(sum + guard);
    }
}

// Each band of each utterance to mean 0 and deviation 1 (with n - 1; a deviation of one frame counts as 0), and 0 where it
// is masked: block (band, utterance).
KERNEL(normalise_features, (float* features, const u32* table, int hop, int bands, int frames, int words, int of_time,
                            int of_bands, float guard)) {
    SHARED(double, scratch, THREADS + 16);
    int thread = threadIdx.x, band = blockIdx.x;
    const u32* entry = table + (u64)blockIdx.y * words;
    const u32* times = entry + 4;
    int valid = entry[1] / hop;
    features += ((u64)blockIdx.y * bands + band) * frames;
    for (int mask = of_time; mask < of_time + of_bands; mask++)
        if (band >= (int)times[2 * mask] && band < (int)times[2 * mask + 1]) {
            for (int t = thread; t < valid; t += THREADS) features[t] = 0.0f;
            return;
        }
    double sum = 0;
    for (int t = thread; t < valid; t += THREADS) sum += (double)features[t];
    float mean = (float)(block_sum(sum, scratch) / (double)valid);
    double squares = 0;
    for (int t = thread; t < valid; t += THREADS) {
        double difference = (double)(features[t] - mean);
        squares += difference * difference;
    }
    squares = block_sum(squares, scratch);
    float deviation = valid > 1 ? (float)sqrt(squares / ((double)valid - 1.0)) : 0.0f;
    for (int t = thread; t < valid; t += THREADS) {
        bool masked = false;
        for (int mask = 0; mask < of_time; mask++) masked |= t >= (int)times[2 * mask] && t < (int)times[2 * mask + 1];
        features[t] = masked ? 0.0f : (features[t] - mean) / (deviation + guard);
    }
}
