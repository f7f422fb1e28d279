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

// Adds the gradient of hidden values, where these are above zero, to the rows that they were joined of: each block has 256
// columns of one row, of d_f for the first `first_state` blocks and of d_g for the others. A group has its first member and
// its row; its members are the cells up to the first member of the next group, in order.
KERNEL(joint_hidden_sums, (const float* d_hidden, const float* hidden, const u32* groups, const u32* members, float* d_f,
                           float* d_g, int first_state, int width, float factor)) {
    int column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= width) return;
    const u32* group = groups + 2 * blockIdx.x;
    float* sum = ((int)blockIdx.x < first_state ? d_f : d_g) + (u64)group[1] * width + column;
    float added = *sum;
    for (u32 at = group[0]; at < group[2]; at++) {
        u64 place = (u64)members[at] * width + column;
        added += hidden[place] > 0.0f ? d_hidden[place] * factor : 0.0f;
    }
    *sum = added;
}
