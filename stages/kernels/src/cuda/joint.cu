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

// The gradient of a hidden value, where it is above zero.
DEVICE float passed(const float* d_hidden, const float* hidden, u64 place, float factor) {
    return hidden[place] > 0.0f ? d_hidden[place] * factor : 0.0f;
}

// Adds the gradients of hidden values to the rows that these were joined of, in the order of the cells: block (row, y) has 256
// columns of a row of d_f for the first `frames` blocks, and of d_g for the others, whose threads look for the cells of 256
// frames at a time.
KERNEL(joint_hidden_sums, (const float* d_hidden, const float* hidden, const u32* cells, float* d_f, float* d_g, int count,
                           int frames, int width, float factor)) {
    SHARED(int, places, THREADS);
    int thread = threadIdx.x, column = blockIdx.y * THREADS + thread;
    if ((int)blockIdx.x < frames) {
        u32 frame = blockIdx.x;
        u64 at = first_cell(cells, count, frame, 0);
        if (column >= width || at >= (u64)count || cells[4 * at] != frame) return;
        float* sum = d_f + (u64)frame * width + column;
        float added = *sum;
        for (; at < (u64)count && cells[4 * at] == frame; at++) added += passed(d_hidden, hidden, at * width + column, factor);
        *sum = added;
        return;
    }
    u32 state = blockIdx.x - frames;
    u64 last = cells[4 * (u64)(count - 1)];
    float* sum = d_g + (u64)state * width + column;
    float added = column < width ? *sum : 0.0f;
    for (u64 first = cells[0]; first <= last; first += THREADS) {
        u64 own = first + thread;
        places[thread] = own <= last ? first_cell(cells, count, (u32)own, state) : count;
        BARRIER();
        if (column < width)
            for (int k = 0; k < THREADS && first + k <= last; k++)
                for (u64 at = places[k]; at < (u64)count && cells[4 * at] == first + k && cells[4 * at + 1] == state; at++)
                    added += passed(d_hidden, hidden, at * width + column, factor);
        BARRIER();
    }
    if (column < width) *sum = added;
}
