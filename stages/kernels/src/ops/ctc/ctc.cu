// The CTC loss over rows of logits, one for each frame, whose last output is blank. The rules are those of the CPU's (`mod.rs`):
// states are a target's labels with a blank before, between and after them. A path goes from a state to itself, to the next one,
// and over a blank between two different labels.
//
// `utterances` has four numbers for each: its frames, its labels, the place of its first label in `targets`, and that of its first
// cell. A cell is a state at a frame; those of a frame lie beside each other.
//
// Sums are logarithms in 64 bits, as on the CPU: a logarithm of -7000 in 32 bits is known to 5e-4, and so
// would be the posteriors.

enum {
    // The most states whose sums at two frames are in shared memory; as in cuda.rs.
    CTC_STATES = 2048,
    // Labels whose posteriors are in shared memory at a time; as in cuda.rs.
    CTC_LABELS = 1024,
    // States of a thread whose logits of the next frame are asked for before this frame's sums.
    CTC_OWN = 4
};

struct CtcUtterance {
    int frames, labels, states;
    const u32* target;
    u64 first_label, first_cell;
};

DEVICE CtcUtterance ctc_utterance(const u32* utterances, const u32* targets, u32 number) {
    const u32* entry = utterances + 4 * (u64)number;
    int labels = (int)entry[1];
    return {(int)entry[0], labels, 2 * labels + 1, targets + entry[2], entry[2], entry[3]};
}

// The output of a state.
DEVICE u32 ctc_output(const CtcUtterance& of, int state, int blank) {
    return state % 2 ? of.target[state / 2] : (u32)blank;
}

// Whether a path may come to a state from two states before.
DEVICE bool ctc_skips(const CtcUtterance& of, int state) {
    return state >= 3 && state < of.states && state % 2 && of.target[state / 2] != of.target[state / 2 - 1];
}

// log(e^a + e^b).
DEVICE double ctc_added(double a, double b) {
    double large = a >= b ? a : b, small = a >= b ? b : a;
    if (small == -(double)infinity()) return large;
    return large + log1p(exp(small - large));
}

// Logarithms of the sums of exponentials of the valid frames' logits: a block for each row, of which an utterance has `time`.
KERNEL(ctc_normalisers, (const float* logits, const u32* utterances, double* normalisers, int time, int outputs)) {
    SHARED(float, scratch, THREADS + 16);
    u32 row = blockIdx.x, utterance = row / (u32)time;
    if (row - utterance * (u32)time >= utterances[4 * (u64)utterance]) return;
    logits += (u64)row * outputs;
    float top = -infinity();
    for (int j = threadIdx.x; j < outputs; j += THREADS) {
        float value = logits[j];
        top = value > top ? value : top;
    }
    // What is not a number is passed over, and comes back through the sum.
    top = block_largest(top, scratch);
    float sum = 0.0f;
    for (int j = threadIdx.x; j < outputs; j += THREADS) sum += expf(logits[j] - top);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) normalisers[row] = (double)top + log((double)sum);
}

// The sums of one utterance from its beginning, each with its own frame, or from its end, each without it. `rows` has two rows of
// `width` numbers, those of the frame before and of this one, which come with their own frame from either side. Gives the row of
// the last frame.
DEVICE const double* ctc_recursion(const CtcUtterance& of, bool from_begin, const float* logits, const double* normalisers,
                                   double* sums, double* rows, int width, int outputs) {
    int thread = threadIdx.x, back = from_begin ? -1 : 1;
    u32 columns[CTC_OWN];
    bool skips[CTC_OWN];
    float next[CTC_OWN];
    double next_normaliser = 0.0;
    UNROLL(CTC_OWN)
    for (int i = 0; i < CTC_OWN; i++) {
        int state = thread + i * THREADS;
        columns[i] = state < of.states ? ctc_output(of, state, outputs - 1) : (u32)outputs - 1;
        skips[i] = ctc_skips(of, from_begin ? state : state + 2);
    }
    auto ask = [&](int step) {
        if (step >= of.frames) return;
        int frame = from_begin ? step : of.frames - 1 - step;
        next_normaliser = normalisers[frame];
        UNROLL(CTC_OWN)
        for (int i = 0; i < CTC_OWN; i++) next[i] = logits[(u64)frame * outputs + columns[i]];
    };
    double *before = rows, *now = rows + width;
    auto set = [&](int step, int frame, int state, bool skip, double log_probability) {
        // States that are passed before this one.
        int passed = from_begin ? state : of.states - 1 - state;
        double sum = passed < 2 ? 0.0 : -(double)infinity(), with_frame = sum;
        if (step > 0) {
            sum = before[state];
            if (passed > 0) sum = ctc_added(sum, before[state + back]);
            if (skip) sum = ctc_added(sum, before[state + 2 * back]);
        }
        if (step > 0 || passed < 2) with_frame = sum + log_probability;
        now[state] = with_frame;
        sums[(u64)frame * of.states + state] = from_begin ? with_frame : sum;
    };
    ask(0);
    for (int step = 0; step < of.frames; step++) {
        int frame = from_begin ? step : of.frames - 1 - step;
        double normaliser = next_normaliser;
        float own[CTC_OWN];
        UNROLL(CTC_OWN)
        for (int i = 0; i < CTC_OWN; i++) own[i] = next[i];
        ask(step + 1);
        UNROLL(CTC_OWN)
        for (int i = 0; i < CTC_OWN; i++) {
            int state = thread + i * THREADS;
            if (state < of.states) set(step, frame, state, skips[i], (double)own[i] - normaliser);
        }
        for (int state = thread + CTC_OWN * THREADS; state < of.states; state += THREADS) {
            float logit = logits[(u64)frame * outputs + ctc_output(of, state, outputs - 1)];
            set(step, frame, state, ctc_skips(of, from_begin ? state : state + 2), (double)logit - normaliser);
        }
        double* swapped = before;
        before = now;
        now = swapped;
        BARRIER();
    }
    return before;
}

// Sums over the paths to each cell (block (utterance, 0)) and from each cell (block (utterance, 1)), `cells` numbers each, and the
// loss of each utterance. `long_rows` has 4 x `width` numbers for each utterance, if one has more states than shared memory.
KERNEL(ctc_sums, (const float* logits, const double* normalisers, const u32* utterances, const u32* targets, double* sums,
                  double* long_rows, double* losses, int cells, int time, int outputs, int width)) {
    SHARED(double, rows, 2 * CTC_STATES);
    CtcUtterance of = ctc_utterance(utterances, targets, blockIdx.x);
    bool from_begin = blockIdx.y == 0;
    u64 first = (u64)blockIdx.x * time;
    logits += first * outputs;
    normalisers += first;
    sums += of.first_cell + (from_begin ? 0 : (u64)cells);
    double total;
    if (of.frames == 0) {
        total = of.labels ? -(double)infinity() : 0.0;
    } else {
        const double* last;
        if (of.states <= CTC_STATES) {
            last = ctc_recursion(of, from_begin, logits, normalisers, sums, rows, CTC_STATES, outputs);
        } else {
            double* own = long_rows + ((u64)blockIdx.x * 2 + blockIdx.y) * 2 * width;
            last = ctc_recursion(of, from_begin, logits, normalisers, sums, own, width, outputs);
        }
        total = last[of.states - 1];
        if (of.states > 1) total = ctc_added(total, last[of.states - 2]);
    }
    if (from_begin && threadIdx.x == 0) losses[blockIdx.x] = -total;
}

// The gradient of the logits, a block for each row: the softmax minus the posteriors of the states of an output, times the
// utterance's factor. Zeros behind the frames of an utterance, and if its loss is not finite. `links` has for each label the place
// of the next equal one among the same CTC_LABELS labels, its own if there is none; the highest bit marks the first of them. Who has
// the first one adds up all, in order.
KERNEL(ctc_gradient, (const float* logits, const double* normalisers, const double* sums, const double* losses,
                      const u32* utterances, const u32* targets, const u32* links, const double* factors, float* gradient,
                      int cells, int time, int outputs)) {
    SHARED(double, scratch, THREADS + 16);
    SHARED(double, posteriors, CTC_LABELS);
    SHARED(u32, chain, CTC_LABELS);
    int thread = threadIdx.x, blank = outputs - 1;
    u32 row = blockIdx.x, utterance = row / (u32)time, frame = row - utterance * (u32)time;
    CtcUtterance of = ctc_utterance(utterances, targets, utterance);
    double loss = losses[utterance], factor = factors[utterance];
    logits += (u64)row * outputs;
    gradient += (u64)row * outputs;
    if (frame >= (u32)of.frames || loss - loss != 0.0) {
        for (int j = thread; j < outputs; j += THREADS) gradient[j] = 0.0f;
        return;
    }
    double normaliser = normalisers[row];
    const double* before = sums + of.first_cell + (u64)frame * of.states;
    const double* after = before + cells;
    for (int j = thread; j < outputs; j += THREADS)
        gradient[j] = (float)(factor * (double)expf((float)((double)logits[j] - normaliser)));
    double blanks = 0.0;
    for (int state = 2 * thread; state < of.states; state += 2 * THREADS) blanks += exp(before[state] + after[state] + loss);
    // All have written their columns when it is known.
    blanks = block_sum(blanks, scratch);
    if (thread == 0) gradient[blank] -= (float)(factor * blanks);
    for (int first = 0; first < of.labels; first += CTC_LABELS) {
        int count = of.labels - first < CTC_LABELS ? of.labels - first : CTC_LABELS;
        for (int i = thread; i < count; i += THREADS) {
            int state = 2 * (first + i) + 1;
            posteriors[i] = exp(before[state] + after[state] + loss);
            chain[i] = links[of.first_label + first + i];
        }
        BARRIER();
        for (int i = thread; i < count; i += THREADS) {
            u32 link = chain[i];
            if (!(link >> 31)) continue;
            double sum = posteriors[i];
            for (u32 at = i, then = link & 0x7fffffffu; then != at; then = chain[at]) {
                at = then;
                sum += posteriors[at];
            }
            gradient[of.target[first + i]] -= (float)(factor * sum);
        }
        BARRIER();
    }
}
