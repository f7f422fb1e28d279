// Sums over rows.

KERNEL(column_sum, (const float* x, float* partial, int rows, int width, int chunk)) {
    SHARED(float, scratch, THREADS);
    partial_sums(rows, width, chunk, partial, scratch, [=](int row, int column) { return x[(u64)row * width + column]; });
}

// Second half of a sum over rows: the columns of `partial` (chunks, width), added up in order. With fewer `channels` than
// columns, the sums are (width / channels, channels) and come out transposed.
KERNEL(total, (const float* partial, float* out, int chunks, int width, int channels)) {
    int column = element();
    if (column >= width) return;
    float sum = partial[column];
    for (int chunk = 1; chunk < chunks; chunk++) sum += partial[(u64)chunk * width + column];
    out[(u64)(column % channels) * (width / channels) + column / channels] = sum;
}

// Columns of one tensor of partial sums (chunks, width). With taps there are `width / (taps + 1)` channels, and the sums of all
// but the last channels are (taps, channels) and come out transposed.
struct Chunks {
    const float* partial;
    int chunks, width, taps;

    DEVICE_MEMBER int place(int column) const {
        int channels = width / (taps + 1);
        if (taps == 0 || column >= taps * channels) return column;
        return column % channels * taps + column / channels;
    }
};

// Second half of the sums over rows of up to ten kernels: the columns of each tensor of partial sums (chunks, width), behind
// each other; the first `columns` of them in `out`, where with `accumulate` they are added, and the others in `rest`. A block
// has 32 columns of one tensor, and adds up every eighth chunk in each of its warps.
KERNEL(totals, (const float* partial0, const float* partial1, const float* partial2, const float* partial3,
                const float* partial4, const float* partial5, const float* partial6, const float* partial7,
                const float* partial8, const float* partial9, float* out, float* rest, int columns, int accumulate,
                int chunks0, int width0, int taps0, int chunks1, int width1, int taps1,
                int chunks2, int width2, int taps2, int chunks3, int width3, int taps3,
                int chunks4, int width4, int taps4, int chunks5, int width5, int taps5,
                int chunks6, int width6, int taps6, int chunks7, int width7, int taps7,
                int chunks8, int width8, int taps8, int chunks9, int width9, int taps9)) {
    SHARED(float, scratch, THREADS);
    Chunks of = {partial0, chunks0, width0, taps0};
    int block = blockIdx.x, first = 0;
    // Once a tensor is not passed by, `block` lies within it, and no later one is looked at.
    auto pass_by = [&](const float* partial, int chunks, int width, int taps) {
        int blocks = (of.width + 31) / 32;
        if (block < blocks || !partial) return;
        block -= blocks;
        first += of.width;
        of = {partial, chunks, width, taps};
    };
    pass_by(partial1, chunks1, width1, taps1);
    pass_by(partial2, chunks2, width2, taps2);
    pass_by(partial3, chunks3, width3, taps3);
    pass_by(partial4, chunks4, width4, taps4);
    pass_by(partial5, chunks5, width5, taps5);
    pass_by(partial6, chunks6, width6, taps6);
    pass_by(partial7, chunks7, width7, taps7);
    pass_by(partial8, chunks8, width8, taps8);
    pass_by(partial9, chunks9, width9, taps9);
    int column = block * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    float sum = 0;
    if (column < of.width)
        for (int chunk = lane; chunk < of.chunks; chunk += THREADS / 32)
            sum += of.partial[(u64)chunk * of.width + column];
    scratch[threadIdx.x] = sum;
    BARRIER();
    if (lane == 0 && column < of.width) {
        for (int other = 1; other < THREADS / 32; other++) sum += scratch[other * 32 + threadIdx.x];
        int at = first + of.place(column);
        if (at >= columns)
            rest[at - columns] = sum;
        else
            out[at] = accumulate ? out[at] + sum : sum;
    }
}

// Sums of squares in 64 bits of many tensors: each block adds those of one chunk. Entries of `plan` are of two words.
KERNEL(sum_of_squares, (const float* const* tensors, const u64* plan, double* partial, int count, int chunk)) {
    SHARED(double, scratch, THREADS + 16);
    Part part = part_of(plan, 2, count, chunk);
    const float* x = tensor_at(tensors[part.tensor]);
    double sum = 0;
    // A thread has the same numbers wherever the tensor begins, as their order is that of the sum.
    bool whole = by_fours(x);
    enum { TOGETHER = 4 };
    for (u64 quad = part.first + 4 * threadIdx.x; quad + 4 <= part.end; quad += TOGETHER * 4 * THREADS) {
        float values[TOGETHER][4];
        UNROLL(TOGETHER)
        for (int at = 0; at < TOGETHER; at++) {
            u64 place = quad + at * 4 * THREADS + 4 <= part.end ? quad + at * 4 * THREADS : quad;
            if (whole)
                read_four(x + place, values[at]);
            else
                for (int of = 0; of < 4; of++) values[at][of] = x[place + of];
        }
        UNROLL(TOGETHER)
        for (int at = 0; at < TOGETHER; at++)
            for (int of = 0; of < 4 && quad + at * 4 * THREADS + 4 <= part.end; of++)
                sum += (double)values[at][of] * (double)values[at][of];
    }
    // Those behind the last four.
    u64 rest = part.end - (part.end - part.first) % 4 + threadIdx.x;
    if (rest < part.end) sum += (double)x[rest] * (double)x[rest];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// out[rows[i]] += x[i] for each row `i` of `x` whose place is below `most`, in order. `order` has the numbers of the rows of `x`,
// sorted by place and then by number: block (n, y) has 256 columns of the place that the n-th of them is the first one for.
KERNEL(add_listed_rows, (const float* x, const u32* rows, const u32* order, float* out, int count, int most, int width)) {
    int first = blockIdx.x;
    u32 row = rows[order[first]];
    if (row >= (u32)most || (first > 0 && rows[order[first - 1]] == row)) return;
    int column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= width) return;
    float* sum = out + (u64)row * width + column;
    float added = *sum;
    for (int at = first; at < count && rows[order[at]] == row; at++) added += x[(u64)order[at] * width + column];
    *sum = added;
}
