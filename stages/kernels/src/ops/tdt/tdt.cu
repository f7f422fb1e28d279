// The sums of the TDT loss over all alignments, on lattices of frames and label states. The rules are those of
// `flow_model::loss`: from (frame t, state u) a blank of duration d > 0 leads to (t + d, u), a label of any duration to
// (t + d, u + 1); a blank that lands on the number of frames ends the utterance, in the last state.
//
// `terms` has 3 + durations numbers for each cell, as `cell_terms` writes them; `advances` the frames of each duration;
// `lattices` has for each utterance its first cell among all, its frames, its states, and the place of its first target.
//
// Probabilities are a number in 64 bits and a power of two: the recursions take products and sums, and neither exponentials nor
// logarithms. Weights of arcs, and sums up to a cell and from it, lie by anti-diagonals (t + u), whose cells do not depend on each
// other: (t, u) in row (t + u) % frames, column u. So neighbours on a diagonal are neighbours in memory. In a row of arcs those of
// blanks of each duration come first, of all states each, and then those of labels.

// fraction * 2^exponent; no more than 2^LEAST is 0.
struct Scaled {
    double fraction;
    int exponent;
};

enum {
    LEAST = -(1 << 29),
    // Of an arc. Exponents of an arc and of two cells can be added.
    LEAST_ARC = -(1 << 28),
    // Durations whose arcs a thread has in registers.
    ARCS = 5,
    // Cells of diagonals in shared memory.
    RING = 3840
};

DEVICE Scaled nothing() { return {0.0, LEAST}; }

// 2^exponent, of 1023 at most.
DEVICE double power_of_two(int exponent) {
    // The bits of 0 are those of an exponent that is one too small.
    return double_of((u64)(u32)(1023 + (exponent < -1023 ? -1023 : exponent)) << 52);
}

// With a fraction from 1 up to 2.
DEVICE Scaled normalised(double fraction, int exponent) {
    u64 bits = bits_of(fraction);
    int own = (int)(bits >> 52) & 0x7ff;
    if (own == 0x7ff) return {fraction, 0};
    exponent += own - 1023;
    if (own == 0 || exponent <= LEAST) return nothing();
    return {double_of((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull), exponent};
}

DEVICE Scaled added(const Scaled& a, const Scaled& b) {
    int top = a.exponent > b.exponent ? a.exponent : b.exponent;
    return normalised(a.fraction * power_of_two(a.exponent - top) + b.fraction * power_of_two(b.exponent - top), top);
}

// e^log.
DEVICE Scaled exponential(double log) {
    if (!(log < 1e6)) return {log, 0};
    double twos = rint(log * 1.4426950408889634);
    if (twos <= LEAST_ARC) return {0.0, LEAST_ARC};
    // ln 2 in two parts, of which the first times an integer is exact.
    double rest = (log - twos * 6.93147180369123816490e-01) - twos * 1.90821492927058770002e-10;
    return {exp(rest), (int)twos};
}

// One utterance's lattice.
struct Lattice {
    const u32* advances;
    int frames, states, durations;
    // Durations do not count: a blank takes a frame, a label none.
    bool rnnt;
};

DEVICE Lattice lattice_of(const u32* entry, const u32* advances, int durations, int rnnt) {
    return {advances, (int)entry[1], (int)entry[2], rnnt ? 1 : durations, rnnt != 0};
}

// More frames than there are lead nowhere, however many.
DEVICE int advance_of(const Lattice& lattice, int label, int d) {
    if (lattice.rnnt) return 1 - label;
    u32 advance = lattice.advances[d], most = (u32)lattice.frames + 1;
    return (int)(advance < most ? advance : most);
}

// Frame of a place among an utterance's cells.
DEVICE u32 frame_of(const Lattice& lattice, u32 row, u32 state) {
    u32 frames = lattice.frames;
    return (row + (lattice.states / frames + 1) * frames - state) % frames;
}

// Place of an arc among those of an utterance, by its row, its number among those of a cell, and its state.
DEVICE u32 arc_place(const Lattice& lattice, u32 row, u32 number, u32 state) {
    return row * (u32)(2 * lattice.durations * lattice.states) + (number * lattice.states + state);
}

// Weights of all arcs. Block (x, utterance) has 256 cells.
KERNEL(tdt_arcs, (const double* terms, const u32* lattices, double* fractions, u32* exponents, int durations, int rnnt,
                  double sigma)) {
    const u32* entry = lattices + 4 * (u64)blockIdx.y;
    Lattice lattice = lattice_of(entry, nullptr, durations, rnnt);
    u64 place = element(), first = entry[0];
    if (place >= (u64)lattice.frames * lattice.states) return;
    u32 row = (u32)place / lattice.states, u = (u32)place - row * lattice.states;
    const double* own = terms + (first + (u64)frame_of(lattice, row, u) * lattice.states + u) * (3 + durations);
    double blank = own[1], label = own[2];
    if (!rnnt) {
        blank -= sigma;
        label -= sigma;
    }
    for (int d = 0; d < lattice.durations; d++) {
        double duration = rnnt ? 0.0 : own[3 + d];
        for (int which = 0; which < 2; which++) {
            Scaled arc = exponential((which ? label : blank) + duration);
            u64 at = first * 2 * lattice.durations + arc_place(lattice, row, which * lattice.durations + d, u);
            fractions[at] = arc.fraction;
            exponents[at] = (u32)arc.exponent;
        }
    }
}

// Some cells of an anti-diagonal, one for each thread: those of the states from `begin` on, up to `last`.
struct Turn {
    // Diagonals before it, its number, and its row.
    int before, diagonal, row;
    int begin, last;
};

// Weights of arcs: blanks, then labels.
struct Weights {
    double fractions[2 * ARCS];
    int exponents[2 * ARCS];
};

// The recursion from the end of an utterance, or FORWARD from its begin. Cells of the last diagonals are in a ring in shared memory,
// if they are RINGED; `fractions` and `exponents` are those of the cells, `arc_fractions` and `arc_exponents` of the arcs.
template <bool FORWARD, bool RINGED>
struct Recursion {
    Lattice lattice;
    const double* arc_fractions;
    const u32* arc_exponents;
    double* fractions;
    u32* exponents;
    double* ring_fractions;
    int* ring_exponents;
    int slots;
    int blanks[ARCS], labels[ARCS];

    // The first states of a diagonal.
    DEVICE_MEMBER Turn turn(int before, int diagonal, int row) const {
        int begin = diagonal < lattice.frames ? 0 : diagonal - lattice.frames + 1;
        int last = diagonal < lattice.states ? diagonal : lattice.states - 1;
        return {before, diagonal, row, begin, last};
    }

    DEVICE_MEMBER void next(Turn& of) const {
        of.begin += THREADS;
        if (of.begin > of.last) of = turn(of.before + 1, FORWARD ? of.diagonal + 1 : of.diagonal - 1, next_row(of));
    }

    // Row of the cells that are so many diagonals before, no more than there are frames.
    DEVICE_MEMBER int row(const Turn& of, int diagonals) const {
        int row = FORWARD ? of.row - diagonals : of.row + diagonals, frames = lattice.frames;
        return FORWARD ? (row < 0 ? row + frames : row) : (row < frames ? row : row - frames);
    }

    DEVICE_MEMBER int next_row(const Turn& of) const {
        int last = lattice.frames - 1;
        return FORWARD ? (of.row < last ? of.row + 1 : 0) : (of.row > 0 ? of.row - 1 : last);
    }

    // The advances of up to ARCS durations from `first` on; one that no arc has is -1.
    DEVICE_MEMBER void set_advances(int first, int* blanks, int* labels) const {
        UNROLL(ARCS)
        for (int i = 0; i < ARCS; i++) {
            bool is = first + i < lattice.durations;
            blanks[i] = is ? advance_of(lattice, 0, first + i) : -1;
            labels[i] = is ? advance_of(lattice, 1, first + i) : -1;
            if (blanks[i] == 0) blanks[i] = -1;
        }
    }

    // Whether an arc has its other end in the lattice.
    DEVICE_MEMBER bool within(int t, int advance) const { return FORWARD ? t >= advance : t + advance < lattice.frames; }

    // Whether an arc is one of state u.
    DEVICE_MEMBER bool has(int u, int label, int advance) const {
        return advance >= 0 && (!label || (FORWARD ? u > 0 : u + 1 < lattice.states));
    }

    // Weights are those of the cells where arcs begin. For arcs that a state does not have, one of the first cell is loaded, which is
    // multiplied by 0.
    DEVICE_MEMBER void load(const Turn& of, int first, const int* blanks, const int* labels, Weights& into) const {
        int u = of.begin + threadIdx.x, t = of.diagonal - u;
        if (u > of.last) return;
        UNROLL(2 * ARCS)
        for (int j = 0; j < 2 * ARCS; j++) {
            int label = j >= ARCS, i = j - label * ARCS, advance = label ? labels[i] : blanks[i];
            bool is = has(u, label, advance) && (!FORWARD || t >= advance);
            u32 from = FORWARD ? row(of, advance + label) : of.row;
            u32 place = arc_place(lattice, from, label * lattice.durations + first + i, FORWARD ? u - label : u);
            if (!is) place = 0;
            into.fractions[j] = arc_fractions[place];
            into.exponents[j] = (int)arc_exponents[place];
        }
    }

    // The sum over arcs.
    DEVICE_MEMBER Scaled sum(const Turn& of, int slot, const int* blanks, const int* labels, const Weights& weights) const {
        int u = of.begin + threadIdx.x, t = of.diagonal - u, top = 2 * LEAST, sums[2 * ARCS];
        double parts[2 * ARCS];
        UNROLL(2 * ARCS)
        for (int j = 0; j < 2 * ARCS; j++) {
            int label = j >= ARCS, i = j - label * ARCS, advance = label ? labels[i] : blanks[i];
            bool is = has(u, label, advance), inside = is && within(t, advance);
            double fraction = 0.0;
            int exponent = LEAST;
            if (inside) {
                int column = FORWARD ? u - label : u + label, from;
                if (RINGED) {
                    from = slot - advance - label;
                    from = (from < 0 ? from + slots : from) * lattice.states + column;
                    fraction = ring_fractions[from];
                    exponent = ring_exponents[from];
                } else {
                    from = row(of, advance + label) * lattice.states + column;
                    fraction = fractions[from];
                    exponent = (int)exponents[from];
                }
            }
            if (!FORWARD && !label && is && t + advance == lattice.frames && u + 1 == lattice.states) {
                fraction = 1.0;
                exponent = 0;
            }
            // From where nothing comes, what is not a number does not come either.
            parts[j] = FORWARD && exponent == LEAST ? 0.0 : weights.fractions[j] * fraction;
            sums[j] = weights.exponents[j] + exponent;
            top = sums[j] > top ? sums[j] : top;
        }
        double total = 0.0, labelled = 0.0;
        UNROLL(ARCS)
        for (int i = 0; i < ARCS; i++) {
            total += parts[i] * power_of_two(sums[i] - top);
            labelled += parts[ARCS + i] * power_of_two(sums[ARCS + i] - top);
        }
        return normalised(total + labelled, top);
    }

    // With the weights of its first arcs.
    DEVICE_MEMBER void compute(const Turn& of, int slot, const Weights& weights) const {
        int u = of.begin + threadIdx.x;
        if (u > of.last) return;
        Scaled found = sum(of, slot, blanks, labels, weights);
        for (int first = ARCS; first < lattice.durations; first += ARCS) {
            int more_blanks[ARCS], more_labels[ARCS];
            Weights more;
            set_advances(first, more_blanks, more_labels);
            load(of, first, more_blanks, more_labels, more);
            found = added(found, sum(of, slot, more_blanks, more_labels, more));
        }
        if (FORWARD && of.diagonal == 0) found = {1.0, 0};
        int place = of.row * lattice.states + u;
        fractions[place] = found.fraction;
        exponents[place] = (u32)found.exponent;
        if (RINGED) {
            ring_fractions[slot * lattice.states + u] = found.fraction;
            ring_exponents[slot * lattice.states + u] = found.exponent;
        }
    }

    // Weights are asked for two turns before they are needed.
    DEVICE_MEMBER void run() {
        enum { AHEAD = 2 };
        int diagonals = lattice.frames + lattice.states - 1, slot = 0;
        set_advances(0, blanks, labels);
        Turn now, ahead;
        now = FORWARD ? turn(0, 0, 0) : turn(0, diagonals - 1, (diagonals - 1) % lattice.frames);
        ahead = now;
        Weights weights[AHEAD];
        auto ask = [&](Weights& into) {
            if (ahead.before >= diagonals) return;
            load(ahead, 0, blanks, labels, into);
            next(ahead);
        };
        UNROLL(AHEAD)
        for (int i = 0; i < AHEAD; i++) ask(weights[i]);
        while (now.before < diagonals) {
            UNROLL(AHEAD)
            for (int i = 0; i < AHEAD; i++) {
                if (now.before >= diagonals) break;
                compute(now, slot, weights[i]);
                ask(weights[i]);
                int before = now.before;
                next(now);
                if (now.before == before) continue;
                slot = slot + 1 < slots ? slot + 1 : 0;
                BARRIER();
            }
        }
    }
};

// Sums over the ways from a cell to the end (block (utterance, 0)) and from the begin to a cell (block (utterance, 1)), `cells`
// numbers each. Gives the loss of each utterance.
KERNEL(tdt_align, (const double* arc_fractions, const u32* arc_exponents, const u32* advances, const u32* lattices,
                   double* fractions, u32* exponents, double* results, int cells, int durations, int rnnt, double label_factor)) {
    SHARED(double, ring_fractions, RING);
    SHARED(int, ring_exponents, RING);
    const u32* entry = lattices + 4 * (u64)blockIdx.x;
    Lattice lattice = lattice_of(entry, advances, durations, rnnt);
    u64 first = entry[0], own = first + (blockIdx.y ? (u64)cells : 0);
    if (lattice.frames == 0) {
        if (threadIdx.x == 0 && blockIdx.y == 0) results[blockIdx.x] = 0.0;
        return;
    }
    int longest = 0;
    for (int d = 0; d < lattice.durations; d++) {
        int advance = advance_of(lattice, 0, d);
        longest = advance > longest ? advance : longest;
    }
    // A diagonal, and those that its arcs reach.
    int slots = longest + 2;
    bool ringed = (u64)slots * lattice.states <= RING;
    arc_fractions += first * 2 * lattice.durations;
    arc_exponents += first * 2 * lattice.durations;
    fractions += own;
    exponents += own;
    auto run = [&](auto recursion) {
        recursion.lattice = lattice;
        recursion.arc_fractions = arc_fractions;
        recursion.arc_exponents = arc_exponents;
        recursion.fractions = fractions;
        recursion.exponents = exponents;
        recursion.ring_fractions = ring_fractions;
        recursion.ring_exponents = ring_exponents;
        recursion.slots = slots;
        recursion.run();
    };
    if (blockIdx.y && ringed) run(Recursion<true, true>());
    else if (blockIdx.y) run(Recursion<true, false>());
    else if (ringed) run(Recursion<false, true>());
    else run(Recursion<false, false>());
    // All are behind a barrier since the last diagonal, whose cell is the first of the lattice.
    if (threadIdx.x == 0 && blockIdx.y == 0)
        results[blockIdx.x] = -(log(fractions[0]) + (int)exponents[0] * 0.6931471805599453) * label_factor;
}

// Of each cell the posterior of blank, of the label and of each duration (`arcs`), and whether it counts: whether its posterior,
// labels times `label_factor`, is not below `least`. Block (x, utterance) has 256 cells, and writes how many of them count.
KERNEL(tdt_posteriors, (const double* arc_fractions, const u32* arc_exponents, const double* fractions, const u32* exponents,
                        const u32* advances, const u32* lattices, double* arcs, double* counts, u8* active, int cells,
                        int durations, int rnnt, double label_factor, double least)) {
    SHARED(double, scratch, THREADS + 16);
    const u32* entry = lattices + 4 * (u64)blockIdx.y;
    Lattice lattice = lattice_of(entry, advances, durations, rnnt);
    u64 place = element(), first = entry[0];
    u32 frames = lattice.frames, states = lattice.states;
    double count = 0.0;
    if (place < (u64)frames * states) {
        u32 row = (u32)place / states, u = (u32)place - row * states, t = frame_of(lattice, row, u);
        u64 cell = first + (u64)t * states + u, until = cells + first + place;
        double total = fractions[first], here = fractions[until];
        int shift = (int)exponents[until] - (int)exponents[first];
        // Not so for an utterance that cannot be aligned, and for what is no number.
        bool any = total > 0.0 && here != 0.0;
        if (any) here /= total;
        double* out = arcs + cell * (2 + durations);
        double blank = 0.0, label = 0.0;
        // An RNN-T has arcs of one kind and may have no outputs of durations.
        for (int d = 0; d < durations || d < lattice.durations; d++) {
            double both = 0.0;
            for (int which = 0; which < 2; which++) {
                if (!any || d >= lattice.durations || (which && u + 1 == states)) continue;
                u32 advance = advance_of(lattice, which, d), after = t + advance;
                if (which == 0 && advance == 0) continue;
                Scaled end = {1.0, 0};
                if (after < frames) {
                    u32 to_row = row + advance + which;
                    if (to_row >= frames) to_row -= frames;
                    u64 to = first + (u64)to_row * states + u + which;
                    end = {fractions[to], (int)exponents[to]};
                } else if (which || after > frames || u + 1 < states) {
                    continue;
                }
                u64 arc = first * 2 * lattice.durations + arc_place(lattice, row, which * lattice.durations + d, u);
                double share = here * arc_fractions[arc] * end.fraction *
                               power_of_two(shift + (int)arc_exponents[arc] + end.exponent);
                (which ? label : blank) += share;
                both += share;
            }
            if (d < durations) out[2 + d] = rnnt ? 0.0 : both;
        }
        out[0] = blank;
        out[1] = label;
        active[cell] = blank + label * label_factor >= least;
        count = active[cell];
    }
    count = block_sum(count, scratch);
    if (threadIdx.x == 0) counts[(u64)blockIdx.y * gridDim.x + blockIdx.x] = count;
}

// How many cells of each utterance count, of `parts` numbers each: one block for an utterance.
KERNEL(tdt_counts, (const double* counts, double* results, int parts)) {
    SHARED(double, scratch, THREADS + 16);
    double count = 0.0;
    for (int part = threadIdx.x; part < parts; part += THREADS) count += counts[(u64)blockIdx.x * parts + part];
    count = block_sum(count, scratch);
    if (threadIdx.x == 0) results[blockIdx.x] = count;
}

// Rows of a block of `tdt_logit_gradient`.
#define GRADIENT_ROWS 128

// The gradient of logits, whose rows are those of the cells: block (x, y) has 256 columns of 128 rows. A cell's utterance is its
// row of the encoder's part divided by `frames`, and has a factor in `factors`. Rows have `stride` numbers, of which those behind
// the outputs are not read, and get 0. Logits are in one of two types, and may lie where the result goes. Blocks of the last
// rows come first: what the product wrote last is still in the L2 cache. Row y of `sums`, if it is given, gets the sums of the
// outputs' columns in 32 bits, or with `accumulate` has them added.
KERNEL(tdt_logit_gradient, (const float* logits, const bf16* logits_bf16, const float* bias, const u32* cells,
                            const double* terms, const double* arcs, const double* factors, float* out, bf16* out_bf16,
                            float* sums, int rows, int tokens, int durations, int stride, int frames, int accumulate,
                            double label_factor, float clamp)) {
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
    int block = gridDim.y - 1 - blockIdx.y, first = block * GRADIENT_ROWS, thread = threadIdx.x;
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
            float* to = sums + (u64)block * width + j;
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
        u64 place = (u64)(first + begin) * stride + j;
        if (logits_bf16) {
            UNROLL(TOGETHER)
            for (int i = 0; i < TOGETHER; i++)
                here[i] = begin + i < count ? wide(logits_bf16[place + (u64)i * stride]) : 0.0f;
        } else {
            UNROLL(TOGETHER)
            for (int i = 0; i < TOGETHER; i++)
                here[i] = begin + i < count ? logits[place + (u64)i * stride] : 0.0f;
        }
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
    float* to = sums + (u64)block * width + j;
    *to = accumulate ? *to + sum : sum;
}
