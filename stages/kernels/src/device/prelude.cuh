// What every kernel file may use. It stands before each of them, for NVRTC and for the emulator alike.
//
// A kernel is written as KERNEL(name, (parameters)) { body }. Shared memory is SHARED(type, name, count), a barrier of
// the block's threads BARRIER(). Pointers are to float, double, u8, u32 or bf16, scalars are int, u64, float or double;
// `type* const*` is a table of pointers to tensors, `const u64*` a table of numbers: the Rust side reads the parameters
// from this text and checks what it passes against them.
//
// GRID_BARRIER(arrived, number) in a kernel's own body is a barrier of all threads of all blocks: the first of a launch
// has number 1, the next one 2; `arrived` is 0 at the launch. All blocks of such a kernel run at once: its grid of one
// dimension is cut to what the device runs at once, so a kernel goes by gridDim.
//
// No floating-point atomics, and every sum is taken in an order that depends on sizes alone.

typedef unsigned char u8;
typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
// What a kernel file redefines for the kernels behind it.
#define BOUNDS
#define KERNEL(name, parameters) extern "C" __global__ void BOUNDS name parameters
#define DEVICE __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define SHARED(type, name, count) __shared__ type name[count]
#define BARRIER() __syncthreads()
#define GRID_BARRIER(arrived, number) grid_barrier(arrived, (u32)(number))
#define PRAGMA(text) _Pragma(#text)
#define UNROLL(count) PRAGMA(unroll count)
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u64 bits_of(double value) { return (u64)__double_as_longlong(value); }
DEVICE double double_of(u64 bits) { return __longlong_as_double((long long)bits); }
#endif

// Threads of every block.
#define THREADS 256

#ifdef __CUDACC__
// What a block wrote before is seen by all blocks afterwards. Each block's first thread adds 1 with a release, which is also for
// what the others wrote before the barrier of their block, and waits with an acquire for the sum of all blocks: what any of its
// threads then reads is read anew. By PTX's memory model that is enough; a kernel must not read what other blocks write in the same
// launch by `__restrict__` or `__ldg`.
DEVICE void grid_barrier(u32* arrived, u32 number) {
    BARRIER();
    if (threadIdx.x == 0) {
        u32 there;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(arrived) : "memory");
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(arrived) : "memory");
        } while (there < number * gridDim.x);
    }
    BARRIER();
}
#endif

// Number of this thread among those of all blocks of a grid of one dimension.
DEVICE u64 element() { return (u64)blockIdx.x * THREADS + threadIdx.x; }

// One launch over many tensors. The tensors are cut into chunks of one size, a block each. An entry of `plan` has `words`
// numbers: the first block of a tensor, its elements, and what the kernel needs beside. This is the tensor of this block,
// and its elements from `first` to `end`.
struct Part {
    int tensor;
    const u64* entry;
    u64 first, end;
};

DEVICE Part part_of(const u64* plan, int words, int count, int chunk) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (plan[(u64)middle * words] <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    const u64* entry = plan + (u64)low * words;
    u64 first = (blockIdx.x - entry[0]) * chunk, end = first + chunk;
    Part part = {low, entry, first, end < entry[1] ? end : entry[1]};
    return part;
}

DEVICE float infinity() { return float_of(0x7f800000u); }

DEVICE float not_a_number() { return float_of(0x7fc00000u); }

DEVICE bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }

DEVICE float wide(bf16 value) { return float_of((u32)value << 16); }
DEVICE float wide(float value) { return value; }

// A product that is rounded before anything is added to it, where results have the bits of the CPU. Of other products and sums the
// compiler makes one operation.
DEVICE float times(float a, float b) {
#ifdef __CUDACC__
    return __fmul_rn(a, b);
#else
    volatile float product = a * b;
    return product;
#endif
}

// The nearest number in bf16, of two the even one. What is not a number stays so, with bits that a device chooses.
DEVICE bf16 rounded(float value) {
#ifdef __CUDACC__
    bf16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
#else
    u32 bits = bits_of(value);
    if (value != value) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

// Into a place of either type.
DEVICE void narrow(float& place, float value) { place = value; }
DEVICE void narrow(bf16& place, float value) { place = rounded(value); }

// Two of them, the first in the lower bits.
DEVICE u32 rounded_pair(float low, float high) {
#ifdef __CUDACC__
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return (u32)rounded(low) | (u32)rounded(high) << 16;
#endif
}

// A result that is a factor of a product with a weight is written in the weight's type: to one of two places, of which the
// other is null.
DEVICE void put(float* out, bf16* out_bf16, u64 at, float value) {
    if (out_bf16)
        out_bf16[at] = rounded(value);
    else
        out[at] = value;
}

// Four neighbours, of which the first lies at a multiple of 16 bytes, in one access.
DEVICE void read_four(const float* from, float* into) {
#ifdef __CUDACC__
    float4 four = *(const float4*)from;
    into[0] = four.x;
    into[1] = four.y;
    into[2] = four.z;
    into[3] = four.w;
#else
    for (int i = 0; i < 4; i++) into[i] = from[i];
#endif
}
// The same in bf16, of which the first lies at a multiple of 8 bytes.
DEVICE void read_four(const bf16* from, float* into) {
#ifdef __CUDACC__
    uint2 four = *(const uint2*)from;
    into[0] = float_of(four.x << 16);
    into[1] = float_of(four.x & 0xffff0000u);
    into[2] = float_of(four.y << 16);
    into[3] = float_of(four.y & 0xffff0000u);
#else
    for (int i = 0; i < 4; i++) into[i] = wide(from[i]);
#endif
}
DEVICE void write_four(float* to, const float* values) {
#ifdef __CUDACC__
    *(float4*)to = make_float4(values[0], values[1], values[2], values[3]);
#else
    for (int i = 0; i < 4; i++) to[i] = values[i];
#endif
}
DEVICE void write_four(bf16* to, const float* values) {
#ifdef __CUDACC__
    *(uint2*)to = make_uint2(rounded_pair(values[0], values[1]), rounded_pair(values[2], values[3]));
#else
    for (int i = 0; i < 4; i++) to[i] = rounded(values[i]);
#endif
}

// A tensor out of a table of pointers, which the compiler does not know to lie in the device's memory.
template <class T>
DEVICE T* tensor_at(T* tensor) {
#ifdef __CUDACC__
    __builtin_assume(__isGlobal(tensor));
#endif
    return tensor;
}

// Whether every multiple of four numbers of a tensor may be read and written so.
template <class T>
DEVICE bool by_fours(const T* tensor) {
    return (u64)tensor % (4 * sizeof(T)) == 0;
}

// Writes the elements that `values(i, four)` finds for four from `i` on, which a thread has.
template <class Values>
DEVICE void write_elements(float* out, bf16* out_bf16, u64 n, Values values) {
    u64 i = 4 * element();
    if (i >= n) return;
    float four[4];
    values(i, four);
    if (i + 4 <= n && by_fours(out) && by_fours(out_bf16)) {
        if (out_bf16)
            write_four(out_bf16 + i, four);
        else
            write_four(out + i, four);
        return;
    }
    for (int at = 0; at < 4 && i + at < n; at++) put(out, out_bf16, i + at, four[at]);
}

// Four elements from `i` on, or as many as there are.
template <class T>
DEVICE void read_elements(const T* x, u64 i, u64 n, float* four) {
    if (i + 4 <= n && by_fours(x))
        read_four(x + i, four);
    else
        for (int at = 0; at < 4; at++) four[at] = i + at < n ? wide(x[i + at]) : 0.0f;
}
// The same of two tensors, which are asked for together.
template <class T>
DEVICE void read_elements(const T* x, const T* y, u64 i, u64 n, float* of_x, float* of_y) {
    if (i + 4 <= n && by_fours(x) && by_fours(y)) {
        read_four(x + i, of_x);
        read_four(y + i, of_y);
        return;
    }
    for (int at = 0; at < 4; at++) {
        of_x[at] = i + at < n ? wide(x[i + at]) : 0.0f;
        of_y[at] = i + at < n ? wide(y[i + at]) : 0.0f;
    }
}

// 1 / x, on a device within a unit in the last place (of a subnormal result 0), where a division takes ten times the
// instructions.
DEVICE float reciprocal(float x) {
#ifdef __CUDACC__
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return 1.0f / x;
#endif
}

DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

// Derivative of x * sigmoid(x).
DEVICE float silu_slope(float x) {
    float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// The output function of SplitMix64, as in the crate `flow-random`.
DEVICE u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Whether a dropout mask keeps an element: the same ones as on the CPU. A threshold of 0 is no mask.
DEVICE bool keeps(u64 key, u64 threshold, u64 index) {
    return threshold == 0 || (mix(key + index * 0x9E3779B97F4A7C15ull) >> 32) >= threshold;
}

// Sum over the threads of a block, given to all of them. `scratch` holds THREADS + 16 values. It may be called again at
// once with the same ones: the last of them are written after a barrier that all threads come to when they have read.
template <class T>
DEVICE T block_sum(T value, T* scratch) {
    int thread = threadIdx.x;
    scratch[thread] = value;
    BARRIER();
    if (thread < 16) {
        T sum = scratch[thread];
        for (int other = thread + 16; other < THREADS; other += 16) sum += scratch[other];
        scratch[THREADS + thread] = sum;
    }
    BARRIER();
    T total = scratch[THREADS];
    for (int part = 1; part < 16; part++) total += scratch[THREADS + part];
    return total;
}

// Largest value of the threads of a block, given to all of them. What is not a number is passed over.
DEVICE float block_largest(float value, float* scratch) {
    int thread = threadIdx.x;
    scratch[thread] = value;
    BARRIER();
    if (thread < 16) {
        float largest = scratch[thread];
        for (int other = thread + 16; other < THREADS; other += 16)
            largest = scratch[other] > largest ? scratch[other] : largest;
        scratch[THREADS + thread] = largest;
    }
    BARRIER();
    float all = scratch[THREADS];
    for (int part = 1; part < 16; part++) all = scratch[THREADS + part] > all ? scratch[THREADS + part] : all;
    return all;
}

// Sums over rows, first half: block (x, y) adds `value(row, column)` for 32 columns over the rows of chunk y and writes
// row y of `partial` (chunks, width). `scratch` holds THREADS values. The kernel `total` (sums.cu) adds up the chunks.
template <class T, class Value>
DEVICE void partial_sums(int rows, int width, int chunk, T* partial, T* scratch, Value value) {
    int column = blockIdx.x * 32 + threadIdx.x % 32;
    int lane = threadIdx.x / 32;
    int first = blockIdx.y * chunk;
    int end = first + chunk < rows ? first + chunk : rows;
    T sum = 0;
    if (column < width)
        for (int row = first + lane; row < end; row += THREADS / 32) sum += value(row, column);
    scratch[threadIdx.x] = sum;
    BARRIER();
    if (lane == 0 && column < width) {
        T total = scratch[threadIdx.x];
        for (int other = 1; other < THREADS / 32; other++) total += scratch[other * 32 + threadIdx.x];
        partial[(u64)blockIdx.y * width + column] = total;
    }
}
