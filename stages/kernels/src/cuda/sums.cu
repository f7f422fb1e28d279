// Sums over rows.

KERNEL(column_sum, (const float* x, float* partial, int rows, int width, int chunk)) {
    SHARED(float, scratch, THREADS);
    partial_sums(rows, width, chunk, partial, scratch, [=](int row, int column) { return x[(u64)row * width + column]; });
}

// Second half of every sum over rows: columns `first` to `first + count` of `partial` (chunks, width), added up in order.
// With fewer `channels` than `count`, the sums are (count / channels, channels) and come out transposed.
template <class T>
DEVICE void add_chunks(const T* partial, T* out, int chunks, int width, int first, int count, int channels) {
    int column = element();
    if (column >= count) return;
    T sum = partial[first + column];
    for (int chunk = 1; chunk < chunks; chunk++) sum += partial[(u64)chunk * width + first + column];
    out[(u64)(column % channels) * (count / channels) + column / channels] = sum;
}

KERNEL(total, (const float* partial, float* out, int chunks, int width, int first, int count, int channels)) {
    add_chunks(partial, out, chunks, width, first, count, channels);
}

KERNEL(total_double, (const double* partial, double* out, int chunks, int width, int first, int count, int channels)) {
    add_chunks(partial, out, chunks, width, first, count, channels);
}

// Sums of squares in 64 bits of many tensors: each block adds those of one chunk. Entries of `plan` are of two words.
KERNEL(sum_of_squares, (const float* const* tensors, const u64* plan, double* partial, int count, int chunk)) {
    SHARED(double, scratch, THREADS + 16);
    Part part = part_of(plan, 2, count, chunk);
    const float* x = tensors[part.tensor];
    double sum = 0;
    for (u64 i = part.first + threadIdx.x; i < part.end; i += THREADS) sum += (double)x[i] * (double)x[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// out[row of group g] += sum of x over the members of group g, in order: block (g, y) for 256 columns. `groups` holds
// first member and row of each group, and one more first member at the end.
KERNEL(add_groups, (const float* x, const u32* groups, const u32* members, float* out, int width)) {
    int column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= width) return;
    const u32* group = groups + 2 * blockIdx.x;
    float* sum = out + (u64)group[1] * width + column;
    float added = *sum;
    for (u32 at = group[0]; at < group[2]; at++) added += x[(u64)members[at] * width + column];
    *sum = added;
}
