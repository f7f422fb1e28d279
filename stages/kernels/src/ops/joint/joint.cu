// Element-wise parts of the joint network and its loss. `cells` has four numbers for each cell: row of the encoder's
// part, row of the prediction network's part, label (the largest number for none), place among all cells.

// Rows of the two parts are without their biases where these are given. A thread has four columns of a cell, of which there are
// `n` all in all.
KERNEL(joint_hidden, (const float* f, const float* g, const float* f_bias, const float* g_bias, const u32* cells, float* out,
                      bf16* out_bf16, int n, int width, float factor, u64 key, u64 threshold)) {
    u64 i = element();
    if (i >= (u64)n) return;
    u32 quads = ((u32)width + 3) / 4, row = (u32)i / quads, j = ((u32)i - row * quads) * 4;
    const u32* cell = cells + 4 * (u64)row;
    const float *of_f = f + (u64)cell[0] * width + j, *of_g = g + (u64)cell[1] * width + j;
    u64 index = (u64)cell[3] * width + j;
    auto hidden = [=](float from_f, float from_g, int at) {
        float sum = from_f + from_g;
        // Written so that NaN stays NaN.
        float value = sum <= 0.0f ? 0.0f : sum;
        return keeps(key, threshold, index + at) ? value * factor : 0.0f;
    };
    u64 place = (u64)row * width + j;
    bool aligned = by_fours(f) && by_fours(g) && by_fours(f_bias) && by_fours(g_bias) && by_fours(out) && by_fours(out_bf16);
    if (width % 4 == 0 && aligned) {
        float from_f[4], from_g[4], more_f[4] = {0, 0, 0, 0}, more_g[4] = {0, 0, 0, 0}, values[4];
        read_four(of_f, from_f);
        read_four(of_g, from_g);
        if (f_bias) read_four(f_bias + j, more_f);
        if (g_bias) read_four(g_bias + j, more_g);
        for (int at = 0; at < 4; at++) values[at] = hidden(from_f[at] + more_f[at], from_g[at] + more_g[at], at);
        if (out_bf16)
            write_four(out_bf16 + place, values);
        else
            write_four(out + place, values);
        return;
    }
    for (int at = 0; at < 4 && (int)j + at < width; at++) {
        float from_f = of_f[at] + (f_bias ? f_bias[j + at] : 0.0f), from_g = of_g[at] + (g_bias ? g_bias[j + at] : 0.0f);
        put(out, out_bf16, place + at, hidden(from_f, from_g, at));
    }
}

// An utterance's lattice: its first cell among all, its frames, its states, and the place of its first token in `targets`.
// `frames` and `states` are the rows that an utterance has of the two parts.
struct Extent {
    u32 first, frames, states, target;
};

DEVICE Extent extent_of(const u32* lattices, u32 utterance) {
    const u32* entry = lattices + 4 * (u64)utterance;
    return {entry[0], entry[1], entry[2], entry[3]};
}

// The label of a state, of which the last has none.
DEVICE u32 label_of(const Extent& of, const u32* targets, u32 state) {
    return state + 1 < of.states ? targets[of.target + state] : 0xffffffffu;
}

// Lists all cells of lattices in rising order of frame and state: block (x, utterance) has 256 of them.
KERNEL(list_cells, (const u32* lattices, const u32* targets, u32* cells, int frames, int states)) {
    Extent of = extent_of(lattices, blockIdx.y);
    u64 place = element();
    if (place >= (u64)of.frames * of.states) return;
    u32 frame = (u32)place / of.states, state = (u32)place - frame * of.states;
    u32* cell = cells + 4 * (of.first + place);
    cell[0] = blockIdx.y * (u32)frames + frame;
    cell[1] = blockIdx.y * (u32)states + state;
    cell[2] = label_of(of, targets, state);
    cell[3] = of.first + (u32)place;
}

// Lists the cells that count, one block for each utterance. `active` has a number for each cell, `counted` how many of each
// utterance count. A thread looks at some cells beside each other at a time.
KERNEL(list_active_cells, (const u32* lattices, const u32* targets, const u8* active, const double* counted, u32* cells,
                           int frames, int states)) {
    enum { CELLS = 16 };
    SHARED(u32, flags, THREADS);
    SHARED(u32, parts, 16);
    int thread = threadIdx.x;
    Extent of = extent_of(lattices, blockIdx.x);
    u32 count = of.frames * of.states;
    u64 next = 0;
    for (u32 before = 0; before < blockIdx.x; before++) next += (u64)counted[before];
    for (u32 start = 0; start < count; start += CELLS * THREADS) {
        u32 own = start + CELLS * thread, listed = 0, some = 0, labels[CELLS];
        u8 counts[CELLS];
        UNROLL(CELLS)
        for (int i = 0; i < CELLS; i++) counts[i] = active[of.first + (own + i < count ? own + i : 0)];
        UNROLL(CELLS)
        for (int i = 0; i < CELLS; i++) {
            u32 flag = own + i < count && counts[i];
            listed |= flag << i;
            some += flag;
        }
        u32 frame = own / of.states, first_state = own - frame * of.states, state = first_state;
        UNROLL(CELLS)
        for (int i = 0; i < CELLS; i++) {
            labels[i] = listed >> i & 1 ? label_of(of, targets, state) : 0;
            if (++state == of.states) state = 0;
        }
        flags[thread] = some;
        BARRIER();
        if (thread < 16) {
            u32 sum = 0;
            for (int i = 0; i < 16; i++) sum += flags[16 * thread + i];
            parts[thread] = sum;
        }
        BARRIER();
        u32 before = 0, all = 0;
        for (int part = 0; part < 16; part++) {
            if (part < thread / 16) before += parts[part];
            all += parts[part];
        }
        for (int i = thread / 16 * 16; i < thread; i++) before += flags[i];
        u32* cell = cells + 4 * (next + before);
        state = first_state;
        UNROLL(CELLS)
        for (int i = 0; i < CELLS; i++) {
            if (listed >> i & 1) {
                cell[0] = blockIdx.x * (u32)frames + frame;
                cell[1] = blockIdx.x * (u32)states + state;
                cell[2] = labels[i];
                cell[3] = of.first + own + i;
                cell += 4;
            }
            if (++state == of.states) {
                state = 0;
                frame++;
            }
        }
        next += all;
        BARRIER();
    }
}

// Natural logarithm of the sum of exp(logits + bias), by all threads of the block.
DEVICE double log_sum_exp(const float* logits, const float* bias, int count, float* scratch) {
    float top = -infinity();
    for (int j = threadIdx.x; j < count; j += THREADS) {
        float value = logits[j] + bias[j];
        top = value > top ? value : top;
    }
    top = block_largest(top, scratch);
    float sum = 0;
    for (int j = threadIdx.x; j < count; j += THREADS) sum += expf(logits[j] + bias[j] - top);
    return (double)top + log((double)block_sum(sum, scratch));
}

// One block for each cell, whose logits are the first of a row of `stride` numbers. `terms` gets three numbers: normaliser, log
// probability of blank and of the label; behind them the log probabilities of the durations.
KERNEL(cell_terms, (const float* logits, const float* bias, const u32* cells, double* terms, int tokens,
                    int durations, int stride)) {
    SHARED(float, scratch, THREADS + 16);
    u64 cell = blockIdx.x;
    logits += cell * stride;
    terms += cell * (3 + durations);
    u32 label = cells[4 * cell + 2];
    double normaliser = log_sum_exp(logits, bias, tokens, scratch);
    double duration_normaliser = durations > 0 ? log_sum_exp(logits + tokens, bias + tokens, durations, scratch) : 0.0;
    if (threadIdx.x == 0) {
        int blank = tokens - 1;
        terms[0] = normaliser;
        terms[1] = (double)(logits[blank] + bias[blank]) - normaliser;
        terms[2] = label < (u32)tokens ? (double)(logits[label] + bias[label]) - normaliser : 0.0;
    }
    for (int d = threadIdx.x; d < durations; d += THREADS)
        terms[3 + d] = (double)(logits[tokens + d] + bias[tokens + d]) - duration_normaliser;
}

// Eight neighbours, of which the first lies at a multiple of 16 bytes, in one access.
DEVICE void read_eight(const bf16* from, float* into) {
#ifdef __CUDACC__
    uint4 eight = *(const uint4*)from;
    u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        into[2 * i] = float_of(pairs[i] << 16);
        into[2 * i + 1] = float_of(pairs[i] & 0xffff0000u);
    }
#else
    for (int i = 0; i < 8; i++) into[i] = wide(from[i]);
#endif
}

// A sum of exponentials: exp(top) times `sum`.
struct Exponentials {
    float top, sum;
};

// Adds some exponentials. Minus infinity adds nothing, and what is not a number makes the sum none.
template <int COUNT>
DEVICE void add_exponentials(Exponentials& all, const float* values) {
    float top = all.top;
    UNROLL(COUNT)
    for (int i = 0; i < COUNT; i++) top = values[i] > top ? values[i] : top;
    float base = top == -infinity() ? 0.0f : top, sum = all.sum == 0.0f ? 0.0f : all.sum * expf(all.top - base);
    UNROLL(COUNT)
    for (int i = 0; i < COUNT; i++) sum += expf(values[i] - base);
    all.top = top;
    all.sum = sum;
}

// A thread's share of a row's groups of eight logits, of which it has four in registers at a time. How they are read, many at once
// or one by one, changes nothing of the sum.
template <bool AT_ONCE>
DEVICE Exponentials exponentials_of(const bf16* logits, const float* bias, int groups) {
    enum { GROUPS = 4 };
    Exponentials own = {-infinity(), 0.0f};
    for (int first = threadIdx.x; first < groups; first += GROUPS * THREADS) {
        float values[8 * GROUPS];
        UNROLL(GROUPS)
        for (int i = 0; i < GROUPS; i++) {
            int group = first + i * THREADS;
            const bf16* from = logits + 8 * (group < groups ? group : first);
            if (AT_ONCE)
                read_eight(from, values + 8 * i);
            else
                for (int at = 0; at < 8; at++) values[8 * i + at] = wide(from[at]);
        }
        UNROLL(GROUPS)
        for (int i = 0; i < GROUPS; i++) {
            int group = first + i * THREADS;
            float offsets[8];
            const float* from = bias + 8 * (group < groups ? group : first);
            if (AT_ONCE) {
                read_four(from, offsets);
                read_four(from + 4, offsets + 4);
            } else
                for (int at = 0; at < 8; at++) offsets[at] = from[at];
            UNROLL(8)
            for (int at = 0; at < 8; at++)
                values[8 * i + at] = group < groups ? values[8 * i + at] + offsets[at] : -infinity();
        }
        add_exponentials<8 * GROUPS>(own, values);
    }
    return own;
}

// `cell_terms` of logits in bf16, which are read once. Rows go from the last to the first: what the product wrote last is still in
// the L2 cache.
KERNEL(cell_terms_bf16, (const bf16* logits, const float* bias, const u32* cells, double* terms, int tokens,
                         int durations, int stride)) {
    SHARED(float, scratch, THREADS + 16);
    int thread = threadIdx.x;
    u64 cell = gridDim.x - 1 - blockIdx.x;
    logits += cell * stride;
    terms += cell * (3 + durations);
    u32 label = cells[4 * cell + 2];
    bool aligned = stride % 8 == 0 && (u64)logits % 16 == 0 && by_fours(bias);
    int groups = tokens / 8;
    Exponentials own = aligned ? exponentials_of<true>(logits, bias, groups) : exponentials_of<false>(logits, bias, groups);
    for (int j = 8 * groups + thread; j < tokens; j += THREADS) {
        float value = wide(logits[j]) + bias[j];
        add_exponentials<1>(own, &value);
    }
    float top = block_largest(own.top, scratch);
    float sum = block_sum(own.sum == 0.0f ? 0.0f : own.sum * expf(own.top - top), scratch);
    if (thread == 0) {
        int blank = tokens - 1;
        double normaliser = (double)top + log((double)sum);
        terms[0] = normaliser;
        terms[1] = (double)(wide(logits[blank]) + bias[blank]) - normaliser;
        terms[2] = label < (u32)tokens ? (double)(wide(logits[label]) + bias[label]) - normaliser : 0.0;
    }
    // Durations are few: whoever has one adds up all of them.
    for (int d = thread; d < durations; d += THREADS) {
        Exponentials all = {-infinity(), 0.0f};
        for (int of = 0; of < durations; of++) {
            float value = wide(logits[tokens + of]) + bias[tokens + of];
            add_exponentials<1>(all, &value);
        }
        terms[3 + d] = (double)(wide(logits[tokens + d]) + bias[tokens + d]) - ((double)all.top + log((double)all.sum));
    }
}

// The first of some cells, which are in rising order of frame and state, that does not come before these.
DEVICE int first_cell(const u32* cells, int count, u32 frame, u32 state) {
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2;
        const u32* cell = cells + 4 * (u64)middle;
        if (cell[0] < frame || (cell[0] == frame && cell[1] < state))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Hidden values in one of two types; the pointer to the other is null.
struct Hidden {
    const float* values;
    const bf16* values_bf16;
};

// The gradient of a hidden value, where it is above zero. Both are read before either is looked at.
DEVICE float passed(const float* d_hidden, const Hidden& hidden, u64 place, float factor) {
    float value = hidden.values ? hidden.values[place] : wide(hidden.values_bf16[place]), slope = d_hidden[place];
    return value > 0.0f ? slope * factor : 0.0f;
}

// Adds the gradients of hidden values to the rows that these were joined of, in the order of the cells: block (row, y) has 256
// columns of a row of d_f for the first `frames` blocks, and of d_g for the others. An utterance has `frames_each` rows of d_f
// and `states_each` of d_g: the threads of a state's block look for its cells in 256 frames of its own utterance at a time.
KERNEL(joint_hidden_sums, (const float* d_hidden, const float* values, const bf16* values_bf16, const u32* cells, float* d_f,
                           float* d_g, int count, int frames, int frames_each, int states_each, int width,
                           float factor)) {
    SHARED(int, places, THREADS);
    SHARED(int, ends, THREADS);
    Hidden hidden = {values, values_bf16};
    int thread = threadIdx.x, column = blockIdx.y * THREADS + thread;
    u32 begin = cells[0], end = cells[4 * (u64)(count - 1)] + 1;
    // Cells that are asked for before the first is waited for.
    enum { TOGETHER = 8 };
    if ((int)blockIdx.x < frames) {
        u32 frame = blockIdx.x;
        if (frame < begin || frame >= end) return;
        int at = first_cell(cells, count, frame, 0), last = first_cell(cells, count, frame + 1, 0);
        if (column >= width || at == last) return;
        float* sum = d_f + (u64)frame * width + column;
        float added = *sum;
        UNROLL(8)
        for (; at < last; at++) added += passed(d_hidden, hidden, (u64)at * width + column, factor);
        *sum = added;
        return;
    }
    u32 state = blockIdx.x - frames, own = state / (u32)states_each * (u32)frames_each;
    if (own > begin) begin = own;
    if (own + (u32)frames_each < end) end = own + (u32)frames_each;
    if (begin >= end) return;
    float* sum = d_g + (u64)state * width + column;
    float added = column < width ? *sum : 0.0f;
    for (u32 first = begin; first < end; first += THREADS) {
        u32 frame = first + thread;
        int place = frame < end ? first_cell(cells, count, frame, state) : count, last = place;
        UNROLL(1)
        while (last < count && cells[4 * (u64)last] == frame && cells[4 * (u64)last + 1] == state) last++;
        places[thread] = place;
        ends[thread] = last;
        BARRIER();
        int here = end - first < THREADS ? end - first : THREADS;
        for (int group = 0; column < width && group < here; group += TOGETHER) {
            // The first cell of each frame; there is hardly ever another one.
            float values[TOGETHER];
            UNROLL(TOGETHER)
            for (int k = 0; k < TOGETHER; k++) {
                int at = group + k;
                bool any = places[at] < ends[at];
                float value = passed(d_hidden, hidden, any ? (u64)places[at] * width + column : column, factor);
                values[k] = any ? value : 0.0f;
            }
            UNROLL(TOGETHER)
            for (int k = 0; k < TOGETHER; k++) {
                int at = group + k;
                if (places[at] == ends[at]) continue;
                added += values[k];
                UNROLL(1)
                for (int next = places[at] + 1; next < ends[at]; next++)
                    added += passed(d_hidden, hidden, (u64)next * width + column, factor);
            }
        }
        BARRIER();
    }
    if (column < width) *sum = added;
}
