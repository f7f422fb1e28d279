// Runs kernels on the host, for tests: what prelude.cuh needs in place of CUDA.
//
// The threads of a block are fibers of one thread of the system. They run one after another, each until its next barrier,
// in rising or in falling order: a kernel that leaves out a barrier gives other results in the one than in the other.
// Shared memory holds no number before it is written. A barrier that only some threads of a block come to is an error.
//
// The blocks of a kernel with barriers of the grid exist all at once, and run one after another from one such barrier to
// the next.

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
    unsigned cooperative;
};

enum { MOST_THREADS = 1024, MOST_BLOCKS = 6, STACK = 64 * 1024, SHARED_BYTES = 48 * 1024, MOST_SITES = 256 };

struct Fiber {
    jmp_buf at;
    ucontext_t start;
    bool made;
    bool ended;
    int barrier;
    bool of_grid;
};

struct Machine {
    Fiber fibers[MOST_THREADS];
    char shared[SHARED_BYTES];
    size_t shared_used;
    void* sites[MOST_SITES];
    jmp_buf scheduler;
    ucontext_t scheduler_start;
    char* stacks;
    unsigned current;
    void (*kernel)(void**);
    void** arguments;
};

// What runs a block; and the ones for blocks that exist at once.
static thread_local Machine* machine;
static thread_local Machine* machines[MOST_BLOCKS];
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

static void barrier(int line, bool of_grid) {
    Fiber& self = machine->fibers[machine->current];
    self.barrier = line;
    self.of_grid = of_grid;
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
    if (site >= MOST_SITES) abort();
    if (!machine->sites[site]) {
        bytes = (bytes + 15) / 16 * 16;
        if (machine->shared_used + bytes > SHARED_BYTES) abort();
        machine->sites[site] = machine->shared + machine->shared_used;
        machine->shared_used += bytes;
    }
    return machine->sites[site];
}

static void begin_block(const Launch* launch) {
    memset(machine->shared, 0xff, SHARED_BYTES);
    memset(machine->sites, 0, sizeof machine->sites);
    machine->shared_used = 0;
    for (unsigned i = 0; i < launch->threads; i++) machine->fibers[i].ended = false;
}

// Runs a block to its end (`ended` becomes true) or to its next barrier of the grid.
static const char* run_block(const Launch* launch, bool* ended) {
    unsigned count = launch->threads;
    for (;;) {
        unsigned at_end = 0;
        int line = -1;
        bool of_grid = false;
        for (unsigned i = 0; i < count; i++) {
            unsigned number = launch->falling ? count - 1 - i : i;
            resume(number);
            Fiber& fiber = machine->fibers[number];
            if (fiber.ended) {
                at_end++;
            } else if (line >= 0 && line != fiber.barrier) {
                return "threads of a block wait at different barriers";
            } else {
                line = fiber.barrier;
                of_grid = fiber.of_grid;
            }
        }
        *ended = at_end == count;
        if (*ended) return nullptr;
        if (at_end) return "some threads of a block end while others wait at a barrier";
        if (of_grid) return launch->cooperative ? nullptr : "a barrier of the grid in a kernel without such barriers";
    }
}

// The machine of this number becomes that of the system's thread.
static bool use_machine(unsigned number, void** arguments, void (*kernel)(void**)) {
    if (!machines[number]) {
        Machine* made = (Machine*)calloc(1, sizeof(Machine));
        size_t bytes = (size_t)MOST_THREADS * STACK;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        made->stacks = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (made->stacks == (char*)MAP_FAILED) return false;
        machines[number] = made;
    }
    machine = machines[number];
    machine->kernel = kernel;
    machine->arguments = arguments;
    return true;
}

// Fibers that have not ended must not go on with this kernel when the next one begins.
static const char* failed(const char* error) {
    for (Machine* used : machines)
        if (used)
            for (Fiber& fiber : used->fibers) fiber.made = false;
    return error;
}

static const char* run(const Launch* launch, void** arguments, void (*kernel)(void**)) {
    if (launch->threads > MOST_THREADS) return "a block has too many threads";
    block_size = {launch->threads, 1, 1};
    grid_size = {launch->blocks[0], launch->blocks[1], 1};
    unsigned long long count = (unsigned long long)launch->blocks[0] * launch->blocks[1];
    if (launch->cooperative && count > MOST_BLOCKS) return "too many blocks that exist at once";
    unsigned long long all_ended = 0;
    for (int phase = 0; all_ended < count; phase++) {
        all_ended = 0;
        for (unsigned long long i = 0; i < count; i++) {
            unsigned long long number = launch->falling ? count - 1 - i : i;
            block = {(unsigned)(number % launch->blocks[0]), (unsigned)(number / launch->blocks[0]), 0};
            if (!use_machine(launch->cooperative ? number : 0, arguments, kernel)) return failed("no memory for a block");
            if (phase == 0) begin_block(launch);
            bool ended = false;
            const char* error = run_block(launch, &ended);
            if (error) return failed(error);
            all_ended += ended;
        }
        if (all_ended && all_ended < count) return failed("some blocks end while others wait at a barrier of the grid");
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
#define DEVICE_MEMBER inline
#define SHARED(type, name, count) type* name = (type*)emulator::shared(__COUNTER__, sizeof(type) * (count))
#define BARRIER() emulator::barrier(__LINE__, false)
#define UNROLL(count)
#define GRID_BARRIER(arrived, number) emulator::barrier(__LINE__, true)
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

DEVICE unsigned long long bits_of(double value) {
    unsigned long long bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

DEVICE double double_of(unsigned long long bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
