// Kernels with the mistakes that the emulator is to find, and one without; for its own test alone. x and out have 600
// elements.

KERNEL(sound, (const float* x, float* out)) {
    SHARED(float, scratch, THREADS + 16);
    u64 i = element();
    float sum = block_sum(x[threadIdx.x], scratch);
    if (i < 600) out[i] = sum;
}

KERNEL(no_barrier, (const float* x, float* out)) {
    SHARED(float, scratch, THREADS);
    u64 i = element();
    scratch[threadIdx.x] = x[threadIdx.x] * threadIdx.x;
    if (i < 600) out[i] = scratch[THREADS - 1 - threadIdx.x];
}

KERNEL(shared_place, (const float* x, float* out)) {
    if (element() < 600) out[0] = x[0] + (float)element();
}

KERNEL(early_end, (const float* x, float* out)) {
    if (threadIdx.x == 7) return;
    BARRIER();
    if (element() < 600) out[element()] = x[0];
}

KERNEL(two_barriers, (const float* x, float* out)) {
    if (threadIdx.x % 2)
        BARRIER();
    else
        BARRIER();
    if (element() < 600) out[element()] = x[0];
}

KERNEL(unwritten_shared, (const float* x, float* out)) {
    SHARED(float, scratch, THREADS);
    if (element() < 600) out[element()] = x[0] + scratch[threadIdx.x];
}

// What the next block has written after 1, the first block reads after the barrier.
KERNEL(grid_barrier_sound, (const float* x, float* out)) {
    u64 i = element();
    if (i < 600) out[i] = x[i];
    GRID_BARRIER(nullptr, 1);
    if (i < THREADS) out[i] = out[i] + out[i + THREADS];
}

KERNEL(no_grid_barrier, (const float* x, float* out)) {
    u64 i = element();
    if (i < 600) out[i] = x[i] * 3.0f;
    BARRIER();
    if (i < THREADS) out[i] = out[i] + out[i + THREADS];
}

KERNEL(early_block, (const float* x, float* out)) {
    if (blockIdx.x == 1) return;
    GRID_BARRIER(nullptr, 1);
    if (element() < 600) out[element()] = x[0];
}
