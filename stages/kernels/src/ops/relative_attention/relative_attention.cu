// Self-attention with relative positions, without a matrix of all scores. Query i of a sequence and key j have the score
// scale * ((q_i + u) k_j + (q_i + v) p_r), r = j - i + reach, where row r of the projected positions (2 reach + 1, H k)
// belongs to that distance. A query sees keys below the sequence's length and at most `band` frames away (-1: all).
//
// Scores are computed tile by tile. Forward, the softmax is that of the tiles seen so far, and the sums over keys are scaled
// when a larger score comes (online softmax); backward, weights come from the logarithm of each query's sum. All results
// are sums of one block in a fixed order.
//
// Queries, keys, values, positions and the gradient of the context are read as S, which is bf16 where products gave them so.
// Factors are rounded to T, bf16 or float, and added up in float. A product in bf16 is done by the tensor cores
// (mma.m16n8k16, from compute capability 8.0 on); the emulator computes the same elements in the same threads.

// The widest head.
#define HEAD 128
#define ATTENTION_WARPS (THREADS / 32)

template <class T>
struct Row {
    // Elements from row to row of a tile in shared memory: rows begin in different banks.
    enum { STEP = sizeof(T) == 2 ? HEAD + 8 : HEAD + 1, PAD = sizeof(T) == 2 ? 8 : 1 };
};

// A matrix in shared memory, (rows, depth) row-major.
template <class T>
struct ByRows {
    const T* at;
    int step;
    DEVICE_MEMBER float value(int row, int k) const { return wide(at[row * step + k]); }
    // Two neighbours, of which the first has an even place.
    DEVICE_MEMBER u32 pair(int row, int k) const { return *(const u32*)(at + row * step + k); }
};

// The same, (depth, rows) row-major.
template <class T>
struct ByColumns {
    const T* at;
    int step;
    DEVICE_MEMBER float value(int row, int k) const { return wide(at[k * step + row]); }
    DEVICE_MEMBER u32 pair(int row, int k) const {
        return (u32)at[k * step + row] | (u32)at[(k + 1) * step + row] << 16;
    }
};

// c += a b^T for rows `row` to `row + 16` of a and `column` to `column + 8` of b, by a warp: a thread has the elements
// (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1), where g is its number / 4 and t the rest. In bf16 `depth` is a
// multiple of 16.
template <class T, class A, class B>
DEVICE void multiply(float* c, A a, B b, int row, int column, int depth) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#ifdef __CUDACC__
    if constexpr (sizeof(T) == 2) {
        UNROLL(2)
        for (int k = 0; k < depth; k += 16) {
            u32 a0 = a.pair(row + g, k + 2 * t), a1 = a.pair(row + g + 8, k + 2 * t);
            u32 a2 = a.pair(row + g, k + 2 * t + 8), a3 = a.pair(row + g + 8, k + 2 * t + 8);
            u32 b0 = b.pair(column + g, k + 2 * t), b1 = b.pair(column + g, k + 2 * t + 8);
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                "{%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
        }
    } else
#endif
        UNROLL(2)
        for (int k = 0; k < depth; k++) {
            float upper = a.value(row + g, k), lower = a.value(row + g + 8, k);
            float left = b.value(column + 2 * t, k), right = b.value(column + 2 * t + 1, k);
            c[0] = fmaf(upper, left, c[0]);
            c[1] = fmaf(upper, right, c[1]);
            c[2] = fmaf(lower, left, c[2]);
            c[3] = fmaf(lower, right, c[3]);
        }
}

// Calls `element(row, column, value)` for the four elements that a thread has.
template <class Element>
DEVICE void each_element(const float* c, int row, int column, Element element) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) element(row + g + i / 2 * 8, column + 2 * t + i % 2, c[i]);
}

// The product a b^T of two tiles in shared memory, shared out among the warps from `first_warp` on: `element` is called for
// each of its rows x columns elements.
template <class T, class A, class B, class Element>
DEVICE void product(A a, B b, int rows, int columns, int depth, int first_warp, int warps, Element element) {
    int warp = threadIdx.x / 32 - first_warp;
    if (warp < 0 || warp >= warps) return;
    UNROLL(1)
    for (int part = warp; part < rows / 16 * (columns / 8); part += warps) {
        int row = part / (columns / 8) * 16, column = part % (columns / 8) * 8;
        float c[4] = {0, 0, 0, 0};
        multiply<T>(c, a, b, row, column, depth);
        each_element(c, row, column, element);
    }
}

// A thread's part of a sum of products, (COUNT, head): `PARTS` times four elements.
template <class T, int COUNT>
struct Sum {
    enum { PARTS = COUNT / 16 * (HEAD / 8) / ATTENTION_WARPS };
    float c[PARTS][4];

    DEVICE_MEMBER void clear() {
        for (int part = 0; part < PARTS; part++)
            for (int i = 0; i < 4; i++) c[part][i] = 0;
    }

    // Calls `f(part, row, column)` for each part within `columns`.
    template <class F>
    DEVICE_MEMBER void each(int columns, F f) {
        UNROLL(PARTS)
        for (int part = 0; part < PARTS; part++) {
            int number = part * ATTENTION_WARPS + threadIdx.x / 32;
            int row = number / (HEAD / 8) * 16, column = number % (HEAD / 8) * 8;
            if (column < columns) f(c[part], row, column);
        }
    }

    template <class A, class B>
    DEVICE_MEMBER void add(A a, B b, int columns, int depth) {
        each(columns, [&](float* part, int row, int column) { multiply<T>(part, a, b, row, column, depth); });
    }

    template <class Element>
    DEVICE_MEMBER void elements(int columns, Element element) {
        each(columns, [&](float* part, int row, int column) { each_element(part, row, column, element); });
    }
};

template <class S>
struct Problem {
    // (B T, H k) each, of rows of `step` elements.
    const S *query, *key, *value;
    const S* positions;
    const float *bias_u, *bias_v;
    const u32* lengths;
    int step, batch, time, heads, k, band, reach;
    float scale;
    // The dropout mask's factor, key and threshold. Its places are those of the scores of `block` queries with all keys that
    // one of them sees, each block with a key of its own where there are several.
    float factor;
    u64 mask, threshold;
    const u64* masks;
    int block;

    DEVICE_MEMBER int width() const { return heads * k; }
    // Columns that a product goes over.
    DEVICE_MEMBER int depth() const { return (k + 15) / 16 * 16; }
    DEVICE_MEMBER int length(int b) const { return lengths[b] < (u32)time ? (int)lengths[b] : time; }

    DEVICE_MEMBER bool sees(int i, int j, int length) const {
        if (i < 0 || j < 0 || i >= length || j >= length) return false;
        return band < 0 || (i - j <= band && j - i <= band);
    }

    // The keys that some of the queries from `first` on may see, or the other way round.
    DEVICE_MEMBER int seen_from(int first) const { return band >= 0 && first > band ? first - band : 0; }
    DEVICE_MEMBER int seen_to(int last, int length) const {
        return band >= 0 && band < length - last ? last + band + 1 : length;
    }

    // Factor of a weight after dropout.
    DEVICE_MEMBER float kept(int head, int b, int i, int j) const {
        if (threshold == 0) return factor;
        int first = i / block * block;
        int queries = time - first < block ? time - first : block;
        int from = 0, to = time;
        if (block < time) {
            from = seen_from(first);
            to = seen_to(first + queries - 1, time);
        }
        u64 row = (u64)(head * batch + b) * queries + (i - first);
        u64 key = block < time ? masks[first / block] : mask;
        return keeps(key, threshold, row * (to - from) + (j - from)) ? factor : 0.0f;
    }
};

// Writes two neighbours of a tile, of which the first has an even place.
DEVICE void narrow_pair(float* place, float left, float right) {
    place[0] = left;
    place[1] = right;
}
DEVICE void narrow_pair(bf16* place, float left, float right) { *(u32*)place = rounded_pair(left, right); }

// Four neighbours as they are in memory.
template <class S>
struct Quad;

template <>
struct Quad<float> {
    float four[4];

    DEVICE_MEMBER void read(const float* from) { read_four(from, four); }
    DEVICE_MEMBER void put(int i, float value) { four[i] = value; }
    DEVICE_MEMBER float value(int i) const { return four[i]; }
};

template <>
struct Quad<bf16> {
    u32 pairs[2];

    DEVICE_MEMBER void read(const bf16* from) {
#ifdef __CUDACC__
        uint2 both = *(const uint2*)from;
        pairs[0] = both.x;
        pairs[1] = both.y;
#else
        for (int i = 0; i < 2; i++) pairs[i] = (u32)from[2 * i] | (u32)from[2 * i + 1] << 16;
#endif
    }
    // In the order of `i`.
    DEVICE_MEMBER void put(int i, bf16 value) { pairs[i / 2] = i % 2 ? pairs[i / 2] | (u32)value << 16 : value; }
    DEVICE_MEMBER float value(int i) const {
        return float_of(i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16);
    }
};

// Writes four neighbours of a tile as they are, or zeros.
DEVICE void put_as_read(bf16* place, const Quad<bf16>& quad, bool there) {
    *(u32*)place = there ? quad.pairs[0] : 0u;
    *(u32*)(place + 2) = there ? quad.pairs[1] : 0u;
}

// Rows `first` to `first + HEIGHT` of a matrix, each the columns of one head. A thread has four neighbours of some rows: all of
// them are asked for by `fetch`, and waited for by `put`.
template <int HEIGHT, class S>
struct Rows {
    enum { QUADS = HEAD / 4, APART = THREADS / QUADS, PARTS = HEIGHT / APART };
    Quad<S> values[PARTS];

    // Rows outside of 0 to `end` are not read, nor are columns from k on.
    DEVICE_MEMBER void fetch(const S* from, u64 step, int first, int end, int k) {
        int column = threadIdx.x % QUADS * 4, row0 = first + (int)threadIdx.x / QUADS;
        // There is a row 0, and a whole one begins at a multiple of four numbers.
        if (column + 4 <= k && (step % 4 | (u64)from % (4 * sizeof(S))) == 0) {
            UNROLL(PARTS)
            for (int part = 0; part < PARTS; part++) {
                int row = row0 + part * APART;
                values[part].read(from + (u64)(row >= 0 && row < end ? row : 0) * step + column);
            }
            return;
        }
        UNROLL(PARTS)
        for (int part = 0; part < PARTS; part++) {
            int row = row0 + part * APART;
            const S* place = from + (u64)(row >= 0 && row < end ? row : 0) * step + column;
            for (int i = 0; i < 4; i++) values[part].put(i, column + i < k ? place[i] : (S)0);
        }
    }

    // Rounded to T, plus a bias where given. Rows outside of 0 to `end` are zeros, and so are columns from k on.
    template <class T>
    DEVICE_MEMBER void put(T* tile, int first, int end, int k, int depth, const float* bias) const {
        int column = threadIdx.x % QUADS * 4, row0 = threadIdx.x / QUADS;
        float added[4] = {0, 0, 0, 0};
        if (bias)
            for (int i = 0; i < 4; i++) added[i] = column + i < k ? bias[column + i] : 0.0f;
        if (column >= depth) return;
        UNROLL(PARTS)
        for (int part = 0; part < PARTS; part++) {
            int row = part * APART + row0;
            bool there = first + row >= 0 && first + row < end;
            const Quad<S>& v = values[part];
            T* place = tile + row * Row<T>::STEP + column;
            if constexpr (sizeof(S) == 2 && sizeof(T) == 2) {
                if (!bias) {
                    put_as_read(place, v, there);
                    continue;
                }
            }
            narrow_pair(place, there ? v.value(0) + added[0] : 0.0f, there ? v.value(1) + added[1] : 0.0f);
            narrow_pair(place + 2, there ? v.value(2) + added[2] : 0.0f, there ? v.value(3) + added[3] : 0.0f);
        }
    }
};

template <int HEIGHT, class T, class S>
DEVICE void load(T* tile, const S* from, u64 step, int first, int end, int k, int depth, const float* bias) {
    Rows<HEIGHT, S> rows;
    rows.fetch(from, step, first, end, k);
    rows.put(tile, first, end, k, depth, bias);
}

template <class T, int TILE, class S>
DEVICE void attend(const Problem<S>& of, float* out, bf16* out_bf16, float* logs) {
    enum { STEP = Row<T>::STEP, SPAN = 2 * TILE + 1, WEIGHTS = TILE + Row<T>::PAD, PARTS = THREADS / TILE };
    SHARED(u32, query_u_words, TILE * STEP * sizeof(T) / 4);
    SHARED(u32, query_v_words, TILE * STEP * sizeof(T) / 4);
    SHARED(u32, other_words, 2 * TILE * STEP * sizeof(T) / 4);
    SHARED(u32, weights_words, TILE * WEIGHTS * sizeof(T) / 4);
    SHARED(float, scores, TILE * SPAN);
    SHARED(float, largest, THREADS);
    SHARED(float, sums, THREADS);
    SHARED(float, tops, TILE);
    SHARED(float, totals, TILE);
    SHARED(float, shrinks, TILE);
    T *query_u = (T*)query_u_words, *query_v = (T*)query_v_words, *other = (T*)other_words;
    T* weights = (T*)weights_words;

    int head = blockIdx.x % of.heads, i0 = blockIdx.x / of.heads * TILE, b = blockIdx.y;
    int length = of.length(b), k = of.k, depth = of.depth();
    u64 start = (u64)b * of.time;
    int column0 = head * k;
    const S* queries = of.query + start * of.step + column0;
    load<TILE>(query_u, queries, of.step, i0, of.time, k, depth, of.bias_u + column0);
    load<TILE>(query_v, queries, of.step, i0, of.time, k, depth, of.bias_v + column0);
    if (threadIdx.x < TILE) {
        tops[threadIdx.x] = -infinity();
        totals[threadIdx.x] = 0;
    }
    Sum<T, TILE> sum;
    sum.clear();
    int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    auto score = [&](int i, int j) -> float& { return scores[i * SPAN + j - i + TILE - 1]; };
    int end = i0 < length ? of.seen_to(i0 + TILE - 1 < length ? i0 + TILE - 1 : length - 1, length) : 0;
    for (int j0 = of.seen_from(i0) / TILE * TILE; j0 < end; j0 += TILE) {
        BARRIER();
        load<2 * TILE>(other, of.positions + column0, of.width(), j0 - i0 - TILE + 1 + of.reach, 2 * of.reach + 1, k, depth,
                       nullptr);
        BARRIER();
        product<T>(ByRows<T>{query_v, STEP}, ByRows<T>{other, STEP}, TILE, 2 * TILE, depth, 0, ATTENTION_WARPS,
                   [&](int i, int at, float value) { scores[i * SPAN + at] = value; });
        BARRIER();
        load<TILE>(other, of.key + start * of.step + column0, of.step, j0, of.time, k, depth, nullptr);
        BARRIER();
        product<T>(ByRows<T>{query_u, STEP}, ByRows<T>{other, STEP}, TILE, TILE, depth, 0, ATTENTION_WARPS,
                   [&](int i, int j, float value) {
                       float& place = score(i, j);
                       place = of.sees(i0 + i, j0 + j, length) ? (value + place) * of.scale : -infinity();
                   });
        BARRIER();
        load<TILE>(other, of.value + start * of.step + column0, of.step, j0, of.time, k, depth, nullptr);
        float top = -infinity();
        for (int j = part; j < TILE; j += PARTS) top = score(row, j) > top ? score(row, j) : top;
        largest[threadIdx.x] = top;
        BARRIER();
        top = tops[row];
        for (int other_part = 0; other_part < PARTS; other_part++) {
            float value = largest[row * PARTS + other_part];
            top = value > top ? value : top;
        }
        float total = 0;
        for (int j = part; j < TILE; j += PARTS) {
            float value = score(row, j);
            // What is not seen weighs nothing; what is not a number stays so.
            float weight = value == -infinity() ? 0.0f : expf(value - top);
            total += weight;
            narrow(weights[row * WEIGHTS + j], weight * of.kept(head, b, i0 + row, j0 + j));
        }
        sums[threadIdx.x] = total;
        BARRIER();
        if (part == 0) {
            float shrink = tops[row] == -infinity() ? 0.0f : expf(tops[row] - top);
            float all = totals[row] * shrink;
            for (int other_part = 0; other_part < PARTS; other_part++) all += sums[row * PARTS + other_part];
            tops[row] = top;
            totals[row] = all;
            shrinks[row] = shrink;
        }
        BARRIER();
        sum.each(depth, [&](float* c, int upper, int) {
            int g = threadIdx.x % 32 / 4;
            for (int i = 0; i < 4; i++) c[i] *= shrinks[upper + g + i / 2 * 8];
        });
        sum.add(ByRows<T>{weights, WEIGHTS}, ByColumns<T>{other, STEP}, depth, TILE);
    }
    BARRIER();
    sum.elements(depth, [&](int i, int column, float value) {
        if (i0 + i >= of.time || column >= k) return;
        // A query that sees no key has the context 0.
        float total = totals[i];
        put(out, out_bf16, (start + i0 + i) * of.width() + column0 + column, total == 0 ? 0.0f : value / total);
    });
    if (threadIdx.x < TILE && i0 + (int)threadIdx.x < of.time) {
        float total = totals[threadIdx.x];
        logs[(u64)(head * of.batch + b) * of.time + i0 + threadIdx.x] =
            total == 0 ? infinity() : tops[threadIdx.x] + logf(total);
    }
}

// Gradients: of queries, keys and values behind each other in rows of 3 H k; of both biases over a tile of queries, rows of
// `biases` (B tiles, 2 H k); of the positions over each `together` sequences, (groups of sequences, 2 reach + 1, H k).
struct Results {
    float* projections;
    bf16* projections_bf16;
    float *biases, *positions;
    int together;
};

template <class T, int TILE, class S>
DEVICE void attend_backward(const Problem<S>& of, const float* context, const bf16* context_bf16, const float* logs,
                            const S* d_context, const Results& to) {
    static_assert(TILE * TILE == THREADS, "a thread has one score");
    enum { STEP = Row<T>::STEP, SPAN = 2 * TILE + 1, WEIGHTS = TILE + Row<T>::PAD, SHIFTED = 2 * TILE + Row<T>::PAD };
    SHARED(u32, words0, TILE * STEP * sizeof(T) / 4);
    SHARED(u32, words1, TILE * STEP * sizeof(T) / 4);
    SHARED(u32, words2, TILE * STEP * sizeof(T) / 4);
    SHARED(u32, words3, 2 * TILE * STEP * sizeof(T) / 4);
    SHARED(u32, slopes_words, TILE * WEIGHTS * sizeof(T) / 4);
    // One of the two: slopes by distance in T, or scores in float.
    SHARED(float, wide_words, TILE * SHIFTED);
    SHARED(float, scores, TILE * SPAN);
    SHARED(float, square, TILE * (TILE + 1));
    SHARED(float, along, TILE);
    // In bf16 there is room for all that an iteration reads, so that it waits for memory once.
    enum { ONCE = sizeof(T) == 2, MORE = ONCE ? TILE * STEP * (int)sizeof(T) / 4 : 1 };
    SHARED(u32, words4, 2 * MORE);
    SHARED(u32, words5, MORE);
    T *tile4 = ONCE ? (T*)words4 : nullptr, *tile5 = ONCE ? (T*)words5 : nullptr;
    T *tile0 = (T*)words0, *tile1 = (T*)words1, *tile2 = (T*)words2, *tile3 = (T*)words3;
    T *slopes = (T*)slopes_words, *second = (T*)wide_words;
    ByRows<T> rows0{tile0, STEP}, rows1{tile1, STEP}, rows2{tile2, STEP}, rows3{tile3, STEP};
    ByRows<T> rows4{tile3 + TILE * STEP, STEP};

    int tiles = (of.time + TILE - 1) / TILE;
    int head = blockIdx.x % of.heads, number = blockIdx.x / of.heads, b = blockIdx.y;
    int k = of.k, depth = of.depth(), column0 = head * k, width = of.width();
    int i = threadIdx.x / TILE, j = threadIdx.x % TILE;
    // What is of a sequence.
    int length;
    u64 start;
    const S *queries, *keys, *values, *d_rows;
    const float* logs_here;
    auto go_to = [&](int sequence) {
        b = sequence;
        length = of.length(b);
        start = (u64)b * of.time;
        queries = of.query + start * of.step + column0;
        keys = of.key + start * of.step + column0;
        values = of.value + start * of.step + column0;
        d_rows = d_context + start * width + column0;
        logs_here = logs + (u64)(head * of.batch + b) * of.time;
    };
    go_to(b);

    auto load_queries = [&](T* tile, int first, const float* bias) {
        load<TILE>(tile, queries, of.step, first, of.time, k, depth, bias + column0);
    };
    const S* positions = of.positions + column0;
    int span = 2 * of.reach + 1;
    auto load_slopes = [&](T* tile, int first) { load<TILE>(tile, d_rows, width, first, of.time, k, depth, nullptr); };
    // Logarithm of the sum of the weights of this thread's query of a tile.
    float own_log = 0;
    // For each query of a tile the product of its context and that's gradient, and its logarithm. Ends with a barrier.
    auto find_along = [&](int first) {
        enum { PARTS = HEAD / TILE };
        float slopes_of[PARTS], context_of[PARTS];
        bool there = first + i < of.time;
        own_log = logs_here[there ? first + i : 0];
        UNROLL(PARTS)
        for (int part = 0; part < PARTS; part++) {
            int column = part * TILE + j;
            u64 at = there && column < k ? (u64)(first + i) * width + column : 0, place = start * width + column0 + at;
            slopes_of[part] = wide(d_rows[at]);
            context_of[part] = context_bf16 ? wide(context_bf16[place]) : context[place];
        }
        float sum = 0;
        UNROLL(PARTS)
        for (int part = 0; part < PARTS; part++)
            if (there && part * TILE + j < k) sum += slopes_of[part] * context_of[part];
        square[i * (TILE + 1) + j] = sum;
        BARRIER();
        if (j == 0) {
            for (int other = 1; other < TILE; other++) sum += square[i * (TILE + 1) + other];
            along[i] = sum;
        }
        BARRIER();
    };
    // Weight of a key for this thread's query of the tile from `i0` on, its factor after dropout, and the gradient of the
    // score before it is scaled.
    auto slope_of = [&](int i0, int key, float score, float d_weight, float* dropped) {
        *dropped = 0;
        if (!of.sees(i0 + i, key, length)) return 0.0f;
        float weight = expf(score * of.scale - own_log), kept = of.kept(head, b, i0 + i, key);
        *dropped = kept * weight;
        return weight * (kept * d_weight - along[i]) * of.scale;
    };

    if (number < tiles) {
        // A tile of queries: tile0 and tile1 are the queries with both biases, tile2 the gradient of their context, tile3 keys
        // and values, `near` the positions.
        int i0 = number * TILE;
        T* near = ONCE ? tile4 : tile3;
        load_queries(tile0, i0, of.bias_u);
        load_queries(tile1, i0, of.bias_v);
        load_slopes(tile2, i0);
        find_along(i0);
        Sum<T, TILE> by_content, by_position;
        by_content.clear();
        by_position.clear();
        int end = i0 < length ? of.seen_to(i0 + TILE - 1 < length ? i0 + TILE - 1 : length - 1, length) : 0;
        for (int j0 = of.seen_from(i0) / TILE * TILE; j0 < end; j0 += TILE) {
            int distance = j0 - i0 - TILE + 1 + of.reach;
            Rows<2 * TILE, S> near_rows;
            Rows<TILE, S> key_rows, value_rows;
            auto fetch_keys_and_values = [&]() {
                key_rows.fetch(keys, of.step, j0, of.time, k);
                value_rows.fetch(values, of.step, j0, of.time, k);
            };
            auto put_keys_and_values = [&]() {
                key_rows.put(tile3, j0, of.time, k, depth, nullptr);
                value_rows.put(tile3 + TILE * STEP, j0, of.time, k, depth, nullptr);
            };
            near_rows.fetch(positions, width, distance, span, k);
            if (ONCE) fetch_keys_and_values();
            BARRIER();
            near_rows.put(near, distance, span, k, depth, nullptr);
            if (ONCE) put_keys_and_values();
            BARRIER();
            product<T>(rows1, ByRows<T>{near, STEP}, TILE, 2 * TILE, depth, 0, ATTENTION_WARPS,
                       [&](int row, int at, float value) { scores[row * SPAN + at] = value; });
            BARRIER();
            if (!ONCE) {
                fetch_keys_and_values();
                put_keys_and_values();
                BARRIER();
            }
            product<T>(rows0, rows3, TILE, TILE, depth, 0, 4,
                       [&](int row, int column, float value) { scores[row * SPAN + column - row + TILE - 1] += value; });
            product<T>(rows2, rows4, TILE, TILE, depth, 4, 4,
                       [&](int row, int column, float value) { square[row * (TILE + 1) + column] = value; });
            BARRIER();
            int shift = j - i + TILE - 1;
            float dropped, slope = slope_of(i0, j0 + j, scores[i * SPAN + shift], square[i * (TILE + 1) + j], &dropped);
            narrow(slopes[i * WEIGHTS + j], slope);
            // The row of distances that no key of the tile has is filled with zeros.
            narrow(second[i * SHIFTED + shift], slope);
            narrow(second[i * SHIFTED + (shift + TILE) % (2 * TILE)], 0.0f);
            BARRIER();
            by_content.add(ByRows<T>{slopes, WEIGHTS}, ByColumns<T>{tile3, STEP}, depth, TILE);
            if (!ONCE) {
                BARRIER();
                load<2 * TILE>(near, positions, width, distance, span, k, depth, nullptr);
                BARRIER();
            }
            by_position.add(ByRows<T>{second, SHIFTED}, ByColumns<T>{near, STEP}, depth, 2 * TILE);
        }
        float* whole = (float*)words3;
        for (int which = 0; which < 2; which++) {
            BARRIER();
            auto& sum = which == 0 ? by_content : by_position;
            sum.elements(depth, [&](int row, int column, float value) { whole[row * (HEAD + 1) + column] = value; });
            BARRIER();
            if ((int)threadIdx.x < k) {
                float all = whole[threadIdx.x];
                for (int row = 1; row < TILE; row++) all += whole[row * (HEAD + 1) + threadIdx.x];
                to.biases[(u64)(b * tiles + number) * 2 * width + which * width + column0 + threadIdx.x] = all;
            }
        }
        for (int part = 0; part < Sum<T, TILE>::PARTS; part++)
            for (int at = 0; at < 4; at++) by_content.c[part][at] += by_position.c[part][at];
        by_content.elements(depth, [&](int row, int column, float value) {
            if (i0 + row < of.time && column < k)
                put(to.projections, to.projections_bf16, (start + i0 + row) * 3 * width + column0 + column, value);
        });
        return;
    }
    number -= tiles;
    if (number < tiles) {
        // A tile of keys: tile0 are the keys, tile1 the values, tile2 the queries with the bias v and tile3 positions; `with_u`
        // are the queries with the other bias, `of_context` the gradient of their context.
        int j0 = number * TILE;
        T *with_u = ONCE ? tile4 : tile2, *of_context = ONCE ? tile4 + TILE * STEP : tile3;
        load<TILE>(tile0, keys, of.step, j0, of.time, k, depth, nullptr);
        load<TILE>(tile1, values, of.step, j0, of.time, k, depth, nullptr);
        Sum<T, TILE> d_keys, d_values;
        d_keys.clear();
        d_values.clear();
        int end = j0 < length ? of.seen_to(j0 + TILE - 1 < length ? j0 + TILE - 1 : length - 1, length) : 0;
        for (int i0 = of.seen_from(j0) / TILE * TILE; i0 < end; i0 += TILE) {
            int distance = j0 - i0 - TILE + 1 + of.reach;
            Rows<TILE, S> query_rows, slope_rows;
            Rows<2 * TILE, S> near_rows;
            query_rows.fetch(queries, of.step, i0, of.time, k);
            near_rows.fetch(positions, width, distance, span, k);
            if (ONCE) slope_rows.fetch(d_rows, width, i0, of.time, k);
            auto put_others = [&]() {
                query_rows.put(with_u, i0, of.time, k, depth, of.bias_u + column0);
                slope_rows.put(of_context, i0, of.time, k, depth, nullptr);
            };
            BARRIER();
            query_rows.put(tile2, i0, of.time, k, depth, of.bias_v + column0);
            near_rows.put(tile3, distance, span, k, depth, nullptr);
            if (ONCE) put_others();
            find_along(i0);
            product<T>(rows2, rows3, TILE, 2 * TILE, depth, 0, ATTENTION_WARPS,
                       [&](int row, int at, float value) { scores[row * SPAN + at] = value; });
            BARRIER();
            if (!ONCE) {
                slope_rows.fetch(d_rows, width, i0, of.time, k);
                put_others();
                BARRIER();
            }
            product<T>(ByRows<T>{with_u, STEP}, rows0, TILE, TILE, depth, 0, 4,
                       [&](int row, int column, float value) { scores[row * SPAN + column - row + TILE - 1] += value; });
            product<T>(ByRows<T>{of_context, STEP}, rows1, TILE, TILE, depth, 4, 4,
                       [&](int row, int column, float value) { square[row * (TILE + 1) + column] = value; });
            BARRIER();
            float dropped;
            float slope =
                slope_of(i0, j0 + j, scores[i * SPAN + j - i + TILE - 1], square[i * (TILE + 1) + j], &dropped);
            narrow(slopes[i * WEIGHTS + j], slope);
            narrow(second[i * SHIFTED + j], dropped);
            BARRIER();
            d_keys.add(ByColumns<T>{slopes, WEIGHTS}, ByColumns<T>{with_u, STEP}, depth, TILE);
            d_values.add(ByColumns<T>{second, SHIFTED}, ByColumns<T>{of_context, STEP}, depth, TILE);
        }
        for (int which = 0; which < 2; which++) {
            auto& sum = which == 0 ? d_keys : d_values;
            sum.elements(depth, [&](int row, int column, float value) {
                if (j0 + row < of.time && column < k)
                    put(to.projections, to.projections_bf16,
                        ((start + j0 + row) * 3 + 1 + which) * width + column0 + column, value);
            });
        }
        return;
    }
    number -= tiles;
    int group = b;
    if (group * to.together >= of.batch) return;
    // A tile of distances of some sequences: tile0 are the positions, tile1 the queries with the bias v, tile2 those with u,
    // tile3 the keys that are at these distances from the queries; `of_context` is the gradient of the queries' context, `far`
    // the values.
    int r0 = number * TILE;
    T *of_context = ONCE ? tile5 : tile2, *far = ONCE ? tile4 : tile3;
    load<TILE>(tile0, positions, width, r0, span, k, depth, nullptr);
    Sum<T, TILE> sum;
    sum.clear();
    float* d_weights = wide_words;
    int last = (group + 1) * to.together < of.batch ? (group + 1) * to.together : of.batch;
    for (int sequence = group * to.together; sequence < last; sequence++) {
        go_to(sequence);
        int from = of.reach - r0 - TILE + 1, end = length + of.reach - r0 < length ? length + of.reach - r0 : length;
        for (int i0 = from > 0 ? from / TILE * TILE : 0; i0 < end; i0 += TILE) {
            int j0 = i0 + r0 - of.reach;
            Rows<TILE, S> query_rows, slope_rows;
            Rows<2 * TILE, S> key_rows, value_rows;
            auto fetch_others = [&]() {
                slope_rows.fetch(d_rows, width, i0, of.time, k);
                value_rows.fetch(values, of.step, j0, of.time, k);
            };
            auto put_others = [&]() {
                slope_rows.put(of_context, i0, of.time, k, depth, nullptr);
                value_rows.put(far, j0, of.time, k, depth, nullptr);
            };
            query_rows.fetch(queries, of.step, i0, of.time, k);
            key_rows.fetch(keys, of.step, j0, of.time, k);
            if (ONCE) fetch_others();
            BARRIER();
            query_rows.put(tile1, i0, of.time, k, depth, of.bias_v + column0);
            query_rows.put(tile2, i0, of.time, k, depth, of.bias_u + column0);
            key_rows.put(tile3, j0, of.time, k, depth, nullptr);
            if (ONCE) put_others();
            find_along(i0);
            product<T>(rows1, rows0, TILE, TILE, depth, 0, 2,
                       [&](int row, int at, float value) { square[row * (TILE + 1) + at] = value; });
            product<T>(rows2, rows3, TILE, 2 * TILE, depth, 2, ATTENTION_WARPS - 2,
                       [&](int row, int column, float value) { scores[row * SPAN + column] = value; });
            if (!ONCE) {
                BARRIER();
                fetch_others();
                put_others();
                BARRIER();
            }
            product<T>(ByRows<T>{of_context, STEP}, ByRows<T>{far, STEP}, TILE, 2 * TILE, depth, 0, ATTENTION_WARPS,
                       [&](int row, int column, float value) { d_weights[row * SPAN + column] = value; });
            BARRIER();
            // This thread's j is a distance here.
            float dropped, score = scores[i * SPAN + i + j] + square[i * (TILE + 1) + j];
            bool there = r0 + j < span;
            float slope = there ? slope_of(i0, j0 + i + j, score, d_weights[i * SPAN + i + j], &dropped) : 0.0f;
            narrow(slopes[i * WEIGHTS + j], slope);
            BARRIER();
            sum.add(ByColumns<T>{slopes, WEIGHTS}, ByColumns<T>{tile1, STEP}, depth, TILE);
        }
    }
    sum.elements(depth, [&](int row, int column, float value) {
        if (r0 + row < span && column < k)
            to.positions[((u64)group * span + r0 + row) * width + column0 + column] = value;
    });
}

// Without `key` all three projections are behind each other in the rows of `query`.
template <class S>
DEVICE Problem<S> problem_of(const S* query, const S* key, const S* value, const S* positions,
                          const float* bias_u, const float* bias_v, const u32* lengths, const u64* masks, int batch,
                          int time, int heads, int k, int band, int reach, int block, float scale, float factor, u64 mask,
                          u64 threshold) {
    int d = heads * k;
    Problem<S> of = {query,     key ? key : query + d, key ? value : query + 2 * d, positions, bias_u, bias_v, lengths,
                  key ? d : 3 * d, batch, time, heads, k, band, reach, scale, factor, mask, threshold, masks, block};
    return of;
}

// That of a kernel below: all of them call their parameters so.
#define PROBLEM                                                                                                      \
    problem_of(query, key, value, positions, bias_u, bias_v, lengths, masks, batch, time, heads, k, band, reach,     \
               block, scale, factor, mask, threshold)

KERNEL(relative_attention_f32, (const float* query, const float* key, const float* value, const float* positions,
                                const float* bias_u, const float* bias_v, const u32* lengths, const u64* masks,
                                float* out, bf16* out_bf16, float* logs, int batch, int time, int heads, int k, int band,
                                int reach, int block, float scale, float factor, u64 mask, u64 threshold)) {
    auto of = PROBLEM;
    attend<float, 16>(of, out, out_bf16, logs);
}

KERNEL(relative_attention_bf16, (const float* query, const float* key, const float* value, const float* positions,
                                 const float* bias_u, const float* bias_v, const u32* lengths, const u64* masks,
                                 float* out, bf16* out_bf16, float* logs, int batch, int time, int heads, int k, int band,
                                 int reach, int block, float scale, float factor, u64 mask, u64 threshold)) {
    auto of = PROBLEM;
    attend<bf16, 32>(of, out, out_bf16, logs);
}

KERNEL(relative_attention_bf16_of_bf16, (const bf16* query, const bf16* key, const bf16* value, const bf16* positions,
                                 const float* bias_u, const float* bias_v, const u32* lengths, const u64* masks,
                                 float* out, bf16* out_bf16, float* logs, int batch, int time, int heads, int k, int band,
                                 int reach, int block, float scale, float factor, u64 mask, u64 threshold)) {
    auto of = PROBLEM;
    attend<bf16, 32>(of, out, out_bf16, logs);
}

KERNEL(relative_attention_backward_f32, (const float* query, const float* key, const float* value,
                                         const float* positions, const float* bias_u, const float* bias_v,
                                         const u32* lengths, const u64* masks, const float* context,
                                         const bf16* context_bf16, const float* logs, const float* d_context,
                                         float* d_projections, bf16* d_projections_bf16, float* d_biases,
                                         float* d_positions, int together, int batch, int time, int heads, int k, int band, int reach,
                                         int block, float scale, float factor, u64 mask, u64 threshold)) {
    auto of = PROBLEM;
    Results to = {d_projections, d_projections_bf16, d_biases, d_positions, together};
    attend_backward<float, 16>(of, context, context_bf16, logs, d_context, to);
}

KERNEL(relative_attention_backward_bf16, (const float* query, const float* key, const float* value,
                                          const float* positions, const float* bias_u, const float* bias_v,
                                          const u32* lengths, const u64* masks, const float* context,
                                          const bf16* context_bf16, const float* logs, const float* d_context,
                                          float* d_projections, bf16* d_projections_bf16, float* d_biases,
                                          float* d_positions, int together, int batch, int time, int heads, int k, int band, int reach,
                                          int block, float scale, float factor, u64 mask, u64 threshold)) {
    auto of = PROBLEM;
    Results to = {d_projections, d_projections_bf16, d_biases, d_positions, together};
    attend_backward<bf16, 16>(of, context, context_bf16, logs, d_context, to);
}

// Of the kernel behind this, two blocks are to run on a multiprocessor at once: 128 registers a thread.
#undef BOUNDS
#define BOUNDS __launch_bounds__(THREADS, 2)
KERNEL(relative_attention_backward_bf16_of_bf16, (const bf16* query, const bf16* key, const bf16* value,
                                          const bf16* positions, const float* bias_u, const float* bias_v,
                                          const u32* lengths, const u64* masks, const float* context,
                                          const bf16* context_bf16, const float* logs, const bf16* d_context,
                                          float* d_projections, bf16* d_projections_bf16, float* d_biases,
                                          float* d_positions, int together, int batch, int time, int heads, int k, int band, int reach,
                                          int block, float scale, float factor, u64 mask, u64 threshold)) {
    auto of = PROBLEM;
    Results to = {d_projections, d_projections_bf16, d_biases, d_positions, together};
    attend_backward<bf16, 16>(of, context, context_bf16, logs, d_context, to);
}
