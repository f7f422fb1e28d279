// Runs kernels on the host, for tests: what prelude.cuh needs in place of CUDA.
//
// The threads of a block are fibers of one thread of the system. They run one after another, each until its next barrier,
// in rising or in falling order: a kernel that leaves out a barrier gives other results in the one than in the other.
// Shared memory holds no number before it is written. A barrier that only some threads of a block come to is an error.

#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <utility>

namespace emulator {

struct Place {
    unsigned x, y, z;
};

// As in emulator.rs.
struct Launch {
    unsigned blocks[2];
    unsigned threads;
    unsigned falling;
};

enum { MOST_THREADS = 1024, STACK = 64 * 1024, SHARED_BYTES = 64 * 1024 };

struct Fiber {
    jmp_buf at;
    ucontext_t start;
    bool made;
    bool ended;
    int barrier;
};

struct Machine {
    Fiber fibers[MOST_THREADS];
    char shared[SHARED_BYTES];
    size_t shared_used;
    void* sites[64];
    jmp_buf scheduler;
    ucontext_t scheduler_start;
    char* stacks;
    unsigned current;
    void (*kernel)(void**);
    void** arguments;
};

static thread_local Machine* machine;
static thread_local Place thread, block, block_size, grid_size;

// A fiber's whole life: it runs a kernel each time it is begun.
static void live() {
    for (;;) {
        machine->kernel(machine->arguments);
        Fiber& self = machine->fibers[machine->current];
        self.ended = true;
        if (!_setjmp(self.at)) _longjmp(machine->scheduler, 1);
    }
}

static void barrier(int line) {
    Fiber& self = machine->fibers[machine->current];
    self.barrier = line;
    if (!_setjmp(self.at)) _longjmp(machine->scheduler, 1);
}

static void resume(unsigned number) {
    Fiber& fiber = machine->fibers[number];
    machine->current = number;
    thread = {number, 0, 0};
    if (_setjmp(machine->scheduler)) return;
    if (fiber.made) _longjmp(fiber.at, 1);
    fiber.made = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = machine->stacks + (size_t)number * STACK;
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, live, 0);
    swapcontext(&machine->scheduler_start, &fiber.start);
}

// Memory that all threads of a block share, one chunk for each place in the program.
static void* shared(int site, size_t bytes) {
    if (!machine->sites[site]) {
        bytes = (bytes + 15) / 16 * 16;
        if (machine->shared_used + bytes > SHARED_BYTES) abort();
        machine->sites[site] = machine->shared + machine->shared_used;
        machine->shared_used += bytes;
    }
    return machine->sites[site];
}

static const char* run_block(const Launch* launch) {
    memset(machine->shared, 0xff, SHARED_BYTES);
    memset(machine->sites, 0, sizeof machine->sites);
    machine->shared_used = 0;
    unsigned count = launch->threads;
    for (unsigned i = 0; i < count; i++) machine->fibers[i].ended = false;
    for (;;) {
        unsigned ended = 0;
        int line = -1;
        for (unsigned i = 0; i < count; i++) {
            unsigned number = launch->falling ? count - 1 - i : i;
            resume(number);
            Fiber& fiber = machine->fibers[number];
            if (fiber.ended) {
                ended++;
            } else if (line >= 0 && line != fiber.barrier) {
                return "threads of a block wait at different barriers";
            } else {
                line = fiber.barrier;
            }
        }
        if (ended == count) return nullptr;
        if (ended) return "some threads of a block end while others wait at a barrier";
    }
}

static const char* run(const Launch* launch, void** arguments, void (*kernel)(void**)) {
    if (launch->threads > MOST_THREADS) return "a block has too many threads";
    if (!machine) {
        machine = (Machine*)calloc(1, sizeof(Machine));
        size_t bytes = (size_t)MOST_THREADS * STACK;
        machine->stacks = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (machine->stacks == (char*)MAP_FAILED) return "no memory for the threads of a block";
    }
    machine->kernel = kernel;
    machine->arguments = arguments;
    block_size = {launch->threads, 1, 1};
    grid_size = {launch->blocks[0], launch->blocks[1], 1};
    unsigned long long count = (unsigned long long)launch->blocks[0] * launch->blocks[1];
    for (unsigned long long i = 0; i < count; i++) {
        unsigned long long number = launch->falling ? count - 1 - i : i;
        block = {(unsigned)(number % launch->blocks[0]), (unsigned)(number / launch->blocks[0]), 0};
        const char* error = run_block(launch);
        if (error) {
            // Fibers that have not ended must not go on with this kernel when the next one begins.
            for (Fiber& fiber : machine->fibers) fiber.made = false;
            return error;
        }
    }
    return nullptr;
}

template <class... P, size_t... I>
static void unpack(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*(P*)arguments[I]...);
}

template <class... P>
static void unpack(void (*kernel)(P...), void** arguments) {
    unpack(kernel, arguments, std::index_sequence_for<P...>());
}

}  // namespace emulator

#define KERNEL(name, parameters)                                                                          \
    static void body_##name parameters;                                                                   \
    extern "C" const char* emulate_##name(const emulator::Launch* launch, void** arguments) {             \
        return emulator::run(launch, arguments, [](void** given) { emulator::unpack(body_##name, given); }); \
    }                                                                                                     \
    static void body_##name parameters
#define DEVICE static inline
#define SHARED(type, name, count) type* name = (type*)emulator::shared(__COUNTER__, sizeof(type) * (count))
#define BARRIER() emulator::barrier(__LINE__)
#define threadIdx emulator::thread
#define blockIdx emulator::block
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

DEVICE unsigned bits_of(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

DEVICE float float_of(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
