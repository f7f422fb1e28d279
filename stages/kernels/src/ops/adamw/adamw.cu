// AdamW, in place on the parameters and moments of many tensors.

// What an update is made with; see optimizer in flow-training.
struct Rates {
    float scale, keep, beta1, rest1, beta2, rest2, epsilon, step_size, root_correction;
};

// Words of an entry of the plan: first block, elements, seed of the rounding, and the rates, two in a word.
#define WORDS 8

DEVICE Rates rates_of(const Part& part) {
    float values[10];
    for (int pair = 0; pair < 5; pair++) {
        u64 word = part.entry[3 + pair];
        values[2 * pair] = float_of((u32)word);
        values[2 * pair + 1] = float_of((u32)(word >> 32));
    }
    Rates rates = {values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7], values[8]};
    return rates;
}

// A weight as it is stored, in 32 bits: one in bf16 is rounded up or down at random, in proportion.
DEVICE float stored(const float*, float value, u64 seed, u64 index) { return value; }
DEVICE float stored(const bf16*, float value, u64 seed, u64 index) {
    u32 bits = bits_of(value);
    if (is_finite(value))
        bits += (u32)(mix((seed ^ index) + 0x9E3779B97F4A7C15ull) & 0xffff);
    else if (value != value)
        bits |= 0x400000u;
    return float_of(bits & 0xffff0000u);
}

// A weight that is one of its type.
DEVICE void store(float* place, float value) { *place = value; }
DEVICE void store(bf16* place, float value) { *place = (bf16)(bits_of(value) >> 16); }

template <class P>
DEVICE void update(P* const* parameters, const float* const* gradients, float* const* firsts, float* const* seconds,
                   const u64* plan, int count, int chunk) {
    Part part = part_of(plan, WORDS, count, chunk);
    Rates r = rates_of(part);
    u64 seed = part.entry[2];
    P* parameter = tensor_at(parameters[part.tensor]);
    const float* gradient = tensor_at(gradients[part.tensor]);
    float *first = tensor_at(firsts[part.tensor]), *second = tensor_at(seconds[part.tensor]);
    auto change = [&](float& p, float& m, float& v, float g, u64 i) {
        g *= r.scale;
        m = m + times(r.rest1, g - m);
        v = times(r.beta2, v) + times(times(r.rest2, g), g);
        float step = times(r.step_size, m / (sqrtf(v) / r.root_correction + r.epsilon));
        p = stored(parameter, times(r.keep, p) - step, seed, i);
    };
    u64 i = part.first + threadIdx.x;
    if (by_fours(parameter) && by_fours(gradient) && by_fours(first) && by_fours(second)) {
        u64 quad = part.first + 4 * threadIdx.x;
        for (; quad + 4 <= part.end; quad += 4 * THREADS) {
            float p[4], m[4], v[4], g[4];
            read_four(gradient + quad, g);
            read_four(first + quad, m);
            read_four(second + quad, v);
            read_four(parameter + quad, p);
            for (int at = 0; at < 4; at++) change(p[at], m[at], v[at], g[at], quad + at);
            write_four(first + quad, m);
            write_four(second + quad, v);
            write_four(parameter + quad, p);
        }
        // Those behind the last four.
        i = part.end - (part.end - part.first) % 4 + threadIdx.x;
    }
    for (; i < part.end; i += THREADS) {
        float p = wide(parameter[i]), m = first[i], v = second[i];
        change(p, m, v, gradient[i], i);
        first[i] = m;
        second[i] = v;
        store(parameter + i, p);
    }
}

KERNEL(adamw_f32, (float* const* parameters, const float* const* gradients, float* const* firsts, float* const* seconds,
                   const u64* plan, int count, int chunk)) {
    update(parameters, gradients, firsts, seconds, plan, count, chunk);
}

KERNEL(adamw_bf16, (bf16* const* parameters, const float* const* gradients, float* const* firsts,
                    float* const* seconds, const u64* plan, int count, int chunk)) {
    update(parameters, gradients, firsts, seconds, plan, count, chunk);
}

// The code of a number of a block with this scale; tables as in optimizer/eight_bit.rs.
DEVICE u8 code_of(float number, float scale, bool finite, const u8* nearest, u8 zero) {
    if (!finite) return zero;
    if (scale == 0.0f) return 0;
    if (number == 0.0f) return zero;
    float step = times((number / scale + 1.0f) * 0.5f, 65535.0f) + 0.5f;
    return nearest[step < 65535.0f ? (int)step : 65535];
}

// Moments in eight bits: 256 numbers, one for each thread, share a scale. `values` holds what the codes stand for, signed
// and unsigned, 256 each; `nearest` the codes of 65536 steps for either, and behind them the codes of zero. A chunk is
// some times 256.
template <class P>
DEVICE void update_coded(P* const* parameters, const float* const* gradients, u8* const* firsts,
                         float* const* first_scales, u8* const* seconds, float* const* second_scales,
                         const float* values, const u8* nearest, const u64* plan, int count, int chunk,
                         float* scratch) {
    Part part = part_of(plan, WORDS, count, chunk);
    Rates r = rates_of(part);
    u64 seed = part.entry[2];
    P* parameter = parameters[part.tensor];
    const float* gradient = gradients[part.tensor];
    u8 *first = firsts[part.tensor], *second = seconds[part.tensor];
    for (u64 start = part.first; start < part.end; start += THREADS) {
        u64 i = start + threadIdx.x;
        float *scale1 = first_scales[part.tensor] + start / THREADS, *scale2 = second_scales[part.tensor] + start / THREADS;
        float m = 0, v = 0;
        if (i < part.end) {
            float g = gradient[i] * r.scale;
            m = values[first[i]] * *scale1;
            v = values[256 + second[i]] * *scale2;
            m = times(m, r.beta1) + times(r.rest1, g);
            v = times(v, r.beta2) + times(r.rest2, g * g);
            float p = times(wide(parameter[i]), r.keep) - times(r.step_size, m / (sqrtf(v) + r.epsilon));
            store(parameter + i, stored(parameter, p, seed, i));
        }
        // Largest magnitudes, and whether all are finite. The barriers within also part the reads of the scales from the
        // writes.
        float largest1 = block_largest(fabsf(m), scratch), largest2 = block_largest(fabsf(v), scratch);
        bool finite1 = block_largest(is_finite(m) ? 0.0f : 1.0f, scratch) == 0.0f;
        bool finite2 = block_largest(is_finite(v) ? 0.0f : 1.0f, scratch) == 0.0f;
        if (i < part.end) {
            first[i] = code_of(m, largest1, finite1, nearest, nearest[131072]);
            second[i] = code_of(v, largest2, finite2, nearest + 65536, nearest[131073]);
        }
        if (threadIdx.x == 0) {
            *scale1 = finite1 ? largest1 : not_a_number();
            *scale2 = finite2 ? largest2 : not_a_number();
        }
    }
}

KERNEL(adamw_coded_f32, (float* const* parameters, const float* const* gradients, u8* const* firsts,
                         float* const* first_scales, u8* const* seconds, float* const* second_scales,
                         const float* values, const u8* nearest, const u64* plan, int count, int chunk)) {
    SHARED(float, scratch, THREADS + 16);
    update_coded(parameters, gradients, firsts, first_scales, seconds, second_scales, values, nearest, plan, count,
                 chunk, scratch);
}

KERNEL(adamw_coded_bf16, (bf16* const* parameters, const float* const* gradients, u8* const* firsts,
                          float* const* first_scales, u8* const* seconds, float* const* second_scales,
                          const float* values, const u8* nearest, const u64* plan, int count, int chunk)) {
    SHARED(float, scratch, THREADS + 16);
    update_coded(parameters, gradients, firsts, first_scales, seconds, second_scales, values, nearest, plan, count,
                 chunk, scratch);
}
