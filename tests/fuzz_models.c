/* fuzz_models.c: small models of every family, changed so that most of them still run. A mutation edits keys, shapes, types,
 * tensors or the vocabulary; what the library then refuses is repaired as its message says, until the model plans or the
 * message has no remedy. A model that plans runs on the CPU or on an emulated GPU, through all that a session can do, and
 * what has to agree is compared. Meant for AddressSanitizer and UBSan:
 *     build/fuzz_models                           the suite: 160 mutants, a minute
 *     build/fuzz_models SECONDS [SEED [DIR]]      longer, from another seed; what ends the process is left in DIR
 *     build/fuzz_models run SEED [FILE]           the trial of a mutant once more, of what was left in FILE or made anew
 * A child process tries them; one that crashes or hangs is a line of the report, and another child goes on after it. */
#define _GNU_SOURCE
#define main rocmforge_cli_main
#include "../examples/rocmforge_cli.c"
#undef main

#include "hip_emu.h"
#include "make_gguf.h"
#include "rf_test.h"
#include "rf_rig.h"
#include <glob.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>

enum { MAX_PAIRS = 128, MAX_TENSORS = 400, MAX_TENSOR_BYTES = 256 << 10, MAX_FILE_BYTES = 4 << 20 };

/* ---- a model in pieces ---- */

typedef struct pair {
    char key[96];
    uint32_t type, element_type;
    uint64_t count;
    mg_buf value; /* of an array: its elements */
} pair;

typedef struct tensor {
    char name[72];
    uint32_t type;
    uint64_t ne[4];
    mg_buf data;
} tensor;

typedef struct mutant {
    pair pairs[MAX_PAIRS];
    tensor tensors[MAX_TENSORS];
    uint32_t n_pairs, n_tensors;
    mg_rng r;
    int wild;        /* weights that no training gives: results need not be numbers, nor alike */
    const char *how; /* what was changed                                                       */
    mg_buf file;
} mutant;

static uint32_t below(mutant *m, uint32_t n) { return mg_below(&m->r, n); }
static int percent(mutant *m, uint32_t n) { return below(m, 100) < n; }
#define ANY_OF(m, array) ((array)[below(m, (uint32_t)RFT_COUNT(array))])

static void drop_model(mutant *m) {
    for (uint32_t i = 0; i < m->n_pairs; i++) mg_free(&m->pairs[i].value);
    for (uint32_t i = 0; i < m->n_tensors; i++) mg_free(&m->tensors[i].data);
    mg_free(&m->file);
    m->n_pairs = m->n_tensors = 0;
}

static void read_model(mutant *m, const mg_buf *file) {
    rf_gguf *g = NULL;
    rf_error err;
    MUST(rf_gguf_open_memory(file->data, file->n, NULL, &g, &err) == RF_OK, "%s", err.text);
    const rf_gguf_info info = rf_gguf_get_info(g);
    MUST(info.n_kv <= MAX_PAIRS && info.n_tensors <= MAX_TENSORS, "a large model");
    for (uint64_t i = 0; i < info.n_kv; i++) {
        rf_kv kv;
        pair *p = &m->pairs[m->n_pairs++];
        rf_gguf_get_kv(g, i, &kv, NULL);
        *p = (pair){.type = kv.type, .element_type = kv.element_type, .count = kv.count};
        snprintf(p->key, sizeof p->key, "%.*s", (int)kv.key.len, kv.key.data);
        mg_put(&p->value, kv.data, (size_t)kv.size_bytes);
    }
    for (uint64_t i = 0; i < info.n_tensors; i++) {
        rf_tensor_info ti;
        tensor *t = &m->tensors[m->n_tensors++];
        rf_gguf_get_tensor(g, i, &ti, NULL);
        *t = (tensor){.type = ti.type};
        snprintf(t->name, sizeof t->name, "%.*s", (int)ti.name.len, ti.name.data);
        memcpy(t->ne, ti.ne, sizeof t->ne);
        unsigned char *data = (unsigned char *)calloc(1, (size_t)ti.size_bytes + 1);
        MUST(data && rf_gguf_read_tensor(g, i, 0, data, (size_t)ti.size_bytes, &err) == RF_OK, "%s", err.text);
        mg_put(&t->data, data, (size_t)ti.size_bytes);
        free(data);
    }
    rf_gguf_close(g, NULL);
}

static pair *find_pair(mutant *m, const char *key) {
    for (uint32_t i = 0; i < m->n_pairs; i++)
        if (strcmp(m->pairs[i].key, key) == 0) return &m->pairs[i];
    return NULL;
}
static tensor *find_tensor(mutant *m, const char *name) {
    for (uint32_t i = 0; i < m->n_tensors; i++)
        if (strcmp(m->tensors[i].name, name) == 0) return &m->tensors[i];
    return NULL;
}

/* The file's architecture and a dot: what its hyperparameters begin with. */
static const char *prefix(mutant *m) {
    static char text[64];
    const pair *p = find_pair(m, "general.architecture");
    if (p && p->type == MG_KV_STR) snprintf(text, sizeof text, "%.*s.", (int)(p->value.n - 8), (char *)p->value.data + 8);
    return text;
}
static const char *own_key(mutant *m, const char *suffix) {
    static char text[160];
    snprintf(text, sizeof text, "%s%s", prefix(m), suffix);
    return text;
}

static void write_model(mutant *m) {
    mg_gguf w;
    mg_begin(&w, 3);
    for (uint32_t i = 0; i < m->n_pairs; i++) {
        const pair *p = &m->pairs[i];
        uint32_t alignment = 0;
        if (p->type == MG_KV_U32 && strcmp(p->key, "general.alignment") == 0) memcpy(&alignment, p->value.data, 4);
        if (alignment && alignment <= 4096) w.alignment = alignment;
        mg_kv(&w, p->key, p->type);
        if (p->type == MG_KV_ARR) mg_put_u32(&w.kv, p->element_type), mg_put_u64(&w.kv, p->count);
        mg_put(&w.kv, p->value.data, p->value.n);
    }
    for (uint32_t i = 0; i < m->n_tensors; i++) {
        const tensor *t = &m->tensors[i];
        uint32_t n_dims = 4;
        while (n_dims > 1 && t->ne[n_dims - 1] == 1) n_dims--;
        mg_tensor(&w, t->name, t->type, n_dims, t->ne, t->data.data, t->data.n);
    }
    m->file.n = 0;
    mg_finish(&w, &m->file);
}

/* ---- numbers of keys ---- */

static uint32_t width_of(uint32_t type) {
    static const uint32_t widths[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < RFT_COUNT(widths) ? widths[type] : 0;
}

/* Element i of a number or an array of numbers; 0 if it is none. */
static double get_number(const pair *p, uint64_t i) {
    const rf_kv kv = {.type = p->type, .element_type = p->element_type, .count = p->count, .data = p->value.data,
                      .size_bytes = p->value.n};
    double v = 0;
    rf_kv_real(&kv, i, &v, NULL);
    return v;
}

static void put_number(mg_buf *b, uint32_t type, double v) {
    const int64_t whole = v > -9e18 && v < 9e18 ? (int64_t)v : -1;
    const float single = (float)v;
    if (type == MG_KV_F32) mg_put(b, &single, 4);
    else mg_put(b, type == MG_KV_F64 ? (const void *)&v : &whole, width_of(type));
}

/* All elements become v. */
static void set_number(pair *p, double v) {
    if (!width_of(p->element_type)) return;
    p->value.n = 0;
    for (uint64_t i = 0; i < p->count; i++) put_number(&p->value, p->element_type, v);
}

static pair *set_key(mutant *m, const char *key, uint32_t type, double v) {
    pair *p = find_pair(m, key);
    if (!p && m->n_pairs < MAX_PAIRS) {
        p = &m->pairs[m->n_pairs++];
        *p = (pair){.type = type, .element_type = type, .count = 1};
        snprintf(p->key, sizeof p->key, "%s", key);
    }
    if (p) set_number(p, v);
    return p;
}

/* ---- data of tensors ---- */

static const uint32_t float_types[] = {MG_F32, MG_F32, MG_F16, MG_BF16};
static const uint32_t all_types[] = {
    MG_F32, MG_F16, MG_BF16, MG_Q4_0, MG_Q4_1, MG_Q5_0, MG_Q5_1, MG_Q8_0, MG_Q4_K, MG_Q5_K, MG_Q6_K, MG_Q2_K, MG_Q3_K,
    MG_IQ2_XXS, MG_IQ2_XS, MG_IQ3_XXS, MG_IQ1_S, MG_IQ4_NL, MG_IQ3_S, MG_IQ2_S, MG_IQ4_XS, MG_IQ1_M, MG_TQ1_0, MG_TQ2_0,
    MG_MXFP4, MG_NVFP4, MG_Q1_0, MG_Q2_0};

/* Random weights of that shape; another type if its blocks do not fit. 0: too large. */
static int fill(mutant *m, tensor *t, uint32_t type, const uint64_t *ne) {
    uint32_t elements, bytes;
    uint64_t n = 1;
    for (int i = 0; i < 4; i++) {
        if (ne[i] == 0 || ne[i] > MAX_TENSOR_BYTES || n > MAX_TENSOR_BYTES / ne[i]) return 0;
        n *= ne[i];
    }
    mg_block(type, &elements, &bytes);
    if (!elements || ne[0] % elements) type = ANY_OF(m, float_types), mg_block(type, &elements, &bytes);
    if (n / elements * bytes > MAX_TENSOR_BYTES) return 0;
    const int is_norm = strstr(t->name, "norm") != NULL && n == ne[0];
    t->type = type;
    memmove(t->ne, ne, sizeof t->ne);
    t->data.n = 0;
    for (uint64_t i = 0; i < n / elements; i++) {
        const float one = 1 + 0.1f * mg_uniform(&m->r);
        if (is_norm && type == MG_F32) mg_put(&t->data, &one, 4);
        else mg_put_block(&t->data, &m->r, type, is_norm ? 1 : 1 / sqrtf((float)ne[0]));
    }
    return 1;
}

/* ---- mutations ---- */

static const double sizes[] = {1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 80,
                               96, 100, 127, 128, 129, 136, 160, 192, 255, 256, 257, 264, 300, 320, 512, 576};
static const double reals[] = {0, 1e-9, 1e-7, 1e-3, 0.5, 1, 2, 1e3, 1e9, 3e38, 1e-38, 1e-45, -1, NAN, INFINITY};

/* Values for the first word that a key has. */
static double value_for(mutant *m, const char *key) {
    static const struct { const char *word; double values[16]; } table[] = {
        {"block_count", {1, 2, 3, 4, 5, 6}},
        {"embedding_length", {1, 2, 3, 5, 8, 16, 32, 33, 48, 64, 96, 100, 128, 256, 257, 288}},
        {"context_length", {1, 2, 15, 16, 17, 128, 2147483647, 4294967295}},
        {"head_count", {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33}},
        {"expert_feed", {1, 3, 16, 31, 32, 33, 64, 96, 100, 256}},
        {"expert", {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 33, 64, 65, 100}},
        {"window", {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 2147483647}},
        {"original", {0, 1, 2, 5, 16, 2147483647}},
    };
    for (size_t i = 0; i < RFT_COUNT(table); i++)
        if (strstr(key, table[i].word)) {
            uint32_t n = 16;
            while (n > 1 && table[i].values[n - 1] == 0) n--;
            return table[i].values[below(m, n)];
        }
    return percent(m, 30) ? below(m, 9) : ANY_OF(m, sizes);
}

static void change_pair(mutant *m, pair *p) {
    static const char *const scalings[] = {"none", "linear", "yarn", "longrope"};
    if (p->type == MG_KV_ARR && width_of(p->element_type)) {
        mg_buf old = p->value;
        const pair was = {.type = p->type, .element_type = p->element_type, .count = p->count, .value = old};
        p->value = (mg_buf){0};
        for (uint64_t i = 0; i < p->count; i++) {
            const double v = percent(m, 50) ? value_for(m, p->key) : get_number(&was, i);
            put_number(&p->value, p->element_type, p->element_type == MG_KV_BOOL ? below(m, 2) : v);
        }
        mg_free(&old);
    } else if (p->type == MG_KV_STR && strstr(p->key, "scaling.type")) {
        const char *text = ANY_OF(m, scalings);
        p->value.n = 0;
        mg_put_text(&p->value, text, strlen(text));
    } else if (p->type == MG_KV_F32 || p->type == MG_KV_F64) {
        set_number(p, ANY_OF(m, reals));
    } else {
        set_number(p, p->type == MG_KV_BOOL ? below(m, 2) : value_for(m, p->key));
    }
}

/* A key that other families have. */
static void add_foreign_key(mutant *m) {
    static const struct { const char *suffix; uint32_t type; double values[4]; } table[] = {
        {"attention.sliding_window", MG_KV_U32, {1, 2, 3, 5}},
        {"attention.sliding_window_pattern", MG_KV_U32, {0, 1, 2, 3}},
        {"rope.scaling.factor", MG_KV_F32, {0, 0.1, 0.5, 4}},
        {"rope.scaling.original_context_length", MG_KV_U32, {1, 2, 16, 16}},
        {"attention.key_length", MG_KV_U32, {2, 32, 48, 128}},
        {"attention.value_length", MG_KV_U32, {1, 32, 33, 128}},
        {"rope.dimension_count", MG_KV_U32, {2, 6, 10, 16}},
        {"nextn_predict_layers", MG_KV_U32, {1, 1, 1, 2}},
        {"expert_group_count", MG_KV_U32, {1, 2, 2, 4}},
        {"expert_group_used_count", MG_KV_U32, {1, 1, 2, 3}},
        {"expert_gating_func", MG_KV_U32, {1, 2, 3, 4}},
        {"expert_shared_count", MG_KV_U32, {1, 1, 2, 3}},
        {"leading_dense_block_count", MG_KV_U32, {0, 1, 1, 2}},
        {"attention.shared_kv_layers", MG_KV_U32, {1, 1, 2, 2}},
        {"attn_logit_softcapping", MG_KV_F32, {1e-9, 0.1, 1, 50}},
        {"final_logit_softcapping", MG_KV_F32, {1e-9, 0.1, 1, 30}},
        {"logit_scale", MG_KV_F32, {1e-9, 0.5, 2, 1e9}},
        {"expert_weights_scale", MG_KV_F32, {1e38, 2.5, 0, 1e-40}},
        {"expert_weights_norm", MG_KV_BOOL, {0, 1, 0, 1}},
        {"rope.scaling.attn_factor", MG_KV_F32, {0.1, 1, 2, 1e9}},
        {"attention.temperature_scale", MG_KV_F32, {0.1, 1, 2, 1e9}},
        {"use_parallel_residual", MG_KV_BOOL, {0, 1, 0, 1}},
        {"rope.scaling.finetuned", MG_KV_BOOL, {0, 1, 0, 1}},
    };
    const uint32_t i = below(m, (uint32_t)RFT_COUNT(table));
    set_key(m, own_key(m, table[i].suffix), table[i].type, ANY_OF(m, table[i].values));
    if (percent(m, 30)) {
        pair *p = set_key(m, own_key(m, "rope.scaling.type"), MG_KV_STR, 0);
        if (p) p->type = p->element_type = MG_KV_STR, p->value.n = 0, mg_put_text(&p->value, "yarn", 4);
    }
}

/* Values that no program writes, of any type; arrays that are too short, too long, empty. */
static void mutate_rudely(mutant *m) {
    static const double values[] = {0, 1, -1, 2, 3, 7, 255, 256, 65535, 65536, 1048577, 2147483647, 2147483648., 4294967295.,
                                    4294967296., 9.2e18, -9.2e18, 1e300, -1e300, NAN, INFINITY};
    static const uint32_t types[] = {MG_KV_U8, MG_KV_I8, MG_KV_U16, MG_KV_I16, MG_KV_U32, MG_KV_I32, MG_KV_F32, MG_KV_BOOL,
                                     MG_KV_U64, MG_KV_I64, MG_KV_F64};
    m->how = "rude";
    for (uint32_t k = 1 + below(m, 3); k > 0;) {
        pair *p = &m->pairs[below(m, m->n_pairs)];
        if (strncmp(p->key, prefix(m), strlen(prefix(m))) != 0 && percent(m, 80)) continue;
        k--;
        const uint64_t n = p->count, counts[] = {0, 1, n / 2, n + 1, n + 5, 100000};
        if (percent(m, 30) || !width_of(p->element_type)) p->type = p->element_type = ANY_OF(m, types), p->count = 1;
        if (percent(m, 25)) p->type = MG_KV_ARR;
        if (p->type == MG_KV_ARR && percent(m, 50)) p->count = ANY_OF(m, counts);
        set_number(p, ANY_OF(m, values));
        if (p->type == MG_KV_ARR && p->count && percent(m, 50)) change_pair(m, p); /* only some elements are odd */
    }
}

/* As many layers as block_count says: copies of those there are. */
static void match_layers(mutant *m) {
    const pair *p = find_pair(m, own_key(m, "block_count"));
    const uint32_t want = p ? (uint32_t)get_number(p, 0) : 1, n_old = m->n_tensors;
    uint32_t have = 0, il;
    char suffix[64];
    for (uint32_t i = 0; i < n_old; i++)
        if (sscanf(m->tensors[i].name, "blk.%u.", &il) == 1 && il >= have) have = il + 1;
    for (uint32_t layer = have; have && layer < want && layer < 8; layer++)
        for (uint32_t i = 0; i < n_old && m->n_tensors < MAX_TENSORS; i++) {
            if (sscanf(m->tensors[i].name, "blk.%u.%63s", &il, suffix) != 2 || il != layer % have) continue;
            tensor *t = &m->tensors[m->n_tensors++];
            *t = m->tensors[i];
            t->data = mg_copy(&m->tensors[i].data);
            snprintf(t->name, sizeof t->name, "blk.%u.%s", layer, suffix);
        }
}

static void mutate_types(mutant *m) {
    const uint32_t type = ANY_OF(m, all_types);
    m->how = "types";
    for (uint32_t i = 0; i < m->n_tensors; i++) {
        tensor *t = &m->tensors[i];
        uint32_t elements, bytes, other = percent(m, 70) ? type : ANY_OF(m, all_types);
        mg_block(other, &elements, &bytes);
        if (t->ne[1] > 1 && percent(m, 60) && t->ne[0] % elements == 0) fill(m, t, other, t->ne);
    }
}

static void mutate_keys(mutant *m) {
    static const uint32_t times[] = {1, 1, 2, 2, 3, 4};
    pair *own[MAX_PAIRS];
    uint32_t n = 0;
    m->how = "keys";
    for (uint32_t i = 0; i < m->n_pairs; i++)
        if (strncmp(m->pairs[i].key, prefix(m), strlen(prefix(m))) == 0) own[n++] = &m->pairs[i];
    for (uint32_t k = ANY_OF(m, times); n && k > 0; k--) change_pair(m, own[below(m, n)]);
    if (percent(m, 25)) add_foreign_key(m);
    match_layers(m);
    if (percent(m, 30)) mutate_types(m);
}

/* The experts of tokens: some twice, and some that are none. */
static void change_ids(mutant *m, tensor *t, int beyond) {
    static const int32_t ids[] = {0, 1, 2, 3, 0, 1, 7, 8, -1, 64, INT32_MAX, INT32_MIN};
    for (size_t k = 0; k + 4 <= t->data.n; k += 4)
        if (percent(m, 30)) memcpy(t->data.data + k, &ids[below(m, beyond ? 12 : 4)], 4);
}

/* Weights of one odd kind in some tensors. */
static void mutate_weights(mutant *m) {
    static const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 0, 1e-40f};
    const float v = ANY_OF(m, odd);
    const uint32_t kind = below(m, 4);
    m->how = "weights";
    m->wild = 1;
    if (percent(m, 50)) mutate_types(m), m->how = "weights";
    for (uint32_t i = 0; i < m->n_tensors; i++) {
        tensor *t = &m->tensors[i];
        uint32_t elements, bytes;
        mg_block(t->type, &elements, &bytes);
        if (t->type == RF_TYPE_I32) change_ids(m, t, kind == 0);
        if (!percent(m, 30) || !bytes) continue;
        const uint16_t half = t->type == MG_BF16 ? mg_bf16(v) : mg_f16(v);
        const void *value = t->type == MG_F32 ? (const void *)&v : &half;
        const size_t width = t->type == MG_F32 ? 4 : 2, n = t->data.n / bytes;
        for (size_t k = 0; k < n; k++) {
            unsigned char *at = t->data.data + k * bytes;
            if (kind == 0) memset(at, 0xff, bytes);
            else if (kind == 1) for (uint32_t b = 0; b < bytes; b++) at[b] = (unsigned char)mg_next(&m->r);
            else if (kind == 2 || below(m, (uint32_t)n) < 4)
                memcpy(at + (bytes > width ? below(m, bytes - (uint32_t)width) : 0), value, width);
        }
    }
}

static void mutate_text(mutant *m, mg_buf *out) {
    static const char *const texts[] = {"", " ", "  ", "a b", "\xff", "<0x41>", "<0x4>", "\xe2\x96\x81\xe2\x96\x81",
                                        "<|im_start|>", "<s>", "</s>", "\xc4\xa0"};
    const char *text = ANY_OF(m, texts);
    char noise[6];
    const uint32_t n = below(m, sizeof noise + 1);
    for (uint32_t i = 0; i < n; i++) noise[i] = (char)below(m, 256);
    if (percent(m, 50)) mg_put_text(out, text, strlen(text));
    else mg_put_text(out, noise, n);
}

static void mutate_array(mutant *m, pair *p) {
    static const double values[] = {0, 1, 2, 3, 4, 5, 6, 7, -1, 255, 2147483647, NAN, INFINITY, -INFINITY};
    const uint32_t change = below(m, 5);
    if (change == 0) p->count = 0, p->value.n = 0;
    mg_buf old = p->value;
    p->value = (mg_buf){0};
    size_t at = 0;
    uint64_t n = 0;
    const uint64_t keep = change == 1 ? p->count / 2 : p->count;
    for (uint64_t i = 0; i < p->count && n < keep; i++, n++) {
        const size_t size = p->element_type == MG_KV_STR ? 8 + (size_t)mg_get_u64(&old, at) : width_of(p->element_type);
        if (!percent(m, 10)) mg_put(&p->value, old.data + at, size);
        else if (p->element_type == MG_KV_STR) mutate_text(m, &p->value);
        else put_number(&p->value, p->element_type, ANY_OF(m, values));
        at += size;
    }
    p->count = n;
    mg_free(&old);
}

static void mutate_vocabulary(mutant *m) {
    static const char *const names[] = {"llama", "gpt2", "bert", "gemma4", "t5", "", "default", "qwen2", "llama-bpe", "gpt-4o",
                                        "deepseek-llm", "tekken"};
    static const double values[] = {0, 1, 2, -1, 2147483647, 2147483648., 63, 64, 511, 512, 513};
    pair *own[MAX_PAIRS];
    uint32_t n = 0;
    m->how = "vocabulary";
    for (uint32_t i = 0; i < m->n_pairs; i++)
        if (strncmp(m->pairs[i].key, "tokenizer.", 10) == 0) own[n++] = &m->pairs[i];
    for (uint32_t k = 1 + below(m, 3); n && k > 0; k--) {
        pair *p = own[below(m, n)];
        if (p->type == MG_KV_ARR) {
            mutate_array(m, p);
        } else if (p->type == MG_KV_STR) {
            const char *name = ANY_OF(m, names);
            p->value.n = 0;
            mg_put_text(&p->value, name, strlen(name));
        } else {
            set_number(p, ANY_OF(m, values));
        }
    }
}

/* Two of a name, none, names exchanged, dimensions in another order. */
static void mutate_directory(mutant *m) {
    tensor *a = &m->tensors[below(m, m->n_tensors)], *b = &m->tensors[below(m, m->n_tensors)], t = *a;
    m->how = "directory";
    switch (below(m, 4)) {
    case 0: if (m->n_tensors < MAX_TENSORS) t.data = mg_copy(&a->data), m->tensors[m->n_tensors++] = t; break;
    case 1: mg_free(&a->data), *a = m->tensors[--m->n_tensors]; break;
    case 2: memcpy(a->name, b->name, sizeof a->name), memcpy(b->name, t.name, sizeof b->name); break;
    default: a->ne[0] = t.ne[1], a->ne[1] = t.ne[0]; break;
    }
}

/* ---- repairs ---- */

/* What a refusal names: a key or tensor, and up to three numbers. */
typedef struct refusal {
    char name[128];
    unsigned long long v[3];
} refusal;

static int fix_shape(mutant *m, const refusal *f) {
    const uint64_t ne[4] = {f->v[0], f->v[1], f->v[2], 1};
    char suffix[72] = "", other[72];
    unsigned il;
    sscanf(f->name, "blk.%u.%71s", &il, suffix);
    for (uint32_t i = 0; i < m->n_tensors; i++) { /* and those of other layers */
        tensor *t = &m->tensors[i];
        const int named = strcmp(t->name, f->name) == 0;
        const int like = *suffix && sscanf(t->name, "blk.%u.%71s", &il, other) == 2 && strcmp(suffix, other) == 0;
        if ((named || (like && percent(m, 90))) && !fill(m, t, t->type, ne)) return 0;
    }
    return 1;
}
static int fix_missing_tensor(mutant *m, const refusal *f) {
    const uint64_t ne[4] = {1, 1, 1, 1};
    if (m->n_tensors == MAX_TENSORS) return 0;
    tensor *t = &m->tensors[m->n_tensors++];
    *t = (tensor){0};
    snprintf(t->name, sizeof t->name, "%.71s", f->name);
    return fill(m, t, MG_F32, ne);
}
static int fix_type(mutant *m, const refusal *f) {
    tensor *t = find_tensor(m, f->name);
    return t && fill(m, t, MG_F32, t->ne);
}
static int fix_missing_key(mutant *m, const refusal *f) {
    const int real = strstr(f->name, "epsilon") || strstr(f->name, "scale") || strstr(f->name, "freq");
    if (percent(m, 30)) return 0;
    return set_key(m, f->name, real ? MG_KV_F32 : MG_KV_U32, real ? 1e-5 : 1 + below(m, 8)) != NULL;
}
static int fix_array(mutant *m, const refusal *f) {
    pair *p = find_pair(m, f->name);
    if (!p || p->type != MG_KV_ARR || !width_of(p->element_type) || f->v[0] > 1000) return 0;
    const uint64_t n = p->count;
    mg_buf old = p->value;
    p->value = (mg_buf){0}, p->count = f->v[0];
    for (uint64_t i = 0; i < p->count; i++) {
        if (n) mg_put(&p->value, old.data + i % n * width_of(p->element_type), width_of(p->element_type));
        else put_number(&p->value, p->element_type, 1);
    }
    mg_free(&old);
    return 1;
}
static int fix_range(mutant *m, const refusal *f) {
    const uint64_t most = f->v[1] - f->v[0] < 64 ? f->v[1] - f->v[0] : 63;
    return set_key(m, f->name, MG_KV_U32, (double)(f->v[0] + below(m, (uint32_t)most + 1))) != NULL;
}
static int fix_real(mutant *m, const refusal *f) {
    static const double values[] = {1e-9, 1e-6, 0.5, 1, 1e4, 1e9};
    return set_key(m, f->name, MG_KV_F32, ANY_OF(m, values)) != NULL;
}
static int fix_heads(mutant *m, const refusal *f) { /* layer, heads, KV heads */
    uint32_t divisor = 1 + below(m, 8);
    while (f->v[1] % divisor) divisor--;
    return set_key(m, own_key(m, "attention.head_count_kv"), MG_KV_U32, (double)f->v[1] / divisor) != NULL;
}
static int fix_one_head(mutant *m, const refusal *f) {
    return set_key(m, own_key(m, "attention.head_count_kv"), MG_KV_U32, (double)f->v[0]) != NULL;
}
static int fix_latent(mutant *m, const refusal *f) {
    return set_key(m, own_key(m, "attention.key_length"), MG_KV_U32, (double)f->v[0]) &&
           set_key(m, own_key(m, "attention.value_length"), MG_KV_U32, (double)f->v[1]);
}
static int fix_value_length(mutant *m, const refusal *f) {
    return set_key(m, own_key(m, "attention.value_length"), MG_KV_U32, (double)f->v[0]) != NULL;
}
static int fix_even(mutant *m, const refusal *f) { return set_key(m, f->name, MG_KV_U32, 2 + 2 * below(m, 4)) != NULL; }
static int fix_head_size(mutant *m, const refusal *f) {
    (void)f;
    return set_key(m, own_key(m, "attention.key_length"), MG_KV_U32, ANY_OF(m, sizes)) != NULL;
}
static int fix_delta_heads(mutant *m, const refusal *f) { /* inner size, groups */
    const uint32_t groups = f->v[1] < 9 ? (uint32_t)f->v[1] : 9, heads = groups * (1 + below(m, 3));
    static const uint32_t widths[] = {1, 3, 8, 16, 17, 32, 33};
    return set_key(m, own_key(m, "ssm.group_count"), MG_KV_U32, groups) &&
           set_key(m, own_key(m, "ssm.time_step_rank"), MG_KV_U32, heads) &&
           set_key(m, own_key(m, "ssm.inner_size"), MG_KV_U32, heads * ANY_OF(m, widths));
}
static int fix_groups(mutant *m, const refusal *f) {
    (void)f;
    return set_key(m, own_key(m, "expert_group_count"), MG_KV_U32, 0) != NULL;
}
static int fix_gating(mutant *m, const refusal *f) {
    (void)f;
    return set_key(m, own_key(m, "expert_gating_func"), MG_KV_U32, below(m, 5)) != NULL;
}
static int fix_shared_layers(mutant *m, const refusal *f) {
    pair *p = find_pair(m, own_key(m, "attention.shared_kv_layers"));
    (void)f;
    if (p) set_number(p, get_number(p, 0) - 1);
    return p != NULL;
}

/* The first whose text, to the last number that sscanf finds, stands in the message. */
static const struct { const char *text; int (*fix)(mutant *m, const refusal *f); } remedies[] = {
    {"want ne={%llu, %llu, %llu}", fix_shape},
    {"tensor %127[^ ] is missing", fix_missing_tensor},
    {"key %127[^ ] is missing", fix_missing_key},
    {"want a vector of", fix_type},
    {"tensor type", fix_type},
    {"want %llu to %llu, found", fix_range},
    {"want %llu elements, one per layer", fix_array},
    {"want %llu truth values, one per layer", fix_array},
    {"want a finite number", fix_real},
    {"want 0, or 1e-9 to 1e9", fix_real},
    {"layer %llu has %llu heads on %llu key/value", fix_heads},
    {"want attention.key_length %llu and value_length %llu", fix_latent},
    {"want attention.head_count_kv %llu", fix_one_head},
    {"want attention.key_length %llu", fix_value_length},
    {"want an even number", fix_even},
    {"want a divisor or ", fix_head_size},
    {"want a divisor of ssm.inner_size %llu and a multiple of ssm.group_count %llu", fix_delta_heads},
    {"groups of experts are not supported", fix_groups},
    {" groups for ", fix_groups},
    {"expert_gating_func is", fix_gating},
    {"finds no earlier layer", fix_shared_layers},
};

/* Where the text up to its first % stands in the message and the rest can be read; returns 1. */
static int read_refusal(const char *message, const char *text, refusal *f) {
    char literal[80];
    const size_t n = strcspn(text, "%");
    int end = 0;
    snprintf(literal, sizeof literal, "%.*s", (int)n, text);
    const char *at = strstr(message, literal);
    if (!at) return 0;
    if (strstr(text, "%127")) return sscanf(at, text, f->name) == 1;
    sscanf(message, "(memory): %127s at byte %*u:%n", f->name, &end);
    int numbers = 0;
    for (const char *p = text; (p = strstr(p, "%llu")) != NULL; p++) numbers++;
    return numbers == 0 || sscanf(at, text, &f->v[0], &f->v[1], &f->v[2]) == numbers;
}

static rf_result plan(const mutant *m, rf_error *err) {
    rig r;
    rf_result res = rig_try(&r, &(rig_how){.file = &m->file, .device = "null"});
    *err = r.err;
    if (res != RF_OK) return res;
    const uint64_t peak = (uint64_t)r.mem.peak, head = rf_gguf_get_info(r.g).metadata_bytes;
    MUST(peak <= 32 * head + (256u << 10), "%llu bytes of metadata: planning took %llu", LLU(head), LLU(peak));
    rig_close(&r);
    return RF_OK;
}

/* 1: the mutant plans, 0: it does not. */
static int repair(mutant *m) {
    rf_error err;
    for (int k = 0; k < 60; k++) {
        write_model(m);
        if (m->file.n > MAX_FILE_BYTES) return 0;
        if (plan(m, &err) == RF_OK) return 1;
        MUST(err.code < 0 && err.text[0], "a failure without code or text");
        for (const char *p = err.text; *p; p++) MUST(*p >= 0x20 && *p < 0x7f, "byte %d in a message", *p);
        int fixed = 0;
        for (size_t i = 0; i < RFT_COUNT(remedies) && !fixed; i++) {
            refusal f = {{0}, {0}};
            if (!read_refusal(err.text, remedies[i].text, &f)) continue;
            fixed = remedies[i].fix(m, &f);
            break;
        }
        if (!fixed) return 0;
    }
    return 0;
}

/* ---- where mutants come from ---- */

/* Every file of tests/family, and of families that the generators make. */
static mg_buf generated_model(uint32_t i) {
    static const mg_options models[] = {
        {.arch = "gpt-oss", .type = MG_MXFP4, .n_experts = 4, .window = 4, .bpe = 1},
        {.arch = "gpt-oss", .n_experts = 6, .n_used = 4, .window = 3, .vector_type = MG_BF16},
        {.arch = "qwen3moe", .type = MG_Q8_0, .n_experts = 6, .expert_norm = 1, .bpe = 1},
        {.arch = "glm4moe", .n_layers = 3, .n_experts = 4, .n_shared = 1, .n_dense = 1, .gating = 2, .bias_choice = 1},
        {.arch = "granitemoe", .type = MG_Q4_0, .n_experts = 5, .scale_attention = 0.3f, .scale_residual = 0.5f},
        {.arch = "llama", .type = MG_Q4_K, .use_mix = 1, .mix_type = MG_Q6_K, .n_layers = 1},
        {.arch = "llama", .fused_qkv = 1, .rope_freqs = 1, .bias_ffn = 1, .chat_template = "{{ '<|im_start|>' + '<|im_end|>' }}"},
        {.arch = "qwen2", .type = MG_F16, .rope_scaling = "yarn", .rope_factor = 4, .n_ctx_original = 16},
        {.arch = "qwen3", .type = MG_Q5_1, .rope_scaling = "linear", .rope_factor = 2, .tied = 1}};
    static const mg_family families[] = {
        {.arch = "gemma2", .has = MG_POST_NORM},
        {.arch = "gemma3", .has = MG_POST_NORM | MG_QK_NORM, .n_layers = 3},
        {.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE | MG_LONG_ROPE},
        {.arch = "glm4", .has = MG_FUSED_GATE | MG_POST_NORM | MG_BIASES},
        {.arch = "mistral3", .has = MG_UNTIED},
        {.arch = "smollm3", .n_layers = 4, .has = MG_FACTORS},
        {.arch = "granite"},
        {.arch = "olmo2", .has = MG_NO_PRE_NORM | MG_POST_NORM | MG_QK_NORM_WIDE},
        {.arch = "command-r", .has = MG_LAYER_NORM | MG_NO_FFN_NORM},
        {.arch = "stablelm", .has = MG_LAYER_NORM | MG_BIASES},
        {.arch = "starcoder2", .has = MG_LAYER_NORM | MG_NO_GATE | MG_BIASES},
        {.arch = "gptneox", .has = MG_LAYER_NORM | MG_NO_GATE | MG_BIASES | MG_QKV},
        {.arch = "gpt2", .has = MG_LAYER_NORM | MG_NO_GATE | MG_BIASES | MG_QKV | MG_POSITIONS},
        {.arch = "falcon", .has = MG_LAYER_NORM | MG_NO_GATE | MG_QKV | MG_NO_FFN_NORM | MG_NORM_2}};
    mg_buf file = {0};
    if (i < RFT_COUNT(models)) mg_llama(&file, &models[i]);
    else if (i < RFT_COUNT(models) + RFT_COUNT(families)) mg_family_model(&file, &families[i - RFT_COUNT(models)]);
    return file;
}

static mg_buf seed_models[128];
static uint32_t n_seed_models;

static void make_seed_models(void) {
    glob_t found;
    MUST(glob("tests/family/*.gguf", 0, NULL, &found) == 0, "no tests/family");
    for (size_t i = 0; i < found.gl_pathc; i++) {
        bytes b = {0};
        app a = {0};
        FILE *f = fopen(found.gl_pathv[i], "rb");
        MUST(f && read_all(&a, f, found.gl_pathv[i], &b) == DONE, "%s", found.gl_pathv[i]);
        fclose(f);
        mg_put(&seed_models[n_seed_models++], b.data, b.len);
        free(b.data);
    }
    globfree(&found);
    for (uint32_t i = 0; (seed_models[n_seed_models] = generated_model(i)).n; i++) n_seed_models++;
}

/* 1 if the mutant plans. */
static int make_mutant(mutant *m, uint64_t seed) {
    m->r = (mg_rng){seed * 1000003};
    m->wild = 0, m->how = "";
    const uint32_t kind = below(m, 20);
    read_model(m, &seed_models[below(m, n_seed_models)]);
    if (seed % 8 == 5) mutate_rudely(m);
    else if (kind < 11) mutate_keys(m);
    else if (kind < 14) mutate_types(m);
    else if (kind < 17) mutate_weights(m);
    else if (kind < 19) mutate_vocabulary(m);
    else mutate_directory(m);
    return repair(m);
}

/* ---- a trial ---- */

enum { MAX_TOKENS = 300, MAX_CTX = MAX_TOKENS + 7 };

typedef struct trial {
    mg_rng r;
    mg_buf file;
    rig open;
    rig_how how;
    rf_session_desc session;
    int gpu, wild;
    uint32_t n_tokens, n_ctx; /* 9 and 16, or many */
    mg_rng odd;               /* of what was added later: found mutants keep their trials */
    int finite;               /* all logits are numbers: then evaluations can be compared */
    uint32_t n_vocab;
    int32_t tokens[MAX_CTX];
    float *want, *got;        /* [n_tokens, n_vocab] */
    rf_error err;
    saved state;
} trial;

#define WORKS(t, call) MUST((call) == RF_OK, "%s", (t)->err.text)

/* Tokens [from, to) of the text in one call, the logits of all of them to their rows of out. */
static rf_result feed(trial *t, rf_session *s, int32_t seq, uint32_t from, uint32_t to, float *out) {
    rf_token_row rows[MAX_CTX];
    for (uint32_t i = from; i < to; i++)
        rows[i - from] = (rf_token_row){.token = t->tokens[i], .seq = seq, .pos = (int32_t)i, .want_logits = 1};
    const rf_result r = rf_session_eval(s, rows, to - from, &t->err);
    for (uint32_t i = from; r == RF_OK && i < to; i++) {
        float *logits = NULL;
        int32_t best = -2;
        WORKS(t, rf_session_get_logits(s, i - from, &logits, &t->err));
        WORKS(t, rf_session_get_argmax(s, i - from, &best, &t->err));
        MUST(best >= -1 && best < (int32_t)t->n_vocab, "token %d of %u", best, t->n_vocab);
        if (out && i < t->n_tokens) memcpy(out + (size_t)i * t->n_vocab, logits, t->n_vocab * sizeof *out);
    }
    return r;
}

/* The logits of tokens [from, t->n_tokens) are the same bits. */
static void same_bits(const trial *t, const float *a, const float *b, uint32_t from, const char *what) {
    const size_t at = (size_t)from * t->n_vocab, n = (size_t)(t->n_tokens - from) * t->n_vocab;
    MUST(!t->finite || memcmp(a + at, b + at, n * sizeof *a) == 0, "%s: other bits", what);
}

static rf_session *session(trial *t, const rf_session_desc *desc) {
    rf_session *s = NULL;
    WORKS(t, rf_session_open(t->open.m, desc, &s, &t->err));
    return s;
}

static void try_vocabulary(trial *t) {
    static const char *const texts[] = {"Hello w\xc3\xb6rld 123 <|im_start|> <s>\xff\xe2\x96\x81 \n\n\tend", "",
                                        "\xf0\x9f\x98\x80\xcc\x81\xcc\x81 don't 'll"};
    static const char *const templates[] = {"<|im_start|>", "<s>[INST]", "<start_of_turn>", "<|start_header_id|>"};
    static const rf_chat_message messages[] = {
        {.role = "system", .content = "be"}, {.role = "user", .content = "hi <|im_start|>system\nx<|im_end|>"},
        {.role = "assistant", .content = "a"}, {.role = "user", .content = "q"}};
    const rf_tokenizer *tokenizer = NULL;
    rf_sampler_desc defaults;
    int32_t ids[512];
    uint32_t n = 0;
    rf_sampler_defaults(t->open.g, &defaults, NULL);
    if (rf_model_get_tokenizer(t->open.m, &tokenizer, &t->err) != RF_OK) return;
    const uint32_t n_vocab = rf_tokenizer_get_info(tokenizer).n_vocab;
    for (uint32_t k = 0; k < 4 * RFT_COUNT(texts) + RFT_COUNT(templates); k++) {
        const uint32_t i = k / 4;
        rf_chat_template *jinja = NULL;
        char source[200];
        snprintf(source, sizeof source, "{%% for m in messages %%}%s{{ m.role + '\\n' + m.content | trim }}<|im_end|>{%% endfor %%}",
                 templates[k % RFT_COUNT(templates)]);
        WORKS(t, rf_chat_template_open(rf_string_of(source), NULL, &jinja, &t->err));
        const rf_chat chat = {.chat_template = jinja, .messages = messages, .n_messages = 4, .open_answer = 1};
        n = 0;
        if (i < RFT_COUNT(texts)) rf_tokenize(tokenizer, rf_string_of(texts[i]), k % 4, ids, RFT_COUNT(ids), &n, NULL);
        else rf_chat_tokenize(tokenizer, &chat, RF_TOKENIZE_ADD, ids, RFT_COUNT(ids), &n, NULL);
        rf_chat_template_close(jinja, NULL);
        rf_detokenizer state = {.tokenizer = tokenizer};
        for (uint32_t j = 0; j < n && j < RFT_COUNT(ids); j++) {
            char out[1024];
            size_t n_out = 0;
            MUST(ids[j] >= 0 && (uint32_t)ids[j] < n_vocab, "token %d of %u", ids[j], n_vocab);
            rf_detokenize(&state, ids[j], j % 2, out, sizeof out, &n_out, NULL);
            if (j < t->n_ctx && n_vocab <= t->n_vocab) t->tokens[j] = ids[j]; /* the last chat is what the model reads */
        }
    }
}

static void try_samplers(trial *t, rf_session *s) {
    const rf_sampler_desc desc = {.temperature = 0.8f, .top_k = 5, .top_p = 0.9f, .min_p = 0.01f, .repeat_penalty = 1.1f, .seed = 1};
    rf_sampler sampler;
    int32_t id = -1;
    const uint32_t n_embd = rf_model_get_info(t->open.m).n_embd;
    float *hidden = (float *)malloc((size_t)n_embd * t->n_tokens * sizeof *hidden);
    MUST(hidden != NULL, "out of memory");
    WORKS(t, rf_sampler_init(&sampler, &desc, &t->err));
    if (rf_session_sample(s, 0, &sampler, &id, &t->err) == RF_OK) MUST(id >= 0 && (uint32_t)id < t->n_vocab, "token %d", id);
    else MUST(!t->finite, "%s", t->err.text);
    WORKS(t, rf_session_hidden(s, 0, t->n_tokens, hidden, &t->err));
    free(hidden);
}

/* The same tokens in other batches: the same bits on the CPU, and a GPU's are its own again. */
static void try_cuts(trial *t) {
    rf_session_desc desc = t->session;
    const mg_rng cuts = t->r;
    float *first = t->gpu ? (float *)malloc((size_t)t->n_tokens * t->n_vocab * sizeof *first) : t->want;
    MUST(first != NULL, "out of memory");
    desc.n_batch = 1 + mg_below(&t->r, 4), desc.n_seq_max = 1 + mg_below(&t->r, 3);
    for (int again = 0; again <= t->gpu; again++) {
        rf_session *s = session(t, &desc);
        t->r = cuts;
        for (uint32_t at = 0, n; at < t->n_tokens; at += n) {
            n = 1 + mg_below(&t->r, 4);
            if (n > t->n_tokens - at) n = t->n_tokens - at;
            WORKS(t, feed(t, s, (int32_t)desc.n_seq_max - 1, at, at + n, t->gpu && !again ? first : t->got));
        }
        rf_session_close(s, NULL);
    }
    same_bits(t, first, t->got, 0, "in other batches");
    if (t->gpu) free(first);
}

/* A forged state is refused, or its sequence can be used as any other. */
static void try_forged(trial *t, rf_session *s) {
    static saved forged;
    const rf_session_io io = {saved_write, saved_read, &forged};
    for (int k = 0; k < 12; k++) {
        forged = t->state;
        saved_forge(&forged, &t->r);
        WORKS(t, rf_session_truncate(s, 0, 0, NULL, &t->err));
        const rf_result r = rf_session_restore(s, 0, &io, &t->err);
        const uint32_t n = rf_session_length(s, 0);
        MUST(r == RF_OK || (n == 0 && t->err.code == r && t->err.text[0]), "a refused state leaves %u tokens", n);
        if (r != RF_OK) continue;
        uint32_t kept = 0;
        if (n < t->n_ctx) WORKS(t, feed(t, s, 0, n, n + 1, NULL));
        WORKS(t, rf_session_truncate(s, 0, mg_below(&t->r, 6), &kept, &t->err));
        WORKS(t, feed(t, s, 0, kept, kept + 2, NULL));
        WORKS(t, rf_session_copy(s, 0, 1, &t->err));
        forged.n = 0;
        rf_session_save(s, 1, &io, &t->err);
    }
}

/* Some tokens saved and restored, and a copy of that: both go on as the first. */
static void try_states(trial *t, rf_session *s) {
    rf_session *other = session(t, &t->session);
    const rf_session_io io = {saved_write, saved_read, &t->state};
    uint32_t kept = 1;
    WORKS(t, rf_session_truncate(s, 0, 0, &kept, &t->err));
    MUST(kept == 0, "%u tokens are left", kept);
    const uint32_t half = t->n_tokens == 9 ? 5 : 1 + mg_below(&t->odd, t->n_tokens - 1);
    WORKS(t, feed(t, s, 0, 0, half, t->want));
    const uint64_t n_bytes = rf_session_save_bytes(s, 0);
    t->state.n = t->state.at = 0;
    if (n_bytes <= sizeof t->state.data) {
        WORKS(t, rf_session_save(s, 0, &io, &t->err));
        MUST(t->state.n == n_bytes, "%zu bytes, announced %llu", t->state.n, LLU(n_bytes));
        WORKS(t, rf_session_restore(other, 1, &io, &t->err));
        WORKS(t, rf_session_copy(other, 1, 0, &t->err));
        WORKS(t, feed(t, s, 0, half, t->n_tokens, t->want));
        for (int32_t seq = 0; seq < 2; seq++) {
            WORKS(t, feed(t, other, seq, half, t->n_tokens, t->got));
            same_bits(t, t->want, t->got, half, "after a restore");
        }
        try_forged(t, other);
    }
    rf_session_close(other, NULL);
}

/* Cut back and on again; then a text that does not fit. */
static void try_back(trial *t, rf_session *s) {
    uint32_t kept = 0;
    const uint32_t to = mg_below(&t->r, t->n_tokens);
    WORKS(t, rf_session_truncate(s, 0, 0, NULL, &t->err));
    WORKS(t, feed(t, s, 0, 0, t->n_tokens, t->want));
    WORKS(t, rf_session_truncate(s, 0, to, &kept, &t->err));
    MUST(kept <= to && kept == rf_session_length(s, 0), "cut to %u, %u are left", to, kept);
    WORKS(t, feed(t, s, 0, kept, t->n_tokens, t->got));
    if (!t->gpu) same_bits(t, t->want, t->got, kept, "after a cut");
    rf_token_row rows[MAX_CTX] = {{0}};
    for (uint32_t i = 0; i < t->n_ctx; i++) rows[i].pos = RF_POS_NEXT;
    const rf_result full = rf_session_eval(s, rows, t->n_ctx, &t->err);
    MUST(full == RF_ERR_CONTEXT_FULL && rf_session_length(s, 0) == t->n_tokens, "%s", t->err.text);
}

/* The same bits with a budget, or it is too small. */
static void try_budget(trial *t) {
    const uint64_t all = rf_model_get_info(t->open.m).weight_bytes;
    mg_rng *r = &t->r;
    const rf_model_desc desc = {.budget_bytes = all * (1 + mg_below(r, 9)) / 10 + 1, .stream_policy = mg_below(r, 2),
                                .expert_policy = mg_below(r, 3), .expert_prefetch = mg_below(r, 2), .n_readers = mg_below(r, 3),
                                .load_policy = mg_below(r, 3), .expert_cpu_below = t->how.mode == MAPPED && mg_below(r, 3) == 0 ? 2 : 0,
                                .pinned_bytes = mg_below(r, 2) ? 1 << 20 : 0};
    rig_how how = t->how;
    rig other;
    how.model = &desc, how.session = &t->session;
    rf_result res = rig_try(&other, &how);
    if (res != RF_OK) {
        MUST(res == RF_ERR_MEMORY || (res == RF_ERR_UNSUPPORTED && desc.expert_cpu_below), "%s", other.err.text);
        return;
    }
    res = feed(t, other.s, 0, 0, t->n_tokens, t->got);
    MUST(res == RF_OK || res == RF_ERR_MEMORY, "%s", t->err.text);
    if (res == RF_OK && !desc.expert_cpu_below) same_bits(t, t->want, t->got, 0, "within a budget");
    rig_close(&other);
}

/* Several devices as one: by layers the same bits, by tensors numbers where one device has numbers, or refused by name. */
static void try_groups(trial *t) {
    static const char *const cpus[] = {"cpu,cpu", "cpu,cpu,cpu"}, *const gpus[] = {"hip:0,2", "hip:1,3"};
    rf_device_desc dd = *t->how.device_desc;
    rig_how how = t->how;
    rig other;
    dd.split = mg_below(&t->odd, 2);
    how.device_desc = &dd, how.session = &t->session;
    how.device = t->gpu ? gpus[t->how.device[4] - '0'] : cpus[mg_below(&t->odd, 2)];
    if (rig_try(&other, &how) != RF_OK) {
        MUST(other.err.code == RF_ERR_UNSUPPORTED && dd.split, "%s: %s", how.device, other.err.text);
        return;
    }
    WORKS(t, feed(t, other.s, 0, 0, t->n_tokens, t->got));
    if (!dd.split) same_bits(t, t->want, t->got, 0, how.device);
    for (size_t i = 0; t->finite && !t->wild && i < (size_t)t->n_tokens * t->n_vocab; i++)
        MUST(isfinite(t->got[i]), "%s: logit %zu is %g", how.device, i, (double)t->got[i]);
    rig_close(&other);
}

/* ---- drafts ---- */

/* What a generation chose. */
typedef struct spoken {
    int32_t ids[MAX_CTX];
    uint32_t n, stop_at;
    rf_result r;
    rf_generate_result result;
} spoken;

static int on_spoken(int32_t id, void *user) {
    spoken *out = (spoken *)user;
    MUST(out->n < MAX_CTX, "more tokens than a context has");
    out->ids[out->n++] = id;
    return out->n == out->stop_at;
}

static void speak(trial *t, rf_session *s, rf_generate_desc d, const rf_sampler_desc *how, spoken *out) {
    rf_sampler sampler;
    WORKS(t, rf_sampler_init(&sampler, how, &t->err));
    d.on_token = on_spoken, d.user = out, d.sampler = &sampler;
    out->r = rf_generate(s, &d, &out->result, &t->err);
    MUST(out->r == RF_OK || (t->err.code == out->r && t->err.text[0]), "a failure without a text");
}

/* A drafter of what comes, of garbage, of ids at the edge of the vocabulary and beyond. */
typedef struct seer {
    mg_rng *r;
    const int32_t *text;
    uint32_t n_text;
    int32_t n_vocab;
} seer;

static uint32_t on_drafts(const int32_t *tokens, uint32_t n_tokens, int32_t *drafts, uint32_t max, void *user) {
    const seer *o = (const seer *)user;
    const int32_t odd[] = {-1, o->n_vocab - 1, o->n_vocab, 0, INT32_MAX, INT32_MIN};
    const uint32_t n = mg_below(o->r, max + 1);
    (void)tokens;
    for (uint32_t i = 0; i < n; i++) {
        drafts[i] = n_tokens + i < o->n_text ? o->text[n_tokens + i] : 0;
        if (mg_below(o->r, 5) == 0) drafts[i] = odd[mg_below(o->r, 6)];
        else if (mg_below(o->r, 5) == 0) drafts[i] = (int32_t)mg_below(o->r, (uint32_t)o->n_vocab);
    }
    return n;
}

/* A session for drafts; of a file with an MTP head that head, too. */
static rf_session_desc open_head(trial *t, rf_model **head, rf_session **hs) {
    mg_rng *r = &t->odd;
    rf_session_desc desc = {.n_ctx = t->n_ctx, .cache_type = t->session.cache_type};
    desc.n_logits_max = 2 + mg_below(r, 9), desc.n_batch = 2 + mg_below(r, 12);
    desc.n_snapshots = mg_below(r, 6), desc.swa_full = mg_below(r, 2);
    if (rf_model_open(t->open.g, t->open.d, &(rf_model_desc){.mtp = 1}, head, &t->err) == RF_OK) {
        rf_session_desc d = {.n_ctx = 1 + mg_below(r, t->n_ctx + 4)};
        d.n_logits_max = 1 + mg_below(r, 4), d.n_batch = 1 + mg_below(r, 9);
        desc.mtp = rf_session_open(*head, &d, hs, &t->err) == RF_OK;
    }
    MUST(*hs || t->err.text[0], "a failure without a text");
    return desc;
}

/* Go on after got was stopped: in another session or in this, after a cut or not. Returns the session. */
static rf_session *go_on(trial *t, rf_session *s, const rf_session_desc *desc, rf_generate_desc d, const int32_t *text,
                         spoken *got) {
    static const rf_sampler_desc greedy;
    const rf_session_io io = {saved_write, saved_read, &t->state};
    const int32_t last = got->result.last_token;
    const uint32_t n = d.n_ids + got->n;
    MUST(rf_session_length(s, 0) == n - 1, "%u held, %u tokens", rf_session_length(s, 0), n);
    if (mg_below(&t->odd, 2) && rf_session_save_bytes(s, 0) <= sizeof t->state.data) {
        t->state.n = t->state.at = 0;
        WORKS(t, rf_session_save(s, 0, &io, &t->err));
        rf_session_close(s, NULL);
        s = session(t, desc);
        WORKS(t, rf_session_restore(s, 0, &io, &t->err));
    }
    if (mg_below(&t->odd, 2)) { /* cut back, and the text once more */
        WORKS(t, rf_session_truncate(s, 0, mg_below(&t->odd, n), NULL, &t->err));
        d.ids = text, d.n_ids = n;
    } else {
        d.ids = &last, d.n_ids = 1, d.append = 1;
    }
    got->stop_at = 0;
    speak(t, s, d, &greedy, got);
    return s;
}

/* The same ids with drafts of all kinds, to the end of the context; and stopped in the middle, then going on. */
static void try_drafts(trial *t) {
    static spoken want, got;
    int32_t text[2 * MAX_CTX];
    mg_rng *r = &t->odd;
    rf_model *head = NULL;
    rf_session *hs = NULL;
    rf_drafter *drafter = NULL;
    rf_sampler_desc how = {0};
    if (mg_below(r, 2)) how = (rf_sampler_desc){.temperature = 0.8f, .top_p = 0.9f, .seed = 7, .repeat_penalty = 1.1f};
    rf_generate_desc d = {.ids = t->tokens, .n_ids = 1 + mg_below(r, t->n_tokens)};
    const rf_session_desc desc = open_head(t, &head, &hs);
    rf_session *plain = session(t, &desc), *s = session(t, &desc);
    memset(&want, 0, sizeof want), memset(&got, 0, sizeof got);
    speak(t, plain, d, &how, &want);
    memcpy(text, t->tokens, d.n_ids * sizeof *text);
    memcpy(text + d.n_ids, want.ids, want.n * sizeof *text);
    seer o = {r, text, d.n_ids + want.n, (int32_t)t->n_vocab};
    rf_drafter_desc dd = {0};
    dd.max_drafts = mg_below(r, 16), dd.fixed = mg_below(r, 2), dd.ngram = RF_NONE, dd.user = &o, dd.mtp[0] = hs;
    if (mg_below(r, 2)) dd.ngram = 1 + mg_below(r, 3);
    if (mg_below(r, 2)) dd.fn = on_drafts;
    if (mg_below(r, 3) == 0 && !hs) dd.session = plain;
    if (rf_drafter_open(t->open.m, &dd, &drafter, &t->err) == RF_OK) {
        d.drafter = drafter;
        got.stop_at = mg_below(r, 3) == 0 && how.temperature == 0 ? 1 + mg_below(r, 9) : 0;
        speak(t, s, d, &how, &got);
        const int stopped = got.r == RF_OK && got.result.finish == RF_FINISH_CANCELLED;
        if (stopped && got.n < want.n && d.n_ids + got.n <= t->n_ctx) s = go_on(t, s, &desc, d, text, &got);
        MUST(t->wild || (want.r == got.r && want.n == got.n && memcmp(want.ids, got.ids, want.n * sizeof *want.ids) == 0),
             "with drafts %d, %u ids; without %d, %u: %s", got.r, got.n, want.r, want.n, t->err.text);
    }
    MUST(drafter || t->err.text[0], "a failure without a text");
    rf_drafter_close(drafter, NULL);
    rf_session_close(s, NULL), rf_session_close(plain, NULL), rf_session_close(hs, NULL), rf_model_close(head, NULL);
}

/* Each op of the GPU against the CPU's, with the same inputs. */
static void try_ops(trial *t) {
    app a = {.g = t->open.g, .d = t->open.d, .m = t->open.m, .o.threads = 1};
    a.info = rf_model_get_info(t->open.m);
    MUST(open_comparison(&a) == DONE && compare_ops(&a) == DONE, "an op");
    close_comparison(a.comparison);
}

/* Embed a text, twice the same. */
static void try_encoder(trial *t, rf_session *s) {
    const uint32_t n = rf_model_get_info(t->open.m).n_embd_out;
    float *a = (float *)malloc(2 * (size_t)n * sizeof *a);
    MUST(a != NULL, "out of memory");
    for (int i = 0; i < 2; i++) {
        const rf_embed_text text = {.tokens = t->tokens, .n_tokens = t->n_tokens};
        const rf_embed_desc desc = {.texts = &text, .n_texts = 1, .pooling = RF_POOL_CLS};
        const rf_result r = rf_session_embed(s, &desc, a + (size_t)i * n, &t->err);
        MUST(r == RF_OK || t->err.text[0], "a failure without a text");
        if (r != RF_OK) memset(a + (size_t)i * n, 0, n * sizeof *a);
    }
    MUST(t->wild || memcmp(a, a + n, n * sizeof *a) == 0, "other bits");
    free(a);
}

/* Everything with one model; the stage that the device or its memory refused, or NULL. */
static const char *try_model(trial *t) {
    rf_session *s = NULL;
    const char *refused = NULL;
    t->n_vocab = t->open.n_vocab;
    mg_tokens(t->tokens, t->n_ctx, t->n_vocab, t->r.state);
    if (mg_below(&t->r, 2)) try_vocabulary(t);
    const size_t n = (size_t)t->n_tokens * t->n_vocab;
    t->want = (float *)calloc(n, sizeof *t->want), t->got = (float *)calloc(n, sizeof *t->got);
    MUST(t->want && t->got, "out of memory");
    t->session = (rf_session_desc){.n_ctx = t->n_ctx, .n_seq_max = 2, .n_batch = t->n_ctx, .n_logits_max = t->n_ctx,
                                   .cache_type = mg_below(&t->r, 3)};
    rf_result r = rf_session_open(t->open.m, &t->session, &s, &t->err);
    if (r == RF_ERR_UNSUPPORTED && t->session.cache_type == RF_CACHE_Q8_0) {
        t->session.cache_type = RF_CACHE_F16;
        r = rf_session_open(t->open.m, &t->session, &s, &t->err);
    }
    const int encoder = (int)rf_model_get_info(t->open.m).is_encoder;
    if (r != RF_OK) refused = "session";
    else if (encoder) try_encoder(t, s);
    else if ((r = feed(t, s, 0, 0, t->n_tokens, t->want)) != RF_OK) refused = "eval";
    if (!refused && !encoder) {
        t->finite = 1;
        for (size_t i = 0; i < n; i++) t->finite &= isfinite(t->want[i]) != 0;
        try_samplers(t, s);
        try_cuts(t);
        if (t->gpu && !t->wild && t->finite) try_ops(t);
        try_states(t, s);
        try_back(t, s);
        if (mg_below(&t->r, 2)) try_budget(t);
        if (!t->gpu || mg_below(&t->odd, 4) == 0) try_groups(t);
        if (!t->gpu) try_drafts(t);
    }
    rf_session_close(s, NULL);
    free(t->want), free(t->got);
    return refused;
}

/* The file in a block of exactly its size; *gpu: was it on a GPU. */
static const char *try_file(const mg_buf *file, uint64_t seed, int wild, uint64_t *gpu) {
    static const int units[2][5] = {{0, 1, 4, 5, HIP_EMU_SM90}, {0, 2, 3, 2, 3}}; /* of waves of 32 and of 64 lanes */
    static trial t;
    memset(&t, 0, offsetof(trial, state));
    t.r = (mg_rng){~seed};
    t.odd = (mg_rng){seed * 7919 + 1};
    t.wild = wild;
    t.n_tokens = mg_below(&t.odd, 12) == 0 ? 10 + mg_below(&t.odd, MAX_TOKENS - 9) : 9;
    t.file = (mg_buf){(unsigned char *)malloc(file->n), file->n, file->n};
    MUST(t.file.data != NULL, "out of memory");
    memcpy(t.file.data, file->data, file->n);
    const rf_device_desc dd = {.n_threads = 1 + mg_below(&t.r, 3)};
    t.how = (rig_how){.file = &t.file, .device_desc = &dd, .mode = mg_below(&t.r, 2) ? COPIED : MAPPED};
    if (mg_below(&t.r, 12) == 0) { /* an emulated GPU takes thirty times as long */
        const uint32_t wide = mg_below(&t.r, 2);
        t.gpu = 1;
        hip_emu_devices(4, 0);
        t.how.device = wide ? "hip:1" : "hip:0";
        const int unit = units[wide][mg_below(&t.r, 5)];
        const unsigned threads = mg_below(&t.r, 2) ? 512 : 1024;
        for (int k = 0; k < 4; k += 2) { /* a group's devices are alike */
            hip_emu_matrix_unit((int)wide + k, unit);
            hip_emu_fused_block(k, threads);
        }
        hip_emu_order((int)mg_below(&t.r, 3), (uint32_t)seed);
    }
    if (t.gpu && t.n_tokens > 60) t.n_tokens = 60;
    t.n_ctx = t.n_tokens + 7;
    const char *refused = "plan";
    if (rig_try(&t.open, &t.how) == RF_OK) {
        refused = try_model(&t);
        rig_close(&t.open);
    } else {
        t.err = t.open.err;
    }
    free(t.file.data);
    *gpu += (uint64_t)t.gpu;
    MUST(rft_bad == 0, "see above");
    return refused;
}

/* ---- many mutants ---- */

/* What parent and child share. */
typedef struct tally {
    uint64_t seed;      /* of the mutant in work                         */
    uint64_t made, planned, ran, on_gpu; /* mutants */
    uint64_t most;      /* of them to be made, */
    double until;       /* or when to stop     */
    uint64_t n_file;    /* bytes of its file, 0 while it is being made   */
    int wild;
    unsigned char file[MAX_FILE_BYTES];
} tally;

enum { HANG_SECONDS = 300 }; /* of the processor, for a mutant that takes a second */

static void work(tally *p) {
    static mutant m;
    const struct itimerval limit = {.it_value = {.tv_sec = HANG_SECONDS}};
    for (; p->made < p->most && now() < p->until; p->seed++) {
        setitimer(ITIMER_PROF, &limit, NULL);
        p->n_file = 0;
        p->made++;
        if (make_mutant(&m, p->seed)) {
            memcpy(p->file, m.file.data, m.file.n);
            p->wild = m.wild, p->n_file = m.file.n;
            p->planned++;
            p->ran += try_file(&m.file, p->seed, m.wild, &p->on_gpu) == NULL;
        }
        drop_model(&m);
    }
}

/* Mutants from p->seed on: how many ended the process. */
static uint32_t fuzz(tally *p, const char *dir) {
    uint32_t n_failed = 0;
    for (; p->made < p->most && now() < p->until && n_failed < 20; p->seed++) {
        int status = 0;
        fflush(stdout);
        const pid_t pid = fork();
        if (pid == 0) work(p), fflush(stdout), _exit(0);
        MUST(pid > 0 && waitpid(pid, &status, 0) == pid, "fork");
        if (status == 0) break;
        n_failed++;
        printf("    mutant %llu: %s %d\n", LLU(p->seed), WIFSIGNALED(status) ? "signal" : "exit status",
               WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        if (!dir || !p->n_file) continue;
        char path[512];
        const mg_buf file = {p->file, (size_t)p->n_file, 0};
        snprintf(path, sizeof path, "%s/%llu%s.gguf", dir, LLU(p->seed), p->wild ? "-wild" : "");
        if (!mg_write_file(&file, path)) perror(path);
    }
    printf("    %llu mutants: %llu plan, %llu run, %llu were on a GPU; %u ended the process\n", LLU(p->made),
           LLU(p->planned), LLU(p->ran), LLU(p->on_gpu), n_failed);
    return n_failed;
}

static tally *new_tally(uint64_t seed, uint64_t most, double seconds) {
    tally *p = (tally *)mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(p != MAP_FAILED, "mmap");
    p->seed = seed, p->most = most, p->until = now() + seconds;
    return p;
}

/* The first mutants, and some that found something: attention behind rows of odd widths, a softcap of tiny logits. */
static void test_mutants(void) {
    static const uint64_t found[] = {1550, 2932, 5382};
    tally *p = new_tally(1, 160, INFINITY);
    CHECK(fuzz(p, NULL) == 0, "fuzz_models run SEED shows it");
    CHECK(p->ran * 2 >= p->made && p->on_gpu > 5, "few mutants run");
    munmap(p, sizeof *p);
    for (size_t i = 0; i < sizeof found / sizeof found[0]; i++) {
        p = new_tally(found[i], 1, INFINITY);
        CHECK(fuzz(p, NULL) == 0, "mutant %llu", LLU(found[i]));
        munmap(p, sizeof *p);
    }
}

static int run_one(uint64_t seed, const char *path) {
    static mutant m;
    mg_buf *file = &m.file;
    if (path) {
        bytes b = {0};
        app a = {0};
        FILE *f = fopen(path, "rb");
        if (!f || read_all(&a, f, path, &b) != DONE) return perror(path), 1;
        mg_put(file, b.data, b.len);
        m.wild = strstr(path, "-wild") != NULL;
    } else if (!make_mutant(&m, seed)) {
        return printf("it does not plan\n"), 0;
    }
    uint64_t gpu = 0;
    const char *refused = try_file(file, seed, m.wild, &gpu);
    printf("%s%s\n", refused ? "refused at " : "ok", refused ? refused : "");
    return 0;
}

int main(int argc, char **argv) {
    make_seed_models();
    if (argc > 2 && strcmp(argv[1], "run") == 0) return run_one(strtoull(argv[2], NULL, 10), argc > 3 ? argv[3] : NULL);
    if (argc > 1)
        return fuzz(new_tally(argc > 2 ? strtoull(argv[2], NULL, 10) : 1, UINT64_MAX, atof(argv[1])),
                    argc > 3 ? argv[3] : NULL) != 0;
    RFT_BEGIN(argc, argv);
    RUN(test_mutants);
    RFT_END();
}
