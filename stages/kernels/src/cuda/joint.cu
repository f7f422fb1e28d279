// Element-wise parts of the joint network and its loss. `cells` has four numbers for each cell: row of the encoder's
// part, row of the prediction network's part, label (the largest number for none), place among all cells.

KERNEL(joint_hidden, (const float* f, const float* g, const u32* cells, float* out, u64 n, int width, float factor,
                      u64 key, u64 threshold)) {
    u64 i = element();
    if (i >= n) return;
    const u32* cell = cells + i / width * 4;
    u64 j = i % width;
    float sum = f[(u64)cell[0] * width + j] + g[(u64)cell[1] * width + j];
    // Written so that NaN stays NaN.
    float value = sum <= 0.0f ? 0.0f : sum;
    out[i] = keeps(key, threshold, (u64)cell[3] * width + j) ? value * factor : 0.0f;
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

// One block for each cell. `terms` gets three numbers: normaliser, log probability of blank and of the label; behind
// them the log probabilities of the durations.
KERNEL(cell_terms, (const float* logits, const float* bias, const u32* cells, double* terms, int tokens,
                    int durations)) {
    SHARED(float, scratch, THREADS + 16);
    u64 cell = blockIdx.x;
    logits += cell * (tokens + durations);
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

// out[frame] += sum of x over the cells of a frame, in order: block (frame, y) for 256 columns.
KERNEL(add_to_frames, (const float* x, const u32* cells, float* out, int count, int width)) {
    int column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= width) return;
    u32 frame = blockIdx.x;
    u64 at = first_cell(cells, count, frame, 0);
    if (at >= (u64)count || cells[4 * at] != frame) return;
    float* sum = out + (u64)frame * width + column;
    float added = *sum;
    for (; at < (u64)count && cells[4 * at] == frame; at++) added += x[at * width + column];
    *sum = added;
}

// out[state] += sum of x over the cells of a state, in order: block (state, y) for 256 columns. The threads look for the
// cells of 256 frames at a time.
KERNEL(add_to_states, (const float* x, const u32* cells, float* out, int count, int width)) {
    SHARED(int, places, THREADS);
    int thread = threadIdx.x, column = blockIdx.y * THREADS + thread;
    u32 state = blockIdx.x;
    u64 last = cells[4 * (u64)(count - 1)];
    float* sum = out + (u64)state * width + column;
    float added = column < width ? *sum : 0.0f;
    for (u64 first = cells[0]; first <= last; first += THREADS) {
        u64 own = first + thread;
        places[thread] = own <= last ? first_cell(cells, count, (u32)own, state) : count;
        BARRIER();
        if (column < width)
            for (int k = 0; k < THREADS && first + k <= last; k++)
                for (u64 at = places[k]; at < (u64)count && cells[4 * at] == first + k && cells[4 * at + 1] == state; at++)
                    added += x[at * width + column];
        BARRIER();
    }
    if (column < width) *sum = added;
}

// The gradient of hidden values, where they are above zero.
KERNEL(joint_hidden_backward, (const float* d_hidden, const float* hidden, float* out, float factor, u64 n)) {
    u64 i = element();
    if (i < n) out[i] = hidden[i] > 0.0f ? d_hidden[i] * factor : 0.0f;
}
