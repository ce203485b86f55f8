/* Lazy loading: nothing of a tensor is read before it is needed, exactly one thread reads it, failures are reported to
 * everybody who waited and can be tried again, and whatever fails - a read, an allocation, a device call - leaves
 * nothing behind. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"

/* ---- a file in memory that counts and can fail ---- */

typedef struct disk {
    mg_buf file;
    size_t data_start;
    _Atomic int counting;                    /* set when the file is open: parsing reads ahead    */
    uint64_t parsed_to;                      /* end of what was read before that                  */
    _Atomic uint64_t data_reads, data_bytes; /* calls and bytes after that                        */
    _Atomic uint64_t fail_read;              /* this data read fails with EIO, once; 0: none      */
    _Atomic uint64_t calls;                  /* of any hook but the closing one                   */
    uint64_t fail_call;                      /* this one of them fails with EIO; 0: none          */
    int forever;                             /* and so do all later ones                          */
    _Atomic int blocked;                     /* data reads wait while this is set                 */
    _Atomic int waiting;                     /* reads that do                                     */
    _Atomic int n_open;
    uint64_t most;                           /* bytes of a read at most: short reads; 0: any      */
    void (*in_read)(void *user);             /* called in every data read                         */
    void *in_read_user;
} disk;

static int disk_fails(disk *d) {
    uint64_t call = atomic_fetch_add(&d->calls, 1) + 1;
    return d->fail_call && (call == d->fail_call || (d->forever && call > d->fail_call));
}

static int64_t disk_open(const char *path, uint64_t *size_bytes, void *user) {
    disk *d = (disk *)user;
    if (strcmp(path, "disk") != 0) return -ENOENT;
    if (disk_fails(d)) return -EIO;
    *size_bytes = d->file.n;
    atomic_fetch_add(&d->n_open, 1);
    return 7;
}
static int64_t disk_read(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    disk *d = (disk *)user;
    if (handle != 7 || offset > d->file.n) return -EINVAL;
    if (disk_fails(d)) return -EIO;
    if (n > d->file.n - offset) n = (size_t)(d->file.n - offset);
    if (d->most && n > d->most) n = (size_t)d->most;
    if (!atomic_load(&d->counting)) {
        d->parsed_to = rfi_max_u64(d->parsed_to, offset + n);
    } else {
        uint64_t call = atomic_fetch_add(&d->data_reads, 1) + 1;
        atomic_fetch_add(&d->data_bytes, n);
        atomic_fetch_add(&d->waiting, 1);
        while (atomic_load(&d->blocked)) sched_yield();
        atomic_fetch_sub(&d->waiting, 1);
        if (d->in_read) d->in_read(d->in_read_user);
        if (call == atomic_load(&d->fail_read)) return -EIO;
    }
    memcpy(dst, d->file.data + offset, n);
    return (int64_t)n;
}
static void disk_close(int64_t handle, void *user) { atomic_fetch_sub(&((disk *)user)->n_open, handle == 7); }

static const rf_io disk_io = {.open_fn = disk_open, .read_fn = disk_read, .close_fn = disk_close};

static void disk_make(disk *d, const mg_options *o) {
    memset(d, 0, sizeof *d);
    mg_llama_at(&d->file, o, &d->data_start);
}

/* ---- a model and everything below it ---- */

static void close_rig(rig *r) {
    if (r->d && strcmp(r->d->api->name, "null") == 0) {
        rf_session_close(r->s, NULL), r->s = NULL;
        CHECK(rf_model_close(r->m, NULL) == RF_OK, "the model stays busy");
        r->m = NULL;
        CHECK(atomic_load(&rfi_null_of(r->d->dev)->n_live) == 0, "%lld objects are left on the device",
              (long long)atomic_load(&rfi_null_of(r->d->dev)->n_live));
    }
    rig_close(r);
}

/* File, device and model; the session is the test's to open. 0 after a report. */
static int open_rig(rig *r, disk *dk, int mode, const rf_model_desc *md) {
    memset(r, 0, sizeof *r);
    const rf_allocator a = memory_allocator(&r->mem);
    rf_gguf_desc gd = {.allocator = a, .io = disk_io, .no_map = 1};
    const rf_device_desc dd = {.allocator = a, .n_threads = 2};
    gd.io.user = dk;
    atomic_store(&dk->counting, 0);
    rf_result res = mode == MAPPED ? rf_gguf_open_memory(dk->file.data, dk->file.n, &(rf_gguf_desc){.allocator = a}, &r->g, &r->err)
                                   : rf_gguf_open("disk", &gd, &r->g, &r->err);
    atomic_store(&dk->counting, 1);
    if (res == RF_OK) res = rf_device_open(mode == NULLED ? "null" : "cpu", &dd, &r->d, &r->err);
    if (res == RF_OK) res = rf_model_open(r->g, r->d, md, &r->m, &r->err);
    CHECK(res == RF_OK, "%s: %s", modes[mode], r->err.text);
    if (res != RF_OK) close_rig(r);
    return res == RF_OK;
}

static const int32_t some_tokens[5] = {7, 300, 12, 0, 99};
#define N_VOCAB 320

/* logits of the last of some_tokens in a fresh session */
static rf_result run(rf_model *m, float *out, rf_error *err) {
    rf_session *s;
    float *logits;
    rf_result r = rf_session_open(m, NULL, &s, err);
    if (r == RF_OK) r = rf_session_forward(s, some_tokens, 5, &logits, err);
    if (r == RF_OK) memcpy(out, logits, N_VOCAB * sizeof *out);
    rf_session_close(s, NULL);
    return r;
}

/* ---- nothing before first use ---- */

static void test_no_read_before_use(void) {
    for (int mode = COPIED; mode <= NULLED; mode++) {
        disk dk;
        rig r;
        disk_make(&dk, &(mg_options){.type = MG_F32, .n_vocab = 1000});
        dk.most = 1000;
        if (!open_rig(&r, &dk, mode, NULL)) continue;
        CHECK(dk.parsed_to <= dk.data_start + 65536 && dk.file.n > dk.data_start + 400000, "parsing read %llu bytes, %zu are metadata",
              (unsigned long long)dk.parsed_to, dk.data_start); /* a buffer's length too far, whatever the file's size */
        rf_forecast f;
        CHECK(rf_model_forecast(r.m, NULL, &f, &r.err) == RF_OK && rf_session_open(r.m, NULL, &r.s, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(atomic_load(&dk.data_reads) == 0, "%s: %llu bytes of tensors were read", modes[mode], (unsigned long long)atomic_load(&dk.data_bytes));
        CHECK(rf_model_get_loading_stats(r.m).loads == 0 && rf_model_get_loading_stats(r.m).tensors_loaded == 0, "stats");
        CHECK(rf_session_forward(r.s, some_tokens, 5, NULL, &r.err) == RF_OK, "%s", r.err.text);
        uint64_t want = rf_gguf_get_info(r.g).data_bytes;
        CHECK(atomic_load(&dk.data_bytes) == want, "%s: %llu bytes were read, the tensors have %llu", modes[mode],
              (unsigned long long)atomic_load(&dk.data_bytes), (unsigned long long)want);
        CHECK(rf_session_forward(r.s, some_tokens, 5, NULL, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(atomic_load(&dk.data_bytes) == want, "%s: read again", modes[mode]);
        close_rig(&r);
        CHECK(atomic_load(&dk.n_open) == 0, "%d handles are left", atomic_load(&dk.n_open));
        mg_free(&dk.file);
    }
}

/* Mapped through hooks onto pages that may not be touched: the tensor data starts on a page of its own. */
static void *guard_map(int64_t handle, uint64_t size_bytes, void *user) {
    disk *d = (disk *)user;
    (void)handle;
    uint8_t *p = (uint8_t *)mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    memcpy(p, d->file.data, size_bytes);
    mprotect(p + d->data_start, size_bytes - d->data_start, PROT_NONE);
    d->in_read_user = p;
    return p;
}
static void guard_unmap(void *base, uint64_t size_bytes, void *user) {
    (void)user;
    munmap(base, size_bytes);
}

static void test_no_touch_before_use(void) {
    disk dk;
    rig r;
    float want[N_VOCAB], got[N_VOCAB];
    disk_make(&dk, &(mg_options){.type = MG_Q4_K, .alignment = 4096});
    REQUIRE(dk.data_start % 4096 == 0, "data at %zu", dk.data_start);
    if (!open_rig(&r, &dk, MAPPED, NULL)) return;
    CHECK(run(r.m, want, &r.err) == RF_OK, "%s", r.err.text);
    close_rig(&r);

    memset(&r, 0, sizeof r);
    rf_gguf_desc gd = {.allocator = memory_allocator(&r.mem), .io = disk_io};
    gd.io.user = &dk, gd.io.map_fn = guard_map, gd.io.unmap_fn = guard_unmap;
    atomic_store(&dk.counting, 0);
    CHECK(rf_gguf_open("disk", &gd, &r.g, &r.err) == RF_OK && rf_gguf_get_info(r.g).mapped, "%s", r.err.text);
    atomic_store(&dk.counting, 1);
    CHECK(rf_device_open("cpu", NULL, &r.d, &r.err) == RF_OK && rf_model_open(r.g, r.d, NULL, &r.m, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_session_open(r.m, NULL, &r.s, &r.err) == RF_OK, "%s", r.err.text); /* a touch ends the program here */
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "binding touches nothing: %s", r.err.text);
    mprotect((uint8_t *)dk.in_read_user + dk.data_start, dk.file.n - dk.data_start, PROT_READ);
    CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want, sizeof got) == 0, "%s", r.err.text);
    CHECK(atomic_load(&dk.data_reads) == 0, "a mapped file was read");
    close_rig(&r);
    mg_free(&dk.file);
}

/* A file in memory at an odd address cannot be used in place by vector loads: the tensors are copied, the bits are equal. */
static void test_odd_address(void) {
    disk dk;
    rig r;
    float want[N_VOCAB], got[N_VOCAB];
    disk_make(&dk, &(mg_options){.type = MG_F32, .bias = 1});
    if (!open_rig(&r, &dk, MAPPED, NULL)) return;
    CHECK(run(r.m, want, &r.err) == RF_OK && rf_model_get_loading_stats(r.m).device_bytes == 0, "%s", r.err.text);
    close_rig(&r);
    mg_buf shifted = {0};
    mg_put(&shifted, "x", 1);
    mg_put(&shifted, dk.file.data, dk.file.n);
    memset(&r, 0, sizeof r);
    CHECK(rf_gguf_open_memory(shifted.data + 1, dk.file.n, &(rf_gguf_desc){.allocator = memory_allocator(&r.mem)}, &r.g, &r.err) == RF_OK,
          "%s", r.err.text);
    CHECK(rf_device_open("cpu", NULL, &r.d, &r.err) == RF_OK && rf_model_open(r.g, r.d, NULL, &r.m, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(run(r.m, got, &r.err) == RF_OK && memcmp(got, want, sizeof got) == 0, "%s", r.err.text);
    uint64_t bytes = rf_model_get_loading_stats(r.m).device_bytes, data = rf_gguf_get_info(r.g).data_bytes;
    CHECK(bytes >= data && bytes < data + 256 * (uint64_t)rf_model_get_info(r.m).n_tensors, "copied: %llu", (unsigned long long)bytes);
    close_rig(&r);
    mg_free(&shifted);
    mg_free(&dk.file);
}

/* ---- files of real size: the tables of Llama 3.1, all zeros after them, sparse on disk ---- */

typedef struct big_shape {
    const char *name;
    uint32_t n_layers, n_embd, n_ff, n_heads;
} big_shape;

static const big_shape shape_8b = {"a sparse 8B", 32, 4096, 14336, 32}, shape_70b = {"a sparse 70B", 80, 8192, 28672, 64};

static void big_tensor(mg_gguf *w, uint64_t *end, const char *name, uint32_t type, uint64_t n_in, uint64_t n_rows) {
    uint32_t elements, bytes;
    mg_row row = {.type = type, .n_dims = n_rows ? 2 : 1, .ne = {n_in, n_rows}};
    mg_block(type, &elements, &bytes);
    snprintf(row.name, sizeof row.name, "%s", name);
    row.at = (size_t)*end;
    row.n = (size_t)(n_in * (n_rows ? n_rows : 1) / elements * bytes);
    *end = (*end + row.n + 31) / 32 * 32;
    mg_put(&w->rows, &row, sizeof row);
}

/* n strings "prefix<i>" */
static void big_strings(mg_gguf *w, const char *key, const char *prefix, uint32_t n) {
    mg_kv_arr(w, key, MG_KV_STR, NULL, n, 0);
    for (uint32_t i = 0; i < n; i++) {
        char text[32];
        mg_put_text(&w->kv, text, (size_t)snprintf(text, sizeof text, "%s%u", prefix, i));
    }
}

static size_t big_metadata(mg_buf *out, const big_shape *b, uint64_t *file_bytes) {
    mg_gguf w;
    uint64_t end = 0;
    size_t data_start;
    const uint32_t n_vocab = 128256;
    char name[64];
    mg_begin(&w, 3);
    mg_kv_str(&w, "general.architecture", "llama");
    mg_kv_str(&w, "general.name", b->name);
    mg_kv_u32(&w, "llama.block_count", b->n_layers);
    mg_kv_u32(&w, "llama.context_length", 131072);
    mg_kv_u32(&w, "llama.embedding_length", b->n_embd);
    mg_kv_u32(&w, "llama.feed_forward_length", b->n_ff);
    mg_kv_u32(&w, "llama.attention.head_count", b->n_heads);
    mg_kv_u32(&w, "llama.attention.head_count_kv", 8);
    mg_kv_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    mg_kv_f32(&w, "llama.rope.freq_base", 500000.0f);
    mg_kv_u32(&w, "llama.rope.dimension_count", 128);
    mg_kv_str(&w, "tokenizer.ggml.model", "gpt2");
    mg_kv_str(&w, "tokenizer.ggml.pre", "llama-bpe");
    big_strings(&w, "tokenizer.ggml.tokens", "token", n_vocab);
    mg_kv_arr(&w, "tokenizer.ggml.token_type", MG_KV_I32, NULL, n_vocab, 0);
    for (uint32_t i = 0; i < n_vocab; i++) mg_put_u32(&w.kv, 1);
    big_strings(&w, "tokenizer.ggml.merges", "left right", 280147);
    big_tensor(&w, &end, "token_embd.weight", MG_Q4_K, b->n_embd, n_vocab);
    big_tensor(&w, &end, "rope_freqs.weight", MG_F32, 64, 0);
    for (uint32_t il = 0; il < b->n_layers; il++) {
        const struct {
            const char *name;
            uint32_t type, n_in, n_rows;
        } t[] = {{"attn_norm", MG_F32, b->n_embd, 0},       {"attn_q", MG_Q4_K, b->n_embd, b->n_embd},      {"attn_k", MG_Q4_K, b->n_embd, 1024},
                 {"attn_v", MG_Q6_K, b->n_embd, 1024},      {"attn_output", MG_Q4_K, b->n_embd, b->n_embd}, {"ffn_norm", MG_F32, b->n_embd, 0},
                 {"ffn_gate", MG_Q4_K, b->n_embd, b->n_ff}, {"ffn_up", MG_Q4_K, b->n_embd, b->n_ff},        {"ffn_down", MG_Q6_K, b->n_ff, b->n_embd}};
        for (size_t k = 0; k < RFI_COUNT(t); k++) {
            snprintf(name, sizeof name, "blk.%u.%s.weight", il, t[k].name);
            big_tensor(&w, &end, name, t[k].type, t[k].n_in, t[k].n_rows);
        }
    }
    big_tensor(&w, &end, "output_norm.weight", MG_F32, b->n_embd, 0);
    big_tensor(&w, &end, "output.weight", MG_Q6_K, b->n_embd, n_vocab);
    mg_finish_at(&w, out, &data_start);
    *file_bytes = data_start + end;
    return data_start;
}

/* Rss in bytes of the mappings of a file; -1 if /proc does not say */
static int64_t resident(const char *path) {
    FILE *f = fopen("/proc/self/smaps", "r");
    char line[512];
    int64_t total = 0, found = 0;
    int mine = 0;
    while (f && fgets(line, sizeof line, f)) {
        long kib;
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) found += mine = strstr(line, path) != NULL;
        if (mine && sscanf(line, "Rss: %ld kB", &kib) == 1) total += kib * 1024;
    }
    if (f) fclose(f);
    return found ? total : -1;
}

static double cpu_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* Metadata, and a hole after it; path is mkstemp's. */
static int big_write(const big_shape *b, char *path, uint64_t *bytes) {
    mg_buf meta = {0};
    size_t data_start = big_metadata(&meta, b, bytes);
    int fd = mkstemp(path), written = 0;
    if (fd >= 0) written = write(fd, meta.data, data_start) == (ssize_t)data_start && ftruncate(fd, (off_t)*bytes) == 0;
    if (fd >= 0) close(fd);
    mg_free(&meta);
    if (!written) unlink(path);
    return written;
}

#if defined(__x86_64__) && !RFT_SANITIZED
static const double limit_ms = 50; /* the promise; a desktop core takes 25 */
#else
static const double limit_ms = 5000; /* sanitized, or perhaps emulated: only that it is not minutes */
#endif

/* The plan of a 70B: quick, without a byte of tensors read, and what opening and planning allocate is bounded. */
static void test_big_plan(void) {
    char path[] = "/tmp/rf_lazy_XXXXXX";
    uint64_t bytes;
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_error err;
    rf_forecast f;
    memory mem = {0};
    double best = 1e9;
    const rf_gguf_desc gd = {.allocator = memory_allocator(&mem)};
    REQUIRE(big_write(&shape_70b, path, &bytes), "cannot write a sparse file of %llu bytes in /tmp", (unsigned long long)bytes);
    REQUIRE(rf_gguf_open(path, &gd, &g, &err) == RF_OK && rf_device_open("null", NULL, &d, &err) == RF_OK, "%s", err.text);
    for (int i = 0; i < 20 && best >= limit_ms; i++) { /* once, more often where others share the caches */
        double cpu = cpu_ms();
        REQUIRE(rf_model_open(g, d, NULL, &m, &err) == RF_OK, "%s", err.text);
        best = fmin(best, cpu_ms() - cpu);
        CHECK(rf_model_close(m, NULL) == RF_OK, "busy");
    }
    for (int i = 0; i < 3; i++) {
        double cpu = cpu_ms();
        REQUIRE(rf_model_open(g, d, NULL, &m, &err) == RF_OK, "%s", err.text);
        best = fmin(best, cpu_ms() - cpu);
        CHECK(rf_model_forecast(m, NULL, &f, &err) == RF_OK && f.weight_bytes > (uint64_t)40e9, "%s", err.text);
        if (i < 2) CHECK(rf_model_close(m, NULL) == RF_OK, "busy");
        if (i == 0) mem.total = 0, rf_gguf_close(g, NULL), rf_gguf_open(path, &gd, &g, &err); /* count one of each */
    }
    rf_gguf_info info = rf_gguf_get_info(g);
    int64_t most = 8 * (int64_t)info.metadata_bytes + (1 << 20);
    printf("    %.1f GB, %u tensors: plan %.1f ms of CPU, %.1f MB allocated for %.1f MB of metadata\n", (double)bytes * 1e-9, rf_model_get_info(m).n_tensors, best,
           (double)memory_read(&mem.total) * 1e-6, (double)info.metadata_bytes * 1e-6);
    CHECK(best < limit_ms, "the plan took %.1f ms of CPU", best);
    CHECK(memory_read(&mem.total) <= most, "%lld bytes allocated", (long long)memory_read(&mem.total));
    CHECK(resident(path) <= (int64_t)info.metadata_bytes + 128 * 1024, "%lld bytes resident", (long long)resident(path));
    rf_loading_stats st = rf_model_get_loading_stats(m);
    CHECK(st.device_bytes == 0 && st.bytes_read == 0 && st.device_allocations == 0, "opening loads");
    CHECK(rf_model_close(m, NULL) == RF_OK && rf_device_close(d, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
    CHECK(memory_read(&mem.live) == 0, "%lld blocks are left", (long long)memory_read(&mem.live));
    unlink(path);
}

static void test_big_file(void) {
    char path[] = "/tmp/rf_lazy_XXXXXX";
    uint64_t bytes;
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_session *s;
    rf_error err;
    double best_cpu = 1e9, best_wall = 1e9;
    REQUIRE(big_write(&shape_8b, path, &bytes), "cannot write a sparse file of %llu bytes in /tmp", (unsigned long long)bytes);
    rf_device_open("cpu", &(rf_device_desc){.n_threads = 2}, &d, NULL);
    for (int i = 1;; i++) {
        double cpu = cpu_ms(), wall = rfi_now();
        rf_result r = rf_gguf_open(path, NULL, &g, &err);
        if (r == RF_OK) r = rf_model_open(g, d, NULL, &m, &err);
        best_cpu = fmin(best_cpu, cpu_ms() - cpu);
        best_wall = fmin(best_wall, (rfi_now() - wall) * 1e3);
        CHECK(r == RF_OK, "%s", err.text);
        if (r != RF_OK || (i >= 5 && best_cpu < limit_ms) || i == 20) break;
        rf_model_close(m, NULL);
        rf_gguf_close(g, NULL);
    }
    rf_gguf_info info = rf_gguf_get_info(g);
    int64_t rss = resident(path), limit = (int64_t)info.metadata_bytes + 128 * 1024;
    printf("    %.1f GB, metadata %.1f MB: open and plan %.1f ms (%.1f ms of CPU), %lld KiB of the mapping resident\n", (double)bytes * 1e-9,
           (double)info.metadata_bytes * 1e-6, best_wall, best_cpu, (long long)rss / 1024);
    CHECK(best_cpu < limit_ms, "open and plan took %.1f ms of CPU", best_cpu);
    CHECK(info.mapped && rss >= 0 && rss <= limit, "%lld bytes resident", (long long)rss);
    CHECK(rf_session_open(m, &(rf_session_desc){.n_ctx = 64, .n_batch = 8}, &s, &err) == RF_OK, "%s", err.text);
    CHECK(rf_model_load_tensor(m, "token_embd.weight", &err) == RF_OK && rf_model_is_tensor_loaded(m, "token_embd.weight"), "%s", err.text);
    CHECK(rf_model_preload_layers(m, (uint32_t[]){31}, 1, &err) == RF_OK, "%s", err.text);
    rss = resident(path);
    int64_t layer = (int64_t)rf_model_get_loading_stats(m).bytes_loaded - (int64_t)rf_model_get_plan(m)->weights[0].size_bytes;
    CHECK(rss >= layer && rss <= limit + layer + (1 << 20), "%lld bytes resident, the layer has %lld", (long long)rss, (long long)layer);
    rf_loading_stats st = rf_model_get_loading_stats(m);
    CHECK(st.tensors_loaded == 10 && st.device_bytes == 0 && st.device_allocations == 0, "used in place");
    rf_session_close(s, NULL);
    CHECK(rf_model_close(m, NULL) == RF_OK && rf_device_close(d, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
    unlink(path);
}

/* A budget on the CPU: of a file used in place no more is resident, whatever is computed, and the logits are the same. */
static void test_budget_in_place(void) {
    char path[] = "/tmp/rf_lazy_XXXXXX";
    mg_buf file = {0};
    rf_gguf *g;
    rf_device *d;
    rf_model *m;
    rf_error err;
    float want[N_VOCAB], got[N_VOCAB];
    mg_llama(&file, &(mg_options){.type = MG_Q8_0, .n_layers = 8, .n_embd = 512, .n_heads = 8, .head_dim = 64, .n_ff = 1024, .n_vocab = N_VOCAB});
    int fd = mkstemp(path), written = fd >= 0 && write(fd, file.data, file.n) == (ssize_t)file.n;
    if (fd >= 0) close(fd);
    mg_free(&file);
    REQUIRE(written && rf_gguf_open(path, NULL, &g, &err) == RF_OK, "cannot write %s", path);
    REQUIRE(rf_device_open("cpu", &(rf_device_desc){.n_threads = 2}, &d, &err) == RF_OK, "%s", err.text);
    uint64_t total = rf_gguf_get_info(g).data_bytes;
    for (int percent = 100; percent >= 30; percent -= 35) {
        int64_t budget = (int64_t)total * percent / 100;
        REQUIRE(rf_model_open(g, d, &(rf_model_desc){.budget_bytes = percent < 100 ? (uint64_t)budget : 0}, &m, &err) == RF_OK, "%s", err.text);
        CHECK(resident(path) <= 256 * 1024, "%lld bytes resident before", (long long)resident(path));
        for (int i = 0; i < 2; i++) CHECK(run(m, percent < 100 ? got : want, &err) == RF_OK, "%s", err.text);
        CHECK(percent == 100 || memcmp(got, want, sizeof got) == 0, "%d %%: other logits", percent);
        int64_t rss = resident(path);
        for (int wait = 0; wait < 100 && rss > budget + (1 << 20); wait++) { /* a reader may be about to let a tensor go */
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
            rss = resident(path);
        }
        CHECK(rss <= budget + (1 << 20) /* pages at edges */ && rss >= budget / 2, "%d %%: %lld bytes resident, the budget was %lld", percent, (long long)rss, (long long)budget);
        CHECK(rf_model_clear_device_cache(m, NULL, NULL) == RF_OK && resident(path) <= 256 * 1024, "%lld bytes resident after", (long long)resident(path));
        CHECK(rf_model_close(m, NULL) == RF_OK, "busy");
    }
    CHECK(rf_device_close(d, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
    unlink(path);
}

/* ---- what the calls mean ---- */

static void expect(const char *mode, const char *field, uint64_t got, uint64_t want) {
    CHECK(got == want, "%s: %s is %llu, want %llu", mode, field, (unsigned long long)got, (unsigned long long)want);
}
#define EXPECT(field, value) expect(modes[mode], #field, st.field, (uint64_t)(value))

static void test_loading(void) {
    for (int mode = MAPPED; mode <= NULLED; mode++) {
        disk dk;
        rig r;
        rf_loading_stats st;
        float before[N_VOCAB], after[N_VOCAB];
        uint32_t left = 99;
        const uint64_t norm = 64 * 4, up = 64 * 96 * 2, layer = 2 * norm + (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) * 2, embd = 320 * 64 * 2;
        const uint64_t all = 2 * layer + 2 * embd + norm;
        disk_make(&dk, &(mg_options){.type = MG_F16});
        if (!open_rig(&r, &dk, mode, NULL)) continue;
        CHECK(!rf_model_is_tensor_loaded(r.m, "blk.1.ffn_up.weight") && !rf_model_is_layer_loaded(r.m, 1), "at the start");
        CHECK(rf_model_load_tensor(r.m, "blk.1.ffn_up.weight", &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_model_is_tensor_loaded(r.m, "blk.1.ffn_up.weight") && !rf_model_is_layer_loaded(r.m, 1), "one tensor");
        CHECK(!rf_model_is_tensor_loaded(r.m, "blk.0.ffn_up.weight"), "another tensor");
        st = rf_model_get_loading_stats(r.m);
        EXPECT(tensors_loaded, 1), EXPECT(bytes_loaded, up), EXPECT(hits, 0), EXPECT(misses, 1), EXPECT(loads, 1), EXPECT(failures, 0);
        EXPECT(device_bytes, mode == MAPPED ? 0 : all), EXPECT(device_allocations, mode != MAPPED);
        EXPECT(bytes_read, mode == MAPPED ? 0 : up);
        CHECK(rf_model_load_tensor(r.m, "blk.1.ffn_up.weight", &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_model_preload_layers(r.m, (uint32_t[]){1}, 1, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_model_is_layer_loaded(r.m, 1) && !rf_model_is_layer_loaded(r.m, 0), "layer 1");
        st = rf_model_get_loading_stats(r.m);
        EXPECT(tensors_loaded, 9), EXPECT(bytes_loaded, layer), EXPECT(hits, 2), EXPECT(misses, 9), EXPECT(loads, 9);
        CHECK(rf_model_preload_layers(r.m, (uint32_t[]){1, 1}, 2, &r.err) == RF_OK && rf_model_preload_layers(r.m, NULL, 0, &r.err) == RF_OK, "again");
        CHECK(rf_model_preload_layers(r.m, (uint32_t[]){0, 2}, 2, &r.err) == RF_ERR_ARGUMENT && !rf_model_is_layer_loaded(r.m, 0), "%s", r.err.text);
        CHECK(rf_model_preload_layers(r.m, NULL, 1, &r.err) == RF_ERR_ARGUMENT, "NULL");
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && rf_model_is_layer_loaded(r.m, 0), "%s", r.err.text);
        CHECK(rf_model_is_tensor_loaded(r.m, "token_embd.weight") && rf_model_is_tensor_loaded(r.m, "output_norm.weight"), "outside the layers");
        st = rf_model_get_loading_stats(r.m);
        EXPECT(tensors_loaded, 21), EXPECT(bytes_loaded, all), EXPECT(hits, 2 + 9 + 9), EXPECT(misses, 21), EXPECT(loads, 21), EXPECT(evictions, 0);
        EXPECT(device_bytes, mode == MAPPED ? 0 : all), EXPECT(device_allocations, mode != MAPPED);
        CHECK(st.load_seconds > 0 && st.wait_seconds >= st.load_seconds && st.wait_seconds < 60, "%g s of %g s", st.load_seconds, st.wait_seconds);

        CHECK(rf_model_load_tensor(r.m, "no.such.tensor", &r.err) == RF_ERR_NOT_FOUND && strstr(r.err.text, "no.such.tensor"), "%s", r.err.text);
        CHECK(rf_model_load_tensor(r.m, NULL, &r.err) == RF_ERR_ARGUMENT && rf_model_load_tensor(NULL, "x", &r.err) == RF_ERR_ARGUMENT, "NULL");
        CHECK(!rf_model_is_tensor_loaded(r.m, "no.such.tensor") && !rf_model_is_tensor_loaded(r.m, NULL) && !rf_model_is_tensor_loaded(NULL, "x"), "no");
        CHECK(!rf_model_is_layer_loaded(r.m, 2) && !rf_model_is_layer_loaded(r.m, UINT32_MAX) && !rf_model_is_layer_loaded(NULL, 0), "no layer");
        CHECK(rf_model_preload_all(NULL, &r.err) == RF_ERR_ARGUMENT && rf_model_clear_device_cache(NULL, &left, &r.err) == RF_ERR_ARGUMENT, "NULL");
        CHECK(rf_model_get_loading_stats(NULL).loads == 0, "NULL");

        CHECK(run(r.m, before, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_session_open(r.m, NULL, &r.s, &r.err) == RF_OK, "%s", r.err.text); /* an idle session holds no weight */
        CHECK(rf_model_clear_device_cache(r.m, &left, &r.err) == RF_OK && left == 0, "%u left", left);
        st = rf_model_get_loading_stats(r.m);
        EXPECT(tensors_loaded, 0), EXPECT(bytes_loaded, 0), EXPECT(device_bytes, 0), EXPECT(evictions, 21), EXPECT(loads, 21);
        CHECK(!rf_model_is_tensor_loaded(r.m, "blk.1.ffn_up.weight"), "dropped");
        CHECK(rf_model_clear_gpu_cache(r.m, NULL, NULL) == RF_OK && rf_model_get_loading_stats(r.m).evictions == 21, "nothing to drop, by the old name");
        CHECK(run(r.m, after, &r.err) == RF_OK && memcmp(before, after, sizeof after) == 0, "after clearing: %s", r.err.text);
        st = rf_model_get_loading_stats(r.m);
        EXPECT(loads, 42), EXPECT(tensors_loaded, 21), EXPECT(device_bytes, mode == MAPPED ? 0 : all);
        close_rig(&r);
        mg_free(&dk.file);
    }
}

/* A tensor larger than the staging buffer arrives piece by piece: rows of all pieces are looked up and multiplied. */
static void test_large_tensor(void) {
    enum { N = 40000 }; /* x 64 x 4 bytes: 10 MB, staging has 4 MiB */
    static float want[N];
    static const int32_t tokens[4] = {3, 17000, 20000, N - 1};
    disk dk;
    disk_make(&dk, &(mg_options){.type = MG_F32, .no_vocab = 1, .n_vocab = N, .n_layers = 1});
    for (int mode = MAPPED; mode <= NULLED; mode++) {
        rig r;
        float *logits = NULL;
        atomic_store(&dk.data_bytes, 0);
        if (!open_rig(&r, &dk, mode, NULL)) continue;
        rf_result res = rf_session_open(r.m, NULL, &r.s, &r.err);
        if (res == RF_OK) res = rf_session_forward(r.s, tokens, 4, &logits, &r.err);
        CHECK(res == RF_OK, "%s: %s", modes[mode], r.err.text);
        if (mode == MAPPED && logits) memcpy(want, logits, sizeof want);
        if (mode == COPIED && logits) CHECK(memcmp(logits, want, sizeof want) == 0, "the copied weights give other bits");
        if (mode != MAPPED) CHECK(atomic_load(&dk.data_bytes) == rf_gguf_get_info(r.g).data_bytes, "read %llu", (unsigned long long)atomic_load(&dk.data_bytes));
        close_rig(&r);
    }
    mg_free(&dk.file);
}

static void one_mtp_layer(mg_gguf *w) { mg_kv_u32(w, "llama.nextn_predict_layers", 1); }

/* A tensor that the plan does not use is in the file but not of the model. */
static void test_unused_tensor(void) {
    disk dk;
    rig r;
    disk_make(&dk, &(mg_options){.n_layers = 2, .more_kv = one_mtp_layer});
    if (!open_rig(&r, &dk, COPIED, NULL)) return;
    CHECK(rf_model_load_tensor(r.m, "blk.1.ffn_up.weight", &r.err) == RF_ERR_NOT_FOUND, "%s", r.err.text);
    CHECK(!rf_model_is_tensor_loaded(r.m, "blk.1.ffn_up.weight"), "loaded");
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && rf_model_get_loading_stats(r.m).tensors_loaded == 12, "%s", r.err.text);
    close_rig(&r);
    mg_free(&dk.file);
}

/* ---- the progress callback ---- */

typedef struct progress {
    rf_model *m;
    uint64_t done[64], total;
    char name[64][72];
    int n, cancel_at;          /* the n-th call cancels; 0: none */
    void (*inside)(struct progress *p, const char *name);
} progress;

static int on_progress(uint64_t done, uint64_t total, rf_string tensor, void *user) {
    progress *p = (progress *)user;
    int i = p->n < 64 ? p->n : 63;
    p->n++;
    p->done[i] = done;
    p->total = total;
    snprintf(p->name[i], sizeof p->name[i], "%.*s", (int)tensor.len, tensor.data);
    if (p->inside) p->inside(p, p->name[i]);
    return p->n == p->cancel_at;
}

static void test_progress(void) {
    for (int mode = MAPPED; mode <= NULLED; mode++) {
        disk dk;
        rig r;
        progress p = {.cancel_at = 0};
        rf_model_desc md = {.progress_fn = on_progress, .progress_user = &p};
        disk_make(&dk, &(mg_options){.type = MG_Q8_0});
        if (!open_rig(&r, &dk, mode, &md)) continue;
        const rf_plan *plan = rf_model_get_plan(r.m);
        CHECK(p.n == 0, "opening reports progress");
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(p.n == (int)plan->n_weights, "%d calls for %u tensors", p.n, plan->n_weights);
        uint64_t sum = 0;
        for (uint32_t i = 0; i < plan->n_weights && i < 64; i++) {
            sum += plan->weights[i].size_bytes;
            CHECK(p.done[i] == sum && !strcmp(p.name[i], plan->weights[i].name), "call %u: %llu bytes, %s", i, (unsigned long long)p.done[i], p.name[i]);
        }
        CHECK(p.total == sum && sum == rf_model_get_info(r.m).weight_bytes, "total %llu", (unsigned long long)p.total);
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && p.n == (int)plan->n_weights, "what is loaded is not reported again");

        /* cancelled at the 4th: it stays loaded, the rest is not; then the rest */
        rf_model_clear_device_cache(r.m, NULL, NULL);
        p.n = 0, p.cancel_at = 4;
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_ERR_CANCELLED && strstr(r.err.text, plan->weights[3].name), "%s", r.err.text);
        CHECK(rf_model_get_loading_stats(r.m).tensors_loaded == 4 && rf_model_is_tensor_loaded(r.m, plan->weights[3].name), "after cancelling");
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && p.n == (int)plan->n_weights, "%s, %d calls", r.err.text, p.n);
        /* the same inside an evaluation */
        rf_model_clear_device_cache(r.m, NULL, NULL);
        p.n = 0, p.cancel_at = 7;
        CHECK(rf_session_open(r.m, NULL, &r.s, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_session_forward(r.s, some_tokens, 5, NULL, &r.err) == RF_ERR_CANCELLED && rf_session_length(r.s, 0) == 0, "%s", r.err.text);
        uint32_t left = 99;
        CHECK(rf_model_clear_device_cache(r.m, &left, NULL) == RF_OK && left == 0, "%u tensors are still in use", left);
        p.cancel_at = 0;
        CHECK(rf_session_forward(r.s, some_tokens, 5, NULL, &r.err) == RF_OK && rf_session_length(r.s, 0) == 5, "%s", r.err.text);
        close_rig(&r);
        mg_free(&dk.file);
    }
}

/* A cancel in the middle of a tensor of five pieces, by a thread that reads or by a callback: each thread that reads ends its
 * piece (one more, if it was just about to begin it), and no more is read. Nothing depends on who is quicker: the 3rd read
 * cancels, or the callback does while reads from the 12th on wait for it. By then a tensor has arrived, of which the callback is
 * told: eight reads can be of tensors that have not, four of each of the two that have five pieces. */
typedef struct cancel_at {
    rf_model *m;
    int callback;           /* it cancels, not a read                       */
    _Atomic uint64_t reads; /* data reads, each of which has its own number */
    _Atomic uint64_t late;  /* those begun after the cancel                 */
    _Atomic int gave_up;    /* the callback's cancel did not come           */
} cancel_at;

static int is_cancelled(const cancel_at *c) { return atomic_load(&c->m->store->cancels) != 0; }

static void cancel_in_read(void *user) {
    cancel_at *c = (cancel_at *)user;
    if (is_cancelled(c)) atomic_fetch_add(&c->late, 1);
    const uint64_t number = atomic_fetch_add(&c->reads, 1) + 1;
    if (!c->callback && number == 3) rf_model_cancel_loading(c->m);
    if (!c->callback || number < 12) return;
    const double give_up_at = rfi_now() + 60;
    while (!is_cancelled(c) && !atomic_load(&c->gave_up)) {
        if (rfi_now() > give_up_at) atomic_store(&c->gave_up, 1);
        sched_yield();
    }
}

static int cancel_in_callback(uint64_t done, uint64_t total, rf_string tensor, void *user) {
    (void)done, (void)total, (void)tensor, (void)user;
    return 1;
}

static uint32_t n_jobs(rfi_store *s) {
    pthread_mutex_lock(&s->monitor.mutex);
    uint32_t n = s->loader.n_jobs;
    pthread_mutex_unlock(&s->monitor.mutex);
    return n;
}

static void test_cancel_within_a_piece(void) {
    disk dk;
    disk_make(&dk, &(mg_options){.type = MG_F32, .no_vocab = 1, .n_vocab = 40000, .n_layers = 1}); /* 10 MB + 10 MB */
    for (int callback = 0; callback < 2; callback++)
        for (uint32_t readers = 1; readers <= 3; readers += 2) {
            rig r;
            cancel_at c = {.callback = callback};
            rf_model_desc md = {.n_readers = readers, .progress_fn = callback ? cancel_in_callback : NULL, .progress_user = &c};
            if (!open_rig(&r, &dk, COPIED, &md)) continue;
            c.m = r.m;
            dk.in_read = cancel_in_read, dk.in_read_user = &c;
            atomic_store(&dk.data_reads, 0);
            rf_result res = rf_model_preload_all(r.m, &r.err);
            while (n_jobs(r.m->store)) sched_yield();
            CHECK(res == RF_ERR_CANCELLED, "%s", rf_result_name(res));
            CHECK(is_cancelled(&c) && !atomic_load(&c.gave_up), "nothing was cancelled");
            CHECK(atomic_load(&c.late) <= readers, "%u readers: %u more pieces are read", readers, (unsigned)atomic_load(&c.late));
            dk.in_read = NULL;
            if (!callback) CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "afterwards: %s", r.err.text);
            close_rig(&r);
        }
    mg_free(&dk.file);
}

/* The only thread that reads is cancelled in the middle of a tensor for which nobody waits: the error ends with that load. */
static void test_cancel_of_a_reader(void) {
    disk dk;
    rig r;
    cancel_at c = {0};
    uint64_t cancels;
    const rf_model_desc md = {.n_readers = 1};
    disk_make(&dk, &(mg_options){.type = MG_F32, .no_vocab = 1, .n_vocab = 40000, .n_layers = 1});
    if (!open_rig(&r, &dk, COPIED, &md)) return;
    rfi_store *s = r.m->store;
    c.m = r.m;
    CHECK(rfi_store_begin(s, &cancels, &r.err) == RF_OK, "%s", r.err.text);
    dk.in_read = cancel_in_read, dk.in_read_user = &c;
    rfi_store_prefetch(s, NULL, 0, cancels);
    while (!is_cancelled(&c) || n_jobs(s)) sched_yield();
    rfi_store_end(s);
    CHECK(rf_model_get_loading_stats(r.m).failures == 1, "%llu failures", RFI_LLU(rf_model_get_loading_stats(r.m).failures));
    for (uint32_t slot = 0; slot < s->n_tensors; slot++) CHECK(!s->tensors[slot].err, "slot %u keeps an error", slot);
    dk.in_read = NULL;
    CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK && rf_model_get_loading_stats(r.m).failures == 1, "%s", r.err.text);
    close_rig(&r);
    mg_free(&dk.file);
}

/* A call that saw no cancel yet, and comes to its load after one: nothing is read. The next call is not concerned. */
static void test_cancel_before_a_load(void) {
    disk dk;
    rig r;
    disk_make(&dk, &(mg_options){.type = MG_F32});
    if (!open_rig(&r, &dk, COPIED, NULL)) return;
    rfi_store *s = r.m->store;
    rfi_monitor_lock(&r.d->monitor);
    CHECK(rfi_store_prepare(s, &r.err) == RF_OK, "%s", r.err.text);
    rfi_monitor_unlock(&r.d->monitor);
    rfi_tensor *t = &s->tensors[0];
    rfi_load late = {s, t, atomic_load(&s->cancels)};
    int loaded = 0;
    rf_model_cancel_loading(r.m);
    rf_result res = rfi_cell_acquire(&t->cell, &s->cell_monitor, rfi_tensor_load, &late, &loaded, &r.err);
    CHECK(res == RF_ERR_CANCELLED && !loaded, "%s: %s", rf_result_name(res), r.err.text);
    rfi_store_prefetch(s, NULL, 0, late.cancels);
    for (uint32_t i = 0; i < s->plan.n_weights; i++) CHECK(!s->tensors[i].prefetch, "tensor %u is to be loaded", i);
    CHECK(!s->loader.n_running && !atomic_load(&dk.data_reads), "%u data reads", (unsigned)atomic_load(&dk.data_reads));
    CHECK(rf_model_load_tensor(r.m, s->plan.weights[0].name, &r.err) == RF_OK, "%s", r.err.text);
    close_rig(&r);
    mg_free(&dk.file);
}

/* The callback may call the library: for the tensor just loaded, for others, to drop, to look. */
static void inside_progress(progress *p, const char *name) {
    rf_error err;
    uint32_t left = 0;
    CHECK(rf_model_is_tensor_loaded(p->m, name), "%s is reported before it is loaded", name);
    CHECK(rf_model_load_tensor(p->m, name, &err) == RF_OK, "%s: %s", name, err.text);
    if (p->n == 3) CHECK(rf_model_load_tensor(p->m, "blk.1.ffn_down.weight", &err) == RF_OK, "%s", err.text); /* calls back again */
    if (p->n == 6) {
        CHECK(rf_model_clear_device_cache(p->m, &left, &err) == RF_OK && left == 1, "only the one being reported is in use: %u", left);
        CHECK(rf_model_is_tensor_loaded(p->m, name), "%s was dropped under its user", name);
    }
    rf_loading_stats st = rf_model_get_loading_stats(p->m);
    CHECK(st.tensors_loaded > 0, "stats");
}

static void test_reentry(void) {
    for (int mode = MAPPED; mode <= NULLED; mode++) {
        disk dk;
        rig r;
        progress p = {.inside = inside_progress};
        rf_model_desc md = {.progress_fn = on_progress, .progress_user = &p};
        disk_make(&dk, &(mg_options){.type = MG_F32});
        if (!open_rig(&r, &dk, mode, &md)) continue;
        p.m = r.m;
        CHECK(rf_model_preload_all(r.m, &r.err) == RF_OK, "%s: %s", modes[mode], r.err.text);
        CHECK(p.n > 20, "%d calls", p.n);
        close_rig(&r);
        mg_free(&dk.file);
    }
}

/* A load that asks for itself, through the read hook, is told so instead of waiting for ever. */
static void ask_for_itself(void *user) {
    rf_error err;
    rf_result r = rf_model_load_tensor((rf_model *)user, "blk.0.attn_q.weight", &err);
    CHECK(r == RF_ERR_BUSY && strstr(err.text, "blk.0.attn_q.weight"), "%s: %s", rf_result_name(r), err.text);
}

static void test_self_wait(void) {
    disk dk;
    rig r;
    disk_make(&dk, &(mg_options){.type = MG_F32});
    if (!open_rig(&r, &dk, COPIED, NULL)) return;
    dk.in_read = ask_for_itself, dk.in_read_user = r.m;
    CHECK(rf_model_load_tensor(r.m, "blk.0.attn_q.weight", &r.err) == RF_OK, "%s", r.err.text);
    dk.in_read = NULL;
    close_rig(&r);
    mg_free(&dk.file);
}

/* Loads in the read hook of other loads: two have staging buffers, the third is told so. */
typedef struct nested {
    rf_model *m;
    uint32_t depth;
    rf_result results[3];
} nested;

static const char *const nested_names[3] = {"blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"};

static void load_the_next(void *user) {
    nested *n = (nested *)user;
    rf_error err;
    if (n->depth == 2) return;
    const uint32_t depth = ++n->depth;
    n->results[depth] = rf_model_load_tensor(n->m, nested_names[depth], &err);
}

static void test_nested_loads(void) {
    disk dk;
    rig r;
    disk_make(&dk, &(mg_options){.type = MG_F32});
    if (!open_rig(&r, &dk, COPIED, NULL)) return;
    nested n = {.m = r.m};
    dk.in_read = load_the_next, dk.in_read_user = &n;
    CHECK(rf_model_load_tensor(r.m, nested_names[0], &r.err) == RF_OK, "%s", r.err.text);
    dk.in_read = NULL;
    CHECK(n.depth == 2 && n.results[1] == RF_OK && n.results[2] == RF_ERR_BUSY, "%u: %s, %s", n.depth,
          rf_result_name(n.results[1]), rf_result_name(n.results[2]));
    CHECK(rf_model_load_tensor(r.m, nested_names[2], &r.err) == RF_OK, "%s", r.err.text);
    close_rig(&r);
    mg_free(&dk.file);
}

/* ---- many threads ---- */

typedef struct worker {
    rf_model *m;
    uint64_t seed;
    rf_result result;
    rf_error err;
    _Atomic int *start;
    int rounds, clears;
    const float *want;
} worker;

static void *load_all_shuffled(void *arg) {
    worker *w = (worker *)arg;
    const rf_plan *plan = rf_model_get_plan(w->m);
    uint32_t order[80], n = plan->n_weights;
    mg_rng rng = {w->seed};
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = n - 1; i > 0; i--) {
        uint32_t k = mg_below(&rng, i + 1), t = order[i];
        order[i] = order[k], order[k] = t;
    }
    while (!atomic_load(w->start)) sched_yield();
    for (uint32_t i = 0; i < n && w->result == RF_OK; i++) {
        w->result = rf_model_load_tensor(w->m, plan->weights[order[i]].name, &w->err);
        if (w->result == RF_OK && !rf_model_is_tensor_loaded(w->m, plan->weights[order[i]].name)) w->result = RF_ERR_DEVICE;
    }
    return NULL;
}

static void test_one_load_each(void) {
    enum { N = 64 };
    for (int mode = MAPPED; mode <= NULLED; mode++) {
        disk dk;
        rig r;
        static worker w[N];
        pthread_t threads[N];
        _Atomic int start = 0;
        disk_make(&dk, &(mg_options){.type = MG_Q4_K, .n_layers = 6, .arch = "qwen2"});
        dk.most = 3000; /* many short reads: loads take a while */
        if (!open_rig(&r, &dk, mode, NULL)) continue;
        uint32_t n = rf_model_get_plan(r.m)->n_weights;
        REQUIRE(n <= 80, "%u tensors", n);
        int n_started = 0;
        for (int i = 0; i < N; i++) {
            w[i] = (worker){.m = r.m, .seed = (uint64_t)i, .start = &start};
            if (pthread_create(&threads[i], NULL, load_all_shuffled, &w[i]) != 0) break;
            n_started++;
        }
        atomic_store(&start, 1);
        for (int i = 0; i < n_started; i++) {
            pthread_join(threads[i], NULL);
            CHECK(w[i].result == RF_OK, "thread %d: %s: %s", i, rf_result_name(w[i].result), w[i].err.text);
        }
        rf_loading_stats st = rf_model_get_loading_stats(r.m);
        EXPECT(loads, n), EXPECT(tensors_loaded, n), EXPECT(failures, 0), EXPECT(hits + st.misses, n_started * n);
        if (mode != MAPPED) {
            CHECK(atomic_load(&dk.data_bytes) == rf_gguf_get_info(r.g).data_bytes, "%llu bytes read, the file has %llu",
                  (unsigned long long)atomic_load(&dk.data_bytes), (unsigned long long)rf_gguf_get_info(r.g).data_bytes);
            EXPECT(device_allocations, 1);
        }
        close_rig(&r);
        mg_free(&dk.file);
    }
}

static void *evaluate_again(void *arg) {
    worker *w = (worker *)arg;
    float got[N_VOCAB];
    while (!atomic_load(w->start)) sched_yield();
    for (int i = 0; i < w->rounds && w->result == RF_OK; i++) {
        w->result = run(w->m, got, &w->err);
        if (w->result == RF_OK && w->want && memcmp(got, w->want, sizeof got) != 0) w->result = RF_ERR_DEVICE;
    }
    return NULL;
}

static void *clear_again(void *arg) {
    worker *w = (worker *)arg;
    while (!atomic_load(w->start)) sched_yield();
    while (atomic_load(w->start) == 1 && w->result == RF_OK) {
        w->result = rf_model_clear_device_cache(w->m, NULL, &w->err);
        w->clears++;
        sched_yield();
    }
    return NULL;
}

/* Sessions of one model in parallel, on a cold model, while another thread drops whatever it can. */
static void test_parallel_sessions(void) {
    for (int mode = MAPPED; mode <= NULLED; mode++) {
        enum { N = 4 };
        disk dk;
        rig r;
        worker w[N + 1];
        pthread_t threads[N + 1];
        float want[N_VOCAB];
        _Atomic int start = 0;
        disk_make(&dk, &(mg_options){.type = MG_Q4_0});
        if (!open_rig(&r, &dk, mode, NULL)) continue;
        CHECK(run(r.m, want, &r.err) == RF_OK, "%s", r.err.text);
        CHECK(rf_model_clear_device_cache(r.m, NULL, NULL) == RF_OK, "clear");
        for (int i = 0; i <= N; i++) {
            w[i] = (worker){.m = r.m, .start = &start, .rounds = RFT_SANITIZED ? 10 : 40, .want = want};
            CHECK(pthread_create(&threads[i], NULL, i < N ? evaluate_again : clear_again, &w[i]) == 0, "thread");
        }
        atomic_store(&start, 1);
        for (int i = 0; i <= N; i++) {
            if (i == N) atomic_store(&start, 2);
            pthread_join(threads[i], NULL);
            CHECK(w[i].result == RF_OK, "%s, thread %d: %s: %s", modes[mode], i, rf_result_name(w[i].result), w[i].err.text);
        }
        rf_loading_stats st = rf_model_get_loading_stats(r.m);
        CHECK(st.loads - st.evictions == st.tensors_loaded, "%llu loads, %llu evictions, %llu loaded", (unsigned long long)st.loads,
              (unsigned long long)st.evictions, (unsigned long long)st.tensors_loaded);
        uint32_t left = 99;
        CHECK(rf_model_clear_device_cache(r.m, &left, NULL) == RF_OK && left == 0, "%u tensors are still in use", left);
        CHECK(rf_model_get_loading_stats(r.m).bytes_loaded == 0 && rf_model_get_loading_stats(r.m).device_bytes == 0, "bytes");
        close_rig(&r);
        mg_free(&dk.file);
    }
}

/* ---- failures ---- */

static void *load_one(void *arg) {
    worker *w = (worker *)arg;
    w->result = rf_model_load_tensor(w->m, "blk.0.ffn_down.weight", &w->err);
    return NULL;
}

static int n_waiters(rfi_store *s, uint32_t slot) {
    int n = 0;
    if (slot >= atomic_load(&s->n_tensors)) return 0;
    pthread_mutex_lock(&s->cell_monitor.mutex);
    for (rfi_waiter *w = s->tensors[slot].cell.waiters; w; w = w->next) n++;
    pthread_mutex_unlock(&s->cell_monitor.mutex);
    return n;
}

/* One thread reads and fails while others wait: all of them get that failure, and a later call reads again. */
static void test_read_failure(void) {
    enum { N = 12 };
    disk dk;
    rig r;
    worker w[N];
    pthread_t threads[N];
    disk_make(&dk, &(mg_options){.type = MG_F32});
    dk.most = 4096;
    if (!open_rig(&r, &dk, COPIED, NULL)) return;
    uint32_t slot = rfi_model_weight(r.m, "blk.0.ffn_down.weight")->slot;
    atomic_store(&dk.fail_read, 1);
    atomic_store(&dk.blocked, 1);
    for (int i = 0; i < N; i++) {
        w[i] = (worker){.m = r.m};
        CHECK(pthread_create(&threads[i], NULL, load_one, &w[i]) == 0, "thread");
    }
    while (n_waiters(r.m->store, slot) < N - 1 || atomic_load(&dk.waiting) == 0) sched_yield();
    CHECK(atomic_load(&dk.waiting) == 1 && !rf_model_is_tensor_loaded(r.m, "blk.0.ffn_down.weight"), "one reads, the others wait");
    atomic_store(&dk.blocked, 0);
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        CHECK(w[i].result == RF_ERR_IO && w[i].err.code == RF_ERR_IO && w[i].err.sys == EIO, "thread %d: %s: %s", i, rf_result_name(w[i].result), w[i].err.text);
    }
    rf_loading_stats st = rf_model_get_loading_stats(r.m);
    CHECK(st.failures == 1 && st.loads == 0 && st.bytes_loaded == 0 && st.tensors_loaded == 0, "%llu failures", (unsigned long long)st.failures);
    CHECK(rf_model_load_tensor(r.m, "blk.0.ffn_down.weight", &r.err) == RF_OK, "later: %s", r.err.text);
    close_rig(&r);
    mg_free(&dk.file);
}

/* The n-th read fails, for every n: the evaluation fails, changes nothing, and works when asked again. */
static void test_every_read_failure(void) {
    disk dk;
    rig r;
    float want[N_VOCAB];
    disk_make(&dk, &(mg_options){.type = MG_F16});
    if (!open_rig(&r, &dk, COPIED, NULL)) return;
    CHECK(run(r.m, want, &r.err) == RF_OK, "%s", r.err.text);
    uint64_t n_reads = atomic_load(&dk.data_reads);
    CHECK(n_reads >= 21, "%llu reads", (unsigned long long)n_reads);
    CHECK(rf_session_open(r.m, NULL, &r.s, &r.err) == RF_OK, "%s", r.err.text);
    for (uint64_t n = 1; n <= n_reads; n++) {
        float *logits;
        rf_model_clear_device_cache(r.m, NULL, NULL);
        rf_session_truncate(r.s, 0, 0, NULL, NULL);
        atomic_store(&dk.data_reads, 0);
        atomic_store(&dk.fail_read, n);
        rf_result res = rf_session_forward(r.s, some_tokens, 5, &logits, &r.err);
        CHECK(res == RF_ERR_IO && r.err.sys == EIO && !logits, "read %llu: %s: %s", (unsigned long long)n, rf_result_name(res), r.err.text);
        CHECK(rf_session_length(r.s, 0) == 0, "read %llu changed the sequence", (unsigned long long)n);
        res = rf_session_forward(r.s, some_tokens, 5, &logits, &r.err);
        CHECK(res == RF_OK && memcmp(logits, want, sizeof want) == 0, "read %llu, again: %s: %s", (unsigned long long)n, rf_result_name(res), r.err.text);
    }
    CHECK(rf_model_get_loading_stats(r.m).failures == n_reads, "failures");
    close_rig(&r);
    mg_free(&dk.file);
}

/* The null device as one that repacks weights: it asks for scratch memory while one is written. */
static rf_weight_layout repacking_layout(rf_dev *d, const rf_plan *plan, const rf_plan_weight *w) {
    (void)d, (void)plan;
    return (rf_weight_layout){.size_bytes = w->size_bytes, .scratch_bytes = 4096, .align = 1};
}

static rf_device_api repacking;

/* File, device, model, tokenizer, all weights, session, an evaluation of three micro-batches, a copy, everything evicted,
 * a token, which loads again. The first failure ends it; called again, it goes on with what there is. */
static rf_result whole_life(rig *r, disk *dk, const char *device, const rf_device_desc *more, int map) {
    rf_allocator a = memory_allocator(&r->mem);
    rf_gguf_desc gd = {.allocator = a, .io = disk_io, .no_map = 1};
    rf_device_desc dd = *more;
    rf_session_desc sd = {.n_ctx = 32, .n_seq_max = 2, .n_batch = 2};
    rf_model_desc md = {.pre_tokenizer = "llama-bpe"};
    const rf_tokenizer *t;
    rf_result res = RF_OK;
    gd.io.user = dk;
    dd.allocator = a;
    if (!r->g && map) res = rf_gguf_open_memory(dk->file.data, dk->file.n, &(rf_gguf_desc){.allocator = a}, &r->g, &r->err);
    if (!r->g && !map) res = rf_gguf_open("disk", &gd, &r->g, &r->err);
    if (res == RF_OK && !r->d) {
        res = rf_device_open(strcmp(device, "repacking") ? device : "null", &dd, &r->d, &r->err);
        if (res == RF_OK && strcmp(device, "repacking") == 0) {
            repacking = rfi_null_api;
            repacking.weight_layout = repacking_layout;
            r->d->api = &repacking;
        }
    }
    if (res == RF_OK && !r->m) res = rf_model_open(r->g, r->d, &md, &r->m, &r->err);
    if (res == RF_OK) res = rf_model_get_tokenizer(r->m, &t, &r->err);
    if (res == RF_OK) res = rf_model_preload_all(r->m, &r->err);
    if (res == RF_OK && !r->s) res = rf_session_open(r->m, &sd, &r->s, &r->err);
    if (res == RF_OK) res = rf_session_forward(r->s, some_tokens, 5, NULL, &r->err);
    if (res == RF_OK) res = rf_session_copy(r->s, 0, 1, &r->err);
    if (res == RF_OK) res = rf_model_clear_device_cache(r->m, NULL, &r->err);
    if (res == RF_OK) res = rf_session_forward(r->s, some_tokens, 1, NULL, &r->err);
    if (res == RF_OK) res = rf_session_get_logits(r->s, 0, &(float *){NULL}, &r->err);
    return res;
}

/* After the n-th call failed: what is there stays usable or closable. One that failed once works when asked again. */
static void after_failure(rig *r, disk *dk, const char *device, int map, int forever, uint64_t n) {
    uint32_t held = rf_session_length(r->s, 0);
    CHECK(held == 0 || held == 5 || held == 6, "call %llu left %u tokens", (unsigned long long)n, held);
    if (forever) {
        whole_life(r, dk, device, &(rf_device_desc){.n_threads = 2}, map); /* any verdict */
        return;
    }
    rf_result again = whole_life(r, dk, device, &(rf_device_desc){.n_threads = 2}, map);
    CHECK(again == RF_OK && rf_session_length(r->s, 0) == held + 6, "after call %llu: %s: %s", (unsigned long long)n,
          rf_result_name(again), r->err.text);
}

/* The n-th allocation fails: once, or it and all later ones; of a file used in place, and of one that is read. */
static void test_every_allocation_failure(void) {
    for (int round = 0; round < 4; round++) {
        int map = round & 1, forever = round >> 1;
        disk dk;
        int64_t n = 1, failed = 0;
        disk_make(&dk, &(mg_options){.type = MG_Q4_0, .n_layers = 1, .bpe = 1, .bias = 1});
        for (int64_t calls = 1; n <= calls && n < 2000; n++) {
            rig r;
            memset(&r, 0, sizeof r);
            r.mem.fail_at = n;
            r.mem.forever = forever;
            rf_result res = whole_life(&r, &dk, "cpu", &(rf_device_desc){.n_threads = 2}, map);
            CHECK(res == RF_OK || (res == RF_ERR_MEMORY && r.err.code == res && r.err.text[0]), "allocation %lld: %s: %s", (long long)n,
                  rf_result_name(res), r.err.text);
            failed += res != RF_OK;
            calls = res != RF_OK ? n + 1 : memory_read(&r.mem.calls); /* after a failure there may be more */
            if (res != RF_OK) after_failure(&r, &dk, "cpu", map, forever, (uint64_t)n);
            close_rig(&r);
        }
        printf("    %s, %s: %lld of %lld allocations fail the call\n", map ? "mapped" : "copied", forever ? "for ever" : "once",
               (long long)failed, (long long)n - 1);
        /* device memory for weights may be made up for by smaller blocks */
        CHECK(failed > 20 && failed >= n - (map ? 2 : 6) && atomic_load(&dk.n_open) == 0, "%lld of %lld, %d handles left", (long long)failed,
              (long long)n - 1, atomic_load(&dk.n_open));
        mg_free(&dk.file);
    }
}

/* The n-th call of the file's hooks fails: once, or it and all later ones; reads are short. */
static void test_every_io_failure(void) {
    for (int forever = 0; forever < 2; forever++) {
        disk dk;
        uint64_t n = 1;
        disk_make(&dk, &(mg_options){.type = MG_Q8_0, .n_layers = 1, .bpe = 1});
        dk.most = 4096;
        dk.forever = forever;
        for (int done = 0; !done && n < 2000; n++) {
            rig r;
            memset(&r, 0, sizeof r);
            atomic_store(&dk.calls, 0);
            dk.fail_call = n;
            rf_result res = whole_life(&r, &dk, "cpu", &(rf_device_desc){.n_threads = 2}, 0);
            CHECK(res == RF_OK || (res == RF_ERR_IO && r.err.sys == EIO && strstr(r.err.text, "disk")), "call %llu: %s: %s",
                  (unsigned long long)n, rf_result_name(res), r.err.text);
            done = res == RF_OK;
            if (!done) after_failure(&r, &dk, "cpu", 0, forever, n);
            close_rig(&r);
        }
        printf("    %s: %llu calls\n", forever ? "for ever" : "once", (unsigned long long)n - 2);
        CHECK(n > 30 && n < 2000 && atomic_load(&dk.n_open) == 0, "%llu calls, %d handles left", (unsigned long long)n,
              atomic_load(&dk.n_open));
        mg_free(&dk.file);
    }
}

/* The n-th call of the device fails: once, or it and all later ones. */
static void test_every_device_failure(void) {
    for (uint32_t round = 0; round < 4; round++) {
        disk dk;
        uint64_t n = 1;
        uint32_t forever = round & 1;
        const char *device = round & 2 ? "repacking" : "null";
        disk_make(&dk, &(mg_options){.type = MG_Q4_0, .n_layers = 1, .bpe = 1});
        int failed = 0;
        for (uint64_t n_calls = 1; n <= n_calls && n < 2000; n++) { /* a failed allocation may be made up for by smaller ones */
            rig r;
            char call[32];
            memset(&r, 0, sizeof r);
            rf_device_desc dd = {.fail_call = n, .fail_forever = forever};
            snprintf(call, sizeof call, "call %llu ", (unsigned long long)n);
            rf_result res = whole_life(&r, &dk, device, &dd, 0);
            n_calls = r.d ? atomic_load(&((rfi_null *)(void *)r.d->dev)->n_calls) : n;
            if (res != RF_OK) n_calls = n + 1; /* it ended early: there are more */
            failed += res != RF_OK;
            CHECK(res == RF_OK || (res == RF_ERR_DEVICE && strstr(r.err.text, call) && r.err.where == n), "call %llu: %s: %s",
                  (unsigned long long)n, rf_result_name(res), r.err.text);
            if (res != RF_OK && forever && r.s)
                CHECK(rf_session_eval(r.s, &(rf_token_row){.token = 1, .pos = RF_POS_NEXT}, 1, &r.err) == RF_ERR_DEVICE, "call %llu: %s", (unsigned long long)n, r.err.text);
            if (res != RF_OK) after_failure(&r, &dk, device, 0, (int)forever, n);
            close_rig(&r);
        }
        printf("    %s device, %s: %llu calls\n", device, forever ? "for ever" : "once", (unsigned long long)n - 2);
        CHECK(failed > 30 && failed + 6 > (int)n - 2 && n < 2000, "%d of %llu calls failed", failed, (unsigned long long)n);
        mg_free(&dk.file);
    }
}

/* ---- closing in the wrong order is refused ---- */

static void test_busy(void) {
    disk dk;
    rig r;
    rf_model *second;
    rf_tokenizer *t;
    disk_make(&dk, &(mg_options){.type = MG_F32});
    if (!open_rig(&r, &dk, COPIED, NULL)) return;
    CHECK(rf_model_open(r.g, r.d, NULL, &second, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_session_open(r.m, NULL, &r.s, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_gguf_close(r.g, &r.err) == RF_ERR_BUSY && r.err.text[0], "%s", r.err.text);
    CHECK(rf_device_close(r.d, &r.err) == RF_ERR_BUSY && strstr(r.err.text, "2"), "%s", r.err.text);
    CHECK(rf_model_close(r.m, &r.err) == RF_ERR_BUSY && strstr(r.err.text, "1"), "%s", r.err.text);
    CHECK(rf_session_forward(r.s, some_tokens, 5, NULL, &r.err) == RF_OK, "still usable: %s", r.err.text);
    CHECK(rf_model_close(second, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_device_close(r.d, &r.err) == RF_ERR_BUSY && rf_gguf_close(r.g, &r.err) == RF_ERR_BUSY, "%s", r.err.text);
    rf_session_close(r.s, NULL);
    r.s = NULL;
    CHECK(rf_model_close(r.m, &r.err) == RF_OK, "%s", r.err.text);
    r.m = NULL;
    CHECK(rf_tokenizer_open(r.g, NULL, &t, &r.err) == RF_OK, "%s", r.err.text);
    CHECK(rf_gguf_close(r.g, &r.err) == RF_ERR_BUSY, "a tokenizer uses it");
    rf_tokenizer_close(t, NULL);
    CHECK(rf_gguf_close(NULL, &r.err) == RF_OK && rf_device_close(NULL, &r.err) == RF_OK && rf_model_close(NULL, &r.err) == RF_OK, "NULL");
    CHECK(rf_model_open(NULL, r.d, NULL, &second, &r.err) == RF_ERR_ARGUMENT && !second, "NULL");
    CHECK(rf_model_open(r.g, NULL, NULL, &second, &r.err) == RF_ERR_ARGUMENT && rf_model_open(r.g, r.d, NULL, NULL, &r.err) == RF_ERR_ARGUMENT, "NULL");
    close_rig(&r);
    mg_free(&dk.file);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    alarm(RFT_SANITIZED ? 900 : 300); /* a deadlock is a failure too */
    RUN(test_no_read_before_use);
    RUN(test_no_touch_before_use);
    RUN(test_odd_address);
    RUN(test_big_file);
    RUN(test_big_plan);
    RUN(test_budget_in_place);
    RUN(test_loading);
    RUN(test_large_tensor);
    RUN(test_unused_tensor);
    RUN(test_progress);
    RUN(test_cancel_within_a_piece);
    RUN(test_cancel_of_a_reader);
    RUN(test_cancel_before_a_load);
    RUN(test_reentry);
    RUN(test_self_wait);
    RUN(test_nested_loads);
    RUN(test_one_load_each);
    RUN(test_parallel_sessions);
    RUN(test_read_failure);
    RUN(test_every_read_failure);
    RUN(test_every_allocation_failure);
    RUN(test_every_io_failure);
    RUN(test_every_device_failure);
    RUN(test_busy);
    RFT_END();
}
