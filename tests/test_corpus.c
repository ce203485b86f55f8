/* test_corpus.c: every file of the corpus of malformed and odd files (make_bad_gguf.py, both widths) through open,
 * plan, load of every tensor, tokenizer and one token, by each way to open a file. What must be refused is refused at
 * or before its stage, what must be accepted is accepted, nothing crashes, hangs or allocates without bound, and
 * messages name the field and the byte. The files are worked on in a child process, so that one that kills it is just
 * one. */
#define _GNU_SOURCE /* nftw */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include "make_gguf.h"
#include "rf_life.h"
#include "rf_test.h"
#include <ftw.h>
#include <sys/time.h>
#include <sys/wait.h>

#define SLOW (RFT_SANITIZED ? 6 : 1)

/* Seconds after which a file hangs: of the processor, because others may use it; and of the clock, if it waits. */
#define HANG_SECONDS (2 * SLOW)
#define WAIT_SECONDS 60

/* What the header promises of rf_model_open and rf_model_get_tokenizer, the open file included. */
#define PLAN_TIMES 32
#define PLAN_BYTES (256u << 10)

/* ---- the manifest ---- */

typedef struct expectation {
    char *file, *verdict, *stage, *then, *at, *what;
    uint64_t header_bytes;
    int special;
} expectation;

typedef struct corpus {
    char dir[300];
    char *text; /* the manifest, cut into strings */
    expectation *files;
    size_t n;
} corpus;

static char tmp_dir[256];

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *at) {
    RFI_UNUSED(st), RFI_UNUSED(type), RFI_UNUSED(at);
    return remove(path);
}

static char *read_whole(const char *path, size_t *n_bytes) {
    FILE *f = fopen(path, "rb");
    char *data = NULL;
    if (!f) return NULL;
    if (fseek(f, 0, SEEK_END) == 0) {
        long n = ftell(f);
        rewind(f);
        data = n < 0 ? NULL : (char *)malloc((size_t)n + !n); /* exactly: a sanitizer sees a read after it */
        *n_bytes = (size_t)n;
        if (data && fread(data, 1, *n_bytes, f) != *n_bytes) free(data), data = NULL;
    }
    fclose(f);
    return data;
}

/* Cut the next field off *at. */
static char *next_field(char **at) {
    char *field = *at;
    *at += strcspn(field, "\t");
    if (**at) *(*at)++ = 0;
    return field;
}

static int read_manifest(corpus *c) {
    char path[400];
    size_t n = 0, lines = 0;
    snprintf(path, sizeof path, "%s/manifest.tsv", c->dir);
    char *raw = read_whole(path, &n);
    c->text = raw ? (char *)malloc(n + 1) : NULL;
    if (!c->text) return 0;
    memcpy(c->text, raw, n);
    c->text[n] = 0;
    free(raw);
    for (size_t i = 0; i < n; i++) lines += c->text[i] == '\n';
    c->files = (expectation *)calloc(lines + 1, sizeof *c->files);
    for (char *line = c->text; c->files && *line;) {
        expectation *e = &c->files[c->n++];
        char *end = line + strcspn(line, "\n");
        *end = 0;
        e->file = next_field(&line), e->verdict = next_field(&line), e->stage = next_field(&line);
        e->then = next_field(&line), e->at = next_field(&line);
        e->header_bytes = strtoull(next_field(&line), NULL, 10);
        e->what = next_field(&line);
        e->special = strncmp(e->file, "special/", 8) == 0;
        line = end + 1;
    }
    return c->files != NULL;
}

/* ---- what happens to a file ---- */

enum { BY_MAP, BY_READ, BY_MEMORY, BY_HOOKS, N_WAYS };
static const char *const ways[] = {"mapped", "read", "memory", "hooks"};

typedef struct outcome {
    int state;          /* 0 untouched, 1 in work, 2 done                */
    int killed_by;      /* signal that ended the process working on it   */
    int way;            /* in work                                       */
    life lives[N_WAYS];
} outcome;

/* Hooks over the same file: reads of odd, short lengths. */
static int64_t short_read(int64_t handle, uint64_t offset, void *dst, size_t n, void *user) {
    size_t most = 1 + (size_t)(offset * 7919 % 30011);
    return rfi_os_read(handle, offset, dst, n < most ? n : most, user);
}
static const rf_io hooks = {.open_fn = rfi_os_open, .read_fn = short_read, .close_fn = rfi_os_close};

static void set_alarms(int cpu_seconds, unsigned wait_seconds) {
    struct itimerval t = {.it_value = {.tv_sec = cpu_seconds}};
    setitimer(ITIMER_PROF, &t, NULL);
    alarm(wait_seconds);
}

static void live(const corpus *c, const expectation *e, outcome *o) {
    char path[700];
    size_t n = 0;
    snprintf(path, sizeof path, "%s/%s", c->dir, e->file);
    for (o->way = 0; o->way < N_WAYS; o->way++) {
        life_file f = {.path = path, .no_map = o->way == BY_READ};
        char *data = NULL;
        if (o->way == BY_MEMORY) {
            if (e->special || !(data = read_whole(path, &n))) continue;
            f = (life_file){.data = data, .size_bytes = n};
        }
        if (o->way == BY_HOOKS) f.io = &hooks;
        set_alarms(HANG_SECONDS, WAIT_SECONDS);
        life_run(&o->lives[o->way], &f, o->way <= BY_READ);
        set_alarms(0, 0);
        free(data);
    }
}

/* Work through the corpus from file `first` on, in a child; the file that killed it, or the number of files. */
static size_t work(const corpus *c, outcome *all, size_t first) {
    int status = 0;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        for (size_t i = first; i < c->n; i++) {
            all[i].state = 1;
            live(c, &c->files[i], &all[i]);
            all[i].state = 2;
        }
        _exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return c->n;
    for (size_t i = first; i < c->n; i++)
        if (all[i].state != 2) {
            all[i].killed_by = WIFSIGNALED(status) ? WTERMSIG(status) : -1;
            return i;
        }
    return c->n;
}

/* ---- judgement ---- */

typedef struct score {
    unsigned n[3], good[3]; /* must_reject, must_accept, either */
    unsigned hangs, crashes;
    unsigned with_at, says_byte, exact, with_what, says_what;
    double open_ratio, plan_ratio; /* most memory over header bytes, less 64 KiB */
} score;

/* The object that the manifest blames: KEY of "kv[KEY].field", NAME of "tensor[NAME].field", field of "header.field",
 * or the text itself. */
static void blamed(const char *what, char *out, size_t capacity) {
    const char *begin = strchr(what, '['), *end = begin ? strstr(begin, "].") : NULL;
    if (strncmp(what, "header.", 7) == 0) snprintf(out, capacity, "%s", what + 7);
    else if (end) snprintf(out, capacity, "%.*s", (int)(end - begin - 1), begin + 1);
    else snprintf(out, capacity, "%s", what);
}

static void judge_message(const expectation *e, const life *l, score *s) {
    char object[256];
    for (const char *p = l->err.text; *p; p++)
        if (*p < 0x20 || *p > 0x7e) {
            CHECK(0, "%s: byte %d in the message", e->file, *p);
            break;
        }
    CHECK(l->err.code < 0 && l->err.text[0], "%s: refused without code or text", e->file);
    if (*e->at != '-') {
        int says = strstr(l->err.text, " byte ") != NULL;
        s->with_at++;
        s->says_byte += says;
        s->exact += l->err.where == strtoull(e->at, NULL, 10);
        if (!says) printf("      no byte: %s: %s\n", e->file, l->err.text);
    }
    if (strcmp(e->what, "-") != 0) {
        blamed(e->what, object, sizeof object);
        int says = strstr(l->err.text, object) != NULL;
        s->with_what++;
        s->says_what += says;
        if (!says) printf("      does not name %s: %s: %s\n", object, e->file, l->err.text);
    }
}

/* Every way to open the file gives the same verdict, in the same words, and the same token. */
static void judge_ways(const expectation *e, const outcome *o) {
    const life *a = &o->lives[BY_MAP];
    for (int way = BY_READ; way < N_WAYS; way++) {
        const life *b = &o->lives[way];
        int until = way == BY_READ ? LIFE_DONE : LIFE_PLAN; /* the others go no further */
        if (way == BY_MEMORY && e->special) continue;
        if ((int)a->stage > until) {
            CHECK(b->stage == LIFE_DONE, "%s, %s: %s", e->file, ways[way], b->err.text);
            continue;
        }
        CHECK(a->stage == b->stage && a->err.code == b->err.code && a->err.where == b->err.where,
              "%s, mapped: %s; %s: %s", e->file, a->err.text, ways[way], b->err.text);
        const char *says_a = strchr(a->err.text, ':'), *says_b = strchr(b->err.text, ':');
        int by_name = e->special || strstr(e->what, "split.count") != NULL; /* the message is about the file's name */
        CHECK(by_name || (!says_a == !says_b && (!says_a || strcmp(says_a, says_b) == 0)), "%s, mapped: %s; %s: %s",
              e->file, a->err.text, ways[way], b->err.text);
        CHECK(way != BY_READ || a->token == b->token, "%s: token %d when mapped, %d when read", e->file, a->token,
              b->token);
    }
}

static void judge(const expectation *e, const outcome *o, score *s) {
    int kind = strcmp(e->verdict, "must_reject") == 0 ? 0 : strcmp(e->verdict, "must_accept") == 0 ? 1 : 2;
    int open = strcmp(e->stage, "open") == 0, plan = strcmp(e->stage, "plan") == 0, good = 1;
    const life *l = &o->lives[BY_MAP];
    s->n[kind]++;
    if (o->state != 2) {
        int hang = o->killed_by == SIGPROF || o->killed_by == SIGALRM;
        s->hangs += (unsigned)hang;
        s->crashes += (unsigned)!hang;
        CHECK(0, "%s, %s: killed by signal %d", e->file, ways[o->way], o->killed_by);
        return;
    }
    if (kind == 0) {
        good = l->stage <= (open ? LIFE_OPEN : plan ? LIFE_PLAN : LIFE_LOAD);
        CHECK(good, "%s: must be refused at %s, got to stage %d: %s", e->file, e->stage, (int)l->stage, l->err.text);
        if (good && !e->special) judge_message(e, l, s);
    }
    if (kind == 1) {
        int refused = strcmp(e->then, "reject") == 0;
        good = l->stage > (open ? LIFE_OPEN : plan ? LIFE_PLAN : LIFE_GENERATE) && (!refused || l->stage <= LIFE_PLAN);
        CHECK(good, "%s: must be accepted to %s: %s", e->file, e->stage, l->err.text);
    }
    for (int way = 0; way < N_WAYS; way++) {
        const life *w = &o->lives[way];
        double head = (double)e->header_bytes, most = 65536;
        CHECK(w->left == 0, "%s, %s: %llu blocks left", e->file, ways[way], RFI_LLU(w->left));
        if (e->special) continue;
        int bounded = (double)w->open_peak <= 8 * head + most;
        CHECK(bounded, "%s, %s: opening took %llu bytes for a header of %.0f", e->file, ways[way],
              RFI_LLU(w->open_peak), head);
        good &= bounded;
        CHECK((double)w->plan_peak <= PLAN_TIMES * head + PLAN_BYTES,
              "%s, %s: planning took %llu bytes for a header of %.0f", e->file, ways[way], RFI_LLU(w->plan_peak), head);
        if ((double)w->open_peak > most) s->open_ratio = fmax(s->open_ratio, ((double)w->open_peak - most) / head);
        if ((double)w->plan_peak > most) s->plan_ratio = fmax(s->plan_ratio, ((double)w->plan_peak - most) / head);
    }
    judge_ways(e, o);
    s->good[kind] += (unsigned)good;
}

/* The base file cut at every byte is refused at open. What is cut in the metadata, or just after it, lies in a block
 * of exactly its size, so that a sanitizer sees any read beyond it; tensor bytes are not read at open. */
static void check_truncation(const corpus *c) {
    char path[400];
    size_t n_bytes = 0;
    rf_gguf *g;
    rf_error err;
    snprintf(path, sizeof path, "%s/base.gguf", c->dir);
    char *data = read_whole(path, &n_bytes);
    REQUIRE(data && rf_gguf_open_memory(data, n_bytes, NULL, &g, &err) == RF_OK, "no base file");
    size_t head = (size_t)rf_gguf_get_info(g).metadata_bytes;
    CHECK(rf_gguf_close(g, NULL) == RF_OK, "busy");
    unsigned cuts = 0;
    size_t step = n_bytes < 200000 ? 1 : 61; /* of the tensor bytes of the larger file not every one: time */
    for (size_t n = 0; n < n_bytes; n += n < head + 64 ? 1 : step, cuts++) {
        char *cut = n < head + 64 ? (char *)malloc(n + !n) : data;
        REQUIRE(cut != NULL, "out of memory");
        if (cut != data) memcpy(cut, data, n);
        rf_result r = rf_gguf_open_memory(cut, n, NULL, &g, &err);
        CHECK(r == RF_ERR_FORMAT && !g && strstr(err.text, " byte ") && err.where <= n, "%zu bytes: %s: %s", n,
              rf_result_name(r), err.text);
        if (cut != data) free(cut);
    }
    printf("    %u truncations\n", cuts);
    free(data);
}

static void check_corpus(int dim) {
    corpus c = {0};
    score s = {0};
    snprintf(c.dir, sizeof c.dir, "%s/%d", tmp_dir, dim);
    REQUIRE(read_manifest(&c), "no corpus of width %d", dim);
    outcome *all = (outcome *)mmap(NULL, c.n * sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(all != MAP_FAILED, "mmap");
    for (size_t i = 0; i < c.n; i++) i = work(&c, all, i);
    for (size_t i = 0; i < c.n; i++) judge(&c.files[i], &all[i], &s);
    printf("    width %d: %u of %u refused at or before their stage, %u of %u accepted to theirs, %u of %u odd ones "
           "judged; %u crashes, %u hangs\n",
           dim, s.good[0], s.n[0], s.good[1], s.n[1], s.good[2], s.n[2], s.crashes, s.hangs);
    printf("    messages: %u of %u say a byte (%u the very one), %u of %u name the field; memory to open %.2f, to plan "
           "%.2f times the header beyond 64 KiB\n",
           s.says_byte, s.with_at, s.exact, s.says_what, s.with_what, s.open_ratio, s.plan_ratio);
    CHECK(s.n[0] > 1200 && s.n[1] == 68 && s.n[2] == 133, "the corpus is small");
    CHECK(s.says_byte * 100 >= s.with_at * 95, "only %u of %u messages say a byte", s.says_byte, s.with_at);
    CHECK(s.says_what * 100 >= s.with_what * 95, "only %u of %u messages name the field", s.says_what, s.with_what);
    munmap(all, c.n * sizeof *all);
    check_truncation(&c);
    free(c.files);
    free(c.text);
}

/* As many layers as there may be, and two vocabularies: what planning and the tokenizer take. */
static void test_plan_memory(void) {
    for (int bpe = 0; bpe < 2; bpe++) {
        mg_buf file = {0};
        life l = {0};
        mg_llama(&file, &(mg_options){.n_layers = ROCMFORGE_MAX_LAYERS, .n_embd = 2, .n_heads = 1, .n_kv_heads = 1,
                                      .head_dim = 2, .n_ff = 2, .n_vocab = 900, .bias = 1, .bpe = bpe});
        life_run(&l, &(life_file){.data = file.data, .size_bytes = file.n}, 0);
        CHECK(l.stage == LIFE_DONE, "%s", l.err.text);
        CHECK(l.plan_peak <= PLAN_TIMES * l.head_bytes + PLAN_BYTES, "%llu bytes", RFI_LLU(l.plan_peak));
        printf("    %u layers: %.2f times the metadata\n", ROCMFORGE_MAX_LAYERS,
               (double)l.plan_peak / (double)l.head_bytes);
        mg_free(&file);
    }
}

/* Mixtures of experts: matrices by the hundred thousand, from metadata of a few kilobytes. What planning takes, and how
 * long, follows from the metadata, with a budget and without one; nor does a forecast take more. */
static void test_mixture_memory(void) {
    static const mg_options shapes[] = {{.arch = "qwen3moe", .n_layers = 1}, {.arch = "qwen3moe", .n_layers = 200},
                                        {.arch = "glm4moe", .n_layers = 40, .n_shared = 1},
                                        {.arch = "gpt-oss", .n_layers = 40}};
    double worst = 0;
    for (size_t i = 0; i < RFT_COUNT(shapes); i++) {
        mg_buf file = {0};
        mg_options o = shapes[i];
        o.n_embd = o.head_dim = 2, o.n_heads = o.n_kv_heads = o.n_used = o.n_ff_expert = 1;
        o.n_experts = RF_MAX_EXPERTS, o.n_vocab = 300, o.type = MG_F16;
        mg_llama(&file, &o);
        for (uint64_t budget = 0; budget <= 1u << 20; budget += 1u << 20) {
            memory mem = {0};
            const rf_gguf_desc gd = {.allocator = memory_allocator(&mem)};
            const rf_device_desc dd = {.allocator = memory_allocator(&mem), .n_threads = 1};
            const rf_model_desc md = {.budget_bytes = budget};
            rf_gguf *g = NULL;
            rf_device *d = NULL;
            rf_model *m = NULL;
            rf_forecast forecast;
            rf_error err;
            const clock_t begin = clock();
            rf_result r = rf_gguf_open_memory(file.data, file.n, &gd, &g, &err);
            if (r == RF_OK) r = rf_device_open("cpu", &dd, &d, &err);
            if (r == RF_OK) r = rf_model_open(g, d, &md, &m, &err);
            REQUIRE(r == RF_OK, "%s, %u layers: %s", o.arch, o.n_layers, err.text);
            rf_model_forecast(m, &(rf_session_desc){.n_ctx = 8}, &forecast, NULL);
            const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
            const uint64_t head = rf_gguf_get_info(g).metadata_bytes, peak = (uint64_t)memory_read(&mem.peak);
            CHECK(rf_model_get_plan(m)->n_slots > 3 * RF_MAX_EXPERTS * o.n_layers, "%s has few experts", o.arch);
            CHECK(peak <= PLAN_TIMES * head + PLAN_BYTES, "%s, %u layers: %llu bytes for %llu of metadata", o.arch, o.n_layers,
                  RFI_LLU(peak), RFI_LLU(head));
            CHECK(seconds < SLOW, "%s, %u layers: %.2f s", o.arch, o.n_layers, seconds);
            worst = fmax(worst, (double)peak / (double)(PLAN_TIMES * head + PLAN_BYTES));
            CHECK(rf_model_close(m, NULL) == RF_OK && rf_device_close(d, NULL) == RF_OK && rf_gguf_close(g, NULL) == RF_OK, "busy");
            CHECK(memory_read(&mem.live) == 0, "%lld blocks are left", (long long)memory_read(&mem.live));
        }
        mg_free(&file);
    }
    printf("    mixtures: at most %.2f of the memory that planning may take\n", worst);
}

static void test_corpus_64(void) { check_corpus(64); }
static void test_corpus_256(void) { check_corpus(256); }

static int make_corpora(void) {
    char command[1024];
    const char *dims = !rft_wanted("test_corpus_256", 1) ? "64" : !rft_wanted("test_corpus_64", 0) ? "256" : "64 256";
    const char *base = getenv("TMPDIR");
    snprintf(tmp_dir, sizeof tmp_dir, "%s/rf_corpus.XXXXXX", base && strlen(base) < 200 ? base : "/tmp");
    if (!mkdtemp(tmp_dir)) return 0;
    snprintf(command, sizeof command,
             "for dim in %s; do python3 tests/make_bad_gguf.py '%s/'$dim --dim $dim >/dev/null & done; wait", dims, tmp_dir);
    return system(command) == 0;
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    int have = system("python3 -c 'import argparse' >/dev/null 2>&1") == 0 && make_corpora();
    RUN(test_plan_memory);
    RUN(test_mixture_memory);
    RUN_IF(have, test_corpus_64, "no python3 (make deps)");
    if (have) RUN_SLOW(test_corpus_256);
    if (*tmp_dir) nftw(tmp_dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    RFT_END();
}
