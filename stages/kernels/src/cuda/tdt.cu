// The sums of the TDT loss over all alignments, on lattices of frames and label states. The rules are those of
// `flow_model::loss`: from (frame t, state u) a blank of duration d > 0 leads to (t + d, u), a label of any duration to
// (t + d, u + 1); a blank that lands on the number of frames ends the utterance, in the last state.
//
// `terms` has 3 + durations numbers for each cell, as `cell_terms` writes them; `advances` the frames of each duration;
// `lattices` has for each utterance its first cell among all, its frames, its states, and the place of its first target.

// One utterance's lattice; state minor.
struct Lattice {
    const double* terms;
    const u32* advances;
    double sigma;
    int frames, states, durations;
    // Durations do not count: a blank takes a frame, a label none.
    bool rnnt;
};

DEVICE double minus_infinity() { return -(double)infinity(); }

DEVICE int blank_advance(const Lattice& lattice, int d) { return lattice.rnnt ? 1 : (int)lattice.advances[d]; }

DEVICE int label_advance(const Lattice& lattice, int d) { return lattice.rnnt ? 0 : (int)lattice.advances[d]; }

// Log probability of an arc from (t, u), a blank (which = 1) or a label (which = 2) of duration d.
DEVICE double arc(const Lattice& lattice, int t, int u, int which, int d) {
    const double* terms = lattice.terms + ((u64)t * lattice.states + u) * (3 + lattice.durations);
    double duration = lattice.rnnt ? 0.0 : terms[3 + d];
    return terms[which] - lattice.sigma + duration;
}

// Log probability of ending by that arc.
DEVICE double through_blank(const Lattice& lattice, const double* beta, int t, int u, int d) {
    int next = t + blank_advance(lattice, d);
    double after = minus_infinity();
    if (next < lattice.frames) after = beta[(u64)next * lattice.states + u];
    else if (next == lattice.frames && u + 1 == lattice.states) after = 0.0;
    return arc(lattice, t, u, 1, d) + after;
}

DEVICE double through_label(const Lattice& lattice, const double* beta, int t, int u, int d) {
    int next = t + label_advance(lattice, d);
    double after = next < lattice.frames ? beta[(u64)next * lattice.states + u + 1] : minus_infinity();
    return arc(lattice, t, u, 2, d) + after;
}

// The log probability of ending from (t, u): the logarithm of a sum of exponentials over its arcs.
DEVICE double ending(const Lattice& lattice, const double* beta, int t, int u) {
    int kinds = lattice.rnnt ? 1 : lattice.durations;
    bool labels = u + 1 < lattice.states;
    double top = minus_infinity(), sum = 0.0;
    bool broken = false;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1 && top == minus_infinity()) break;
        for (int which = 1; which <= 2; which++) {
            if (which == 2 && !labels) break;
            for (int d = 0; d < kinds; d++) {
                if (which == 1 && blank_advance(lattice, d) == 0) continue;
                double term = which == 1 ? through_blank(lattice, beta, t, u, d) : through_label(lattice, beta, t, u, d);
                if (pass == 1) sum += exp(term - top);
                else if (term != term) broken = true;
                else if (term > top) top = term;
            }
        }
    }
    if (top == minus_infinity()) return broken ? (double)not_a_number() : top;
    return top + log(sum);
}

// The share of a cell's posterior that goes along an arc to a cell, whose log probability of ending is `after`.
DEVICE double share(double posterior, double arc, double after, double before) {
    return posterior == 0.0 ? 0.0 : posterior * exp(arc + after - before);
}

// The posterior of (t, u), from those of the cells that lead to it.
DEVICE double arrived(const Lattice& lattice, const double* beta, const double* posterior, int t, int u) {
    if (t == 0 && u == 0) return 1.0;
    int kinds = lattice.rnnt ? 1 : lattice.durations;
    double after = beta[(u64)t * lattice.states + u], sum = 0.0;
    for (int d = 0; d < kinds; d++) {
        int advance = blank_advance(lattice, d);
        if (advance == 0 || advance > t) continue;
        u64 from = (u64)(t - advance) * lattice.states + u;
        sum += share(posterior[from], arc(lattice, t - advance, u, 1, d), after, beta[from]);
    }
    for (int d = 0; d < kinds && u > 0; d++) {
        int advance = label_advance(lattice, d);
        if (advance > t) continue;
        u64 from = (u64)(t - advance) * lattice.states + u - 1;
        sum += share(posterior[from], arc(lattice, t - advance, u - 1, 2, d), after, beta[from]);
    }
    return sum;
}

// One block for each utterance. Cells of an anti-diagonal (t + u) do not depend on each other. Gives the loss of each utterance
// and behind these, in `results`, how many of its cells count; of each cell the posterior of blank, of the label and of each
// duration (`arcs`), and whether it counts: whether its posterior, labels times `label_factor`, is not below `least`. `beta` and
// `posterior` have a number for each cell.
KERNEL(tdt_align, (const double* terms, const u32* advances, const u32* lattices, double* beta, double* posterior, double* arcs,
                   double* results, u8* active, int durations, int rnnt, double sigma, double label_factor, double least)) {
    SHARED(double, scratch, THREADS + 16);
    const u32* entry = lattices + 4 * (u64)blockIdx.x;
    u64 first = entry[0];
    Lattice lattice;
    lattice.terms = terms + first * (3 + durations);
    lattice.advances = advances;
    lattice.sigma = rnnt ? 0.0 : sigma;
    lattice.frames = entry[1];
    lattice.states = entry[2];
    lattice.durations = durations;
    lattice.rnnt = rnnt != 0;
    int frames = lattice.frames, states = lattice.states;
    beta += first;
    posterior += first;
    arcs += first * (2 + durations);
    active += first;
    double* counted = results + gridDim.x + blockIdx.x;
    if (frames == 0) {
        if (threadIdx.x == 0) results[blockIdx.x] = *counted = 0.0;
        return;
    }
    for (int diagonal = frames + states - 2; diagonal >= 0; diagonal--) {
        int begin = diagonal < states ? 0 : diagonal - states + 1;
        int end = diagonal < frames ? diagonal + 1 : frames;
        for (int t = begin + threadIdx.x; t < end; t += THREADS) {
            int u = diagonal - t;
            beta[(u64)t * states + u] = ending(lattice, beta, t, u);
        }
        BARRIER();
    }
    double total = beta[0];
    if (threadIdx.x == 0) results[blockIdx.x] = -total * label_factor;
    // Not so for infinities and for what is no number.
    bool aligned = total - total == 0.0;
    double count = 0.0;
    for (int diagonal = 0; diagonal < frames + states - 1; diagonal++) {
        int begin = diagonal < states ? 0 : diagonal - states + 1;
        int end = diagonal < frames ? diagonal + 1 : frames;
        for (int t = begin + threadIdx.x; t < end; t += THREADS) {
            int u = diagonal - t;
            u64 cell = (u64)t * states + u;
            double here = aligned ? arrived(lattice, beta, posterior, t, u) : 0.0;
            posterior[cell] = here;
            double* out = arcs + cell * (2 + durations);
            double blank = 0.0, label = 0.0;
            for (int d = 0; d < durations; d++) {
                double both = 0.0;
                if (here != 0.0 && (!rnnt || d == 0)) {
                    double part = 0.0;
                    if (blank_advance(lattice, d) > 0) part = here * exp(through_blank(lattice, beta, t, u, d) - beta[cell]);
                    blank += part;
                    both = part;
                    if (u + 1 < states) {
                        part = here * exp(through_label(lattice, beta, t, u, d) - beta[cell]);
                        label += part;
                        both += part;
                    }
                }
                out[2 + d] = rnnt ? 0.0 : both;
            }
            out[0] = blank;
            out[1] = label;
            active[cell] = blank + label * label_factor >= least;
            count += active[cell];
        }
        BARRIER();
    }
    count = block_sum(count, scratch);
    if (threadIdx.x == 0) *counted = count;
}

// Rows of a block of `tdt_logit_gradient`.
#define GRADIENT_ROWS 128

// The gradient of logits, whose rows are those of the cells: block (x, y) has 256 columns of 128 rows. A cell's utterance is its
// row of the encoder's part divided by `frames`, and has a factor in `factors`. Rows have `stride` numbers, of which those behind
// the outputs are not read, and get 0. Row y of `sums`, if it is given, gets the sums of the outputs' columns in 32 bits, or with
// `accumulate` has them added.
KERNEL(tdt_logit_gradient, (const float* logits, const float* bias, const u32* cells, const double* terms,
                            const double* arcs, const double* factors, float* out, bf16* out_bf16, float* sums, int rows,
                            int tokens, int durations, int stride, int frames, int accumulate, double label_factor,
                            float clamp)) {
    SHARED(u32, places, GRADIENT_ROWS);
    SHARED(u32, labels, GRADIENT_ROWS);
    SHARED(double, wholes, GRADIENT_ROWS);
    SHARED(float, normalisers, GRADIENT_ROWS);
    SHARED(float, occupancies, GRADIENT_ROWS);
    SHARED(float, blanks, GRADIENT_ROWS);
    SHARED(float, labelleds, GRADIENT_ROWS);
    // Columns of durations are found some at a time.
    enum { SOME = 8 };
    SHARED(float, found, GRADIENT_ROWS * SOME);
    int first = blockIdx.y * GRADIENT_ROWS, thread = threadIdx.x;
    int count = rows - first < GRADIENT_ROWS ? rows - first : GRADIENT_ROWS;
    if (thread < count) {
        const u32* cell = cells + 4 * (u64)(first + thread);
        const double* own = arcs + (u64)cell[3] * (2 + durations);
        double whole = factors[cell[0] / (u32)frames], blank = own[0], labelled = own[1] * label_factor;
        float occupancy = blank + labelled;
        if (clamp <= 0.0f) {
            occupancy *= (float)whole;
            blank *= whole;
            labelled *= whole;
        }
        places[thread] = cell[3];
        labels[thread] = cell[2];
        wholes[thread] = whole;
        normalisers[thread] = terms[(u64)cell[3] * (3 + durations)];
        occupancies[thread] = occupancy;
        blanks[thread] = blank;
        labelleds[thread] = labelled;
    }
    BARRIER();
    int width = tokens + durations, start = blockIdx.x * THREADS, j = start + thread;
    // Columns of durations are shared out among all threads of the block, and added up as those of tokens are.
    int last = start + THREADS < width ? start + THREADS : width;
    for (int column = start > tokens ? start : tokens; column < last; column += SOME) {
        int columns = last - column < SOME ? last - column : SOME;
        for (int item = thread; item < count * columns; item += THREADS) {
            int row = item / columns, at = column + item % columns;
            const double* own = arcs + (u64)places[row] * (2 + durations);
            double total = 0;
            for (int of = 0; of < durations; of++) total += own[2 + of];
            double log = terms[(u64)places[row] * (3 + durations) + 3 + at - tokens];
            float d = (float)((total * exp(log) - own[2 + at - tokens]) * wholes[row]);
            put(out, out_bf16, (u64)(first + row) * stride + at, d);
            found[item] = d;
        }
        BARRIER();
        if (sums && j >= column && j < column + columns) {
            float sum = 0.0f;
            for (int row = 0; row < count; row++) sum += found[row * columns + j - column];
            float* to = sums + (u64)blockIdx.y * width + j;
            *to = accumulate ? *to + sum : sum;
        }
        BARRIER();
    }
    if (j >= stride || (j >= tokens && j < width)) return;
    if (j >= width) {
        for (int row = 0; row < count; row++) put(out, out_bf16, (u64)(first + row) * stride + j, 0.0f);
        return;
    }
    float offset = bias[j], sum = 0.0f;
    // Several rows are asked for before the first is waited for.
    enum { TOGETHER = 8 };
    for (int begin = 0; begin < count; begin += TOGETHER) {
        float here[TOGETHER];
        UNROLL(TOGETHER)
        for (int i = 0; i < TOGETHER; i++)
            here[i] = begin + i < count ? logits[(u64)(first + begin + i) * stride + j] : 0.0f;
        UNROLL(TOGETHER)
        for (int i = 0; i < TOGETHER; i++) {
            int row = begin + i;
            if (row >= count) continue;
            float d = expf(here[i] + offset - normalisers[row]) * occupancies[row];
            if (j == tokens - 1) d -= blanks[row];
            if ((u32)j == labels[row]) d -= labelleds[row];
            if (clamp > 0.0f) d = (d > clamp ? clamp : d < -clamp ? -clamp : d) * (float)wholes[row];
            put(out, out_bf16, (u64)(first + row) * stride + j, d);
            sum += d;
        }
    }
    if (!sums) return;
    float* to = sums + (u64)blockIdx.y * width + j;
    *to = accumulate ? *to + sum : sum;
}
