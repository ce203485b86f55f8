/* rccl_emu.h: the calls of RCCL (and NCCL) that rocmforge_kernels.hip uses, for its emulation on the CPU (hip_emu.h, which comes
 * first). Ranks are processes of one machine, or devices of one; what they send lies in a file that all of them map, whose name is
 * the id. As the real ones with `blocking` 0: a call that is in progress says so at least once; sends and receives are work of a stream, those of a
 * group go on together, and wait for other ranks without end, unless the communicator is aborted. Each call counts as one of the
 * runtime's, which hip_emu_fail_call makes fail. */
#ifndef RCCL_EMU_H
#define RCCL_EMU_H

#include <fcntl.h>
#include <unistd.h>
#include <atomic>

#define NCCL_VERSION_CODE 21400
typedef struct { char internal[128]; } ncclUniqueId;
typedef enum {
    ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclSystemError = 2, ncclInternalError = 3, ncclInvalidArgument = 4,
    ncclInvalidUsage = 5, ncclRemoteError = 6, ncclInProgress = 7, ncclNumResults = 8
} ncclResult_t;
typedef enum { ncclInt8 = 0 } ncclDataType_t;
typedef struct { int blocking; } ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {1}

/* Bytes on their way from one rank to another: a ring. */
struct rccl_emu_pipe {
    std::atomic<uint64_t> written, read;
    char bytes[8192];
};
struct rccl_emu_shared {
    std::atomic<int> joined[16]; /* the number of ranks that each joined with; 0: it has not */
    rccl_emu_pipe pipe[16][16];  /* [from][to] */
};
struct rccl_emu_comm {
    std::atomic<int> n_holders; /* the communicator, and work in streams */
    std::atomic<bool> aborted;
    rccl_emu_shared *shared;
    int n, rank, asked;
    char path[64];
};
typedef rccl_emu_comm *ncclComm_t;

static void rccl_emu_drop(ncclComm_t c) {
    if (--c->n_holders > 0) return;
    munmap(c->shared, sizeof *c->shared);
    delete c;
}

struct rccl_emu_op {
    char *at;
    size_t left;
    int peer;
    bool is_send;
    ncclComm_t comm;
    hipStream_t stream;
};

static uint64_t rccl_emu_moved; /* bytes, by this process; guarded by the emulation's lock */

/* Move what can be moved. Of one peer, in order. */
static bool rccl_emu_progress(ncclComm_t c, std::vector<rccl_emu_op> &ops) {
    bool all = true, waits[2][16] = {{false}};
    for (rccl_emu_op &op : ops) {
        if (op.left == 0) continue;
        if (waits[op.is_send][op.peer]) continue;
        rccl_emu_pipe &p = op.is_send ? c->shared->pipe[c->rank][op.peer] : c->shared->pipe[op.peer][c->rank];
        while (op.left) {
            const uint64_t written = p.written, read = p.read;
            const uint64_t at = (op.is_send ? written : read) % sizeof p.bytes,
                           there = op.is_send ? sizeof p.bytes - (written - read) : written - read;
            size_t n = op.left < there ? op.left : static_cast<size_t>(there);
            if (n > sizeof p.bytes - at) n = static_cast<size_t>(sizeof p.bytes - at);
            if (n == 0) break;
            if (op.is_send) memcpy(p.bytes + at, op.at, n), p.written += n;
            else memcpy(op.at, p.bytes + at, n), p.read += n;
            op.at += n, op.left -= n, rccl_emu_moved += n;
        }
        waits[op.is_send][op.peer] = op.left > 0;
        all &= op.left == 0;
    }
    return all;
}

static inline const char *ncclGetErrorString(ncclResult_t e) {
    static const char *const text[] = {"no error", "unhandled cuda error", "system error", "internal error", "invalid argument",
                                       "invalid usage", "remote process exited", "in progress", "unknown"};
    return text[e];
}
static ncclResult_t rccl_emu_call() {
    HIP_EMU_LOCK;
    return hip_emu_call() == hipSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

static inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    const ncclResult_t e = rccl_emu_call();
    if (e != ncclSuccess) return e;
    if (hip_emu().rccl == HIP_EMU_RCCL_NONE) return ncclSystemError;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/tmp/rccl_emu.XXXXXX");
    const int file = mkstemp(id->internal);
    if (file < 0 || ftruncate(file, sizeof(rccl_emu_shared)) != 0) return ncclSystemError;
    close(file);
    return ncclSuccess;
}

static bool rccl_emu_all_joined(ncclComm_t c) {
    int n = 0;
    for (int k = 0; k < c->n; k++) n += c->shared->joined[k] > 0;
    if (n == c->n) (void)unlink(c->path); /* all have it mapped */
    return n == c->n;
}
static inline ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int n, ncclUniqueId id, int rank, ncclConfig_t *config) {
    const ncclResult_t e = rccl_emu_call();
    if (e != ncclSuccess) return e;
    if (config->blocking) hip_emu_die("a communicator that blocks");
    const int file = open(id.internal, O_RDWR);
    if (file < 0) return ncclSystemError;
    void *map = mmap(nullptr, sizeof(rccl_emu_shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED) return ncclSystemError;
    ncclComm_t c = new rccl_emu_comm;
    c->n_holders = 1, c->aborted = false;
    c->shared = static_cast<rccl_emu_shared *>(map);
    c->n = n, c->rank = rank, c->asked = 0;
    snprintf(c->path, sizeof c->path, "%.60s", id.internal);
    c->shared->joined[rank] = n;
    HIP_EMU_LOCK;
    hip_emu().n_comms++;
    *out = c;
    return ncclInProgress;
}
static inline ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *state) {
    const ncclResult_t e = rccl_emu_call();
    if (e != ncclSuccess) return e;
    *state = c->asked++ == 0 || !rccl_emu_all_joined(c) ? ncclInProgress : ncclSuccess;
    return ncclSuccess;
}

static void rccl_emu_end(ncclComm_t c) {
    HIP_EMU_LOCK;
    hip_emu().n_comms--;
    (void)unlink(c->path);
    rccl_emu_drop(c);
}
static inline ncclResult_t ncclCommFinalize(ncclComm_t c) {
    const ncclResult_t e = rccl_emu_call();
    c->asked = 0;
    return e == ncclSuccess ? ncclInProgress : e;
}
static inline ncclResult_t ncclCommDestroy(ncclComm_t c) {
    const ncclResult_t e = rccl_emu_call();
    if (c->n_holders > 1) hip_emu_die("a communicator is destroyed that is in use");
    rccl_emu_end(c);
    return e;
}
static inline ncclResult_t ncclCommAbort(ncclComm_t c) {
    const ncclResult_t e = rccl_emu_call();
    c->aborted = true;
    rccl_emu_end(c);
    return e;
}

static thread_local std::vector<rccl_emu_op> *rccl_emu_group; /* of the thread; NULL: none was begun */

static inline ncclResult_t ncclGroupStart() {
    const ncclResult_t e = rccl_emu_call();
    if (e != ncclSuccess) return e;
    if (rccl_emu_group) hip_emu_die("a group in a group");
    rccl_emu_group = new std::vector<rccl_emu_op>;
    return ncclSuccess;
}
static ncclResult_t rccl_emu_add(const void *p, size_t n, int peer, ncclComm_t c, hipStream_t s, bool is_send) {
    const ncclResult_t e = rccl_emu_call();
    if (e != ncclSuccess) return e;
    if (!rccl_emu_group) hip_emu_die("a transfer in no group");
    if (peer < 0 || peer >= c->n || peer == c->rank) return ncclInvalidArgument;
    HIP_EMU_LOCK;
    if (!hip_emu_lies_in(hip_emu().device_memory, p, n)) hip_emu_die("a transfer of what is not device memory");
    rccl_emu_op op = {static_cast<char *>(const_cast<void *>(p)), n, peer, is_send, c, s};
    if (hip_emu_owner(p) != (*s)->device) hip_emu_die("a transfer of another device's memory");
    rccl_emu_group->push_back(op);
    return ncclSuccess;
}
static inline ncclResult_t ncclSend(const void *p, size_t n, ncclDataType_t, int peer, ncclComm_t c, hipStream_t s) {
    return rccl_emu_add(p, n, peer, c, s, true);
}
static inline ncclResult_t ncclRecv(void *p, size_t n, ncclDataType_t, int peer, ncclComm_t c, hipStream_t s) {
    return rccl_emu_add(p, n, peer, c, s, false);
}
static void rccl_emu_nap() {
    const struct timespec nap = {0, 2000000};
    nanosleep(&nap, nullptr);
}
/* A communicator's part of a group. here: of ranks of this process, of which it lets the others work. */
static void rccl_emu_work(ncclComm_t c, std::vector<rccl_emu_op> &ops, bool here) {
    const int how = here ? hip_emu().rccl : HIP_EMU_RCCL_FAST;
    if (how == HIP_EMU_RCCL_HANG && !c->aborted) hip_emu().again = true;
    if (c->aborted || how == HIP_EMU_RCCL_HANG) return;
    for (bool more = true; !rccl_emu_progress(c, ops);) {
        if (!more) return (void)(hip_emu().again = true);
        const uint64_t moved = rccl_emu_moved;
        more = here && (hip_emu_run_other() || rccl_emu_moved > moved);
    }
    if (how == HIP_EMU_RCCL_SLOW) rccl_emu_nap();
    if (how == HIP_EMU_RCCL_WRONG && !ops.back().is_send) ops.back().at[-1] ^= 1;
}

/* Ends the group also where it fails; then nothing was given to the streams. */
static inline ncclResult_t ncclGroupEnd() {
    const ncclResult_t e = rccl_emu_call();
    if (!rccl_emu_group) hip_emu_die("the end of no group");
    const std::unique_ptr<std::vector<rccl_emu_op> > all(rccl_emu_group);
    rccl_emu_group = nullptr;
    if (e != ncclSuccess || all->empty()) return e;
    HIP_EMU_LOCK;
    const bool here = all->front().comm != all->back().comm;
    for (size_t i = 0; i < all->size();) {
        const ncclComm_t c = (*all)[i].comm;
        const hipStream_t stream = (*all)[i].stream;
        std::shared_ptr<std::vector<rccl_emu_op> > ops(new std::vector<rccl_emu_op>);
        for (; i < all->size() && (*all)[i].comm == c; i++) ops->push_back((*all)[i]);
        std::shared_ptr<rccl_emu_comm> held(c, rccl_emu_drop);
        c->n_holders++;
        c->asked = 0;
        if (here) hip_emu().rccl_transfers += ops->size();
        (void)hip_emu_enqueue(stream, [held, ops, here] { rccl_emu_work(held.get(), *ops, here); });
    }
    return ncclInProgress;
}

#endif
