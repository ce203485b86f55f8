/* test_promises.c: promises of the table in promises.txt that no other suite is about: tables that a file cannot slow
 * down, objects after failures, files that change while they are used, weights that are not numbers, and texts of a
 * file that are nothing but texts. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"
#include <sys/wait.h>

#define N_VOCAB 320
static const int32_t some_tokens[5] = {7, 300, 12, 0, 99};

static char path[] = "/tmp/rf_promises_XXXXXX";
static mg_buf file;

/* A new file under the name, or its bytes in place. */
static int put_file(const mg_buf *b, int anew) {
    if (anew) unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    int ok = fd >= 0 && pwrite(fd, b->data, b->n, 0) == (ssize_t)b->n && ftruncate(fd, (off_t)b->n) == 0;
    if (fd >= 0) close(fd);
    return ok;
}

static int open_rig(rig *r, int mode) {
    return rig_open(r, &(rig_how){.path = path, .mode = mode, .session = &(rf_session_desc){.n_ctx = 64, .n_batch = 2}});
}

static rf_result run(rig *r, float *out) {
    float *logits;
    rf_result res = rf_session_truncate(r->s, 0, 0, NULL, &r->err);
    if (res == RF_OK) res = rf_session_forward(r->s, some_tokens, 5, &logits, &r->err);
    if (res == RF_OK) memcpy(out, logits, N_VOCAB * sizeof *out);
    return res;
}

/* ---- names that collide ---- */

/* Names chosen to share one slot of a table share none in the table of another object: the hash has a seed. */
static void test_colliding_names(void) {
    enum { SLOTS = 4096, NAMES = 1500 };
    static char names[NAMES][24];
    static unsigned used[SLOTS];
    const uint64_t seeds[] = {0x555555554000u, 0x555555554010u, 0x7ffff0000b20u};
    unsigned n = 0, most = 0;
    for (uint64_t i = 0; n < NAMES; i++) {
        int len = snprintf(names[n], sizeof names[n], "test.k%llx", RFI_LLU(i));
        n += (rfi_hash(names[n], (uint64_t)len, seeds[0]) & (SLOTS - 1)) == 77;
    }
    for (size_t s = 1; s < RFI_COUNT(seeds); s++) {
        memset(used, 0, sizeof used);
        for (n = 0; n < NAMES; n++) used[rfi_hash(names[n], strlen(names[n]), seeds[s]) & (SLOTS - 1)]++;
        for (n = 0; n < SLOTS; n++) most = used[n] > most ? used[n] : most;
        CHECK(most < 12, "%u of %u names in one slot", most, NAMES);
    }
}

/* ---- objects after a failure ---- */

/* A failed open leaves nothing, and every closing function takes NULL. */
static void test_after_failed_open(void) {
    rf_gguf *g = (rf_gguf *)&file;
    rf_device *d = (rf_device *)&file;
    rf_model *m = (rf_model *)&file;
    rf_session *s = (rf_session *)&file;
    rf_tokenizer *t = (rf_tokenizer *)&file;
    rf_scheduler *sch = (rf_scheduler *)&file;
    rf_error err;
    CHECK(rf_gguf_open("/nonexistent.gguf", NULL, &g, &err) == RF_ERR_NOT_FOUND && !g, "%s", err.text);
    CHECK(rf_gguf_open_memory("GGUF", 4, NULL, &g, &err) == RF_ERR_FORMAT && !g, "%s", err.text);
    CHECK(rf_device_open("nonesuch", NULL, &d, &err) == RF_ERR_NOT_FOUND && !d, "%s", err.text);
    CHECK(rf_model_open(g, d, NULL, &m, &err) == RF_ERR_ARGUMENT && !m, "%s", err.text);
    CHECK(rf_session_open(m, NULL, &s, &err) == RF_ERR_ARGUMENT && !s, "%s", err.text);
    CHECK(rf_tokenizer_open(g, NULL, &t, &err) == RF_ERR_ARGUMENT && !t, "%s", err.text);
    CHECK(rf_scheduler_open(s, t, 1, &sch, &err) == RF_ERR_ARGUMENT && !sch, "%s", err.text);
    for (int twice = 0; twice < 2; twice++) {
        CHECK(rf_gguf_close(g, &err) == RF_OK && rf_device_close(d, &err) == RF_OK, "NULL");
        CHECK(rf_model_close(m, &err) == RF_OK, "NULL");
        rf_session_close(s, NULL), rf_tokenizer_close(t, NULL), rf_scheduler_close(sch, NULL);
    }
    CHECK(rf_session_forward(NULL, some_tokens, 5, NULL, &err) == RF_ERR_ARGUMENT, "%s", rf_result_name(err.code));
    CHECK(!rft_logits(NULL, 0) && rf_session_length(NULL, 0) == 0, "NULL");
    rf_dev *dev = (rf_dev *)&file;
    CHECK(!rf_device_get_api(NULL, &dev) && !dev && !rf_device_get_api(NULL, NULL), "NULL");
}

/* ---- wrong calls ---- */

/* NULL wherever it may stand: what needs an object says so, what gives facts gives zeros. */
static void test_null_calls(void) {
    rf_sampler sampler;
    float nan = NAN;
    int32_t id;
    size_t size;
    uint32_t n;
    rf_sampler_init(&sampler, NULL, NULL);
    const rf_result refused[] = {
        rf_gguf_open(NULL, NULL, NULL, NULL), rf_gguf_open_memory(NULL, 100, NULL, NULL, NULL), rf_gguf_get_kv(NULL, 0, NULL, NULL),
        rf_gguf_find_kv(NULL, NULL, NULL, NULL), rf_gguf_get_tensor(NULL, 0, NULL, NULL), rf_gguf_find_tensor(NULL, NULL, NULL, NULL),
        rf_kv_int(NULL, 0, NULL, NULL), rf_kv_real(NULL, 0, NULL, NULL), rf_kv_text(NULL, NULL, NULL, NULL),
        rf_gguf_read_tensor(NULL, 0, 0, NULL, 1, NULL), rf_device_list(NULL, 0, NULL, NULL), rf_device_list(NULL, 5, &n, NULL),
        rf_device_open("cpu", NULL, NULL, NULL), rf_model_open(NULL, NULL, NULL, NULL, NULL), rf_model_load_tensor(NULL, NULL, NULL),
        rf_model_preload_layers(NULL, NULL, 0, NULL), rf_model_preload_all(NULL, NULL), rf_model_forecast(NULL, NULL, NULL, NULL),
        rf_model_clear_device_cache(NULL, NULL, NULL), rf_model_get_tokenizer(NULL, NULL, NULL), rf_session_open(NULL, NULL, NULL, NULL),
        rf_session_eval(NULL, NULL, 0, NULL), rf_session_forward(NULL, NULL, 0, NULL, NULL), rf_session_get_logits(NULL, 0, NULL, NULL),
        rf_session_get_argmax(NULL, 0, NULL, NULL), rf_session_sync(NULL, 0, NULL, 0, NULL, NULL), rf_session_truncate(NULL, 0, 0, NULL, NULL),
        rf_session_copy(NULL, 0, 0, NULL), rf_session_keep(NULL, 0, NULL), rf_session_hidden(NULL, 0, 0, NULL, NULL),
        rf_session_embed(NULL, NULL, NULL, NULL), rf_session_save(NULL, 0, NULL, NULL), rf_session_restore(NULL, 0, NULL, NULL),
        rf_tokenizer_open(NULL, NULL, NULL, NULL), rf_tokenize(NULL, (rf_string){0}, 0, NULL, 0, NULL, NULL),
        rf_detokenize(NULL, 0, 0, NULL, 0, NULL, NULL), rf_sampler_defaults(NULL, NULL, NULL), rf_sampler_init(NULL, NULL, NULL),
        rf_sampler_sample(NULL, NULL, 0, NULL, NULL), rf_sampler_sample(&sampler, &nan, 1, &id, NULL), rf_sampler_sample(&sampler, &nan, 0, &id, NULL),
        rf_session_sample(NULL, 0, NULL, NULL, NULL), rf_scheduler_open(NULL, NULL, 0, NULL, NULL), rf_scheduler_submit(NULL, NULL, NULL),
        rf_scheduler_step(NULL, NULL, NULL), rf_generate(NULL, NULL, NULL, NULL), rf_model_get_chat_template(NULL, NULL, NULL)};
    for (size_t i = 0; i < RFI_COUNT(refused); i++)
        CHECK(refused[i] == RF_ERR_ARGUMENT || refused[i] == RF_ERR_NOT_FOUND, "call %zu: %s", i, rf_result_name(refused[i]));
    rf_model_cancel_loading(NULL), rf_session_cancel(NULL), rf_sampler_accept(NULL, 0), rf_sampler_accept(&sampler, -9);
    CHECK(!rf_gguf_get_info(NULL).n_kv && !rf_gguf_handle_fault(NULL, NULL) && !rf_device_get_info(NULL).usable && !rf_model_get_info(NULL).n_layers &&
              !rf_model_is_tensor_loaded(NULL, NULL) && !rf_model_is_layer_loaded(NULL, 0) && !rf_model_get_loading_stats(NULL).loads &&
              !rf_model_get_expert_stats(NULL, 0).n_experts && !rf_session_get_stats(NULL).launches && !rf_session_save_bytes(NULL, 0) &&
              !rf_tokenizer_get_info(NULL).n_vocab && !rf_token_is_end(NULL, 0) && !rf_token_get_text(NULL, 0).len && !rf_model_get_plan(NULL), "facts of NULL");
    CHECK(rf_device_list(NULL, 0, &n, NULL) == RF_OK && n >= 3, "%u devices", n);
    rig r;
    CHECK(put_file(&file, 1), "cannot write %s", path);
    if (!open_rig(&r, MAPPED)) return;
    rf_tokenizer *t;
    REQUIRE(rf_tokenizer_open(r.g, NULL, &t, &r.err) == RF_OK, "%s", r.err.text);
    rf_detokenizer state = {.tokenizer = t};
    CHECK(rf_tokenize(t, rf_string_of("a b"), 0, NULL, 0, &n, NULL) == RF_ERR_CAPACITY && n > 0, "%u tokens", n);
    CHECK(rf_tokenize(t, (rf_string){0}, 0, NULL, 0, &n, NULL) == RF_OK && n == 0, "%u tokens", n);
    CHECK(rf_detokenize(&state, -1, RF_DETOKENIZE_FINISH, NULL, 0, &size, NULL) == RF_OK && size == 0, "%zu bytes", size);
    CHECK(rf_gguf_read_tensor(r.g, 0, 0, NULL, 0, NULL) <= RF_OK && rf_gguf_read_tensor(r.g, 0, UINT64_MAX, &id, 4, NULL) == RF_ERR_ARGUMENT &&
              rf_gguf_read_tensor(r.g, UINT64_MAX, 0, &id, 4, NULL) != RF_OK, "a range");
    CHECK(rf_session_sync(r.s, 0, NULL, 0, &n, NULL) == RF_OK && rf_session_hidden(r.s, UINT32_MAX, 2, &nan, NULL) == RF_ERR_ARGUMENT &&
              rf_session_truncate(r.s, -1, 0, NULL, NULL) == RF_ERR_ARGUMENT, "a session");
    CHECK(rf_tokenizer_close(t, NULL) == RF_OK, "busy");
    rig_close(&r);
}

/* A tensor is loaded by its name in the file; parts of one have none. */
static void test_names_of_experts(void) {
    rig r;
    mg_buf moe = {0};
    static const char *const wrong[] = {"blk.0.ffn_up_exps.weight:0", "blk.0.ffn_up_exps.weight:", "blk.0.ffn_up_exps", "", ":0"};
    mg_llama(&moe, &(mg_options){.arch = "qwen3moe", .n_layers = 1, .n_experts = 4});
    if (!rig_open(&r, &(rig_how){.file = &moe})) return;
    for (size_t i = 0; i < RFI_COUNT(wrong); i++)
        CHECK(rf_model_load_tensor(r.m, wrong[i], &r.err) == RF_ERR_NOT_FOUND && !rf_model_is_tensor_loaded(r.m, wrong[i]), "%s", wrong[i]);
    CHECK(rf_model_load_tensor(r.m, "blk.0.ffn_up_exps.weight", &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_model_is_tensor_loaded(r.m, "blk.0.ffn_up_exps.weight") && rf_model_get_loading_stats(r.m).loads == 4, "four matrices");
    for (uint32_t i = 0; i < rf_model_get_plan(r.m)->n_weights; i++)
        CHECK(!strchr(rf_model_get_plan(r.m)->weights[i].name, ':'), "%s", rf_model_get_plan(r.m)->weights[i].name);
    rig_close(&r);
    mg_free(&moe);
}

/* ---- files that change ---- */

/* After tensor n was loaded, for every n, the file is replaced under its name, which nobody notices, or rewritten in
 * place, which the next load does. */
static void test_changed_at_every_tensor(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++)
        for (int in_place = 0; in_place < 2; in_place++)
            for (uint32_t n = 0, n_weights = 1; n < n_weights; n++) {
                rig r;
                float want[N_VOCAB], got[N_VOCAB];
                mg_buf other = mg_copy(&file);
                struct timespec later[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 2000000000}};
                CHECK(put_file(&file, 1), "cannot write %s", path);
                if (!open_rig(&r, mode)) return;
                const rf_plan *plan = rf_model_get_plan(r.m);
                n_weights = plan->n_weights;
                CHECK(run(&r, want) == RF_OK, "%s", r.err.text);
                rf_model_clear_device_cache(r.m, NULL, NULL);
                for (uint32_t i = 0; i < n; i++)
                    CHECK(rf_model_load_tensor(r.m, plan->weights[i].name, &r.err) == RF_OK, "%s", r.err.text);
                memset(other.data + other.n / 2, 0x55, other.n / 2); /* later tensors are others */
                CHECK(put_file(&other, !in_place), "cannot write %s", path);
                if (in_place) CHECK(utimensat(AT_FDCWD, path, later, 0) == 0, "utimensat"); /* clocks are coarse */
                rf_result res = run(&r, got);
                if (!in_place)
                    CHECK(res == RF_OK && memcmp(got, want, sizeof got) == 0, "%s, %u: %s", modes[mode], n, r.err.text);
                else CHECK(res == RF_ERR_IO && strstr(r.err.text, "was written to"), "%s, %u: %s: %s", modes[mode], n,
                           rf_result_name(res), r.err.text);
                rig_close(&r);
                mg_free(&other);
            }
}

/* Cut short after n tokens, for every n: weights that are read again give an error, wherever the text stands; the file
 * used in place gives one where a weight is used for the first time. */
static void test_cut_while_generating(void) {
    for (int mode = MAPPED; mode < N_MODES; mode++)
        for (int n = 0; n < 8; n++) {
            rig r;
            rf_result res = RF_OK;
            CHECK(put_file(&file, 1), "cannot write %s", path);
            if (!open_rig(&r, mode)) return;
            for (int i = 0; res == RF_OK && i <= n; i++) {
                if (i == n) CHECK(truncate(path, (off_t)(file.n / 2) + 8 * n) == 0, "truncate");
                rf_model_clear_device_cache(r.m, NULL, NULL);
                res = rf_session_forward(r.s, some_tokens, 1, NULL, &r.err);
                CHECK(i == n || res == RF_OK, "%s: %s", modes[mode], r.err.text);
            }
            CHECK(res == RF_ERR_IO && strstr(r.err.text, "was changed meanwhile"), "%s, after %d: %s: %s", modes[mode],
                  n, rf_result_name(res), r.err.text);
            CHECK(rf_session_length(r.s, 0) == (uint32_t)n, "the failed call left something");
            CHECK(truncate(path, 100) == 0 && rf_model_preload_all(r.m, &r.err) == RF_ERR_IO, "%s", r.err.text);
            rig_close(&r);
        }
}

/* In use, in a child: evaluates, cuts the file, evaluates with the weights it has. 0 if it lives on. */
static int child_cuts(int mode) {
    float got[N_VOCAB];
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        rig r;
        int devnull = open("/dev/null", O_WRONLY); /* a sanitizer reports the signal */
        dup2(devnull, 2);
        if (!open_rig(&r, mode) || run(&r, got) != RF_OK || truncate(path, 4096) != 0) _exit(3);
        _exit(run(&r, got) == RF_OK ? 0 : 4);
    }
    int status = 0;
    return waitpid(pid, &status, 0) == pid ? status : -1;
}

/* The one documented limit: a file used in place that is cut short where it is in use raises SIGBUS; with no_map the
 * weights are the process's own. */
static void test_cut_in_use(void) {
    CHECK(put_file(&file, 1), "cannot write %s", path);
    int status = child_cuts(MAPPED);
    CHECK(status != 0, "the header says that this raises SIGBUS");
    CHECK(!WIFEXITED(status) || (WEXITSTATUS(status) != 3 && WEXITSTATUS(status) != 4), "exit status %d",
          WEXITSTATUS(status));
    for (int mode = COPIED; mode < N_MODES; mode++) {
        CHECK(put_file(&file, 1), "cannot write %s", path);
        status = child_cuts(mode);
        CHECK(status == 0, "%s: status %d", modes[mode], status);
    }
}

/* ---- fork ---- */

/* In a child of fork, with every lock of the parent's objects held at the fork: none of the parent's objects does anything,
 * none hangs; files and tokenizers work, and what the child opens itself. 0, or the number of what was wrong. */
static int child_uses(rig *r, rf_scheduler *sch, const float *want) {
    static saved stream;
    const rf_session_io io = {.write_fn = saved_write, .user = &stream};
    const rf_token_row row = {.token = 1, .pos = RF_POS_NEXT, .want_logits = 1};
    const uint32_t layer = 0;
    const rf_tokenizer *t;
    const rf_chat_template *chat;
    rf_forecast forecast;
    rf_sampler sampler;
    rf_session *s;
    rf_scheduler *other;
    rf_model *m;
    float *logits, hidden[256];
    int32_t ids[8];
    uint32_t n;
    rf_sampler_init(&sampler, NULL, NULL);
    const rf_embed_text text = {some_tokens, 1};
    const rf_embed_desc embed = {.texts = &text, .n_texts = 1};
    const rf_request request = {.prompt = some_tokens, .n_prompt = 3, .sampler = &sampler};
    const rf_result refused[] = {
        rf_session_eval(r->s, &row, 1, &r->err), rf_session_forward(r->s, some_tokens, 1, NULL, NULL),
        rf_session_get_logits(r->s, 0, &logits, NULL), rf_session_hidden(r->s, 0, 1, hidden, NULL),
        rf_session_embed(r->s, &embed, hidden, NULL), rf_session_sample(r->s, 0, &sampler, ids, NULL),
        rf_session_truncate(r->s, 0, 0, NULL, NULL), rf_session_sync(r->s, 0, some_tokens, 2, &n, NULL),
        rf_session_copy(r->s, 0, 0, NULL), rf_session_keep(r->s, 0, NULL), rf_session_save(r->s, 0, &io, NULL),
        rf_session_restore(r->s, 0, &io, NULL), rf_session_open(r->m, NULL, &s, NULL), rf_session_close(r->s, NULL),
        rf_scheduler_open(r->s, (const rf_tokenizer *)r, 1, &other, NULL), rf_scheduler_submit(sch, &request, NULL),
        rf_scheduler_step(sch, NULL, NULL), rf_scheduler_close(sch, NULL), rf_model_forecast(r->m, NULL, &forecast, NULL),
        rf_model_load_tensor(r->m, "output_norm.weight", NULL), rf_model_preload_layers(r->m, &layer, 1, NULL),
        rf_model_preload_all(r->m, NULL), rf_model_clear_device_cache(r->m, NULL, NULL), rf_model_get_tokenizer(r->m, &t, NULL),
        rf_model_get_chat_template(r->m, &chat, NULL), rf_generate(r->s, &(rf_generate_desc){.ids = some_tokens, .n_ids = 2}, NULL, NULL),
        rf_model_open(r->g, r->d, NULL, &m, NULL), rf_model_close(r->m, NULL), rf_device_close(r->d, NULL)};
    for (size_t i = 0; i < RFI_COUNT(refused); i++)
        if (refused[i] != RF_ERR_ARGUMENT) return 10 + (int)i;
    rf_model_cancel_loading(r->m);
    rf_session_cancel(r->s);
    if (!strstr(r->err.text, "before a fork") || rf_session_save_bytes(r->s, 0) || rf_device_get_info(r->d).name[0]) return 1;
    if (rf_model_get_loading_stats(r->m).loads || rf_session_get_stats(r->s).launches) return 2;
    rig own = {.g = r->g};
    float got[N_VOCAB];
    rf_tokenizer *opened = NULL;
    rf_result res = rf_device_open(rf_device_get_api(r->d, NULL)->name, &(rf_device_desc){.n_threads = 2}, &own.d, NULL);
    if (res == RF_OK) res = rf_model_open(own.g, own.d, NULL, &own.m, NULL);
    if (res == RF_OK) res = rf_session_open(own.m, &(rf_session_desc){.n_ctx = 64, .n_batch = 2}, &own.s, NULL);
    if (res == RF_OK) res = rf_tokenizer_open(own.g, NULL, &opened, NULL);
    if (res == RF_OK) res = rf_tokenize(opened, rf_string_of("a"), 0, ids, 8, &n, NULL);
    if (res != RF_OK || run(&own, got) != RF_OK || memcmp(got, want, sizeof got) != 0) return 3;
    if (rf_tokenizer_close(opened, NULL) || rf_session_close(own.s, NULL) || rf_model_close(own.m, NULL)) return 4;
    return rf_device_close(own.d, NULL) == RF_OK ? 0 : 5;
}

static void test_fork(void) {
    CHECK(put_file(&file, 1), "cannot write %s", path);
    for (int mode = MAPPED; mode < N_MODES; mode++) {
        rig r;
        rf_scheduler *sch;
        float want[N_VOCAB], after[N_VOCAB];
        rf_tokenizer *t;
        int status = -1;
        if (!open_rig(&r, mode)) return;
        REQUIRE(run(&r, want) == RF_OK && rf_tokenizer_open(r.g, NULL, &t, &r.err) == RF_OK &&
                    rf_scheduler_open(r.s, t, 2, &sch, &r.err) == RF_OK, "%s", r.err.text);
        rfi_monitor *const locks[] = {&r.d->monitor, &r.m->store->monitor, &r.m->store->cell_monitor};
        for (int i = 0; i < 3; i++) rfi_monitor_lock(locks[i]);
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            alarm(60); /* who hangs is killed */
            _exit(child_uses(&r, sch, want));
        }
        for (int i = 3; i-- > 0;) rfi_monitor_unlock(locks[i]);
        CHECK(waitpid(pid, &status, 0) == pid && status == 0, "%s: status %x", modes[mode], status);
        CHECK(run(&r, after) == RF_OK && memcmp(after, want, sizeof after) == 0, "the parent: %s", r.err.text);
        CHECK(rf_scheduler_close(sch, NULL) == RF_OK && rf_tokenizer_close(t, NULL) == RF_OK, "busy");
        rig_close(&r);
    }
}

/* ---- weights that are not numbers ---- */

/* Frequency factors of rope divide angles: what leaves these without a meaning is refused when the tensor is loaded, by
 * name and element, wherever the text stands. */
static void test_rope_factors(void) {
    static const char *const names[] = {"rope_freqs.weight", "rope_factors_long.weight"};
    static const struct { float factor; int good; } cases[] = {{1e-4f, 1}, {1e30f, 1}, {0, 0},       {-1, 1},
                                                               {1e-9f, 0}, {NAN, 0},   {INFINITY, 0}};
    for (size_t i = 0; i < 2 * RFI_COUNT(cases); i++)
        for (int mode = MAPPED; mode < N_MODES; mode++) {
            const int good = cases[i / 2].good;
            const char *name = names[i % 2];
            mg_buf spoilt = {0};
            rig r;
            rf_gguf *g;
            rf_tensor_info t;
            uint32_t bits;
            if (i % 2) mg_family_model(&spoilt, &(mg_family){.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE | MG_LONG_ROPE});
            else mg_llama(&spoilt, &(mg_options){.type = MG_F32, .n_layers = 1, .rope_freqs = 1});
            REQUIRE(rf_gguf_open_memory(spoilt.data, spoilt.n, NULL, &g, NULL) == RF_OK, "open");
            CHECK(rf_gguf_find_tensor(g, name, &t, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "tensor");
            memcpy(&bits, &cases[i / 2].factor, sizeof bits);
            mg_set_u32(&spoilt, t.offset_bytes + 8, bits);
            CHECK(put_file(&spoilt, 1), "cannot write %s", path);
            mg_free(&spoilt);
            if (!open_rig(&r, mode)) return;
            for (int by_name = 0; by_name < 2; by_name++) {
                const rf_result res = by_name ? rf_model_load_tensor(r.m, name, &r.err)
                                              : rf_session_forward(r.s, some_tokens, 5, NULL, &r.err);
                CHECK(good ? res == RF_OK : res == RF_ERR_FORMAT && strstr(r.err.text, name) && strstr(r.err.text, ", element 2 ") &&
                                                r.err.where == t.offset_bytes + 8,
                      "%s, %g: %s: %s", modes[mode], (double)cases[i / 2].factor, rf_result_name(res), r.err.text);
            }
            CHECK(rf_model_is_tensor_loaded(r.m, name) == good, "%s", modes[mode]);
            rig_close(&r);
        }
}

/* NaN and infinity in any tensor: evaluating ends, sampling gives a token or says that there is none. */
static void test_not_numbers(void) {
    static const uint32_t patterns[] = {0x7fc00000u, 0xff800000u, 0x7f800001u};
    mg_buf floats = {0};
    size_t data_start;
    mg_llama_at(&floats, &(mg_options){.type = MG_F32, .n_layers = 1}, &data_start);
    rf_gguf *g;
    REQUIRE(rf_gguf_open_memory(floats.data, floats.n, NULL, &g, NULL) == RF_OK, "open");
    uint64_t n_tensors = rf_gguf_get_info(g).n_tensors;
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "busy");
    for (uint64_t i = 0; i < n_tensors; i++)
        for (size_t p = 0; p < RFI_COUNT(patterns); p++) {
            rig r;
            rf_tensor_info t;
            rf_sampler sampler;
            float got[N_VOCAB];
            int32_t id = -7;
            CHECK(put_file(&floats, 1), "cannot write %s", path);
            if (!open_rig(&r, COPIED)) continue;
            CHECK(rf_gguf_get_tensor(r.g, i, &t, NULL) == RF_OK, "tensor");
            rig_close(&r);
            mg_buf spoilt = mg_copy(&floats);
            for (uint64_t k = 0; k < t.size_bytes / 4; k++) mg_set_u32(&spoilt, t.offset_bytes + 4 * k, patterns[p]);
            CHECK(put_file(&spoilt, 1), "cannot write %s", path);
            mg_free(&spoilt);
            if (!open_rig(&r, COPIED)) continue;
            CHECK(run(&r, got) == RF_OK, "%s", r.err.text);
            int32_t top = rft_argmax(r.s, 0);
            CHECK(top >= -1 && top < N_VOCAB, "token %d", top);
            const rf_sampler_desc desc = {.temperature = 1, .top_k = 5, .top_p = 0.5f};
            CHECK(rf_sampler_init(&sampler, &desc, &r.err) == RF_OK, "init");
            rf_result res = rf_session_sample(r.s, 0, &sampler, &id, &r.err);
            CHECK(res == RF_OK ? id >= 0 && id < N_VOCAB : res == RF_ERR_ARGUMENT && r.err.text[0], "%s: token %d",
                  rf_result_name(res), id);
            rig_close(&r);
        }
    mg_free(&floats);
}

/* ---- texts of a file ---- */

static unsigned n_opened;
static int64_t only_this(const char *name, uint64_t *size_bytes, void *user) {
    (void)user;
    n_opened++;
    CHECK(strcmp(name, path) == 0, "opens %s", name);
    return rfi_os_open(path, size_bytes, NULL);
}
static unsigned n_said;
static void printable(rf_log_level level, const char *text, void *user) {
    (void)level, (void)user;
    n_said++;
    for (; *text; text++) CHECK(*text >= 0x20 && *text < 0x7f, "byte %d is said", *text);
}
static const char *hostile_tensor;
static void hostile_keys(mg_gguf *w) {
    static const char *const keys[] = {"general.file", "general.source.url", "general.base_model.0.name",
                                       "tokenizer.chat_template"};
    static const char *const texts[] = {"/etc/passwd", "../../x", "%s%n%n%x", "{{ ''.__class__ }}\x1b[2J\a"};
    for (int i = 0; i < 4; i++) mg_kv_str(w, keys[i], texts[i]);
    mg_tensor(w, hostile_tensor, MG_F32, 1, (uint64_t[]){8}, NULL, 32);
}

/* Paths, formats, escapes and programs in a file's texts: one file is opened, what is logged and said is printable. */
static void test_texts_are_only_texts(void) {
    mg_buf b = {0}, refused = {0};
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_error err;
    char out[512];
    size_t n;
    hostile_tensor = "\x1b[31m%n%s/etc/passwd";
    mg_llama(&refused, &(mg_options){.n_layers = 1, .more_kv = hostile_keys});
    hostile_tensor = "v.\x1b[31m%n%s/etc/passwd"; /* of a part that is ignored */
    mg_llama(&b, &(mg_options){.n_layers = 1, .more_kv = hostile_keys});
    CHECK(put_file(&b, 1), "cannot write %s", path);
    n_opened = n_said = 0;
    rf_gguf_desc gd = {.io = {.open_fn = only_this, .read_fn = rfi_os_read, .close_fn = rfi_os_close}};
    gd.log_fn = printable;
    REQUIRE(rf_gguf_open(path, &gd, &g, &err) == RF_OK, "%s", err.text);
    REQUIRE(rf_device_open("cpu", &(rf_device_desc){.n_threads = 1}, &d, &err) == RF_OK, "%s", err.text);
    REQUIRE(rf_model_open(g, d, NULL, &m, &err) == RF_OK, "%s", err.text);
    CHECK(rf_model_preload_all(m, &err) == RF_OK, "%s", err.text);
    const rf_chat_message message = {.role = "user", .content = "%s%n"};
    rf_chat chat = {.messages = &message, .n_messages = 1};
    CHECK(rf_model_get_chat_template(m, &chat.chat_template, &err) == RF_OK, "%s", err.text);
    CHECK(rf_chat_format(&chat, out, sizeof out, &n, &err) == RF_OK && n == 5 && !memcmp(out, "\x1b[2J\a", 5),
          "the template reaches outside: %.*s", (int)n, out);
    CHECK(rf_model_close(m, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
    REQUIRE(rf_gguf_open_memory(refused.data, refused.n, NULL, &g, &err) == RF_OK, "%s", err.text);
    CHECK(rf_model_open(g, d, NULL, &m, &err) == RF_ERR_UNSUPPORTED, "%s", err.text);
    printable(RF_LOG_INFO, err.text, NULL);
    CHECK(n_opened == 1 && n_said > 0, "%u files opened, %u lines said", n_opened, n_said);
    CHECK(rf_gguf_close(g, NULL) == RF_OK && rf_device_close(d, NULL) == RF_OK, "busy");
    mg_free(&b), mg_free(&refused);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    alarm(RFT_SANITIZED ? 900 : 300); /* a deadlock is a failure too */
    int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 2});
    RUN(test_colliding_names);
    RUN(test_after_failed_open);
    RUN(test_null_calls);
    RUN(test_names_of_experts);
    RUN(test_changed_at_every_tensor);
    RUN(test_cut_while_generating);
    RUN(test_cut_in_use);
    RUN(test_fork);
    RUN(test_rope_factors);
    RUN(test_not_numbers);
    RUN(test_texts_are_only_texts);
    unlink(path);
    mg_free(&file);
    RFT_END();
}
