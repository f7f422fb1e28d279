// Parts of relative-position attention beside its matrix products. Heads come first: (H, rows, k).

// (rows, H * k) -> (H, rows, k), plus a bias (H, k) where given.
KERNEL(split_heads, (const float* x, const float* bias, float* out, u64 n, int rows, int heads, int k)) {
    u64 i = element();
    if (i >= n) return;
    int column = i % k;
    u64 row = i / k % rows;
    int head = i / k / rows;
    float value = x[(row * heads + head) * k + column];
    out[i] = bias ? value + bias[head * k + column] : value;
}

// (H, rows, k) -> (rows, H * k), of the sum of both where there are two.
KERNEL(merge_heads, (const float* x, const float* other, float* out, u64 n, int rows, int heads, int k)) {
    u64 i = element();
    if (i >= n) return;
    int column = i % k;
    int head = i / k % heads;
    u64 row = i / k / heads;
    u64 at = ((u64)head * rows + row) * k + column;
    out[i] = other ? x[at] + other[at] : x[at];
}

// Queries with both biases (H, k), keys and values: four times (rows, H * k) -> (H, rows, k).
KERNEL(split_projections, (const float* query, const float* key, const float* value, const float* bias_u,
                           const float* bias_v, float* query_u, float* query_v, float* keys, float* values, u64 n,
                           int rows, int heads, int k)) {
    u64 i = element();
    if (i >= n) return;
    int column = i % k;
    u64 row = i / k % rows;
    int head = i / k / rows;
    u64 at = (row * heads + head) * k + column;
    query_u[i] = query[at] + bias_u[head * k + column];
    query_v[i] = query[at] + bias_v[head * k + column];
    keys[i] = key[at];
    values[i] = value[at];
}

// The other way round, for the gradients of all four.
KERNEL(merge_projections, (const float* query_u, const float* query_v, const float* keys, const float* values,
                           float* query, float* key, float* value, u64 n, int rows, int heads, int k)) {
    u64 i = element();
    if (i >= n) return;
    int column = i % k;
    int head = i / k % heads;
    u64 row = i / k / heads;
    u64 at = ((u64)head * rows + row) * k + column;
    query[i] = query_u[at] + query_v[at];
    key[i] = keys[at];
    value[i] = values[at];
}

// Columns (2, H, k): those of x and those of y.
KERNEL(head_sums, (const float* x, const float* y, float* partial, int rows, int heads, int k, int chunk)) {
    SHARED(float, scratch, THREADS);
    partial_sums(rows, 2 * heads * k, chunk, partial, scratch, [=](int row, int both) {
        int column = both < heads * k ? both : both - heads * k;
        const float* of = both < heads * k ? x : y;
        return of[((u64)(column / k) * rows + row) * k + column % k];
    });
}

// sum[s, first + r] += part[s, r], for `sum` (S, time, k) and `part` (S, length, k).
KERNEL(add_rows, (float* sum, const float* part, u64 n, int time, int length, int first, int k)) {
    u64 i = element();
    if (i >= n) return;
    u64 row = i / k;
    sum[(row / length * time + first + row % length) * k + i % k] += part[i];
}

// The keys that the query of a row of scores sees: columns `begin` to `end`, of which `begin` has the positional score
// `position`. A band of -1 is none; with chunks of `chunk` frames it is the number of chunks before the query's own. A chunk of
// -1: the band is before the query alone, and all keys that follow are seen.
struct Seen {
    int begin, end, position;
};

DEVICE Seen seen(u64 row, const u32* lengths, int batch, int queries, int first_query, int first_key, int band,
                 int chunk, int reach) {
    int query = first_query + row % queries;
    int length = lengths[row / queries % batch];
    Seen seen = {0, 0, 0};
    if (query >= length) return seen;
    int begin = 0, end = length;
    if (chunk > 0) {
        int own = query / chunk;
        begin = own > band ? (own - band) * chunk : 0;
        end = length - own * chunk > chunk ? (own + 1) * chunk : length;
    } else if (band >= 0) {
        begin = query > band ? query - band : 0;
        // Written so that a band of the largest number does not overflow.
        end = chunk == 0 && band < length - query - 1 ? query + band + 1 : length;
    }
    seen.begin = begin - first_key;
    seen.end = end - first_key;
    seen.position = begin + reach - query;
    return seen;
}

// One block for each row (head, sequence, query). With `dropped` also factor * drop(out).
KERNEL(attention_weights, (const float* content, const float* position, const u32* lengths, float* out, float* dropped,
                           int width, int span, int batch, int queries, int first_query, int first_key, int band,
                           int chunk, int reach, float scale, float factor, u64 key, u64 threshold)) {
    SHARED(float, scratch, THREADS + 16);
    u64 row = blockIdx.x;
    Seen keys = seen(row, lengths, batch, queries, first_query, first_key, band, chunk, reach);
    content += row * width;
    position += row * span + keys.position - keys.begin;
    out += row * width;
    float largest = -infinity();
    for (int j = threadIdx.x; j < width; j += THREADS) {
        if (j < keys.begin || j >= keys.end) {
            out[j] = 0.0f;
            continue;
        }
        float score = (content[j] + position[j]) * scale;
        out[j] = score;
        largest = score > largest ? score : largest;
    }
    largest = block_largest(largest, scratch);
    // Each thread reads only what it has written itself.
    float sum = 0;
    for (int j = threadIdx.x; j < width; j += THREADS) {
        if (j < keys.begin || j >= keys.end) continue;
        out[j] = expf(out[j] - largest);
        sum += out[j];
    }
    float share = 1.0f / block_sum(sum, scratch);
    for (int j = threadIdx.x; j < width; j += THREADS) {
        if (j >= keys.begin && j < keys.end) out[j] *= share;
        if (dropped) dropped[row * width + j] = keeps(key, threshold, row * width + j) ? factor * out[j] : 0.0f;
    }
}

// `dp` is the gradient of factor * drop(p); with `dropped` also that itself.
KERNEL(attention_weights_backward, (const float* p, const float* dp, const u32* lengths, float* content,
                                    float* position, float* dropped, int width, int span, int batch, int queries,
                                    int first_query, int first_key, int band, int chunk, int reach, float scale,
                                    float factor, u64 key, u64 threshold)) {
    SHARED(float, scratch, THREADS + 16);
    u64 row = blockIdx.x;
    Seen keys = seen(row, lengths, batch, queries, first_query, first_key, band, chunk, reach);
    p += row * width;
    dp += row * width;
    content += row * width;
    position += row * span;
    auto kept = [=](int j) { return keeps(key, threshold, row * width + j); };
    auto gradient = [=](int j) { return kept(j) ? factor * dp[j] : 0.0f; };
    float along = 0;
    for (int j = threadIdx.x; j < width; j += THREADS)
        if (j >= keys.begin && j < keys.end) along += p[j] * gradient(j);
    along = block_sum(along, scratch);
    for (int j = threadIdx.x; j < width; j += THREADS) {
        content[j] = j >= keys.begin && j < keys.end ? p[j] * (gradient(j) - along) * scale : 0.0f;
        if (dropped) dropped[row * width + j] = kept(j) ? factor * p[j] : 0.0f;
    }
    for (int at = threadIdx.x; at < span; at += THREADS) {
        int j = at - keys.position + keys.begin;
        position[at] = j >= keys.begin && j < keys.end ? p[j] * (gradient(j) - along) * scale : 0.0f;
    }
}
