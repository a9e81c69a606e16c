// The parts of CUDA that the sources of `kernels/cuda/block_kernel.py` use, so that a C++ compiler builds them
// for the host.
//
// Every thread of a block is a coroutine with a stack of its own. A warp runs until all of its threads wait at a
// barrier of the block, and then the next warp runs; blocks run one after another. A shuffle exchanges registers
// through an array of the warp. Warps and threads take turns in ascending or in descending order: a source in
// which a barrier is missing computes different numbers in the two orders. A block in which all threads wait for
// one that has returned, or that waits elsewhere, ends with an error.

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
#define __syncthreads() emulation::wait(emulation::of_block, emulation::threads)
#define __shfl_xor_sync(mask, value, step) emulation::shuffle(mask, value, step)
#define DISTGRAPH_HAS_FLOAT16

// Declared here because <math.h> of C++ takes longer to read than a kernel takes to compile.
static inline double exp(double x) { return __builtin_exp(x); }
static inline float exp(float x) { return __builtin_expf(x); }
static inline double log(double x) { return __builtin_log(x); }
static inline float log(float x) { return __builtin_logf(x); }
static inline double sqrt(double x) { return __builtin_sqrt(x); }
static inline float sqrt(float x) { return __builtin_sqrtf(x); }

struct Index { unsigned int x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int MOST_THREADS = 1024, WARP = 32;
constexpr size_t STACK = 64 * 1024;

struct Barrier { int arrived, generation; };
struct Warp {
    Barrier barrier;
    double values[2][WARP];  // two sets: a thread may be one shuffle ahead of the others
    int shuffles[WARP];
};
struct Thread {
    ucontext_t start;
    jmp_buf state;
    Barrier* barrier;  // at which it waits, for the end of this generation
    int generation;
    bool started, returned;
};

static Thread block[MOST_THREADS];
static Warp warps[MOST_THREADS / WARP];
static Barrier of_block;
static jmp_buf scheduler;
static int threads, current;
static long long progress;  // barriers reached and threads returned
static void** arguments;

static __attribute__((noinline)) void pause() {
    if (!_setjmp(block[current].state)) _longjmp(scheduler, 1);
}

static __attribute__((noinline)) void resume() {
    if (_setjmp(scheduler)) return;
    if (block[current].started) _longjmp(block[current].state, 1);
    block[current].started = true;
    setcontext(&block[current].start);
}

static void wait(Barrier& barrier, int expected) {
    ++progress;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    block[current].barrier = &barrier;
    block[current].generation = barrier.generation;
    pause();
    block[current].barrier = nullptr;
}

template <class T> T shuffle(unsigned int mask, T value, int step) {
    if (mask != 0xffffffffu) abort();
    Warp& warp = warps[current / WARP];
    const int lane = current % WARP, set = warp.shuffles[lane]++ % 2;
    memcpy(&warp.values[set][lane], &value, sizeof value);
    wait(warp.barrier, WARP);
    memcpy(&value, &warp.values[set][lane ^ step], sizeof value);
    return value;
}

// A thread of one block after another.
template <void (*KERNEL)()> void thread() {
    for (;;) {
        KERNEL();
        block[current].returned = true;
        ++progress;
        pause();
    }
}

// Runs a warp until each of its threads waits for other warps or has returned; how many have returned now.
static int run_warp(int warp, bool descending) {
    int returned = 0;
    for (long long before = -1; before != progress;) {
        before = progress;
        for (int lane = 0; lane < WARP; ++lane) {
            current = warp * WARP + (descending ? WARP - 1 - lane : lane);
            const Thread& thread = block[current];
            const bool waits = thread.barrier && thread.barrier->generation == thread.generation;
            if (thread.returned || waits) continue;
            threadIdx.x = current;
            resume();
            returned += thread.returned;
        }
    }
    return returned;
}

// Runs one block; whether all of its threads have returned.
static bool run_block(bool descending) {
    of_block = Barrier();
    memset(warps, 0, sizeof warps);
    for (int t = 0; t < threads; ++t) block[t].returned = false;
    const int count = threads / WARP;
    for (int running = threads; running > 0;) {
        const long long before = progress;
        for (int i = 0; i < count; ++i) running -= run_warp(descending ? count - 1 - i : i, descending);
        if (progress == before) return false;
    }
    return true;
}

// Calls a kernel with the values at the addresses in `arguments`.
template <int... I> struct Numbers {};
template <int N, int... I> struct UpTo : UpTo<N - 1, N - 1, I...> {};
template <int... I> struct UpTo<0, I...> { typedef Numbers<I...> type; };

template <class... P, int... I> void call(void (*kernel)(P...), Numbers<I...>) {
    kernel(*static_cast<P*>(arguments[I])...);
}

template <class... P> void call(void (*kernel)(P...)) { call(kernel, typename UpTo<sizeof...(P)>::type()); }

// Runs a grid; 0, or 1 where the threads of a block wait for one another without end.
template <void (*KERNEL)()> int launch(int blocks, int size, int descending, void** values) {
    if (size > MOST_THREADS || size % WARP) abort();
    char* stacks = static_cast<char*>(malloc(size * STACK));
    threads = size;
    arguments = values;
    blockDim.x = size;
    gridDim.x = blocks;
    for (int t = 0; t < threads; ++t) {
        block[t].started = false;
        block[t].barrier = nullptr;
        getcontext(&block[t].start);
        block[t].start.uc_stack.ss_sp = stacks + t * STACK;
        block[t].start.uc_stack.ss_size = STACK;
        makecontext(&block[t].start, thread<KERNEL>, 0);
    }
    bool ended = true;
    for (blockIdx.x = 0; ended && blockIdx.x < (unsigned int)blocks; ++blockIdx.x)
        ended = run_block(descending != 0);
    free(stacks);
    return ended ? 0 : 1;
}

}  // namespace emulation

static inline unsigned int __float_as_uint(float x) {
    unsigned int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float __uint_as_float(unsigned int bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

struct float16;
static float float_of(float16 x);
static float16 float16_of(float x);

// IEEE 754 binary16 by its bits.
static float float_of_bits(unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float x = exponent == 31 ? (fraction ? __builtin_nanf("") : __builtin_inff())
              : exponent     ? __builtin_ldexpf(1024 + fraction, exponent - 25)
                             : __builtin_ldexpf(fraction, -24);
    return bits >> 15 ? -x : x;
}

static unsigned short bits_of_float(float x) {
    const unsigned int bits = __float_as_uint(x);
    const unsigned short sign = bits >> 16 & 0x8000;
    const float size = __builtin_fabsf(x);
    if (size != size) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 6.103515625e-05f) return sign | (unsigned short)__builtin_rintf(__builtin_ldexpf(size, 24));
    const unsigned int rounded = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1u);
    return sign | (unsigned short)((rounded - (112u << 23)) >> 13);
}
