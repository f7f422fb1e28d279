// AdamW, in place on parameters and moments.

// What an update is made with; see optimizer in flow-training.
struct Rates {
    float scale, keep, beta1, rest1, beta2, rest2, epsilon, step_size, root_correction;
};

DEVICE Rates rates_of(const float* values) {
    Rates rates = {values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7], values[8]};
    return rates;
}

DEVICE float wide(bf16 value) { return float_of((u32)value << 16); }
DEVICE float wide(float value) { return value; }

// Stores a weight. One in bf16 is rounded up or down at random, in proportion.
DEVICE void store(float* place, float value, u64 seed, u64 index) { *place = value; }
DEVICE void store(bf16* place, float value, u64 seed, u64 index) {
    u32 bits = bits_of(value);
    if (is_finite(value))
        bits += (u32)(mix((seed ^ index) + 0x9E3779B97F4A7C15ull) & 0xffff);
    else if (value != value)
        bits |= 0x400000u;
    *place = (bf16)(bits >> 16);
}

template <class P>
DEVICE void update(P* parameter, const float* gradient, float* first, float* second, const float* values, u64 seed,
                   u64 n) {
    u64 i = element();
    if (i >= n) return;
    Rates r = rates_of(values);
    float g = gradient[i] * r.scale;
    float m = first[i] + r.rest1 * (g - first[i]);
    float v = r.beta2 * second[i] + r.rest2 * g * g;
    first[i] = m;
    second[i] = v;
    store(parameter + i, r.keep * wide(parameter[i]) - r.step_size * (m / (sqrtf(v) / r.root_correction + r.epsilon)),
          seed, i);
}

KERNEL(adamw_f32, (float* parameter, const float* gradient, float* first, float* second, const float* rates, u64 seed,
                   u64 n)) {
    update(parameter, gradient, first, second, rates, seed, n);
}

KERNEL(adamw_bf16, (bf16* parameter, const float* gradient, float* first, float* second, const float* rates, u64 seed,
                    u64 n)) {
    update(parameter, gradient, first, second, rates, seed, n);
}

// The code of a number of a block with this scale; tables as in optimizer/eight_bit.rs.
DEVICE u8 code_of(float number, float scale, bool finite, const u8* nearest, u8 zero) {
    if (!finite) return zero;
    if (scale == 0.0f) return 0;
    if (number == 0.0f) return zero;
    float step = (number / scale + 1.0f) * 0.5f * 65535.0f + 0.5f;
    return nearest[step < 65535.0f ? (int)step : 65535];
}

// Moments in eight bits: one block for each 256 numbers, which share a scale. `values` holds what the codes stand for,
// signed and unsigned, 256 each; `nearest` the codes of 65536 steps for either, and behind them the codes of zero.
template <class P>
DEVICE void update_coded(P* parameter, const float* gradient, u8* first, float* first_scales, u8* second,
                         float* second_scales, const float* values, const u8* nearest, const float* rates, u64 seed,
                         u64 n, float* scratch) {
    u64 i = element();
    Rates r = rates_of(rates);
    float m = 0, v = 0;
    if (i < n) {
        float g = gradient[i] * r.scale;
        m = values[first[i]] * first_scales[blockIdx.x];
        v = values[256 + second[i]] * second_scales[blockIdx.x];
        m = m * r.beta1 + r.rest1 * g;
        v = v * r.beta2 + r.rest2 * (g * g);
        store(parameter + i, wide(parameter[i]) * r.keep - r.step_size * (m / (sqrtf(v) + r.epsilon)), seed, i);
    }
    // Largest magnitudes, and whether all are finite. The barriers within also part the reads of the scales from the
    // writes.
    float first_scale = block_largest(fabsf(m), scratch), second_scale = block_largest(fabsf(v), scratch);
    bool first_finite = block_largest(is_finite(m) ? 0.0f : 1.0f, scratch) == 0.0f;
    bool second_finite = block_largest(is_finite(v) ? 0.0f : 1.0f, scratch) == 0.0f;
    if (i < n) {
        first[i] = code_of(m, first_scale, first_finite, nearest, nearest[131072]);
        second[i] = code_of(v, second_scale, second_finite, nearest + 65536, nearest[131073]);
    }
    if (threadIdx.x == 0) {
        first_scales[blockIdx.x] = first_finite ? first_scale : not_a_number();
        second_scales[blockIdx.x] = second_finite ? second_scale : not_a_number();
    }
}

KERNEL(adamw_coded_f32, (float* parameter, const float* gradient, u8* first, float* first_scales, u8* second,
                         float* second_scales, const float* values, const u8* nearest, const float* rates, u64 seed,
                         u64 n)) {
    SHARED(float, scratch, THREADS + 16);
    update_coded(parameter, gradient, first, first_scales, second, second_scales, values, nearest, rates, seed, n,
                 scratch);
}

KERNEL(adamw_coded_bf16, (bf16* parameter, const float* gradient, u8* first, float* first_scales, u8* second,
                          float* second_scales, const float* values, const u8* nearest, const float* rates, u64 seed,
                          u64 n)) {
    SHARED(float, scratch, THREADS + 16);
    update_coded(parameter, gradient, first, first_scales, second, second_scales, values, nearest, rates, seed, n,
                 scratch);
}
