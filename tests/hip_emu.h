/* hip_emu.h: runs rocmforge_kernels.hip on the CPU, to test it where there is no GPU.
 *     c++ -std=c++11 -x c++ -DROCMFORGE_HIP_EMU -include tests/hip_emu.h -c rocmforge_kernels.hip
 * The threads of a block are fibers of one OS thread; __syncthreads, shuffles and shared memory are real, and a
 * barrier
 * that not every thread reaches stops the program. Two devices: 0 has waves of 32 lanes, 1 of 64. Memory comes in
 * blocks
 * of its own, so that AddressSanitizer sees an access past one; it starts as NaNs. Streams run LATE: work stays
 * queued
 * until a synchronisation forces it, so that a missing wait reads garbage. Without ROCMFORGE_HIP_EMU this header is
 * only
 * the controls for tests, in C or C++. */
#ifndef HIP_EMU_H
#define HIP_EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* When queued work runs. LATE: only when something waits for it. EAGER: at once. SHUFFLED: every call first runs a
 * few
 * items of random streams. */
enum { HIP_EMU_LATE = 0, HIP_EMU_EAGER = 1, HIP_EMU_SHUFFLED = 2 };

/* What there is: nothing of it may be left when everything is closed. */
typedef struct hip_emu_counts {
    uint32_t allocations, host_allocations, streams, events, graphs, comms; /* comms: rccl_emu.h */
    uint64_t calls;    /* of the API since the start */
    uint64_t launches; /* kernels executed           */
    uint64_t replays;  /* graphs launched            */
    uint64_t bytes;    /* of the allocations         */
} hip_emu_counts;

void hip_emu_order(int order, uint32_t seed);
/* The n-th API call from now fails and does nothing (a release works all the same); 0 = none. forever: so do all later
 * ones, and what is queued is never executed. */
void hip_emu_fail_call(uint64_t n, int forever);
/* The n-th queued item executed from now is not: its device is lost, as after a bad access. 0 = none. */
void hip_emu_fail_work(uint64_t n);
/* Lost devices work again: what a new process would see. */
void hip_emu_recover(void);
/* Bytes of a device's memory; 8 GiB at the start. */
void hip_emu_memory(int device, size_t size_bytes);
/* What hipGetDeviceCount answers: n devices (at most 4: those with an even number have waves of 32), or an error code (100: no device) if it is not 0. */
void hip_emu_devices(int n, int error);
void hip_emu_units(int n); /* multiprocessors of devices that are opened from now on; 5 */
/* 1: kernels are not compiled for the devices; launches fail. */
void hip_emu_no_kernels(int on);
/* A wrong kernel: of what the n-th one executed from now changes in device memory, one bit is flipped (the highest of an
 * exponent, where that is a float). Kernels of less than 128 threads, which write indices, do not count. 0 = none; at the
 * start: what the environment variable HIP_EMU_FLIP says. */
void hip_emu_flip_result(uint64_t n);
/* 1: devices that are opened from now on replay graphs without a check, as NVIDIA's. */
void hip_emu_trusted_graphs(int on);
/* 1: replays of a graph leave out its first kernel, whose results are then those of an earlier run. */
void hip_emu_stale_graphs(int on);
/* The matrix unit of a device: RFK_MATRIX_... of the kernels file, or HIP_EMU_SM90, that of SM80 and wgmma. At the start
 * WMMA of gfx11 and MFMA of gfx90a. */
#define HIP_EMU_SM80 1
#define HIP_EMU_WMMA11 4
#define HIP_EMU_SM90 6
void hip_emu_matrix_unit(int device, int kind);
/* How devices copy from each other: as they should, not at all (peer access is refused), with wrong bytes, or never to
 * an end (until this is OK again). */
enum { HIP_EMU_PEERS_OK = 0, HIP_EMU_PEERS_REFUSED = 1, HIP_EMU_PEERS_WRONG = 2, HIP_EMU_PEERS_HANG = 3 };
void hip_emu_peers(int how);
/* Transfers of RCCL (rccl_emu.h) between devices of one process: slower than kernels' sums, as at the start, or faster
 * than those; with wrong bytes; without end; or there is no RCCL at all. */
enum { HIP_EMU_RCCL_SLOW = 0, HIP_EMU_RCCL_FAST = 1, HIP_EMU_RCCL_WRONG = 2, HIP_EMU_RCCL_HANG = 3, HIP_EMU_RCCL_NONE = 4 };
void hip_emu_rccl(int how);
/* Transfers between devices of this process, since the start. */
uint64_t hip_emu_rccl_transfers(void);
/* Copies from one device to another, since the start. */
uint64_t hip_emu_peer_copies(void);
/* Threads of a block of the fused matvec on a device: 1024, as NVIDIA's have, or 512, as AMD's. At the start 1024 and 512. */
void hip_emu_fused_block(int device, unsigned threads);
/* Matrix units that give each lane another of its results: 1: of bytes, 2: of halves, 3: of both, 4: of wgmma. 0 = right
 * ones; at the start: what the environment variable HIP_EMU_WRONG_UNITS says. */
void hip_emu_wrong_units(int kinds);
/* What hipEventElapsedTime answers from now on; below 0, as at the start: what the host's clock says. */
void hip_emu_elapsed(float ms);
hip_emu_counts hip_emu_get_counts(void);
/* 1 while device memory holds [p, p + n): nothing when AddressSanitizer is off. on: make it inaccessible. */
void hip_emu_guard(void *p, size_t n, int on);

#ifdef __cplusplus
}
#endif

#ifdef ROCMFORGE_HIP_EMU

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define HIP_EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HIP_EMU_ASAN 1
#endif
#endif
/* Of the emulation's own code, what runs for every lane and every product: sanitizers would look at little else. */
#ifdef __GNUC__
#define HIP_EMU_UNCHECKED __attribute__((no_sanitize("address", "undefined", "thread")))
#else
#define HIP_EMU_UNCHECKED
#endif

#ifdef HIP_EMU_ASAN
extern "C" {
void __asan_poison_memory_region(void const volatile *addr, size_t size);
void __asan_unpoison_memory_region(void const volatile *addr, size_t size);
}
#endif

/* ---- what kernels see ---- */

#ifdef __SANITIZE_THREAD__ /* one OS thread runs a kernel: nothing to see there, and most of the work */
#define HIP_EMU_KERNEL __attribute__((no_sanitize("thread")))
#else
#define HIP_EMU_KERNEL
#endif
#define __global__ HIP_EMU_KERNEL
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline HIP_EMU_KERNEL /* forced, a compiler takes twice as long and the kernels no less */

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };

static void hip_emu_die(const char *what) {
    fprintf(stderr, "hip_emu: %s\n", what);
    abort();
}

/* ---- fibers ---- */

/* A stack that can be left and continued: its stack pointer is kept. To sanitizers all fibers of an OS thread are that thread:
 * telling AddressSanitizer of each change of stacks takes longer than the change, and kernels have no exceptions. */

#if defined(__x86_64__)
/* Compiled into its callers, and a jump: processors predict where a call returns to, and would be wrong at each change of
 * stacks. 128: below the stack pointer may be variables of the caller. */
HIP_EMU_UNCHECKED __attribute__((always_inline)) static inline void hip_emu_swap(void **save_sp, void *sp) {
    __asm__ volatile("leaq -128(%%rsp),%%rsp\npushq %%rbp\nleaq 1f(%%rip),%%rax\npushq %%rax\n"
                     "movq %%rsp,(%0)\nmovq %1,%%rsp\npopq %%rax\njmpq *%%rax\n"
                     "1:popq %%rbp\nleaq 128(%%rsp),%%rsp\n"
                     : "+D"(save_sp), "+S"(sp)
                     :
                     : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1",
                       "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
                       "xmm14", "xmm15", "cc", "memory");
}
/* the address that is jumped to, and the stack aligned as after a call */
static void *hip_emu_first_sp(char *top, void (*entry)(void)) {
    void **sp = reinterpret_cast<void **>(top) - 2;
    sp[0] = reinterpret_cast<void *>(entry);
    sp[1] = nullptr;
    return sp;
}
#elif defined(__aarch64__)
extern "C" void hip_emu_swap(void **save_sp, void *sp);
__asm__(".text\n.globl hip_emu_swap\n.type hip_emu_swap,%function\nhip_emu_swap:\n"
        "sub sp,sp,#176\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
        "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\n"
        "stp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
        "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\n"
        "ldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\n"
        "ldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\nadd sp,sp,#176\nret\n"
        ".size hip_emu_swap,.-hip_emu_swap\n");
static void *hip_emu_first_sp(char *top, void (*entry)(void)) {
    char *sp = top - 176;
    memset(sp, 0, 176);
    memcpy(sp + 88, &entry, sizeof entry);
    return sp;
}
#else
#include <ucontext.h>
/* sp is a ucontext_t that nobody frees: there are a few hundred fibers a thread */
static void hip_emu_swap(void **save_sp, void *sp) {
    if (!*save_sp) *save_sp = calloc(1, sizeof(ucontext_t));
    swapcontext(static_cast<ucontext_t *>(*save_sp), static_cast<ucontext_t *>(sp));
}
static const size_t hip_emu_stack_bytes_of_context = 128 * 1024;
static void *hip_emu_first_sp(char *top, void (*entry)(void)) {
    ucontext_t *u = static_cast<ucontext_t *>(calloc(1, sizeof(ucontext_t)));
    getcontext(u);
    u->uc_stack.ss_sp = top - hip_emu_stack_bytes_of_context;
    u->uc_stack.ss_size = hip_emu_stack_bytes_of_context;
    makecontext(u, entry, 0);
    return u;
}
#endif

/* ---- a block in progress ---- */

struct hip_emu_wave;
struct hip_emu_fiber {
    void *sp;
    dim3 thread;
    unsigned lane;
    hip_emu_wave *wave;
    unsigned cluster_waits; /* for the other blocks of its cluster, so far */
    hip_emu_fiber *next; /* in the queue that it waits in */
};

struct hip_emu_queue { hip_emu_fiber *first, *last; };

HIP_EMU_UNCHECKED static inline void hip_emu_append(hip_emu_queue *q, hip_emu_fiber *f) {
    f->next = nullptr;
    if (q->first) q->last->next = f;
    else q->first = f;
    q->last = f;
}
HIP_EMU_UNCHECKED static inline void hip_emu_append_all(hip_emu_queue *to, hip_emu_queue *from) {
    if (!from->first) return;
    if (to->first) to->last->next = from->first;
    else to->first = from->first;
    to->last = from->last;
    from->first = nullptr;
}

/* A wave that has met goes on before others: its stacks are in the cache, and a shuffle is no barrier of the whole block. */
HIP_EMU_UNCHECKED static inline void hip_emu_prepend_all(hip_emu_queue *to, hip_emu_queue *from) {
    if (!from->first) return;
    from->last->next = to->first;
    if (!to->first) to->last = from->last;
    to->first = from->first;
    from->first = nullptr;
}

struct hip_emu_wave {
    unsigned size, arrived, finished, round;
    unsigned kind;               /* what the first lane to arrive does */
    hip_emu_queue waiting;       /* for the other lanes */
    uint64_t value[2][64];       /* two rounds: a fast lane may be one ahead */
    alignas(4) unsigned char operands[2][4096]; /* of matrix units: see hip_emu_product */
};

struct hip_emu_shared_block {
    const void *key;
    void *memory;
    size_t size_bytes;
};

struct hip_emu_machine;
struct hip_emu_cluster {
    std::vector<hip_emu_machine *> blocks; /* null: not begun, or has left */
    std::vector<bool> left;
};

static const size_t hip_emu_stack_bytes = 128 * 1024;
static const unsigned hip_emu_max_threads = 1024;

/* Fibers of an OS thread, and the block they run. While a block rests, others run on a machine of their own. */
struct hip_emu_machine {
    void *main_sp;
    std::vector<hip_emu_fiber> fibers;
    std::vector<char *> stacks;
    std::vector<hip_emu_wave> waves;
    hip_emu_queue ready, waiting; /* to run, and for __syncthreads */
    struct { unsigned arrived; hip_emu_queue waiting; } named[16]; /* named barriers */
    std::vector<hip_emu_shared_block> shared;
    size_t dynamic_bytes; /* of shared memory, asked for by the launch */
    hip_emu_fiber *self;
    dim3 grid, block, index;
    unsigned wave, n_threads, n_finished, arrived, idle; /* wave: its lanes */
    uint64_t launch;      /* its number */
    bool rests, others_ran; /* hip_emu_wait */
    hip_emu_cluster *cluster;           /* null: the block is alone */
    unsigned rank, arriving, arrivals;  /* in the cluster; threads at its barrier, and how often all have been there */
    const std::function<void()> *body;

    hip_emu_machine() : main_sp(nullptr), dynamic_bytes(0), self(nullptr), wave(0), n_threads(0), n_finished(0), arrived(0), idle(0), launch(0), rests(false), others_ran(false), cluster(nullptr), rank(0), arriving(0), arrivals(0), body(nullptr) {
        ready.first = waiting.first = nullptr;
        for (unsigned i = 0; i < 16; i++) named[i].arrived = 0, named[i].waiting.first = nullptr;
        fibers.reserve(hip_emu_max_threads);
    }
    ~hip_emu_machine() {
        for (size_t i = 0; i < stacks.size(); i++) munmap(stacks[i], hip_emu_stack_bytes + 4096);
    }
    hip_emu_machine(const hip_emu_machine &) = delete;
    hip_emu_machine &operator=(const hip_emu_machine &) = delete;
};

static thread_local hip_emu_machine *hip_emu_here; /* of the running block; machines live as long as their thread */

#define threadIdx (hip_emu_here->self->thread)
#define blockIdx (hip_emu_here->index)
#define blockDim (hip_emu_here->block)
#define gridDim (hip_emu_here->grid)

/* The first fiber that is ready runs; this one goes on when somebody made it ready and its turn has come. */
HIP_EMU_UNCHECKED static inline void hip_emu_run_next(hip_emu_machine *m) {
    hip_emu_fiber *from = m->self, *to = m->ready.first;
    if (!to) hip_emu_die("deadlock: a barrier or shuffle that not every thread reaches");
    m->ready.first = to->next;
    m->self = to;
    if (to != from) hip_emu_swap(&from->sp, to->sp);
}

/* Let the others run, and look again: at what they may change without a barrier. */
HIP_EMU_UNCHECKED static void hip_emu_yield() {
    hip_emu_machine *m = hip_emu_here;
    if (++m->idle > 2 * m->n_threads + 2) hip_emu_die("deadlock: threads wait for what no other does");
    hip_emu_append(&m->ready, m->self);
    hip_emu_run_next(m);
}

static void hip_emu_entry() {
    for (;;) {
        hip_emu_machine *m = hip_emu_here;
        hip_emu_fiber *f = m->self;
        (*m->body)();
        if (m->arrived) hip_emu_die("a thread left its kernel while others wait at __syncthreads");
        if (f->wave->arrived) hip_emu_die("a lane left its kernel while others of its wave wait in a shuffle");
        f->wave->finished++;
        m->idle = 0;
        if (++m->n_finished == m->n_threads) hip_emu_swap(&f->sp, m->main_sp);
        else hip_emu_run_next(m);
    }
}

HIP_EMU_UNCHECKED static void __syncthreads() {
    hip_emu_machine *m = hip_emu_here;
    if (m->n_finished) hip_emu_die("__syncthreads after a thread of the block has left");
    m->idle = 0;
    if (++m->arrived == m->n_threads) {
        m->arrived = 0;
        hip_emu_append_all(&m->ready, &m->waiting);
        return;
    }
    hip_emu_append(&m->waiting, m->self);
    hip_emu_run_next(m);
}

/* bar.sync: of `count` threads of the block. */
HIP_EMU_UNCHECKED static inline void hip_emu_named_barrier(unsigned id, unsigned count) {
    hip_emu_machine *m = hip_emu_here;
    m->idle = 0;
    if (++m->named[id].arrived == count) {
        m->named[id].arrived = 0;
        hip_emu_append_all(&m->ready, &m->named[id].waiting);
        return;
    }
    hip_emu_append(&m->named[id].waiting, m->self);
    hip_emu_run_next(m);
}

/* Every lane waits for all others of its wave. `kind` must be the same for all lanes. */
HIP_EMU_UNCHECKED static inline void hip_emu_meet(unsigned kind) {
    hip_emu_machine *m = hip_emu_here;
    hip_emu_fiber *f = m->self;
    hip_emu_wave *w = f->wave;
    if (w->arrived == 0) {
        if (w->finished) hip_emu_die("a shuffle after a lane of the wave has left");
        w->kind = kind;
    } else if (w->kind != kind) hip_emu_die("lanes of a wave are in different shuffles");
    if (++w->arrived == w->size) {
        w->arrived = 0;
        w->round++;
        m->idle = 0;
        hip_emu_prepend_all(&m->ready, &w->waiting);
    } else {
        hip_emu_append(&w->waiting, f);
        hip_emu_run_next(m);
    }
}

/* Every lane gives a value and gets those of all. */
HIP_EMU_UNCHECKED static inline const uint64_t *hip_emu_exchange(uint64_t value, unsigned kind) {
    hip_emu_fiber *f = hip_emu_here->self;
    uint64_t *all = f->wave->value[f->wave->round & 1];
    all[f->lane] = value;
    hip_emu_meet(kind);
    return all;
}

/* Sums and maxima of a wave: in four launches of five the last lane to arrive makes them at once, in a fraction of the
 * shuffles' time; in the others they are the shuffles. Sums are added in the shuffles' order; of maxima the order does not
 * matter. */
HIP_EMU_UNCHECKED static inline bool hip_emu_joins_at_once() { return hip_emu_here->launch % 5 != 0; }
template <class T> struct hip_emu_plus { static T of(T a, T b) { return a + b; } };
template <class T> struct hip_emu_largest { static T of(T a, T b) { return a > b ? a : b; } };
template <> inline float hip_emu_largest<float>::of(float a, float b) { return fmaxf(a, b); }
template <class JOIN, class T> HIP_EMU_UNCHECKED static T hip_emu_join(T v, unsigned width, unsigned kind) {
    hip_emu_fiber *f = hip_emu_here->self;
    hip_emu_wave *w = f->wave;
    uint64_t *all = w->value[w->round & 1];
    const unsigned n = w->size;
    if (n != width) hip_emu_die("a shuffle reads a lane that is not there");
    memcpy(&all[f->lane], &v, sizeof v);
    if (w->arrived == n - 1) {
        T join[64];
        for (unsigned i = 0; i < n; i++) memcpy(&join[i], &all[i], sizeof v);
        for (unsigned left = n / 2; left > 0; left /= 2)
            for (unsigned i = 0; i < left; i++) join[i] = JOIN::of(join[2 * i], join[2 * i + 1]);
        memcpy(&all[0], &join[0], sizeof v);
    }
    hip_emu_meet(kind);
    memcpy(&v, &all[0], sizeof v);
    return v;
}
template <class T> static inline T hip_emu_wave_sum(T v, unsigned wave) {
    return hip_emu_join<hip_emu_plus<T>, T>(v, wave, 0x40000u);
}
template <class T> static inline T hip_emu_wave_max(T v, unsigned wave) {
    return hip_emu_join<hip_emu_largest<T>, T>(v, wave, 0x50000u);
}

template <class T> HIP_EMU_UNCHECKED static T __shfl_xor(T v, int mask, int width) {
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    unsigned lane = hip_emu_here->self->lane, from = lane ^ static_cast<unsigned>(mask),
             size = hip_emu_here->self->wave->size;
    const uint64_t *all = hip_emu_exchange(bits, 0x10000u + static_cast<unsigned>(mask));
    if (static_cast<unsigned>(width) != size || from >= size)
        hip_emu_die("a shuffle reads a lane that is not there");
    memcpy(&v, &all[from], sizeof v);
    return v;
}

template <class T> HIP_EMU_UNCHECKED static T __shfl(T v, int from, int width) {
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    unsigned size = hip_emu_here->self->wave->size;
    const uint64_t *all = hip_emu_exchange(bits, 0x20000u);
    if (static_cast<unsigned>(width) != size || static_cast<unsigned>(from) >= size)
        hip_emu_die("a shuffle reads a lane that is not there");
    memcpy(&v, &all[from], sizeof v);
    return v;
}

static int hip_emu_matrix_kind[4] = {4, 2, 4, 2}; /* of each device: RFK_MATRIX_... of the kernels, or HIP_EMU_SM90 */
static unsigned hip_emu_fused_threads[4] = {1024, 512, 1024, 512};
static inline unsigned hip_emu_fused_block_of(int device) { return hip_emu_fused_threads[device]; }
static inline bool hip_emu_has_wgmma(int device) { return hip_emu_matrix_kind[device] == HIP_EMU_SM90; }

static char hip_emu_dynamic_key; /* of the memory that the launch asked for; more of that there can be on request */

/* Shared memory of a block, on request; AMD has 64 KiB: so that kernels for NVIDIA run, too. */
static inline unsigned hip_emu_shared_kib(int device) { return hip_emu_has_wgmma(device) ? 227 : 160; }

/* A shared variable of the block: garbage when the first thread asks. key tells the variables apart. */
static void *hip_emu_shared(const void *key, size_t size_bytes) {
    hip_emu_machine *m = hip_emu_here;
    size_t total = size_bytes, fixed = key == &hip_emu_dynamic_key ? 0 : size_bytes;
    for (size_t i = 0; i < m->shared.size(); i++) {
        if (m->shared[i].key == key) return m->shared[i].memory;
        total += m->shared[i].size_bytes;
        if (m->shared[i].key != &hip_emu_dynamic_key) fixed += m->shared[i].size_bytes;
    }
    if (fixed > 48 * 1024 || total > hip_emu_shared_kib(0) * 1024)
        hip_emu_die("more shared memory in a block than there is");
    hip_emu_shared_block s = {key, nullptr, size_bytes};
    if (posix_memalign(&s.memory, 16, size_bytes)) hip_emu_die("out of memory");
    memset(s.memory, 0xff, size_bytes);
    m->shared.push_back(s);
    return s.memory;
}
#define HIP_EMU_SHARED(T, name)   \
    static char name##_key;       \
    T &name = *static_cast<T *>(hip_emu_shared(&name##_key, sizeof(T)))

/* The shared memory that the launch asked for, as an array of T. */
#define HIP_EMU_DYNAMIC(T, name) \
    T *name = static_cast<T *>(hip_emu_shared(&hip_emu_dynamic_key, hip_emu_here->dynamic_bytes))

/* Blocks run one after the other, and fibers of a block in turn. */
template <class T> static inline T atomicAdd(T *p, T v) {
    T before = *p;
    *p = before + v;
    return before;
}
static inline void __threadfence() {}
static inline void __threadfence_system() {}

/* A thread waits for what a kernel of another device writes: its block rests while other blocks and other devices' work
 * run. 0: there is none. */
HIP_EMU_UNCHECKED static int hip_emu_wait() {
    hip_emu_machine *m = hip_emu_here;
    m->rests = true;
    hip_emu_swap(&m->self->sp, m->main_sp);
    return m->others_ran;
}

/* ---- clusters ---- */

static thread_local uint64_t hip_emu_all_arrivals; /* of any block: something has moved */

/* barrier.cluster.arrive, and wait: for all blocks of the cluster that have not left. */
HIP_EMU_UNCHECKED static inline void hip_emu_arrive_at_cluster() {
    hip_emu_machine *m = hip_emu_here;
    if (!m->cluster) hip_emu_die("a block that is alone arrives at a cluster's barrier");
    m->idle = 0;
    if (++m->arriving < m->n_threads) return;
    m->arriving = 0;
    m->arrivals++;
    hip_emu_all_arrivals++;
}
HIP_EMU_UNCHECKED static inline void hip_emu_wait_for_cluster() {
    hip_emu_machine *m = hip_emu_here;
    if (!m->cluster) hip_emu_die("a block that is alone waits at a cluster's barrier");
    const unsigned phase = ++m->self->cluster_waits;
    for (;;) {
        bool all = true;
        for (size_t i = 0; i < m->cluster->blocks.size(); i++)
            all = all && (m->cluster->left[i] || (m->cluster->blocks[i] && m->cluster->blocks[i]->arrivals >= phase));
        if (all) return;
        if (m->arrivals < phase) hip_emu_yield();
        else if (!hip_emu_wait()) hip_emu_die("deadlock: a block waits for another of its cluster");
    }
}

/* Where block `rank` of the cluster has what is at p in this block's shared memory. */
static void *hip_emu_of_cluster(void *p, unsigned rank) {
    const hip_emu_machine *m = hip_emu_here,
                          *of = m->cluster && rank < m->cluster->blocks.size() ? m->cluster->blocks[rank] : nullptr;
    if (!of) hip_emu_die("shared memory of a block that has left, or is not there");
    char *at = static_cast<char *>(p);
    for (size_t i = 0; i < m->shared.size(); i++) {
        char *own = static_cast<char *>(m->shared[i].memory);
        if (at < own || at >= own + m->shared[i].size_bytes) continue;
        for (size_t k = 0; k < of->shared.size(); k++)
            if (of->shared[k].key == m->shared[i].key) return static_cast<char *>(of->shared[k].memory) + (at - own);
    }
    hip_emu_die("shared memory that the other block of the cluster does not have");
    return nullptr;
}

/* ---- matrix units ----
 * Wave-wide products D = A B + C: where the instruction keeps each element, and nothing else, is stated per instruction
 * (place: lane, and element counted from the lowest bits of the lane's first word; cell: row and column of a result).
 * Entered from the vendors' documents by someone who did not write the kernels, before reading how they use them:
 *   PTX ISA 8.7 (NVIDIA): "Matrix Fragments for mma.m16n8k32" (.s8) and "... mma.m16n8k16 with floating point type"
 *   AMD Matrix Instruction Calculator (github.com/ROCm/amd_matrix_instruction_calculator, matrix_calculator.py), which
 *     states the layouts of the CDNA2, CDNA3 and RDNA3 ISA documents: classes InstCalcGfx9 (MFMA, wave 64) and
 *     InstCalcGfx11 (WMMA, wave 32)
 *   GPUOpen, "Using the Matrix Cores of AMD RDNA 4 architecture GPUs" and "WMMA guide for AMD RDNA 4 architecture GPUs -
 *     part 2": one layout for f16 and int8. (The calculator orders the k of RDNA4 differently, A and B alike, which no
 *     product can tell.)
 *   MIOpen, "MI200 MFMA Behavior Specifics": subnormal halves count as zero there
 * What no document fixes is left loose: the order of additions of an f16 product (here the sum of the exact products is
 * rounded once, then added to C). */

struct hip_emu_int2 { int v[2]; int &operator[](int i) { return v[i]; } };
struct hip_emu_int4 { int v[4]; int &operator[](int i) { return v[i]; } };
struct hip_emu_int8 { int v[8]; int &operator[](int i) { return v[i]; } };
struct hip_emu_half4 { uint16_t v[4]; };
struct hip_emu_half8 { uint16_t v[8]; };
struct hip_emu_half16 { uint16_t v[16]; };
struct hip_emu_float4 { float v[4]; float &operator[](int i) { return v[i]; } };
struct hip_emu_float8 { float v[8]; float &operator[](int i) { return v[i]; } };

struct hip_emu_place { unsigned lane, element; };
struct hip_emu_cell { unsigned row, column; };

/* mma.m16n8k32 with .s8 and, halves for bytes, mma.m16n8k16 with .f16: PER_WORD elements to a register. Lane = 4 groupID
 * + threadID_in_group. A: a row is the groupID's of one group or, in every other register, that plus 8; the registers of
 * the upper half of the columns come after those of the lower half. */
template <unsigned PER_WORD> struct hip_emu_ptx {
    enum { lanes = 32, depth = 8 * PER_WORD, results = 4, copies = 1, a_words = 4, b_words = 2 };
    HIP_EMU_UNCHECKED static hip_emu_place a(unsigned row, unsigned k) {
        hip_emu_place p = {row % 8 * 4 + k % (depth / 2) / PER_WORD,
                           (k / (depth / 2) * 2 + row / 8) * PER_WORD + k % PER_WORD};
        return p;
    }
    HIP_EMU_UNCHECKED static hip_emu_place b(unsigned k, unsigned column) {
        hip_emu_place p = {column * 4 + k % (depth / 2) / PER_WORD, k / (depth / 2) * PER_WORD + k % PER_WORD};
        return p;
    }
    HIP_EMU_UNCHECKED static hip_emu_cell d(unsigned lane, unsigned i) {
        hip_emu_cell c = {lane / 4 + (i >= 2 ? 8 : 0), lane % 4 * 2 + (i & 1)};
        return c;
    }
};

/* v_mfma_*_16x16xDEPTH, one block: 64 / 16 lanes share a row (column); each holds DEPTH / 4 neighbours in k. D: multi-rows
 * of four registers, 16 lanes wide. */
template <unsigned DEPTH, unsigned PER_WORD> struct hip_emu_mfma {
    enum { lanes = 64, depth = DEPTH, results = 4, copies = 1, a_words = DEPTH / 4 / PER_WORD, b_words = a_words };
    HIP_EMU_UNCHECKED static hip_emu_place a(unsigned row, unsigned k) {
        hip_emu_place p = {k / (DEPTH / 4) * 16 + row, k % (DEPTH / 4)};
        return p;
    }
    HIP_EMU_UNCHECKED static hip_emu_place b(unsigned k, unsigned column) { return a(column, k); }
    HIP_EMU_UNCHECKED static hip_emu_cell d(unsigned lane, unsigned i) {
        hip_emu_cell c = {4 * (lane / 16) + i, lane % 16};
        return c;
    }
};

/* v_wmma_*_16x16x16 of gfx11, wave 32: lane l holds all k of row (column) l % 16, so everything is there twice. D:
 * register i has rows 2 i (lanes 0 to 15) and 2 i + 1. */
template <unsigned PER_WORD> struct hip_emu_wmma11 {
    enum { lanes = 32, depth = 16, results = 8, copies = 2, a_words = 16 / PER_WORD, b_words = a_words };
    HIP_EMU_UNCHECKED static hip_emu_place a(unsigned row, unsigned k) {
        hip_emu_place p = {row, k};
        return p;
    }
    HIP_EMU_UNCHECKED static hip_emu_place b(unsigned k, unsigned column) { return a(column, k); }
    HIP_EMU_UNCHECKED static hip_emu_cell d(unsigned lane, unsigned i) {
        hip_emu_cell c = {2 * i + lane / 16, lane % 16};
        return c;
    }
};

/* v_wmma_*_16x16x16 of gfx12, wave 32: each lane holds 8 neighbours in k, lanes 16 to 31 the upper ones. D: lanes 16 to 31
 * hold the lower eight rows. */
template <unsigned PER_WORD> struct hip_emu_wmma12 {
    enum { lanes = 32, depth = 16, results = 8, copies = 1, a_words = 8 / PER_WORD, b_words = a_words };
    HIP_EMU_UNCHECKED static hip_emu_place a(unsigned row, unsigned k) {
        hip_emu_place p = {k / 8 * 16 + row, k % 8};
        return p;
    }
    HIP_EMU_UNCHECKED static hip_emu_place b(unsigned k, unsigned column) { return a(column, k); }
    HIP_EMU_UNCHECKED static hip_emu_cell d(unsigned lane, unsigned i) {
        hip_emu_cell c = {8 * (lane / 16) + i, lane % 16};
        return c;
    }
};

/* Elements of the operands: two or four to a word. Their products are exact in the type they are summed in. `kind`: as
 * hip_emu_wrong_units counts. */
struct hip_emu_s8 {
    enum { per_word = 4, kind = 1 };
    typedef int exact;
    typedef int16_t element; /* a processor adds products of these in pairs */
    HIP_EMU_UNCHECKED static int16_t value(uint32_t word, unsigned i) { return static_cast<signed char>(word >> (8 * i)); }
};
template <bool SUBNORMALS> struct hip_emu_f16 {
    enum { per_word = 2, kind = 2 };
    typedef double exact;
    typedef float element;
    HIP_EMU_UNCHECKED static float value(uint32_t word, unsigned i) {
        unsigned h = word >> (16 * i) & 0xffff, exponent = h >> 10 & 31;
        uint32_t bits = (h & 0x7fff) << 13; /* the same fields of a float, whose exponents are 112 higher */
        float small;
        memcpy(&small, &bits, 4);
        float f = exponent == 31                ? (h & 0x3ff ? static_cast<float>(NAN) : static_cast<float>(INFINITY))
                  : exponent == 0 && !SUBNORMALS ? 0
                                                 : small * 5192296858534827628530496329220096.0f;
        return h & 0x8000 ? -f : f;
    }
};

template <bool SUBNORMALS> struct hip_emu_bf16 {
    enum { per_word = 2, kind = 2 };
    typedef double exact;
    typedef float element;
    HIP_EMU_UNCHECKED static float value(uint32_t word, unsigned i) {
        uint32_t bits = word >> (16 * i) << 16;
        float f;
        memcpy(&f, &bits, 4);
        return SUBNORMALS || (bits & 0x7f800000) ? f : 0;
    }
};

static int hip_emu_wrong_kinds = getenv("HIP_EMU_WRONG_UNITS") ? atoi(getenv("HIP_EMU_WRONG_UNITS")) : 0;

/* Each lane's elements of an operand as numbers, one after the other. */
template <class E, unsigned WORDS>
HIP_EMU_UNCHECKED static void hip_emu_spread(typename E::element *to, const void *mine) {
    for (unsigned w = 0; w < WORDS; w++) {
        uint32_t word;
        memcpy(&word, static_cast<const char *>(mine) + 4 * w, 4);
        for (unsigned i = 0; i < E::per_word; i++) to[w * E::per_word + i] = E::value(word, i);
    }
}

/* Where elements of a lane are in A, whose rows are 16, and in B, column by column. */
template <class L, class E> struct hip_emu_places {
    enum { n_a = L::a_words * E::per_word, n_b = L::b_words * E::per_word, columns = L::results * L::lanes / 16 };
    uint16_t a[L::lanes][n_a], b[L::lanes][n_b];
    hip_emu_places() {
        for (unsigned k = 0; k < L::depth; k++) {
            for (unsigned row = 0; row < 16; row++) {
                const hip_emu_place p = L::a(row, k);
                a[p.lane][p.element] = static_cast<uint16_t>(row * L::depth + k);
            }
            for (unsigned column = 0; column < columns; column++) {
                const hip_emu_place p = L::b(k, column);
                b[p.lane][p.element] = static_cast<uint16_t>(column * L::depth + k);
            }
        }
    }
};

/* By vector instructions, whatever the rest is compiled with. */
#if defined(__GNUC__) && !defined(__clang__)
#define HIP_EMU_VECTORS __attribute__((optimize("O3")))
#else
#define HIP_EMU_VECTORS
#endif
template <class EXACT, unsigned N, class T>
HIP_EMU_UNCHECKED HIP_EMU_VECTORS static EXACT hip_emu_dot(const T *a, const T *b) {
    EXACT sum = 0;
    for (unsigned k = 0; k < N; k++) sum += static_cast<EXACT>(a[k]) * b[k];
    return sum;
}

/* d[i] = c[i] + the product's element that this lane's result i is. Lanes give their elements of A and B, and read all. */
template <class L, class E, class R>
HIP_EMU_UNCHECKED static void hip_emu_product(R *d, const void *a, const void *b, const R *c) {
    typedef typename E::element element;
    typedef hip_emu_places<L, E> places;
    static const places at;
    hip_emu_wave *wave = hip_emu_here->self->wave;
    const unsigned lane = hip_emu_here->self->lane, round = wave->round & 1, each = L::lanes / L::copies;
    if (wave->size != L::lanes) hip_emu_die("a matrix instruction for waves of another size");
    element *all_a = reinterpret_cast<element *>(wave->operands[round]), *all_b = all_a + 16 * L::depth;
    element own[places::n_a + places::n_b];
    static_assert((16 + places::columns) * L::depth * sizeof *own <= sizeof wave->operands[0], "operands of a wave");
    hip_emu_spread<E, L::a_words>(own, a);
    hip_emu_spread<E, L::b_words>(own + places::n_a, b);
    if (lane < each) {
        for (unsigned i = 0; i < places::n_a; i++) all_a[at.a[lane][i]] = own[i];
        for (unsigned i = 0; i < places::n_b; i++) all_b[at.b[lane][i]] = own[places::n_a + i];
    }
    hip_emu_meet(0x30000);
    if (lane >= each) {
        element first[places::n_a + places::n_b];
        for (unsigned i = 0; i < places::n_a; i++) first[i] = all_a[at.a[lane - each][i]];
        for (unsigned i = 0; i < places::n_b; i++) first[places::n_a + i] = all_b[at.b[lane - each][i]];
        if (memcmp(first, own, sizeof own)) hip_emu_die("a matrix operand differs between the lanes that repeat it");
    }
    for (unsigned i = 0; i < L::results; i++) {
        const hip_emu_cell cell = L::d(lane, hip_emu_wrong_kinds & E::kind ? (i + 1) % L::results : i);
        const element *row = all_a + cell.row * L::depth, *column = all_b + cell.column * L::depth;
        d[i] = c[i] + static_cast<R>(hip_emu_dot<typename E::exact, L::depth>(row, column));
    }
}

static inline uint32_t hip_emu_matrix() {
    int kind = hip_emu_matrix_kind[hip_emu_here->self->wave->size == 64];
    return static_cast<uint32_t>(kind == HIP_EMU_SM90 ? 1 : kind);
}

static inline void hip_emu_mma_m16n8k32_s8(int *d, const int *a, const int *b, const int *c) {
    hip_emu_product<hip_emu_ptx<4>, hip_emu_s8>(d, a, b, c);
}
static inline hip_emu_int4 __builtin_amdgcn_mfma_i32_16x16x16i8(int a, int b, hip_emu_int4 c, int, int, int) {
    hip_emu_product<hip_emu_mfma<16, 4>, hip_emu_s8>(c.v, &a, &b, c.v);
    return c;
}
static inline hip_emu_int4 __builtin_amdgcn_mfma_i32_16x16x32_i8(long a, long b, hip_emu_int4 c, int, int, int) {
    hip_emu_product<hip_emu_mfma<32, 4>, hip_emu_s8>(c.v, &a, &b, c.v);
    return c;
}
static inline hip_emu_int8 __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(bool signed_a, hip_emu_int4 a, bool signed_b,
                                                                      hip_emu_int4 b, hip_emu_int8 c, bool) {
    if (!signed_a || !signed_b) hip_emu_die("bytes without a sign are not emulated");
    hip_emu_product<hip_emu_wmma11<4>, hip_emu_s8>(c.v, a.v, b.v, c.v);
    return c;
}
static inline hip_emu_int8 __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(bool signed_a, hip_emu_int2 a, bool signed_b,
                                                                            hip_emu_int2 b, hip_emu_int8 c, bool) {
    if (!signed_a || !signed_b) hip_emu_die("bytes without a sign are not emulated");
    hip_emu_product<hip_emu_wmma12<4>, hip_emu_s8>(c.v, a.v, b.v, c.v);
    return c;
}
static inline void hip_emu_mma_m16n8k16_f16(float *d, const int *a, const int *b) {
    hip_emu_product<hip_emu_ptx<2>, hip_emu_f16<true> >(d, a, b, d);
}
static inline void hip_emu_mma_m16n8k16_bf16(float *d, const int *a, const int *b) {
    hip_emu_product<hip_emu_ptx<2>, hip_emu_bf16<true> >(d, a, b, d);
}
static inline hip_emu_float4 __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(hip_emu_half4 a, hip_emu_half4 b,
                                                                       hip_emu_float4 c, int, int, int) {
    if (hip_emu_matrix() == 2) hip_emu_product<hip_emu_mfma<16, 2>, hip_emu_bf16<false> >(c.v, a.v, b.v, c.v);
    else hip_emu_product<hip_emu_mfma<16, 2>, hip_emu_bf16<true> >(c.v, a.v, b.v, c.v);
    return c;
}
static inline hip_emu_float8 __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(hip_emu_half16 a, hip_emu_half16 b,
                                                                         hip_emu_float8 c) {
    hip_emu_product<hip_emu_wmma11<2>, hip_emu_bf16<true> >(c.v, a.v, b.v, c.v);
    return c;
}
static inline hip_emu_float8 __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(hip_emu_half8 a, hip_emu_half8 b,
                                                                               hip_emu_float8 c) {
    hip_emu_product<hip_emu_wmma12<2>, hip_emu_bf16<true> >(c.v, a.v, b.v, c.v);
    return c;
}
static inline hip_emu_float4 __builtin_amdgcn_mfma_f32_16x16x16f16(hip_emu_half4 a, hip_emu_half4 b, hip_emu_float4 c,
                                                                   int, int, int) {
    if (hip_emu_matrix() == 2) hip_emu_product<hip_emu_mfma<16, 2>, hip_emu_f16<false> >(c.v, a.v, b.v, c.v);
    else hip_emu_product<hip_emu_mfma<16, 2>, hip_emu_f16<true> >(c.v, a.v, b.v, c.v);
    return c;
}
static inline hip_emu_float8 __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(hip_emu_half16 a, hip_emu_half16 b,
                                                                        hip_emu_float8 c) {
    hip_emu_product<hip_emu_wmma11<2>, hip_emu_f16<true> >(c.v, a.v, b.v, c.v);
    return c;
}
static inline hip_emu_float8 __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(hip_emu_half8 a, hip_emu_half8 b,
                                                                              hip_emu_float8 c) {
    hip_emu_product<hip_emu_wmma12<2>, hip_emu_f16<true> >(c.v, a.v, b.v, c.v);
    return c;
}

/* wgmma.mma_async.m64nCOLSk16 with .bf16 or .f16, A and B with rows (columns) of k in shared memory, 128-byte swizzle: row r begins
 * r / 8 * 1024 + r % 8 * 128 bytes after the operand's address, and of every byte's address bits 4 to 6 are xored with bits 7
 * to 9 (PTX ISA 8.7, "Shared Memory Matrix Layout", "Register Fragments and Shared Memory Matrix Layouts"). Lane l of warp w has
 * of row 16 w + l / 4 (and + 8) columns 2 (l % 4) and the next of each eight. */
template <bool F16> HIP_EMU_UNCHECKED static inline float hip_emu_wgmma_value(const void *operand, unsigned row, unsigned k) {
    uintptr_t at = reinterpret_cast<uintptr_t>(operand) + row / 8 * 1024 + row % 8 * 128 + 2 * k;
    at ^= (at >> 7 & 7) << 4;
    const uint16_t *value = reinterpret_cast<const uint16_t *>(at);
    return F16 ? hip_emu_f16<true>::value(*value, 0) : hip_emu_bf16<true>::value(*value, 0);
}
/* rows: the lane's two rows of A. */
template <int COLS, bool F16>
HIP_EMU_UNCHECKED static void hip_emu_wgmma_product(float *d, const float (*rows)[16], const void *b, int add) {
    const unsigned lane = hip_emu_here->self->thread.x % 32;
    float column[16];
    for (unsigned c = 0; c < COLS / 4; c++) {
        for (unsigned k = 0; k < 16; k++) column[k] = hip_emu_wgmma_value<F16>(b, c / 2 * 8 + lane % 4 * 2 + c % 2, k);
        for (unsigned r = 0; r < 2; r++) {
            const double sum = hip_emu_dot<double, 16>(rows[r], column);
            float *to = &d[c / 2 * 4 + (hip_emu_wrong_kinds & 4 ? 1 - r : r) * 2 + c % 2];
            *to = (add ? *to : 0) + static_cast<float>(sum);
        }
    }
}
template <int COLS, bool F16>
HIP_EMU_UNCHECKED static void hip_emu_wgmma_m64k16(float *d, const void *a, const void *b, int add) {
    const unsigned thread = hip_emu_here->self->thread.x % 128, lane = thread % 32;
    float rows[2][16];
    for (unsigned i = 0; i < 32; i++)
        rows[i / 16][i % 16] = hip_emu_wgmma_value<F16>(a, thread / 32 * 16 + lane / 4 + i / 16 * 8, i % 16);
    hip_emu_wgmma_product<COLS, F16>(d, rows, b, add);
}
/* The same with A in registers, of which the lane's two rows were gathered. */
template <int COLS> HIP_EMU_UNCHECKED static void hip_emu_wgmma_rows_m64k16(float *d, const uint16_t (*a)[16], const void *b, int add) {
    float rows[2][16];
    for (unsigned i = 0; i < 32; i++) rows[i / 16][i % 16] = hip_emu_bf16<true>::value(a[i / 16][i % 16], 0);
    hip_emu_wgmma_product<COLS, false>(d, rows, b, add);
}

/* An mbarrier, and copies whose bytes it counts; a wait is for the phase of that parity. */
struct hip_emu_gate { unsigned count, left, phase, bytes; };
static void hip_emu_gate_pass(hip_emu_gate *g) {
    hip_emu_here->idle = 0;
    if (g->left || g->bytes) return;
    g->left = g->count;
    g->phase++;
}
static inline void hip_emu_gate_make(hip_emu_gate *g, unsigned count) { g->count = g->left = count, g->phase = g->bytes = 0; }
static inline void hip_emu_gate_arrive(hip_emu_gate *g, unsigned bytes) {
    if (!g->left) hip_emu_die("more arrivals at an mbarrier than it counts");
    g->left--, g->bytes += bytes;
    hip_emu_gate_pass(g);
}
static inline void hip_emu_gate_bytes(hip_emu_gate *g, unsigned bytes) {
    if (g->bytes < bytes) hip_emu_die("an mbarrier gets more bytes than it was told of");
    g->bytes -= bytes;
    hip_emu_gate_pass(g);
}
static inline void hip_emu_gate_copy(hip_emu_gate *g, void *to, const void *from, unsigned bytes) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16) hip_emu_die("a bulk copy that is not aligned");
    memcpy(to, from, bytes);
    hip_emu_gate_bytes(g, bytes);
}
/* st.async: to block `rank` of the cluster. */
static inline void hip_emu_gate_send(hip_emu_gate *g, unsigned rank, void *to, const void *from, unsigned bytes) {
    if (reinterpret_cast<uintptr_t>(to) % bytes) hip_emu_die("a store to another block that is not aligned");
    g = static_cast<hip_emu_gate *>(hip_emu_of_cluster(g, rank));
    memcpy(hip_emu_of_cluster(to, rank), from, bytes);
    hip_emu_gate_bytes(g, bytes);
    hip_emu_all_arrivals++;
}
/* In a cluster, other blocks may send: they run when all threads of this one wait. */
HIP_EMU_UNCHECKED static inline void hip_emu_gate_wait(hip_emu_gate *g, unsigned parity) {
    hip_emu_machine *m = hip_emu_here;
    while ((g->phase & 1) == parity) {
        if (!m->cluster || m->idle <= m->n_threads) {
            hip_emu_yield();
            continue;
        }
        m->idle = 0;
        if (!hip_emu_wait()) hip_emu_die("deadlock: a block waits for what no other of its cluster sends");
    }
}

/* ---- the runtime ---- */

enum hipError_t {
    hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorInvalidDeviceFunction = 98,
    hipErrorNoDevice = 100, hipErrorInvalidDevice = 101, hipErrorNoBinaryForGpu = 209, hipErrorInvalidHandle = 400,
    hipErrorNotReady = 600, hipErrorIllegalAddress = 700, hipErrorLaunchFailure = 719, hipErrorUnknown = 999
};
enum hipMemcpyKind { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2, hipMemcpyDeviceToDevice = 3 };
#define hipEventDefault 0u
#define hipEventDisableTiming 2u
#define hipStreamNonBlocking 1u
#define hipHostMallocPortable 1u

struct hipDeviceProp_t {
    char name[256];
    char gcnArchName[256];
    size_t totalGlobalMem, sharedMemPerBlock;
    int warpSize, multiProcessorCount, integrated, major, minor;
};

struct hip_emu_stream_state {
    int device;
    bool hangs; /* an item never ends */
    bool busy;  /* its item rests */
    bool waits; /* its item waits for another process */
    std::deque<std::function<void()> > work;
    uint64_t issued, done;
    std::shared_ptr<std::vector<std::function<void()> > > captured; /* while capturing */
};
typedef std::shared_ptr<hip_emu_stream_state> *hipStream_t;
struct hip_emu_graph {
    std::shared_ptr<std::vector<std::function<void()> > > nodes;
};
typedef hip_emu_graph *hipGraph_t;
typedef hip_emu_graph *hipGraphExec_t;
typedef void *hipGraphNode_t;
enum hipStreamCaptureMode { hipStreamCaptureModeThreadLocal = 1 };

struct hip_emu_event_state {
    int device;
    std::shared_ptr<hip_emu_stream_state> stream; /* recorded there, */
    uint64_t at;                                  /* after so much work */
    std::shared_ptr<double> time_us;              /* when it was reached */
    unsigned asked;                               /* hipEventQuery */
    bool timed;
};
typedef hip_emu_event_state *hipEvent_t;

struct hip_emu_state {
    std::recursive_mutex lock;
    std::map<char *, size_t> device_memory, host_memory;
    std::vector<hipStream_t> streams;
    bool again; /* set by an item that must run again: it waits for another process, or for what rests */
    int n_resting; /* kernels */
    std::map<char *, int> exported;                 /* memory that other processes can map: its file */
    std::map<char *, size_t> imported;              /* theirs, which is in device_memory, too */
    unsigned n_events, n_graphs, n_comms;
    uint64_t calls, launches, replays, fail_call, fail_work, flip;
    bool fail_forever, broken;
    int n_devices, n_units, count_error, no_kernels, order, stale_graphs, trusted_graphs;
    size_t memory[4]; /* of each device */
    std::map<char *, int> device_of; /* blocks of device memory */
    bool lost[4];
    bool peers_open[4][4]; /* [d][o]: d was told to use o's memory */
    int peers, rccl;
    uint64_t peer_copies, rccl_transfers;
    float elapsed_ms;
    uint32_t random;
    hip_emu_state() : again(false), n_resting(0), n_events(0), n_graphs(0), n_comms(0), calls(0), launches(0), replays(0), fail_call(0), fail_work(0), flip(0),
                      fail_forever(false), broken(false), n_devices(2), n_units(5), count_error(0), no_kernels(0),
                      order(HIP_EMU_LATE), stale_graphs(0), trusted_graphs(0), peers_open(), peers(0), rccl(0), peer_copies(0), rccl_transfers(0), elapsed_ms(-1),
                      random(1) {
        for (int i = 0; i < 4; i++) lost[i] = false, memory[i] = static_cast<size_t>(8) << 30;
        const char *text = getenv("HIP_EMU_FLIP");
        if (text) flip = strtoull(text, nullptr, 10);
    }
};
static hip_emu_state &hip_emu() {
    static hip_emu_state *s = new hip_emu_state; /* never destroyed: threads may outlive main */
    return *s;
}
typedef std::lock_guard<std::recursive_mutex> hip_emu_guard_lock;
#define HIP_EMU_LOCK hip_emu_guard_lock hip_emu_locked(hip_emu().lock)

#define HIP_EMU_ELSEWHERE 4 /* the device of another process's memory */
static thread_local int hip_emu_device; /* the thread's current device */

static uint32_t hip_emu_random(void) {
    uint32_t &r = hip_emu().random;
    r ^= r << 13, r ^= r >> 17, r ^= r << 5;
    return r;
}

static double hip_emu_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

/* Run a stream's work up to a point. Items may force other streams, so that each is taken out before it runs. */
static void hip_emu_force(const std::shared_ptr<hip_emu_stream_state> &s, uint64_t until) {
    if (s->busy && s->done < until) hip_emu_die("deadlock: work waits for a kernel that waits for it");
    while (s->done < until && !s->work.empty() && !(s->hangs && hip_emu().peers == HIP_EMU_PEERS_HANG)) {
        std::function<void()> item = s->work.front();
        s->work.pop_front();
        if (hip_emu().fail_work && --hip_emu().fail_work == 0) hip_emu().lost[s->device] = true;
        s->busy = true;
        hip_emu().again = false;
        if (!hip_emu().lost[s->device] && !hip_emu().broken) item();
        s->busy = false;
        s->waits = hip_emu().again;
        hip_emu().again = false;
        if (s->waits) return s->work.push_front(item);
        s->done++;
    }
}

/* The same for the host, which waits for other processes, too. Called without the lock. */
static void hip_emu_finish(const std::shared_ptr<hip_emu_stream_state> &s, uint64_t until) {
    for (int n = 0;; n++) {
        {
            hip_emu_guard_lock locked(hip_emu().lock);
            hip_emu_force(s, until);
            if (!s->waits || s->done >= until) return;
        }
        const struct timespec nap = {0, 100000};
        if (n > 600000) hip_emu_die("a wait for another process without end");
        nanosleep(&nap, nullptr);
    }
}

/* Run an item of a device none of whose streams has one that rests: a kernel may fill its device.   Returns whether there
 * is one. */
static bool hip_emu_run_other() {
    std::vector<hipStream_t> &all = hip_emu().streams;
    for (size_t i = 0; i < all.size(); i++) {
        std::shared_ptr<hip_emu_stream_state> s = *all[i];
        const uint64_t done = s->done;
        bool fills = false;
        for (size_t k = 0; k < all.size(); k++) fills = fills || ((*all[k])->busy && (*all[k])->device == s->device);
        if (fills || s->work.empty()) continue;
        hip_emu_force(s, done + 1);
        if (s->done > done) return true;
    }
    return false;
}

static hipError_t hip_emu_enqueue(hipStream_t stream, const std::function<void()> &item) {
    if ((*stream)->captured) {
        (*stream)->captured->push_back(item);
        return hipSuccess;
    }
    (*stream)->work.push_back(item);
    (*stream)->issued++;
    if (hip_emu().order == HIP_EMU_EAGER) hip_emu_force(*stream, (*stream)->issued);
    return hipSuccess;
}

/* Every API function starts with it: what the call returns if not hipSuccess. */
static hipError_t hip_emu_call(hipError_t failure = hipErrorUnknown) {
    hip_emu_state &e = hip_emu();
    e.calls++;
    if (e.order == HIP_EMU_SHUFFLED && !e.streams.empty())
        for (uint32_t n = hip_emu_random() % 4; n; n--) {
            std::shared_ptr<hip_emu_stream_state> s = *e.streams[hip_emu_random() % e.streams.size()];
            hip_emu_force(s, s->done + 1);
        }
    if (e.fail_call && --e.fail_call == 0) {
        e.broken = e.fail_forever;
        return failure;
    }
    if (e.broken) return failure;
    if (e.lost[hip_emu_device]) return hipErrorLaunchFailure;
    return hipSuccess;
}

/* 1 if [p, p + n) lies in one live block. */
static bool hip_emu_lies_in(const std::map<char *, size_t> &blocks, const void *p, size_t n) {
    char *at = const_cast<char *>(static_cast<const char *>(p));
    std::map<char *, size_t>::const_iterator i = blocks.upper_bound(at);
    if (i == blocks.begin()) return false;
    --i;
    size_t offset = static_cast<size_t>(at - i->first);
    return offset <= i->second && n <= i->second - offset;
}

static inline const char *hipGetErrorName(hipError_t e) {
    switch (e) {
    case hipSuccess: return "hipSuccess";
    case hipErrorInvalidValue: return "hipErrorInvalidValue";
    case hipErrorOutOfMemory: return "hipErrorOutOfMemory";
    case hipErrorInvalidDeviceFunction: return "hipErrorInvalidDeviceFunction";
    case hipErrorNoDevice: return "hipErrorNoDevice";
    case hipErrorInvalidDevice: return "hipErrorInvalidDevice";
    case hipErrorNoBinaryForGpu: return "hipErrorNoBinaryForGpu";
    case hipErrorInvalidHandle: return "hipErrorInvalidHandle";
    case hipErrorNotReady: return "hipErrorNotReady";
    case hipErrorIllegalAddress: return "hipErrorIllegalAddress";
    case hipErrorLaunchFailure: return "hipErrorLaunchFailure";
    default: return "hipErrorUnknown";
    }
}
static inline const char *hipGetErrorString(hipError_t e) { return hipGetErrorName(e); }
static inline hipError_t hipGetLastError() { return hipSuccess; } /* nothing is kept */

static inline hipError_t hipGetDeviceCount(int *n) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r == hipSuccess && hip_emu().count_error) r = static_cast<hipError_t>(hip_emu().count_error);
    *n = r == hipSuccess ? hip_emu().n_devices : 0;
    return r;
}
static inline hipError_t hipGetDevice(int *device) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r == hipSuccess) *device = hip_emu_device;
    return r;
}
static inline hipError_t hipSetDevice(int device) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess && r != hipErrorLaunchFailure) return r;
    if (device < 0 || device >= hip_emu().n_devices) return hipErrorInvalidDevice;
    hip_emu_device = device;
    return r;
}
static inline hipError_t hipGetDeviceProperties(hipDeviceProp_t *p, int device) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if (device < 0 || device >= hip_emu().n_devices) return hipErrorInvalidDevice;
    memset(p, 0, sizeof *p);
    p->warpSize = device % 2 == 0 ? 32 : 64;
    snprintf(p->name, sizeof p->name, "emulated GPU, waves of %d", p->warpSize);
    snprintf(p->gcnArchName, sizeof p->gcnArchName, "%s", device % 2 == 0 ? "gfx1100" : "gfx90a:sramecc+:xnack-");
    p->totalGlobalMem = static_cast<size_t>(8) << 30;
    p->sharedMemPerBlock = hip_emu_shared_kib(device) << 10;
    p->multiProcessorCount = hip_emu().n_units;
    return hipSuccess;
}
/* Of the thread's device. */
static inline size_t hip_emu_free_bytes() {
    hip_emu_state &e = hip_emu();
    size_t used = 0;
    for (std::map<char *, size_t>::iterator i = e.device_memory.begin(); i != e.device_memory.end(); ++i)
        if (e.device_of[i->first] == hip_emu_device) used += i->second;
    return used < e.memory[hip_emu_device] ? e.memory[hip_emu_device] - used : 0;
}
static inline hipError_t hipMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    *total_bytes = hip_emu().memory[hip_emu_device];
    *free_bytes = hip_emu_free_bytes();
    return r;
}

static inline hipError_t hip_emu_malloc(std::map<char *, size_t> &blocks, void **p, size_t size_bytes) {
    hipError_t r = hip_emu_call(hipErrorOutOfMemory);
    *p = nullptr;
    if (r != hipSuccess) return r;
    if (size_bytes == 0 || size_bytes > (static_cast<size_t>(8) << 30) || posix_memalign(p, 256, size_bytes))
        return hipErrorOutOfMemory;
    memset(*p, 0xff, size_bytes);
    blocks[static_cast<char *>(*p)] = size_bytes;
    return hipSuccess;
}
static inline hipError_t hip_emu_free(std::map<char *, size_t> &blocks, void *p) {
    hipError_t r = hip_emu_call();
    if (!p) return r;
    std::map<char *, size_t>::iterator i = blocks.find(static_cast<char *>(p));
    if (i == blocks.end()) hip_emu_die("freed what is not an allocation");
    hip_emu_guard(p, i->second, 0);
    const size_t size_bytes = i->second;
    blocks.erase(i);
    std::map<char *, int>::iterator file = hip_emu().exported.find(static_cast<char *>(p));
    if (file == hip_emu().exported.end()) return free(p), r;
    munmap(p, size_bytes);
    close(file->second);
    hip_emu().exported.erase(file);
    return r;
}
static inline hipError_t hipMalloc(void **p, size_t size_bytes) {
    HIP_EMU_LOCK;
    if (size_bytes > hip_emu_free_bytes()) return *p = nullptr, hipErrorOutOfMemory;
    const hipError_t r = hip_emu_malloc(hip_emu().device_memory, p, size_bytes);
    if (*p) hip_emu().device_of[static_cast<char *>(*p)] = hip_emu_device;
    return r;
}
/* Fine-grained memory can be exported: it is a file, which other processes find by its number in this one. */
#define hipDeviceMallocFinegrained 1u
static inline hipError_t hipExtMallocWithFlags(void **p, size_t size_bytes, unsigned) {
    HIP_EMU_LOCK;
    const hipError_t r = hip_emu_call(hipErrorOutOfMemory);
    *p = nullptr;
    if (r != hipSuccess) return r;
    const int file = size_bytes && size_bytes <= hip_emu_free_bytes() ? memfd_create("hip_emu", MFD_CLOEXEC) : -1;
    if (file < 0) return hipErrorOutOfMemory;
    void *map = ftruncate(file, static_cast<off_t>(size_bytes)) == 0
                    ? mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (map == MAP_FAILED) return close(file), hipErrorOutOfMemory;
    memset(map, 0xff, size_bytes);
    *p = map;
    hip_emu().device_memory[static_cast<char *>(map)] = size_bytes;
    hip_emu().device_of[static_cast<char *>(map)] = hip_emu_device;
    hip_emu().exported[static_cast<char *>(map)] = file;
    return hipSuccess;
}
typedef struct { char reserved[64]; } hipIpcMemHandle_t;
#define hipIpcMemLazyEnablePeerAccess 1u
static inline hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *handle, void *p) {
    HIP_EMU_LOCK;
    const hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if (!hip_emu().exported.count(static_cast<char *>(p))) return hipErrorInvalidValue;
    memset(handle, 0, sizeof *handle);
    snprintf(handle->reserved, sizeof handle->reserved, "/proc/%d/fd/%d", static_cast<int>(getpid()),
             hip_emu().exported[static_cast<char *>(p)]);
    return hipSuccess;
}
static inline hipError_t hipIpcOpenMemHandle(void **p, hipIpcMemHandle_t handle, unsigned) {
    HIP_EMU_LOCK;
    const hipError_t r = hip_emu_call();
    *p = nullptr;
    if (r != hipSuccess) return r;
    if (hip_emu().peers == HIP_EMU_PEERS_REFUSED) return hipErrorInvalidValue;
    struct stat s;
    const int file = open(handle.reserved, O_RDWR);
    if (file < 0 || fstat(file, &s) != 0) return hipErrorInvalidValue;
    void *map = mmap(nullptr, static_cast<size_t>(s.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED) return hipErrorOutOfMemory;
    *p = map;
    hip_emu().device_memory[static_cast<char *>(map)] = static_cast<size_t>(s.st_size);
    hip_emu().device_of[static_cast<char *>(map)] = HIP_EMU_ELSEWHERE;
    hip_emu().imported[static_cast<char *>(map)] = static_cast<size_t>(s.st_size);
    return hipSuccess;
}
static inline hipError_t hipIpcCloseMemHandle(void *p) {
    HIP_EMU_LOCK;
    const hipError_t r = hip_emu_call();
    std::map<char *, size_t>::iterator i = hip_emu().imported.find(static_cast<char *>(p));
    if (i == hip_emu().imported.end()) hip_emu_die("closed what is not another process's memory");
    munmap(p, i->second);
    hip_emu().device_memory.erase(i->first);
    hip_emu().imported.erase(i);
    return r;
}
static inline hipError_t hipFree(void *p) { HIP_EMU_LOCK; return hip_emu_free(hip_emu().device_memory, p); }
static inline hipError_t hipHostMalloc(void **p, size_t size_bytes, unsigned flags) {
    HIP_EMU_LOCK;
    (void)flags;
    return hip_emu_malloc(hip_emu().host_memory, p, size_bytes);
}
static inline hipError_t hipHostFree(void *p) { HIP_EMU_LOCK; return hip_emu_free(hip_emu().host_memory, p); }

static inline hipError_t hipStreamCreateWithFlags(hipStream_t *out, unsigned flags) {
    HIP_EMU_LOCK;
    (void)flags;
    hipError_t r = hip_emu_call();
    *out = nullptr;
    if (r != hipSuccess) return r;
    *out = new std::shared_ptr<hip_emu_stream_state>(new hip_emu_stream_state);
    (**out)->device = hip_emu_device;
    (**out)->hangs = (**out)->busy = (**out)->waits = false;
    (**out)->issued = (**out)->done = 0;
    hip_emu().streams.push_back(*out);
    return hipSuccess;
}
static hipError_t hip_emu_locked_call() { HIP_EMU_LOCK; return hip_emu_call(); }
static inline hipError_t hipStreamSynchronize(hipStream_t s) {
    const hipError_t r = hip_emu_locked_call();
    if (r == hipSuccess || r == hipErrorLaunchFailure) hip_emu_finish(*s, (*s)->issued);
    HIP_EMU_LOCK;
    if ((*s)->hangs && hip_emu().peers == HIP_EMU_PEERS_HANG) hip_emu_die("a wait without end");
    return r == hipSuccess && hip_emu().lost[(*s)->device] ? hipErrorLaunchFailure : r;
}
static inline hipError_t hipStreamDestroy(hipStream_t s) {
    const hipError_t r = hip_emu_locked_call();
    hip_emu_finish(*s, (*s)->issued);
    HIP_EMU_LOCK;
    if ((*s)->hangs && hip_emu().peers == HIP_EMU_PEERS_HANG) hip_emu_die("a wait without end");
    for (size_t i = 0; i < hip_emu().streams.size(); i++)
        if (hip_emu().streams[i] == s) {
            hip_emu().streams.erase(hip_emu().streams.begin() + static_cast<std::ptrdiff_t>(i));
            break;
        }
    delete s;
    return r;
}

static inline hipError_t hipEventCreateWithFlags(hipEvent_t *out, unsigned flags) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    *out = nullptr;
    if (r != hipSuccess) return r;
    *out = new hip_emu_event_state;
    (*out)->device = hip_emu_device;
    (*out)->at = 0;
    (*out)->asked = 0;
    (*out)->timed = !(flags & hipEventDisableTiming);
    hip_emu().n_events++;
    return hipSuccess;
}
static inline hipError_t hipEventDestroy(hipEvent_t e) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    delete e;
    hip_emu().n_events--;
    return r;
}
static inline hipError_t hipEventRecord(hipEvent_t e, hipStream_t s) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if (e->device != (*s)->device || e->device != hip_emu_device) return hipErrorInvalidHandle;
    e->stream = *s;
    e->at = (*s)->issued + 1;
    e->asked = 0;
    std::shared_ptr<double> time_us(new double(0));
    e->time_us = time_us;
    return hip_emu_enqueue(s, [time_us] { *time_us = hip_emu_now_us(); });
}
static inline bool hip_emu_reached(hipEvent_t e) { return !e->stream || e->stream->done >= e->at; }
/* Not ready when first asked; the next question finds it finished. */
static inline hipError_t hipEventQuery(hipEvent_t e) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if (!hip_emu_reached(e) && e->asked++ == 0) return hipErrorNotReady;
    if (e->stream) hip_emu_force(e->stream, e->at);
    if (!hip_emu_reached(e)) return hipErrorNotReady; /* it hangs */
    return hip_emu().lost[e->device] ? hipErrorLaunchFailure : hipSuccess;
}
static inline hipError_t hipEventSynchronize(hipEvent_t e) {
    const hipError_t r = hip_emu_locked_call();
    if (r != hipSuccess) return r;
    if (e->stream) hip_emu_finish(e->stream, e->at);
    HIP_EMU_LOCK;
    return hip_emu().lost[e->device] ? hipErrorLaunchFailure : hipSuccess;
}
static inline hipError_t hipEventElapsedTime(float *ms, hipEvent_t a, hipEvent_t b) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if (!a->timed || !b->timed || !a->stream || !b->stream) return hipErrorInvalidHandle;
    if (!hip_emu_reached(a) || !hip_emu_reached(b)) return hipErrorNotReady;
    *ms = hip_emu().elapsed_ms < 0 ? static_cast<float>((*b->time_us - *a->time_us) * 1e-3) : hip_emu().elapsed_ms;
    return hipSuccess;
}
static inline hipError_t hipStreamWaitEvent(hipStream_t s, hipEvent_t e, unsigned flags) {
    HIP_EMU_LOCK;
    (void)flags;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    std::shared_ptr<hip_emu_stream_state> other = e->stream;
    uint64_t at = e->at;
    if (!other) return hipSuccess;
    return hip_emu_enqueue(s, [other, at] {
        if (!hip_emu().n_resting) hip_emu_force(other, at); /* else it has its turns in hip_emu_run_other */
        if ((other->waits || hip_emu().n_resting) && other->done < at) hip_emu().again = true;
    });
}

/* The device that a block belongs to. */
static int hip_emu_owner(const void *p) {
    std::map<char *, size_t>::const_iterator i =
        hip_emu().device_memory.upper_bound(static_cast<char *>(const_cast<void *>(p)));
    return hip_emu().device_of[(--i)->first];
}
static inline hipError_t hipDeviceCanAccessPeer(int *can, int device, int peer) {
    HIP_EMU_LOCK;
    const hipError_t r = hip_emu_call();
    (void)device, (void)peer;
    *can = hip_emu().peers != HIP_EMU_PEERS_REFUSED;
    return r;
}
static inline hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
    HIP_EMU_LOCK;
    const hipError_t r = hip_emu_call();
    bool &open = hip_emu().peers_open[hip_emu_device][peer];
    (void)flags;
    if (r != hipSuccess) return r;
    if (open) return static_cast<hipError_t>(704); /* as a real one: hipErrorPeerAccessAlreadyEnabled */
    open = true;
    return r;
}
static inline hipError_t hipMemcpyAsync(void *dst, const void *src, size_t n, hipMemcpyKind kind, hipStream_t s) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    const std::map<char *, size_t> *from =
        kind == hipMemcpyHostToDevice ? &hip_emu().host_memory : &hip_emu().device_memory;
    const std::map<char *, size_t> *to =
        kind == hipMemcpyDeviceToHost ? &hip_emu().host_memory : &hip_emu().device_memory;
    if (!hip_emu_lies_in(*from, src, n))
        hip_emu_die("an asynchronous copy from memory that is not pinned, or past device memory");
    if (!hip_emu_lies_in(*to, dst, n))
        hip_emu_die("an asynchronous copy to memory that is not pinned, or past device memory");
    const int peer = kind == hipMemcpyDeviceToDevice ? hip_emu_owner(src) : (*s)->device, here = (*s)->device;
    const int how = peer == here ? HIP_EMU_PEERS_OK : hip_emu().peers;
    if (peer != here) hip_emu().peer_copies++;
    if (kind == hipMemcpyDeviceToDevice && hip_emu_owner(dst) != here) hip_emu_die("a copy to another device's memory");
    if (peer != here && peer != HIP_EMU_ELSEWHERE && !hip_emu().peers_open[here][peer]) hip_emu_die("a copy from a peer without access to it");
    if (how == HIP_EMU_PEERS_HANG) (*s)->hangs = true;
    return hip_emu_enqueue(s, [=] {
        if (!hip_emu_lies_in(*from, src, n) || !hip_emu_lies_in(*to, dst, n))
            hip_emu_die("a queued copy uses memory that was freed");
        memmove(dst, src, n);
        if (how == HIP_EMU_PEERS_WRONG) static_cast<char *>(dst)[n / 2] ^= 1;
    });
}
static inline hipError_t hipMemcpy2DAsync(void *dst, size_t dst_stride, const void *src, size_t src_stride, size_t width,
                                          size_t n_rows, hipMemcpyKind kind, hipStream_t s) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if (kind != hipMemcpyHostToDevice || width > dst_stride || width > src_stride || n_rows == 0 ||
        !hip_emu_lies_in(hip_emu().host_memory, src, (n_rows - 1) * src_stride + width) ||
        !hip_emu_lies_in(hip_emu().device_memory, dst, (n_rows - 1) * dst_stride + width) || hip_emu_owner(dst) != (*s)->device)
        hip_emu_die("a copy of rows that is not from pinned memory to the stream's device, or past one of them");
    return hip_emu_enqueue(s, [=] {
        for (size_t i = 0; i < n_rows; i++)
            memcpy(static_cast<char *>(dst) + i * dst_stride, static_cast<const char *>(src) + i * src_stride, width);
    });
}
static inline hipError_t hipMemsetAsync(void *dst, int value, size_t n, hipStream_t s) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if (!hip_emu_lies_in(hip_emu().device_memory, dst, n)) hip_emu_die("memset past device memory");
    return hip_emu_enqueue(s, [=] {
        if (!hip_emu_lies_in(hip_emu().device_memory, dst, n))
            hip_emu_die("a queued memset uses memory that was freed");
        memset(dst, value, n);
    });
}

/* ---- a planted error ---- */

typedef std::map<char *, std::vector<char> > hip_emu_copy;

static hip_emu_copy hip_emu_copy_memory() {
    hip_emu_copy copy;
    std::map<char *, size_t> &blocks = hip_emu().device_memory;
    for (std::map<char *, size_t>::iterator i = blocks.begin(); i != blocks.end(); ++i)
        copy[i->first] = std::vector<char>(i->first, i->first + i->second);
    return copy;
}
static void hip_emu_flip_change(const hip_emu_copy &before) {
    for (hip_emu_copy::const_iterator i = before.begin(); i != before.end(); ++i)
        for (size_t at = 0; at + 4 <= i->second.size(); at += 4)
            if (memcmp(i->first + at, &i->second[at], 4) != 0) {
                i->first[at + 3] = static_cast<char>(i->first[at + 3] ^ 0x40);
                return;
            }
}
/* ---- graphs ---- */

static inline hipError_t hipStreamBeginCapture(hipStream_t s, hipStreamCaptureMode mode) {
    HIP_EMU_LOCK;
    (void)mode;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if ((*s)->captured) return hipErrorInvalidValue;
    (*s)->captured.reset(new std::vector<std::function<void()> >);
    return hipSuccess;
}
/* Ends the capture also when it fails. */
static inline hipError_t hipStreamEndCapture(hipStream_t s, hipGraph_t *out) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    *out = nullptr;
    if (r == hipSuccess && !(*s)->captured) r = hipErrorInvalidValue;
    if (r == hipSuccess) {
        *out = new hip_emu_graph;
        (*out)->nodes = (*s)->captured;
        hip_emu().n_graphs++;
    }
    (*s)->captured.reset();
    return r;
}
static inline hipError_t hipGraphInstantiate(hipGraphExec_t *out, hipGraph_t graph, hipGraphNode_t *node, char *log,
                                             size_t log_bytes) {
    HIP_EMU_LOCK;
    (void)node, (void)log, (void)log_bytes;
    hipError_t r = hip_emu_call();
    *out = nullptr;
    if (r != hipSuccess) return r;
    *out = new hip_emu_graph(*graph);
    hip_emu().n_graphs++;
    return hipSuccess;
}
static inline bool hip_emu_graphs_are_trusted() { HIP_EMU_LOCK; return hip_emu().trusted_graphs != 0; }
static inline hipError_t hipGraphLaunch(hipGraphExec_t exec, hipStream_t s) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    hip_emu().replays++;
    for (size_t i = hip_emu().stale_graphs ? 1 : 0; i < exec->nodes->size(); i++)
        hip_emu_enqueue(s, (*exec->nodes)[i]);
    return hipSuccess;
}
static inline hipError_t hipGraphDestroy(hipGraph_t graph) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    delete graph;
    hip_emu().n_graphs--;
    return r;
}
static inline hipError_t hipGraphExecDestroy(hipGraphExec_t exec) { return hipGraphDestroy(exec); }

/* ---- launches ---- */

static void hip_emu_add_fiber(hip_emu_machine *m) {
    void *stack =
        mmap(nullptr, hip_emu_stack_bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, 4096, PROT_NONE)) hip_emu_die("no memory for a fiber's stack");
    m->stacks.push_back(static_cast<char *>(stack));
    hip_emu_fiber f = hip_emu_fiber();
    /* a cache line further down each: tops at the same offset in their pages would share a few lines of the cache */
    char *top = static_cast<char *>(stack) + 4096 + hip_emu_stack_bytes - m->fibers.size() % 64 * 64;
    f.sp = hip_emu_first_sp(top, hip_emu_entry);
    m->fibers.push_back(f);
}

/* Threads begin forward, backward, or in a scattered order, blocks of every other pair of launches backward: what only
 * works in one order is a race. */
static unsigned hip_emu_step(unsigned n, uint64_t launch) {
    unsigned step = launch % 3 == 0 ? 1 : launch % 3 == 1 ? n - 1 : 7;
    while (step > 1) { /* coprime to n, so that all have a turn */
        unsigned a = n, b = step;
        while (b) { unsigned t = a % b; a = b; b = t; }
        if (a == 1) break;
        step--;
    }
    return step;
}

/* Machines of this OS thread that run no block. */
static thread_local std::vector<std::unique_ptr<hip_emu_machine> > hip_emu_idle;

/* Start or continue a machine's block.   Returns whether it is done; it rests otherwise. */
static bool hip_emu_continue(hip_emu_machine *m) {
    m->rests = false;
    hip_emu_here = m;
    hip_emu_swap(&m->main_sp, m->self->sp);
    if (m->rests) return false;
    if (m->cluster) m->cluster->blocks[m->rank] = nullptr, m->cluster->left[m->rank] = true;
    for (size_t i = 0; i < m->shared.size(); i++) free(m->shared[i].memory);
    m->shared.clear();
    return true;
}

/* Fibers for the threads of a block of this shape. */
static void hip_emu_shape(hip_emu_machine *m, const hip_emu_machine &like, unsigned wave) {
    const unsigned n = like.n_threads;
    while (m->fibers.size() < n) hip_emu_add_fiber(m);
    m->block = like.block;
    m->n_threads = n;
    m->wave = wave;
    m->waves.resize((n + wave - 1) / wave);
    for (unsigned i = 0; i < n; i++) {
        m->fibers[i].thread = dim3(i % m->block.x, i / m->block.x % m->block.y, i / m->block.x / m->block.y);
        m->fibers[i].lane = i % wave;
        m->fibers[i].wave = &m->waves[i / wave];
    }
    for (unsigned w = 0; w < m->waves.size(); w++) m->waves[w].size = n - w * wave < wave ? n - w * wave : wave;
}

/* A machine whose fibers are the threads of block `index`. */
static std::unique_ptr<hip_emu_machine> hip_emu_begin(const hip_emu_machine &like, dim3 index, unsigned wave, uint64_t launch) {
    if (hip_emu_idle.empty()) hip_emu_idle.emplace_back(new hip_emu_machine);
    std::unique_ptr<hip_emu_machine> own = std::move(hip_emu_idle.back());
    hip_emu_idle.pop_back();
    hip_emu_machine *m = own.get();
    const unsigned n = like.n_threads;
    const unsigned step = hip_emu_step(n, launch), first = launch % 3 == 1 ? n - 1 : 0;
    m->grid = like.grid;
    m->launch = launch;
    m->index = index;
    m->dynamic_bytes = like.dynamic_bytes;
    m->body = like.body;
    if (m->n_threads != n || m->wave != wave || m->block.x != like.block.x || m->block.y != like.block.y) hip_emu_shape(m, like, wave);
    m->n_finished = m->arrived = m->idle = m->arriving = m->arrivals = 0;
    m->cluster = like.cluster;
    m->rank = like.rank;
    if (m->cluster) m->cluster->blocks[m->rank] = m;
    for (unsigned i = 0; m->cluster && i < n; i++) m->fibers[i].cluster_waits = 0;
    hip_emu_fiber *last = &m->fibers[first];
    m->self = last;
    for (unsigned i = 1, turn = first; i < n; i++) {
        turn += step;
        if (turn >= n) turn -= n;
        last = last->next = &m->fibers[turn];
    }
    last->next = nullptr;
    m->ready.first = m->self->next;
    m->ready.last = last;
    for (size_t w = 0; w < m->waves.size(); w++) {
        m->waves[w].arrived = m->waves[w].finished = 0;
        m->waves[w].waiting.first = nullptr;
    }
    return own;
}

/* Other processes may write what a block waits for. */
static bool hip_emu_others() {
    const struct timespec nap = {0, 200000};
    if (!hip_emu().imported.empty()) nanosleep(&nap, nullptr);
    return !hip_emu().imported.empty();
}

/* A turn of each block that rests.   Returns whether one has left or arrived somewhere. */
static bool hip_emu_go_on(std::vector<std::unique_ptr<hip_emu_machine> > *resting, bool others_ran) {
    const size_t n = resting->size();
    const uint64_t arrivals = hip_emu_all_arrivals;
    for (size_t i = 0; i < resting->size();) {
        hip_emu_machine *m = (*resting)[i].get();
        m->others_ran = others_ran;
        if (!hip_emu_continue(m)) i++;
        else {
            hip_emu_idle.push_back(std::move((*resting)[i]));
            resting->erase(resting->begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
    return resting->size() < n || hip_emu_all_arrivals != arrivals;
}

/* Blocks run one after the other; those that rest go on when all have begun, of a cluster when its blocks have, and when
 * other streams' work has run. cluster: 0, or how many blocks along y are one. */
static void hip_emu_run(dim3 grid, dim3 block, size_t dynamic_bytes, unsigned cluster, unsigned wave,
                        const std::function<void()> &body) {
    std::vector<std::unique_ptr<hip_emu_machine> > resting;
    const unsigned each = cluster ? cluster : 1;
    const uint64_t launch = ++hip_emu().launches, n_blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    std::vector<hip_emu_cluster> clusters(cluster ? static_cast<size_t>(n_blocks / each) : 0);
    hip_emu_machine like;
    like.grid = grid;
    like.block = block;
    like.dynamic_bytes = dynamic_bytes;
    like.n_threads = block.x * block.y * block.z;
    like.body = &body;
    bool flip = like.n_threads >= 128 && hip_emu().flip && --hip_emu().flip == 0, goes_on = true;
    hip_emu_copy before;
    if (flip) before = hip_emu_copy_memory();
    for (size_t i = 0; i < clusters.size(); i++) clusters[i].blocks.resize(each), clusters[i].left.resize(each);
    for (uint64_t i = 0; i < n_blocks; i++) {
        const uint64_t b = launch / 2 % 2 ? n_blocks - 1 - i : i, c = b / each;
        const unsigned rank = static_cast<unsigned>(b % each);
        const dim3 index(static_cast<unsigned>(c % grid.x), static_cast<unsigned>(c / grid.x % (grid.y / each)) * each + rank,
                         static_cast<unsigned>(c / grid.x / (grid.y / each)));
        like.cluster = cluster ? &clusters[static_cast<size_t>(c)] : nullptr;
        like.rank = rank;
        std::unique_ptr<hip_emu_machine> m = hip_emu_begin(like, index, wave, launch);
        (hip_emu_continue(m.get()) ? hip_emu_idle : resting).push_back(std::move(m));
        while (cluster && (i + 1) % each == 0 && hip_emu_go_on(&resting, true)) {}
    }
    if (!resting.empty() && hip_emu().rccl == HIP_EMU_RCCL_FAST) {
        const struct timespec nap = {0, 10000000};
        nanosleep(&nap, nullptr);
    }
    hip_emu().n_resting++;
    while (!resting.empty()) {
        const bool moved = hip_emu_go_on(&resting, goes_on);
        goes_on = resting.empty() || moved || hip_emu_run_other() || hip_emu_others();
    }
    hip_emu().n_resting--;
    if (flip) hip_emu_flip_change(before);
}

template <unsigned... I> struct hip_emu_list {};
template <unsigned N, unsigned... I> struct hip_emu_count : hip_emu_count<N - 1, N - 1, I...> {};
template <unsigned... I> struct hip_emu_count<0, I...> { typedef hip_emu_list<I...> type; };

template <class... P> struct hip_emu_closure { /* a kernel with its arguments, evaluated at the launch */
    void (*kernel)(P...);
    std::tuple<P...> args;
    template <unsigned... I> void call(hip_emu_list<I...>) const { kernel(std::get<I>(args)...); }
    void operator()() const { call(typename hip_emu_count<sizeof...(P)>::type()); }
};

template <class... P, class... A>
static hipError_t hip_emu_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic_bytes, unsigned cluster,
                                 hipStream_t s, A... args) {
    HIP_EMU_LOCK;
    hipError_t r = hip_emu_call();
    if (r != hipSuccess) return r;
    if (hip_emu().no_kernels) return hipErrorInvalidDeviceFunction;
    if ((*s)->device != hip_emu_device) return hipErrorInvalidHandle;
    unsigned n = block.x * block.y * block.z, wave = hip_emu_device % 2 == 0 ? 32 : 64;
    if (n == 0 || n > hip_emu_max_threads || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 ||
        grid.z > 65535 || (cluster && (cluster > 8 || grid.y % cluster)))
        return hipErrorInvalidValue;
    hip_emu_closure<P...> closure = {kernel, std::tuple<P...>(args...)};
    std::function<void()> body = closure;
    return hip_emu_enqueue(s, [=] { hip_emu_run(grid, block, dynamic_bytes, cluster, wave, body); });
}

/* ---- controls ---- */

extern "C" {
void hip_emu_order(int order, uint32_t seed) {
    HIP_EMU_LOCK;
    hip_emu().order = order;
    hip_emu().random = seed ? seed : 1;
}
void hip_emu_fail_call(uint64_t n, int forever) {
    HIP_EMU_LOCK;
    hip_emu().fail_call = n;
    hip_emu().fail_forever = forever != 0;
    hip_emu().broken = false;
}
void hip_emu_fail_work(uint64_t n) { HIP_EMU_LOCK; hip_emu().fail_work = n; }
void hip_emu_flip_result(uint64_t n) { HIP_EMU_LOCK; hip_emu().flip = n; }
void hip_emu_memory(int device, size_t size_bytes) { HIP_EMU_LOCK; hip_emu().memory[device] = size_bytes; }
void hip_emu_peers(int how) { HIP_EMU_LOCK; hip_emu().peers = how; }
void hip_emu_rccl(int how) { HIP_EMU_LOCK; hip_emu().rccl = how; }
uint64_t hip_emu_rccl_transfers(void) { HIP_EMU_LOCK; return hip_emu().rccl_transfers; }
uint64_t hip_emu_peer_copies(void) { HIP_EMU_LOCK; return hip_emu().peer_copies; }
void hip_emu_recover(void) { HIP_EMU_LOCK; for (int i = 0; i < 4; i++) hip_emu().lost[i] = false; }
void hip_emu_devices(int n, int error) { HIP_EMU_LOCK; hip_emu().n_devices = n; hip_emu().count_error = error; }
void hip_emu_units(int n) { HIP_EMU_LOCK; hip_emu().n_units = n; }
void hip_emu_no_kernels(int on) { HIP_EMU_LOCK; hip_emu().no_kernels = on; }
void hip_emu_matrix_unit(int device, int kind) { HIP_EMU_LOCK; hip_emu_matrix_kind[device] = kind; }
void hip_emu_fused_block(int device, unsigned threads) { HIP_EMU_LOCK; hip_emu_fused_threads[device] = threads; }
void hip_emu_wrong_units(int kinds) { HIP_EMU_LOCK; hip_emu_wrong_kinds = kinds; }
void hip_emu_trusted_graphs(int on) { HIP_EMU_LOCK; hip_emu().trusted_graphs = on; }
void hip_emu_stale_graphs(int on) { HIP_EMU_LOCK; hip_emu().stale_graphs = on; }
void hip_emu_elapsed(float ms) { HIP_EMU_LOCK; hip_emu().elapsed_ms = ms; }
hip_emu_counts hip_emu_get_counts(void) {
    HIP_EMU_LOCK;
    hip_emu_state &e = hip_emu();
    uint64_t bytes = 0;
    for (std::map<char *, size_t>::iterator i = e.device_memory.begin(); i != e.device_memory.end(); ++i)
        bytes += i->second;
    hip_emu_counts c = {static_cast<uint32_t>(e.device_memory.size()), static_cast<uint32_t>(e.host_memory.size()),
                        static_cast<uint32_t>(e.streams.size()), e.n_events, e.n_graphs, e.n_comms, e.calls, e.launches,
                        e.replays, bytes};
    return c;
}
void hip_emu_guard(void *p, size_t n, int on) {
#ifdef HIP_EMU_ASAN
    if (on) __asan_poison_memory_region(p, n);
    else __asan_unpoison_memory_region(p, n);
#else
    (void)p, (void)n, (void)on;
#endif
}
}

#endif /* ROCMFORGE_HIP_EMU */
#endif
