/* hip_ranks.c: ranks (rf_rank_id): processes with an emulated GPU each, joined by tests/rccl_emu.h. By tensors the bits are those of
 * one process with the same GPUs, by layers those of one GPU, on all ranks alike; what does not fit together, who leaves, who is
 * late, and each call that fails, is an error on all of them, in time, and leaves nothing. */
#include "../rocmforge.h"
#include "hip_emu.h"
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_RANKS = 3, N_PROMPT = 9, N_STEPS = 3, N_PARTS = 4, MAX_LOGITS = 2048, N_TOKENS = 8, SECONDS = 60 };

/* What a process is to do. */
typedef struct job {
    const char *device;
    const char *path; /* of a file, or NULL and */
    const mg_buf *file;
    rf_device_desc desc;
    uint32_t n_ctx;         /* 0: 32 */
    rf_model_desc model;
    int peers;              /* HIP_EMU_PEERS_...: how processes read each other's memory */
    int copied;             /* the file is not mapped */
    int ends;               /* after the prompt: 1: the process, 2: it closes all */
    uint64_t fail_call;     /* of the runtime and RCCL */
    int forever;
    uint64_t fail_work;
} job;

/* What it says. */
typedef struct report {
    rf_result result;
    char text[256], note[160]; /* of the device */
    int bad;         /* checks that failed */
    double seconds;
    uint64_t calls;  /* of the runtime and RCCL */
    uint64_t live;   /* allocations, streams, communicators that are left */
    uint64_t weights;/* bytes of device memory after the prompt */
    uint32_t tile_rows[2]; /* rf_session_stats */
    float logits[N_PARTS][MAX_LOGITS];
    int32_t tokens[N_TOKENS];
} report;

static report *reports; /* [MAX_RANKS], shared */

static rf_result say(rig *r, report *to, int part) {
    float *row = NULL;
    const rf_result res = rf_session_get_logits(r->s, 0, &row, &r->err);
    if (res == RF_OK) memcpy(to->logits[part], row, r->n_vocab * sizeof *row);
    return res;
}
static int on_token(int32_t token, void *user) {
    report *to = user;
    for (int i = 0; i < N_TOKENS; i++)
        if (to->tokens[i] < 0) return to->tokens[i] = token, 0;
    return 0;
}

/* A prompt in micro-batches, tokens, a copied sequence and steps of two rows, after a cut, and a generation with seeds. */
static rf_result speak(const job *j, rig *r, report *to) {
    int32_t tokens[N_PROMPT + N_STEPS];
    const rf_token_row rows[] = {{.token = 5, .seq = 0, .pos = RF_POS_NEXT, .want_logits = 1}, {.token = 6, .seq = 1, .pos = RF_POS_NEXT, .want_logits = 1}};
    rf_sampler sampler;
    mg_tokens(tokens, N_PROMPT + N_STEPS, r->n_vocab, 3);
    rf_result res = rf_session_forward(r->s, tokens, N_PROMPT, NULL, &r->err);
    to->weights = hip_emu_get_counts().bytes;
    if (res == RF_OK && j->ends == 1) _exit(0);
    if (res == RF_OK && j->ends) return res;
    for (int i = 0; res == RF_OK && i < N_STEPS; i++) res = rf_session_forward(r->s, tokens + N_PROMPT + i, 1, NULL, &r->err);
    if (res == RF_OK) res = say(r, to, 0);
    if (res == RF_OK) res = rf_session_copy(r->s, 0, 1, &r->err);
    if (res == RF_OK) res = rf_session_eval(r->s, rows, 2, &r->err);
    if (res == RF_OK) res = say(r, to, 1);
    if (res == RF_OK) res = rf_session_truncate(r->s, 0, 4, NULL, &r->err);
    if (res == RF_OK) res = rf_session_forward(r->s, tokens + 4, 3, NULL, &r->err);
    if (res == RF_OK) res = say(r, to, 2);
    if (res == RF_OK && j->desc.ranks > 1) { /* what ranks cannot do */
        static saved file;
        rf_drafter *drafter = NULL;
        const rf_session_io io = {.write_fn = saved_write, .user = &file};
        CHECK(rf_drafter_open(r->m, NULL, &drafter, &r->err) == RF_ERR_UNSUPPORTED, "%s", r->err.text);
        file.n = 0;
        CHECK(rf_session_save(r->s, 0, &io, &r->err) == RF_ERR_UNSUPPORTED && file.n == 0, "%s", r->err.text);
    }
    if (res == RF_OK) res = rf_sampler_init(&sampler, &(rf_sampler_desc){.temperature = 1, .seed = 7}, &r->err);
    const rf_generate_desc d = {.ids = tokens, .n_ids = 6, .max_tokens = N_TOKENS, .sampler = &sampler, .on_token = on_token, .user = to};
    if (res == RF_OK) res = rf_generate(r->s, &d, NULL, &r->err);
    return res == RF_OK ? say(r, to, 3) : res;
}

/* The process. */
static void work(const job *j, report *to) {
    rig r;
    const rf_session_desc session = {.n_ctx = j->n_ctx ? j->n_ctx : 32, .n_seq_max = 2, .n_batch = 4, .n_logits_max = 2};
    const double start = (double)time(NULL);
    rft_bad = 0;
    memset(to, 0, sizeof *to);
    memset(to->tokens, -1, sizeof to->tokens);
    const hip_emu_counts before = hip_emu_get_counts();
    hip_emu_fail_call(j->fail_call, j->forever);
    hip_emu_fail_work(j->fail_work);
    hip_emu_peers(j->peers);
    to->result = rig_try(&r, &(rig_how){.path = j->path, .file = j->file, .mode = j->copied ? COPIED : MAPPED, .device = j->device, .device_desc = &j->desc, .model = &j->model, .session = &session});
    if (to->result == RF_OK) memcpy(to->note, rf_device_get_info(r.d).note, sizeof to->note);
    hip_emu_peers(HIP_EMU_PEERS_OK); /* a copy that hangs ends, so that all can be closed */
    if (to->result == RF_OK) to->result = speak(j, &r, to);
    if (to->result == RF_OK) memcpy(to->tile_rows, rf_session_get_stats(r.s).tile_rows, sizeof to->tile_rows);
    snprintf(to->text, sizeof to->text, "%s", r.err.text);
    rig_close(&r);
    const hip_emu_counts now = hip_emu_get_counts();
    to->calls = now.calls - before.calls;
    to->live = now.allocations + now.host_allocations + now.streams + now.events + now.comms;
    to->seconds = (double)time(NULL) - start;
    to->bad = rft_bad;
}

/* n processes, and their reports. They have SECONDS. */
static void work_all(const job *jobs, int n) {
    pid_t child[MAX_RANKS];
    int status[MAX_RANKS] = {0}, left = n;
    memset(reports, 0xff, MAX_RANKS * sizeof *reports);
    fflush(stdout);
    for (int i = 0; i < n; i++) {
        child[i] = fork();
        if (child[i] != 0) continue;
        work(&jobs[i], &reports[i]);
        fflush(stdout);
        _exit(0);
    }
    for (int turn = 0; left && turn < SECONDS * 1000; turn++) {
        for (int i = 0; i < n; i++)
            if (child[i] && waitpid(child[i], &status[i], WNOHANG) == child[i]) child[i] = 0, left--;
        usleep(1000);
    }
    for (int i = 0; i < n; i++) {
        if (jobs[i].desc.rank_id) unlink((const char *)jobs[i].desc.rank_id); /* where not all have joined */
        if (child[i]) kill(child[i], SIGKILL), waitpid(child[i], &status[i], 0);
        CHECK(status[i] == 0, "rank %d of %d: %s", i, n, child[i] ? "it hangs" : "it crashed");
        CHECK(jobs[i].ends == 1 || reports[i].bad == 0, "rank %d of %d: %d checks failed", i, n, reports[i].bad);
        CHECK(jobs[i].ends == 1 || reports[i].live == 0, "rank %d of %d: %u objects are left", i, n, (unsigned)reports[i].live);
    }
}

/* The same for each rank but its number. */
static void make_jobs(job *jobs, int n, const job *like, uint8_t *id) {
    static const char *const devices[MAX_RANKS] = {"hip:0", "hip:2", "hip:1"};
    rf_error err = {0};
    CHECK(rf_rank_id(id, &err) == RF_OK, "%s", err.text);
    for (int i = 0; i < n; i++) {
        jobs[i] = *like;
        jobs[i].device = devices[i];
        jobs[i].desc.ranks = (uint32_t)n, jobs[i].desc.rank = (uint32_t)i, jobs[i].desc.rank_id = id;
        if (!jobs[i].desc.rank_wait_ms) jobs[i].desc.rank_wait_ms = 20000;
    }
}

static int same_words(const report *a, const report *b) {
    return memcmp(a->logits, b->logits, sizeof a->logits) == 0 && memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0;
}

/* n ranks say what one process says, that has the devices `alone`. */
static void same_case(const char *what, int n, const job *like, const char *alone) {
    static report want;
    uint8_t id[RF_RANK_ID_BYTES];
    job one = *like, jobs[MAX_RANKS];
    one.device = alone, one.peers = HIP_EMU_PEERS_OK;
    work_all(&one, 1);
    want = reports[0];
    CHECK(want.result == RF_OK && want.tokens[N_TOKENS - 1] >= 0, "%s on %s: %s", what, alone, want.text);
    make_jobs(jobs, n, like, id);
    work_all(jobs, n);
    for (int i = 0; i < n; i++) {
        CHECK(reports[i].result == RF_OK, "%s, rank %d: %s", what, i, reports[i].text);
        CHECK(same_words(&want, &reports[i]), "%s, rank %d of %d: other bits than %s", what, i, n, alone);
    }
}

static const mg_options dense = {.type = MG_F32, .n_layers = 3, .n_embd = 512, .n_heads = 8, .n_kv_heads = 4, .n_ff = 160, .seed = 9, .rope_freqs = 1};

static void tensors(const mg_options *model, int copied) {
    mg_buf file = {0};
    mg_llama(&file, model);
    const job like = {.file = &file, .copied = copied, .desc = {.n_threads = 2, .split = RF_SPLIT_TENSORS}};
    same_case("by tensors", 2, &like, "hip:0,2");
    CHECK(!reports[0].note[0] && !reports[1].note[0], "%s, %s", reports[0].note, reports[1].note);
    mg_free(&file);
}
static void test_tensors(void) {
    tensors(&(mg_options){.type = MG_Q8_0, .arch = "qwen3", .n_heads = 8, .n_kv_heads = 4, .n_ff = 224, .seed = 9, .tied = 1, .bias = 1}, 1);
    tensors(&(mg_options){.type = MG_Q8_0, .arch = "qwen3moe", .n_heads = 8, .n_kv_heads = 4, .n_experts = 8, .n_used = 3, .seed = 9}, 0);
}
static void test_tensors_of_floats(void) { tensors(&dense, 0); }

static void test_tensors_of_three(void) {
    mg_buf file = {0};
    mg_llama(&file, &dense);
    same_case("by tensors", 3, &(job){.file = &file, .desc = {.n_threads = 2, .split = RF_SPLIT_TENSORS}}, "hip:0,2,1");
    mg_free(&file);
}

/* Where one rank cannot read the others' memory, or does so wrongly or without end, all say so, and sums go by RCCL: the same bits. */
static void test_tensors_by_rccl(void) {
    static const char *const why[] = {NULL, "hipIpcOpenMemHandle", "wrong bytes", "a copy hangs"};
    mg_buf file = {0};
    uint8_t id[RF_RANK_ID_BYTES];
    job jobs[MAX_RANKS];
    mg_llama(&file, &(mg_options){.type = MG_F32, .n_layers = 3, .n_embd = 256, .n_heads = 8, .n_kv_heads = 4, .n_ff = 160, .seed = 9, .rope_freqs = 1});
    job like = {.file = &file, .desc = {.n_threads = 2, .split = RF_SPLIT_TENSORS}, .peers = HIP_EMU_PEERS_REFUSED};
    same_case("by tensors, by RCCL", 3, &like, "hip:0,2,1");
    like.peers = HIP_EMU_PEERS_OK, like.device = "hip:0,2";
    work_all(&like, 1);
    const report want = reports[0];
    CHECK(want.result == RF_OK, "%s", want.text);
    for (int how = HIP_EMU_PEERS_REFUSED; how <= HIP_EMU_PEERS_HANG; how++) {
        make_jobs(jobs, 2, &like, id);
        jobs[1].peers = how;
        work_all(jobs, 2);
        for (int i = 0; i < 2; i++) CHECK(reports[i].result == RF_OK && same_words(&want, &reports[i]), "%d, rank %d: %s", how, i, reports[i].text);
        CHECK(strstr(reports[1].note, "sums by RCCL") && strstr(reports[1].note, why[how]), "%d: '%s'", how, reports[1].note);
        CHECK(strstr(reports[0].note, "sums by RCCL: rank 1 cannot copy from others"), "%d: '%s'", how, reports[0].note);
    }
    mg_free(&file);
}

/* Dense models, and families with other states; each rank has its layers' weights alone. */
static void test_layers(void) {
    mg_buf file = {0};
    uint64_t most = 0, all = 0;
    mg_llama(&file, &(mg_options){.type = MG_F32, .n_layers = 6, .n_ff = 512, .seed = 4});
    const job like = {.file = &file, .copied = 1, .desc = {.n_threads = 2}};
    same_case("by layers", 2, &like, "hip:0");
    for (int i = 0; i < 2; i++) all += reports[i].weights, most = reports[i].weights > most ? reports[i].weights : most;
    CHECK(all > file.n && most < all * 2 / 3, "%u of %u bytes of device memory on one rank", (unsigned)most, (unsigned)all);
    mg_free(&file);
    same_case("gemma4", 2, &(job){.path = "tests/family/gemma4.gguf", .desc = {.n_threads = 2}}, "hip:0");
}
static void test_layers_more(void) {
    static const char *const families[] = {"mixtral", "lfm2moe"};
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q4_K, .n_layers = 4, .seed = 4});
    same_case("by layers", 2, &(job){.file = &file, .desc = {.n_threads = 2}}, "hip:0");
    mg_free(&file);
    for (size_t i = 0; i < RFT_COUNT(families); i++) {
        char path[64];
        snprintf(path, sizeof path, "tests/family/%s.gguf", families[i]);
        same_case(families[i], 2, &(job){.path = path, .desc = {.n_threads = 2}}, "hip:0");
    }
    same_case("a cache of experts", 2, &(job){.path = "tests/family/mixtral.gguf", .desc = {.n_threads = 2}, .model = {.expert_cache_bytes = 40 << 10}}, "hip:0");
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 8, .seed = 12});
    same_case("streamed", 2, &(job){.file = &file, .desc = {.n_threads = 2}, .model = {.budget_bytes = file.n * 3 / 8, .n_readers = 2}}, "hip:0");
    mg_free(&file);
}

/* Ranks cut a call to tiles that all of them have, as the GPUs of a group do. */
static void test_tiles(void) {
    static const uint32_t units[][2] = {{HIP_EMU_SM90, HIP_EMU_SM90}, {HIP_EMU_SM90, HIP_EMU_WMMA11}, {HIP_EMU_WMMA11, HIP_EMU_SM90}};
    mg_buf file = {0};
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_heads = 8, .n_kv_heads = 4, .n_ff = 128, .n_layers = 2, .seed = 4});
    for (uint32_t split = RF_SPLIT_LAYERS; split <= RF_SPLIT_TENSORS; split++) {
        for (size_t k = 0; k < RFT_COUNT(units); k++) {
            const uint32_t wanted[] = {k == 0 ? 64 : 0, k == 0 ? 256 : 0};
            const job like = {.file = &file, .desc = {.n_threads = 2, .split = split}};
            uint8_t id[RF_RANK_ID_BYTES];
            job jobs[MAX_RANKS], one = like;
            hip_emu_matrix_unit(0, (int)units[k][0]), hip_emu_matrix_unit(2, (int)units[k][1]);
            make_jobs(jobs, 2, &like, id);
            work_all(jobs, 2);
            for (int i = 0; i < 2; i++)
                CHECK(reports[i].result == RF_OK && memcmp(reports[i].tile_rows, wanted, sizeof wanted) == 0, "split %u, units %u, rank %d: %u, %u %s", split,
                      (unsigned)k, i, reports[i].tile_rows[0], reports[i].tile_rows[1], reports[i].text);
            one.device = "hip:0,2";
            work_all(&one, 1);
            CHECK(reports[0].result == RF_OK && memcmp(reports[0].tile_rows, wanted, sizeof wanted) == 0, "split %u, units %u, one process: %u, %u %s", split,
                  (unsigned)k, reports[0].tile_rows[0], reports[0].tile_rows[1], reports[0].text);
        }
    }
    hip_emu_matrix_unit(0, HIP_EMU_WMMA11), hip_emu_matrix_unit(2, HIP_EMU_WMMA11);
    mg_free(&file);
}

/* All ranks end with an error that says `text`, after less than `seconds`; those of the bits `silent` may say anything. */
static void refused(const char *what, const job *jobs, int n, uint32_t silent, const char *text, double seconds) {
    work_all(jobs, n);
    for (int i = 0; i < n; i++) {
        if (silent >> i & 1) continue;
        CHECK(reports[i].result != RF_OK && strstr(reports[i].text, text), "%s, rank %d: %d '%s', want '%s'", what, i, reports[i].result, reports[i].text, text);
        CHECK(reports[i].seconds <= seconds, "%s, rank %d: after %g s", what, i, reports[i].seconds);
    }
}

static void test_refused(void) {
    uint8_t id[RF_RANK_ID_BYTES], other[RF_RANK_ID_BYTES];
    mg_buf file = {0}, another = {0}, wide = {0}, eps = {0};
    rf_error err = {0};
    job jobs[MAX_RANKS];
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .n_ff = 160, .seed = 12});
    mg_llama(&another, &(mg_options){.type = MG_Q4_0, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .n_ff = 160, .seed = 12});
    mg_llama(&wide, &(mg_options){.type = MG_Q8_0, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .n_ff = 160, .seed = 12});
    mg_llama(&eps, &(mg_options){.type = MG_Q8_0, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .n_ff = 160, .seed = 12, .eps = 1e-3f}); /* the same tensors */
    const job like = {.file = &file, .desc = {.n_threads = 2, .split = RF_SPLIT_TENSORS, .rank_wait_ms = 1500}};
    for (int k = 0; k < 3; k++) {
        make_jobs(jobs, 2, &like, id);
        jobs[1].file = k == 0 ? &another : k == 1 ? &wide : &eps;
        refused("another file", jobs, 2, 1u << 1, "rank 1 has another model", 3);
        CHECK(strstr(reports[1].text, "rank 0 has another model"), "rank 1: %s", reports[1].text);
    }
    make_jobs(jobs, 2, &like, id);
    jobs[1].n_ctx = 48;
    refused("other sizes", jobs, 2, 0, "opens a session of other sizes", 3);
    make_jobs(jobs, 2, &like, id);
    jobs[1].desc.split = RF_SPLIT_LAYERS;
    refused("another split", jobs, 2, 0, "split 0", 3);
    make_jobs(jobs, 2, &like, id);
    CHECK(rf_rank_id(other, &err) == RF_OK, "%s", err.text);
    jobs[1].desc.rank_id = other;
    refused("another id", jobs, 2, 0, "not finished after 1500 ms", 4);
    CHECK(strstr(reports[0].text, "rank 0 waited for rank 1: hip:0: ncclCommInitRankConfig"), "%s", reports[0].text);
    make_jobs(jobs, 2, &like, id);
    jobs[1].desc.ranks = 3;
    refused("three of two", jobs, 2, 0, "not finished after 1500 ms", 5);
    CHECK(strstr(reports[1].text, "rank 1 waited for rank 0, 2"), "%s", reports[1].text);
    make_jobs(jobs, 1, &like, id);
    jobs[0].desc.ranks = 2;
    refused("nobody else", jobs, 1, 0, "waited for rank 1", 4);
    make_jobs(jobs, 2, &like, id);
    jobs[0].device = "hip:0,2", jobs[1].device = "auto";
    refused("no one GPU", jobs, 2, 0, "want one GPU for a rank", 1);
    make_jobs(jobs, 2, &like, id);
    jobs[0].desc.rank = 2, jobs[1].desc.rank_id = NULL;
    refused("no rank", jobs, 2, 0, "want an id, and one of at most 16", 1);
    mg_free(&file), mg_free(&another), mg_free(&wide), mg_free(&eps);
}

/* A rank that ends or closes its device, one whose device is lost: the others say whom they waited for. */
static void test_leaving(void) {
    uint8_t id[RF_RANK_ID_BYTES];
    mg_buf file = {0};
    job jobs[MAX_RANKS];
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 4, .n_heads = 6, .n_kv_heads = 3, .n_ff = 160, .seed = 12});
    for (int way = 0; way < 3; way++) { /* by layers, by tensors, by tensors and RCCL */
        const job like = {.file = &file, .desc = {.n_threads = 2, .split = way ? RF_SPLIT_TENSORS : RF_SPLIT_LAYERS, .rank_wait_ms = 1000},
                          .peers = way == 2 ? HIP_EMU_PEERS_REFUSED : HIP_EMU_PEERS_OK};
        for (int who = 0; who < 2; who++) {
            char text[64];
            if (way == 1) snprintf(text, sizeof text, "rank %d", who); /* kernels say: waited in vain for its part from ... */
            else snprintf(text, sizeof text, "rank %d waited for rank %d: ", 1 - who, who);
            for (int ends = 1; ends <= 2; ends++) {
                make_jobs(jobs, 2, &like, id);
                jobs[who].ends = ends;
                refused("it ends", jobs, 2, 1u << who, text, 5);
            }
            make_jobs(jobs, 2, &like, id);
            jobs[who].fail_work = 120;
            refused("it is lost", jobs, 2, 1u << who, text, 5);
            CHECK(reports[who].result == RF_ERR_DEVICE, "%s", reports[who].text);
        }
    }
    make_jobs(jobs, 3, &(job){.file = &file, .desc = {.n_threads = 2, .rank_wait_ms = 1000}}, id);
    jobs[1].ends = 2;
    refused("the second of three ends", jobs, 3, 1u << 1, "waited for rank ", 6);
    mg_free(&file);
}

/* Calls of the runtime and of RCCL fail, one in each run, on one of the ranks: right bits on all, or an error on that rank, and on
 * the others in time. */
static void failing_calls(uint32_t split, int peers, uint32_t n_runs) {
    static report want;
    uint8_t id[RF_RANK_ID_BYTES];
    mg_buf file = {0};
    job jobs[MAX_RANKS];
    uint32_t noticed = 0, failed = 0, n = 0;
    mg_llama(&file, &(mg_options){.type = MG_Q4_0, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .n_ff = 160, .seed = 12});
    job like = {.file = &file, .desc = {.n_threads = 2, .split = split}, .peers = peers};
    make_jobs(jobs, 2, &like, id);
    work_all(jobs, 2);
    want = reports[0];
    CHECK(want.result == RF_OK && reports[1].result == RF_OK, "%s, %s", want.text, reports[1].text);
    const uint64_t n_calls = want.calls;
    like.desc.rank_wait_ms = 250; /* most of a run whose other rank fails; a rank that is late by chance says so, too */
    for (uint64_t call = 1; call < n_calls; call += 1 + n_calls / n_runs, n++) {
        const int who = n % 2, before = rft_bad;
        make_jobs(jobs, 2, &like, id);
        jobs[who].fail_call = call, jobs[who].forever = n / 2 % 2;
        work_all(jobs, 2);
        noticed += reports[who].result != RF_OK, failed += reports[who].calls >= call; /* runs wait, and ask, more or less often */
        for (int i = 0; i < 2; i++) CHECK(reports[i].result != RF_OK || same_words(&want, &reports[i]), "rank %d has other bits", i);
        for (int i = 0; i < 2; i++) CHECK(reports[i].result == RF_OK || strstr(reports[i].text, "rank") || strstr(reports[i].text, "hip"), "rank %d: %s", i, reports[i].text);
        CHECK(rft_bad == before, "call %u of rank %d%s", (unsigned)call, who, jobs[who].forever ? " and all after it" : "");
    }
    CHECK(failed > n / 4 && noticed > failed / 2, "%u of %u failures noticed, in %u runs", noticed, failed, n);
    mg_free(&file);
}
static void test_failing_tensors(void) { failing_calls(RF_SPLIT_TENSORS, HIP_EMU_PEERS_OK, 150); }
static void test_failing_rccl(void) { failing_calls(RF_SPLIT_TENSORS, HIP_EMU_PEERS_REFUSED, 150); }
static void test_failing_layers(void) { failing_calls(RF_SPLIT_LAYERS, HIP_EMU_PEERS_OK, 150); }

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    void *shared = mmap(NULL, MAX_RANKS * sizeof *reports, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 1;
    reports = shared;
    hip_emu_devices(3, 0);
    RUN(test_tensors);
    RUN_SLOW(test_tensors_of_floats);
    RUN_SLOW(test_tensors_of_three);
    RUN_SLOW(test_tensors_by_rccl);
    RUN_SLOW(test_layers);
    RUN_SLOW(test_layers_more);
    RUN_SLOW(test_tiles);
    RUN(test_refused);
    RUN_SLOW(test_leaving);
    RUN_SLOW(test_failing_tensors);
    RUN_SLOW(test_failing_rccl);
    RUN_SLOW(test_failing_layers);
    RFT_END();
}
