// One step of an LSTM, gate order i, f, g, o.

// Activates `gates` (batch, 4 width) in place, which hold the product of the input, and advances the cell.
KERNEL(lstm_step, (float* gates, const float* product, const float* input_bias, const float* hidden_bias,
                   const float* before, float* cells, float* hidden, int n, int width)) {
    int i = element();
    if (i >= n) return;
    int j = i % width;
    u64 row = (u64)(i / width) * 4 * width;
    float gate[4];
    for (int part = 0; part < 4; part++) {
        int at = part * width + j;
        gate[part] = gates[row + at] + (input_bias[at] + hidden_bias[at]);
        if (product) gate[part] += product[row + at];
        gate[part] = part == 2 ? tanhf(gate[part]) : sigmoid(gate[part]);
        gates[row + at] = gate[part];
    }
    float cell = gate[1] * (before ? before[i] : 0.0f) + gate[0] * gate[2];
    cells[i] = cell;
    hidden[i] = gate[3] * tanhf(cell);
}

// `later` is what the step after says about this step's output; `d_cell` goes from step to step.
KERNEL(lstm_step_backward, (const float* dy, const float* later, const float* gates, const float* cells,
                            const float* before, float* d_cell, float* d_gates, int n, int width)) {
    int i = element();
    if (i >= n) return;
    u64 row = (u64)(i / width) * 4 * width + i % width;
    float input = gates[row], forget = gates[row + width];
    float candidate = gates[row + 2 * width], output = gates[row + 3 * width];
    float d_output = later ? dy[i] + later[i] : dy[i];
    float bent = tanhf(cells[i]);
    float d = d_cell[i] + d_output * output * (1.0f - bent * bent);
    d_gates[row] = d * candidate * input * (1.0f - input);
    d_gates[row + width] = d * (before ? before[i] : 0.0f) * forget * (1.0f - forget);
    d_gates[row + 2 * width] = d * input * (1.0f - candidate * candidate);
    d_gates[row + 3 * width] = d_output * bent * output * (1.0f - output);
    d_cell[i] = d * forget;
}

// Rows of `now` where `take` is not 0, of `old` elsewhere.
KERNEL(replace_rows, (const float* old, const float* now, const u32* take, float* out, int n, int width)) {
    int i = element();
    if (i < n) out[i] = take[i / width] ? now[i] : old[i];
}
