// One layer of an LSTM, gate order i, f, g, o.

struct Stepped {
    float cell, hidden;
};

// Element `i` of (batch, width) after a step, whose cell was `before`. `gates` (batch, 4 width) hold the product of the input,
// `product` that of the outputs before.
DEVICE Stepped stepped(const float* gates, const float* product, const float* input_bias, const float* hidden_bias,
                       float before, int i, int width) {
    int j = i % width;
    u64 row = (u64)(i / width) * 4 * width;
    float gate[4];
    for (int part = 0; part < 4; part++) {
        int at = part * width + j;
        gate[part] = gates[row + at] + (input_bias[at] + hidden_bias[at]) + product[row + at];
        gate[part] = part == 2 ? tanhf(gate[part]) : sigmoid(gate[part]);
    }
    float cell = gate[1] * before + gate[0] * gate[2];
    return {cell, gate[3] * tanhf(cell)};
}

// One step of all utterances.
KERNEL(lstm_step, (const float* gates, const float* product, const float* input_bias, const float* hidden_bias,
                   const float* before, float* cells, float* hidden, int n, int width)) {
    int i = element();
    if (i >= n) return;
    Stepped now = stepped(gates, product, input_bias, hidden_bias, before[i], i, width);
    cells[i] = now.cell;
    hidden[i] = now.hidden;
}

// One step of those utterances that move, in place.
KERNEL(lstm_step_rows, (const float* gates, const float* product, const float* input_bias, const float* hidden_bias,
                        const u32* moves, float* cells, float* hidden, int n, int width)) {
    int i = element();
    if (i >= n || !moves[i / width]) return;
    Stepped now = stepped(gates, product, input_bias, hidden_bias, cells[i], i, width);
    cells[i] = now.cell;
    hidden[i] = now.hidden;
}

// All steps of a layer in one launch. A block has some hidden units, with all rows of the batch; the blocks wait for each
// other after each step, as a step needs the outputs of all units of the step before. Products are made in tiles of 4 by
// 4 (rows of weights by rows of the batch), whose sums of products the threads of a tile share.

// Hidden units that a block has at a time, and rows of the batch.
#define UNITS 8
#define ROWS 4
// Numbers of each of its four rows of weights that a thread can keep in registers.
#define KEPT 20

// What a thread has of its four rows of weights of length `depth`: every `lanes`-th number from number `lane` on. They are kept
// from step to step where there are not too many, and the block has the same units in all steps.
struct LayerWeights {
    const float* rows[4];
    int depth, lane, lanes;
    bool are_kept;
    float kept[4][KEPT];

    DEVICE_MEMBER void keep(bool same_units) {
        are_kept = same_units && depth <= KEPT * lanes;
        if (!are_kept) return;
        UNROLL(KEPT)
        for (int part = 0; part < KEPT; part++)
            for (int w = 0; w < 4; w++) {
                int k = part * lanes + lane;
                kept[w][part] = k < depth ? rows[w][k] : 0.0f;
            }
    }

    // This thread's part of a tile's 16 sums.
    DEVICE_MEMBER void products(const float* const* with, float* scratch) const {
        float sums[16];
        for (int at = 0; at < 16; at++) sums[at] = 0.0f;
        if (are_kept) {
            UNROLL(KEPT)
            for (int part = 0; part < KEPT; part++) {
                int k = part * lanes + lane < depth ? part * lanes + lane : depth - 1;
                float x[4];
                for (int b = 0; b < 4; b++) x[b] = with[b][k];
                for (int w = 0; w < 4; w++)
                    for (int b = 0; b < 4; b++) sums[4 * w + b] = fmaf(kept[w][part], x[b], sums[4 * w + b]);
            }
        } else {
            UNROLL(4)
            for (int k = lane; k < depth; k += lanes) {
                float x[4];
                for (int b = 0; b < 4; b++) x[b] = with[b][k];
                for (int w = 0; w < 4; w++) {
                    float weight = rows[w][k];
                    for (int b = 0; b < 4; b++) sums[4 * w + b] = fmaf(weight, x[b], sums[4 * w + b]);
                }
            }
        }
        for (int at = 0; at < 16; at++) scratch[at * (THREADS + 1) + threadIdx.x] = sums[at];
    }
};

// Adds up the parts of the threads of each warp: 16 sums for each of 8 warps.
DEVICE void warp_sums(const float* scratch, float* sums) {
    BARRIER();
    if (threadIdx.x < 128) {
        const float* parts = scratch + threadIdx.x % 16 * (THREADS + 1) + threadIdx.x / 16 * 32;
        // Four sums beside each other, so that not each addition waits for the one before.
        float sum[4] = {parts[0], parts[1], parts[2], parts[3]};
        UNROLL(7)
        for (int lane = 4; lane < 32; lane += 4)
            for (int of = 0; of < 4; of++) sum[of] += parts[lane + of];
        sums[threadIdx.x] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    BARRIER();
}

DEVICE int least(int a, int b) { return a < b ? a : b; }

// `gates` (steps * batch, 4 width) hold the product of the input, and become the activated gates.
KERNEL(lstm_layer, (float* gates, const float* weight, const float* input_bias, const float* hidden_bias, float* cells,
                    float* hidden, u32* arrived, int steps, int batch, int width)) {
    SHARED(float, scratch, 16 * (THREADS + 1));
    SHARED(float, sums, 128);
    int thread = threadIdx.x;
    bool same_units = gridDim.x * UNITS >= (u32)width;
    LayerWeights weights;
    // A warp for each unit, for its four gates.
    auto place = [&](int base) {
        int unit = least(base + thread / 32, width - 1);
        for (int part = 0; part < 4; part++) weights.rows[part] = weight + ((u64)part * width + unit) * width;
        weights.depth = width;
        weights.lane = thread % 32;
        weights.lanes = 32;
    };
    place(blockIdx.x * UNITS);
    weights.keep(same_units);
    for (int step = 0; step < steps; step++) {
        u64 now = (u64)step * batch;
        for (int base = blockIdx.x * UNITS; base < width; base += gridDim.x * UNITS) {
            if (!same_units) place(base);
            for (int first = 0; first < batch; first += ROWS) {
                int unit = base + thread / ROWS, row = first + thread % ROWS;
                bool mine = thread < UNITS * ROWS && unit < width && row < batch;
                u64 at = (now + row) * width + unit;
                // Asked for before the sums are waited for.
                float gate[4], before = 0;
                if (mine) {
                    for (int part = 0; part < 4; part++) {
                        int bias = part * width + unit;
                        gate[part] = gates[(now + row) * 4 * width + bias] + (input_bias[bias] + hidden_bias[bias]);
                    }
                    if (step > 0) before = cells[at - (u64)batch * width];
                }
                if (step > 0) {
                    const float* rows[4];
                    for (int b = 0; b < 4; b++) rows[b] = hidden + (now - batch + least(first + b, batch - 1)) * width;
                    weights.products(rows, scratch);
                    warp_sums(scratch, sums);
                }
                if (mine) {
                    for (int part = 0; part < 4; part++) {
                        if (step > 0) gate[part] += sums[thread / ROWS * 16 + 4 * part + thread % ROWS];
                        gate[part] = part == 2 ? tanhf(gate[part]) : sigmoid(gate[part]);
                        gates[(now + row) * 4 * width + part * width + unit] = gate[part];
                    }
                    float cell = gate[1] * before + gate[0] * gate[2];
                    cells[at] = cell;
                    hidden[at] = gate[3] * tanhf(cell);
                }
            }
        }
        if (step + 1 < steps) GRID_BARRIER(arrived, step + 1);
    }
}

// `transposed` (width, 4 width) are the hidden weights; `d_cell` (batch, width) goes from step to step.
KERNEL(lstm_layer_backward, (const float* dy, const float* transposed, const float* gates, const float* cells,
                             float* d_cell, float* d_gates, u32* arrived, int steps, int batch, int width)) {
    SHARED(float, scratch, 16 * (THREADS + 1));
    SHARED(float, sums, 128);
    int thread = threadIdx.x;
    bool same_units = gridDim.x * UNITS >= (u32)width;
    LayerWeights weights;
    // Four warps for four units.
    auto place = [&](int base) {
        for (int u = 0; u < 4; u++)
            weights.rows[u] = transposed + (u64)least(base + thread / 128 * 4 + u, width - 1) * 4 * width;
        weights.depth = 4 * width;
        weights.lane = thread % 128;
        weights.lanes = 128;
    };
    place(blockIdx.x * UNITS);
    weights.keep(same_units);
    for (int step = steps - 1; step >= 0; step--) {
        u64 now = (u64)step * batch;
        bool last = step + 1 == steps;
        for (int base = blockIdx.x * UNITS; base < width; base += gridDim.x * UNITS) {
            if (!same_units) place(base);
            for (int first = 0; first < batch; first += ROWS) {
                int unit = base + thread / ROWS, row = first + thread % ROWS;
                bool mine = thread < UNITS * ROWS && unit < width && row < batch;
                u64 at = (now + row) * width + unit;
                float* cell_gradient = d_cell + (u64)row * width + unit;
                // Asked for before the sums are waited for.
                float d_output = 0, input = 0, forget = 0, candidate = 0, output = 0, cell = 0, before = 0, after = 0;
                if (mine) {
                    const float* gate = gates + (now + row) * 4 * width + unit;
                    d_output = dy[at];
                    input = gate[0];
                    forget = gate[width];
                    candidate = gate[2 * width];
                    output = gate[3 * width];
                    cell = cells[at];
                    if (step > 0) before = cells[at - (u64)batch * width];
                    if (!last) after = *cell_gradient;
                }
                if (!last) {
                    const float* rows[4];
                    for (int b = 0; b < 4; b++)
                        rows[b] = d_gates + (now + batch + least(first + b, batch - 1)) * 4 * width;
                    weights.products(rows, scratch);
                    warp_sums(scratch, sums);
                }
                if (mine) {
                    // What the step after says about this step's output.
                    if (!last) {
                        const float* parts = sums + thread / 16 * 64 + thread % 16;
                        d_output += ((parts[0] + parts[16]) + parts[32]) + parts[48];
                    }
                    float* d_gate = d_gates + (now + row) * 4 * width + unit;
                    float bent = tanhf(cell);
                    float d = after + d_output * output * (1.0f - bent * bent);
                    d_gate[0] = d * candidate * input * (1.0f - input);
                    d_gate[width] = d * before * forget * (1.0f - forget);
                    d_gate[2 * width] = d * input * (1.0f - candidate * candidate);
                    d_gate[3 * width] = d_output * bent * output * (1.0f - output);
                    *cell_gradient = d * forget;
                }
            }
        }
        if (step > 0) GRID_BARRIER(arrived, steps - step);
    }
}

// Rows of `now` where `take` is not 0, of `old` elsewhere.
KERNEL(replace_rows, (const float* old, const float* now, const u32* take, float* out, int n, int width)) {
    int i = element();
    if (i < n) out[i] = take[i / width] ? now[i] : old[i];
}
