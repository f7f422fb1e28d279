// Greedy search of a transducer, for all utterances of a batch at once. `record` (u32) has two numbers for each utterance,
// its next frame and the tokens emitted on it, and then for each step and utterance what was emitted: token (the largest
// number for none), frame, duration and the bits of the token's logit.
//
// A step looks at `reach` frames of each utterance, as blanks leave the prediction network's output as it is: row
// `b * reach + k` is frame k from the utterance's next one on.

#define NOTHING 0xffffffffu

// The hidden layer of the joint network. Frames past the end are those of the last one, and are not looked at.
KERNEL(greedy_hidden, (const float* f, const float* g, const u32* record, float* out, u64 n, int width, int padded,
                       int reach)) {
    u64 i = element();
    if (i >= n) return;
    u64 row = i / width, j = i % width, b = row / reach;
    u64 frame = (u64)record[2 * b] + row % reach;
    if (frame >= (u64)padded) frame = padded - 1;
    float sum = f[(b * padded + frame) * width + j] + g[b * width + j];
    // Written so that NaN stays NaN.
    out[i] = sum <= 0.0f ? 0.0f : sum;
}

// Index of the first largest of some sums of logits and biases, by all threads of the block: what is not a number is
// passed over, but if the first one is not, it is the first one. Its value goes to `value`.
DEVICE int first_largest(const float* logits, const float* bias, int count, float* values, int* places, float* value) {
    int thread = threadIdx.x, at = 0;
    float top = logits[0] + bias[0];
    for (int j = thread; j < count; j += THREADS) {
        float logit = logits[j] + bias[j];
        if (logit > top) {
            top = logit;
            at = j;
        }
    }
    // Those of an earlier call have been read by all.
    BARRIER();
    values[thread] = top;
    places[thread] = at;
    BARRIER();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (thread < half) {
            float other = values[thread + half];
            int place = places[thread + half];
            if (other > values[thread] || (other == values[thread] && place < places[thread])) {
                values[thread] = other;
                places[thread] = place;
            }
        }
        BARRIER();
    }
    *value = values[0];
    return places[0];
}

// One block for each row of logits, without bias: `best` gets token, index of the duration, and the bits of the token's
// logit. Rows past an utterance's end get nothing.
KERNEL(greedy_best, (const float* logits, const float* bias, const u32* record, const u32* lengths, u32* best,
                     int tokens, int durations, int reach)) {
    SHARED(float, values, THREADS);
    SHARED(int, places, THREADS);
    u64 row = blockIdx.x, b = row / reach;
    if ((u64)record[2 * b] + row % reach >= lengths[b]) return;
    logits += row * (tokens + durations);
    float logit, of_duration;
    int token = first_largest(logits, bias, tokens, values, places, &logit);
    int duration = 0;
    if (durations > 0)
        duration = first_largest(logits + tokens, bias + tokens, durations, values, places, &of_duration);
    if (threadIdx.x == 0) {
        best[3 * row] = token;
        best[3 * row + 1] = duration;
        best[3 * row + 2] = bits_of(logit);
    }
}

// One thread for each utterance: passes over blanks, and emits the first token. `tokens` gets what enters the prediction
// network next (blank where there is nothing), `moves` whether anything does, `rows` the row of logits of the token.
KERNEL(greedy_advance, (const u32* best, const u32* lengths, const u32* durations, u32* record, u32* tokens, u32* moves,
                        u32* rows, int batch, int count, int reach, int blank, int most, int step)) {
    u64 b = element();
    if (b >= (u64)batch) return;
    u32 first = record[2 * b], emitted = record[2 * b + 1], length = lengths[b];
    u32 frame = first, end = first + reach < length ? first + reach : length;
    u32* event = record + 2 * (u64)batch + ((u64)step * batch + b) * 4;
    u32 token = NOTHING;
    while (frame < end) {
        u64 row = b * reach + (frame - first);
        u32 index = best[3 * row + 1];
        u32 duration = index < (u32)count ? durations[index] : 0;
        if (best[3 * row] == (u32)blank) {
            frame += duration > 0 ? duration : 1;
            emitted = 0;
            continue;
        }
        token = best[3 * row];
        event[1] = frame;
        event[2] = duration;
        event[3] = best[3 * row + 2];
        rows[b] = (u32)row;
        emitted++;
        if (duration > 0 || emitted >= (u32)most) {
            frame += duration > 0 ? duration : 1;
            emitted = 0;
        }
        break;
    }
    event[0] = token;
    tokens[b] = token == NOTHING ? (u32)blank : token;
    moves[b] = token != NOTHING;
    record[2 * b] = frame;
    record[2 * b + 1] = emitted;
}

// The logits behind the tokens of a step: `kept` (steps, utterances, tokens). One block for each utterance.
KERNEL(greedy_keep, (const float* logits, const float* bias, const u32* moves, const u32* rows, float* kept, int batch,
                     int tokens, int durations, int step)) {
    u64 b = blockIdx.x;
    if (!moves[b]) return;
    const float* from = logits + (u64)rows[b] * (tokens + durations);
    float* to = kept + ((u64)step * batch + b) * tokens;
    for (int j = threadIdx.x; j < tokens; j += THREADS) to[j] = from[j] + bias[j];
}

// Rows of a table.
KERNEL(greedy_embed, (const float* table, const u32* tokens, float* out, u64 n, int width)) {
    u64 i = element();
    if (i < n) out[i] = table[(u64)tokens[i / width] * width + i % width];
}
