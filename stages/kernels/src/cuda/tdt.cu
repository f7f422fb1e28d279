// The sums of the TDT loss over all alignments, on lattices of frames and label states. The rules are those of
// `flow_model::loss`: from (frame t, state u) a blank of duration d > 0 leads to (t + d, u), a label of any duration to
// (t + d, u + 1); a blank that lands on the number of frames ends the utterance, in the last state.
//
// `terms` has 3 + durations numbers for each cell, as `cell_terms` writes them. `settings` has sigma, the factor of label
// posteriors, the least posterior that counts, and the frames of each duration.

// One utterance's lattice; state minor.
struct Lattice {
    const double* terms;
    const double* advances;
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

// One block for each utterance, whose first cell, frames and states are in `extents`. Cells of an anti-diagonal (t + u) do
// not depend on each other. Gives the loss of each utterance; of each cell the posterior of blank, of the label and of each
// duration (`arcs`), and whether it counts. `beta` and `posterior` have a number for each cell.
KERNEL(tdt_align, (const double* terms, const double* settings, const u32* extents, double* beta, double* posterior,
                   double* arcs, double* losses, u8* active, int durations, int rnnt)) {
    const u32* extent = extents + 3 * blockIdx.x;
    u64 first = extent[0];
    Lattice lattice;
    lattice.terms = terms + first * (3 + durations);
    lattice.advances = settings + 3;
    lattice.sigma = rnnt ? 0.0 : settings[0];
    lattice.frames = extent[1];
    lattice.states = extent[2];
    lattice.durations = durations;
    lattice.rnnt = rnnt != 0;
    int frames = lattice.frames, states = lattice.states;
    beta += first;
    posterior += first;
    arcs += first * (2 + durations);
    active += first;
    if (frames == 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0;
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
    if (threadIdx.x == 0) losses[blockIdx.x] = -total * settings[1];
    // Not so for infinities and for what is no number.
    bool aligned = total - total == 0.0;
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
            active[cell] = blank + label * settings[1] >= settings[2];
        }
        BARRIER();
    }
}

// The gradient of logits, one block for each cell. Row 0 of `logits` is that of the cell with the number `first` among all;
// where that is negative, rows are those of the cells as they come. A cell's utterance is its row of the encoder's part
// divided by `frames`, and has a factor in `factors`.
KERNEL(tdt_logit_gradient, (const float* logits, const float* bias, const u32* cells, const double* terms,
                            const double* arcs, const double* settings, const double* factors, float* out, int tokens,
                            int durations, int frames, int first, float clamp)) {
    const u32* cell = cells + 4 * (u64)blockIdx.x;
    int width = tokens + durations;
    logits += (u64)(first < 0 ? blockIdx.x : cell[3] - (u32)first) * width;
    out += (u64)blockIdx.x * width;
    terms += (u64)cell[3] * (3 + durations);
    arcs += (u64)cell[3] * (2 + durations);
    u32 label = cell[2];
    double whole = factors[cell[0] / (u32)frames];
    double blank = arcs[0], labelled = arcs[1] * settings[1];
    float normaliser = terms[0], factor = whole;
    float occupancy = blank + labelled;
    if (clamp <= 0.0f) {
        occupancy *= factor;
        blank *= whole;
        labelled *= whole;
    }
    for (int j = threadIdx.x; j < tokens; j += THREADS) {
        float d = expf(logits[j] + bias[j] - normaliser) * occupancy;
        if (j == tokens - 1) d -= (float)blank;
        if ((u32)j == label) d -= (float)labelled;
        if (clamp > 0.0f) d = (d > clamp ? clamp : d < -clamp ? -clamp : d) * factor;
        out[j] = d;
    }
    double total = 0;
    for (int d = 0; d < durations; d++) total += arcs[2 + d];
    for (int d = threadIdx.x; d < durations; d += THREADS)
        out[tokens + d] = (float)((total * exp(terms[3 + d]) - arcs[2 + d]) * whole);
}
