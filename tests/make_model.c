/* cc -O2 -I. tests/make_model.c -o make_model -lm
 *
 * make_model SHAPE MIX OUT.gguf: a model of a true shape with random weights, for timing and memory tests. It computes
 * nonsense, with finite logits, at the speed of the real one. 5 GB take about ten seconds.
 *   SHAPE  llama3-70b llama3-8b llama3.2-1b tinyllama-1.1b qwen2.5-0.5b qwen3-0.6b qwen3moe-30b-a3b qwen3moe-small
 *   MIX    Q4_K_M Q5_K_M Q6_K Q8_0 Q4_0 F16 F32, or one of the names in `pure` for all matrices but the output
 * Models with experts have favourites among them that change with the token: see write_router.
 * `make_model SHAPE MIX OUT sparse` writes the metadata only and leaves a hole for the data (zeros, no disk space). */
#include "tests/make_gguf.h"

typedef struct shape {
    const char *name, *arch;
    uint32_t n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim, n_vocab;
    float base;
    int tied, bias, qk_norm;
    uint32_t n_experts, n_used; /* 0: none; then n_ff is an expert's */
} shape;

static const shape shapes[] = {
    {"llama3-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256, 500000, 0, 0, 0, 0, 0},
    {"llama3-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256, 500000, 0, 0, 0, 0, 0},
    {"llama3.2-1b", "llama", 16, 2048, 8192, 32, 8, 64, 128256, 500000, 1, 0, 0, 0, 0},
    {"tinyllama-1.1b", "llama", 22, 2048, 5632, 32, 4, 64, 32000, 10000, 0, 0, 0, 0, 0},
    {"qwen2.5-0.5b", "qwen2", 24, 896, 4864, 14, 2, 64, 151936, 1000000, 1, 1, 0, 0, 0},
    {"qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 1000000, 1, 0, 1, 0, 0},
    {"qwen3moe-30b-a3b", "qwen3moe", 48, 2048, 768, 32, 4, 128, 151936, 1000000, 0, 0, 1, 128, 8},
    {"qwen3moe-small", "qwen3moe", 6, 1024, 256, 8, 2, 64, 8192, 1000000, 0, 0, 1, 128, 8},
};

/* One tensor to write. d: standard deviation of the weights; 0 for a vector of ones. */
typedef struct tensor {
    char name[64];
    uint32_t type;
    uint64_t ne[3], size, offset;
    float d;
} tensor;

static const struct { const char *mix; uint32_t type; } pure[] = {
    {"Q4_0", MG_Q4_0},       {"IQ4_NL", MG_IQ4_NL},   {"IQ4_XS", MG_IQ4_XS}, {"MXFP4", MG_MXFP4}, {"NVFP4", MG_NVFP4},
    {"Q2_K", MG_Q2_K},       {"Q3_K", MG_Q3_K},       {"IQ3_XXS", MG_IQ3_XXS}, {"IQ3_S", MG_IQ3_S},
    {"IQ2_XXS", MG_IQ2_XXS}, {"IQ2_XS", MG_IQ2_XS},   {"IQ2_S", MG_IQ2_S},   {"IQ1_S", MG_IQ1_S}, {"IQ1_M", MG_IQ1_M},
    {"TQ1_0", MG_TQ1_0},     {"TQ2_0", MG_TQ2_0},     {"Q1_0", MG_Q1_0},     {"Q2_0", MG_Q2_0}};

static tensor *list;
static size_t n_list;

/* The mixes as llama.cpp makes them: attn_v, half of ffn_down and output in more bits; rows that are no multiple of 256
 * fall back to blocks of 32. */
static uint32_t type_of(const char *mix, const char *name, uint32_t il, const shape *s, uint64_t n_in) {
    int more = strcmp(name, "attn_v") == 0 || strncmp(name, "ffn_down", 8) == 0, n = (int)s->n_layers, i = (int)il;
    int half = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
    uint32_t type = MG_F32;
    if (strcmp(mix, "F16") == 0) type = MG_F16;
    if (strcmp(mix, "Q8_0") == 0) type = MG_Q8_0;
    for (size_t p = 0; p < sizeof pure / sizeof pure[0]; p++)
        if (strcmp(mix, pure[p].mix) == 0) type = strcmp(name, "output") == 0 ? (uint32_t)MG_Q6_K : pure[p].type;
    if (strcmp(mix, "Q6_K") == 0) type = MG_Q6_K;
    if (strcmp(mix, "Q4_K_M") == 0 || strcmp(mix, "Q5_K_M") == 0) {
        type = mix[1] == '4' ? MG_Q4_K : MG_Q5_K;
        if ((more && half) || strcmp(name, "output") == 0 || (s->tied && strcmp(name, "token_embd") == 0))
            type = MG_Q6_K;
    }
    uint32_t elements = 1, bytes = 4;
    mg_block(type, &elements, &bytes);
    if (n_in % elements == 0) return type;
    return type == MG_Q4_K ? MG_Q5_0 : type == MG_Q5_K ? MG_Q5_1 : type == MG_Q6_K ? MG_Q8_0 : MG_IQ4_NL;
}

static tensor *add(const char *mix, const shape *s, int il, const char *name, const char *suffix, uint64_t n_in,
                uint64_t n_rows) {
    uint32_t elements = 1, bytes = 4;
    tensor *t;
    if (n_list % 256 == 0) list = (tensor *)realloc(list, (n_list + 256) * sizeof *list);
    if (!list) fprintf(stderr, "make_model: out of memory\n"), exit(1);
    t = &list[n_list++];
    memset(t, 0, sizeof *t);
    if (il < 0) snprintf(t->name, sizeof t->name, "%s.%s", name, suffix);
    else snprintf(t->name, sizeof t->name, "blk.%d.%s.%s", il, name, suffix);
    t->ne[0] = n_in;
    t->ne[1] = n_rows;
    t->type = n_rows ? type_of(mix, name, (uint32_t)(il < 0 ? 0 : il), s, n_in) : (uint32_t)MG_F32;
    t->d = n_rows ? 0.02f : 0;
    mg_block(t->type, &elements, &bytes);
    t->size = n_in / elements * bytes * (n_rows ? n_rows : 1);
    return t;
}

/* Matrices of experts. */
static tensor *add_experts(const char *mix, const shape *s, int il, const char *name, uint64_t n_in, uint64_t n_rows) {
    tensor *t = add(mix, s, il, name, "weight", n_in, n_rows);
    t->ne[2] = s->n_experts;
    t->size *= s->n_experts;
    return t;
}

/* A layer's router and experts. What they and attention add to the residual stream is little, so that what a token's
 * embedding says of experts arrives at every router. */
#define LITTLE 0.002f
static void add_moe(const char *mix, const shape *s, int il) {
    tensor *t = add("F32", s, il, "ffn_gate_inp", "weight", s->n_embd, s->n_experts);
    t->d = 0.02f;
    add_experts(mix, s, il, "ffn_gate_exps", s->n_embd, s->n_ff);
    add_experts(mix, s, il, "ffn_up_exps", s->n_embd, s->n_ff);
    add_experts(mix, s, il, "ffn_down_exps", s->n_ff, s->n_embd)->d = LITTLE;
}

static void add_all(const char *mix, const shape *s) {
    uint64_t q = (uint64_t)s->n_heads * s->head_dim, kv = (uint64_t)s->n_kv_heads * s->head_dim;
    /* write_embedding knows Q4_K alone */
    tensor *t = add(s->n_experts ? "Q4_K_M" : mix, s, -1, "token_embd", "weight", s->n_embd, s->n_vocab);
    if (s->n_experts) t->d = 1;
    for (int il = 0; il < (int)s->n_layers; il++) {
        add(mix, s, il, "attn_norm", "weight", s->n_embd, 0);
        add(mix, s, il, "attn_q", "weight", s->n_embd, q);
        add(mix, s, il, "attn_k", "weight", s->n_embd, kv);
        add(mix, s, il, "attn_v", "weight", s->n_embd, kv);
        if (s->bias) add(mix, s, il, "attn_q", "bias", q, 0);
        if (s->bias) add(mix, s, il, "attn_k", "bias", kv, 0);
        if (s->bias) add(mix, s, il, "attn_v", "bias", kv, 0);
        if (s->qk_norm) add(mix, s, il, "attn_q_norm", "weight", s->head_dim, 0);
        if (s->qk_norm) add(mix, s, il, "attn_k_norm", "weight", s->head_dim, 0);
        t = add(mix, s, il, "attn_output", "weight", q, s->n_embd);
        if (s->n_experts) t->d = LITTLE;
        add(mix, s, il, "ffn_norm", "weight", s->n_embd, 0);
        if (s->n_experts) {
            add_moe(mix, s, il);
            continue;
        }
        add(mix, s, il, "ffn_gate", "weight", s->n_embd, s->n_ff);
        add(mix, s, il, "ffn_up", "weight", s->n_embd, s->n_ff);
        add(mix, s, il, "ffn_down", "weight", s->n_ff, s->n_embd);
    }
    add(mix, s, -1, "output_norm", "weight", s->n_embd, 0);
    if (!s->tied) add(mix, s, -1, "output", "weight", s->n_embd, s->n_vocab);
}

/* Header, keys (an SPM vocabulary of filler words) and directory. */
static void write_metadata(mg_buf *b, const shape *s) {
    mg_gguf w;
    char key[96];
    const char **words = (const char **)malloc(s->n_vocab * sizeof *words);
    char *text = (char *)malloc((size_t)s->n_vocab * 16);
    float *score = (float *)calloc(s->n_vocab, sizeof *score);
    int32_t *type = (int32_t *)malloc(s->n_vocab * sizeof *type);
    if (!words || !text || !score || !type) fprintf(stderr, "make_model: out of memory\n"), exit(1);
    for (uint32_t i = 0; i < s->n_vocab; i++) {
        words[i] = text + (size_t)i * 16;
        snprintf(text + (size_t)i * 16, 16,
                 i == 0    ? "<unk>"
                 : i == 1  ? "<s>"
                 : i == 2  ? "</s>"
                 : i < 259 ? "<0x%02X>"
                           : "w%u",
                 i < 259 ? i - 3 : i);
        type[i] = i == 0 ? 2 : i < 3 ? 3 : i < 259 ? 6 : 1;
    }
    mg_begin(&w, 3);
#define KEY(suffix) (snprintf(key, sizeof key, "%s." suffix, s->arch), key)
    mg_kv_str(&w, "general.architecture", s->arch);
    mg_kv_str(&w, "general.name", s->name);
    mg_kv_u32(&w, KEY("block_count"), s->n_layers);
    mg_kv_u32(&w, KEY("context_length"), 32768);
    mg_kv_u32(&w, KEY("embedding_length"), s->n_embd);
    mg_kv_u32(&w, KEY("feed_forward_length"), s->n_ff);
    mg_kv_u32(&w, KEY("attention.head_count"), s->n_heads);
    mg_kv_u32(&w, KEY("attention.head_count_kv"), s->n_kv_heads);
    mg_kv_u32(&w, KEY("attention.key_length"), s->head_dim);
    mg_kv_u32(&w, KEY("attention.value_length"), s->head_dim);
    mg_kv_u32(&w, KEY("rope.dimension_count"), s->head_dim);
    mg_kv_f32(&w, KEY("rope.freq_base"), s->base);
    mg_kv_f32(&w, KEY("attention.layer_norm_rms_epsilon"), 1e-5f);
    if (s->n_experts) {
        mg_kv_u32(&w, KEY("expert_count"), s->n_experts);
        mg_kv_u32(&w, KEY("expert_used_count"), s->n_used);
        mg_kv_u32(&w, KEY("expert_feed_forward_length"), s->n_ff);
    }
#undef KEY
    mg_kv_str(&w, "tokenizer.ggml.model", "llama");
    mg_kv_arr_str(&w, "tokenizer.ggml.tokens", words, s->n_vocab);
    mg_kv_arr_f32(&w, "tokenizer.ggml.scores", score, s->n_vocab);
    mg_kv_arr_i32(&w, "tokenizer.ggml.token_type", type, s->n_vocab);
    mg_kv_u32(&w, "tokenizer.ggml.bos_token_id", 1);
    mg_kv_u32(&w, "tokenizer.ggml.eos_token_id", 2);
    mg_put(b, "GGUF", 4);
    mg_put_u32(b, 3);
    mg_put_u64(b, n_list);
    mg_put_u64(b, w.n_kv);
    mg_put(b, w.kv.data, w.kv.n);
    for (size_t i = 0; i < n_list; i++) {
        const tensor *t = &list[i];
        mg_put_text(b, t->name, strlen(t->name));
        mg_put_u32(b, t->ne[2] ? 3 : t->ne[1] ? 2 : 1);
        mg_put_u64(b, t->ne[0]);
        if (t->ne[1]) mg_put_u64(b, t->ne[1]);
        if (t->ne[2]) mg_put_u64(b, t->ne[2]);
        mg_put_u32(b, t->type);
        mg_put_u64(b, t->offset);
    }
    mg_pad(b, 32);
    free(words), free(text), free(score), free(type);
}

/* Random blocks of a type, repeated through the file; ones for vectors. */
#define POOL_BYTES ((size_t)16 << 20)

static void fill_pool(mg_buf *pool, uint32_t type, float d) {
    const float one = 1;
    mg_rng rng = {type + 1};
    pool->n = 0;
    while (pool->n < POOL_BYTES) {
        if (d > 0) mg_put_block(pool, &rng, type, d);
        else mg_put(pool, &one, sizeof one);
    }
}

/* ---- experts that are chosen more often than others ----
 * Token t is of phase t / 512 % 8. The last 256 values of its embedding say which: 32 of them are 1, the others 0; what
 * is before them is random, of standard deviation 1. A router's row is random for the random part, so that each token
 * gives every expert a logit of its own, normally distributed over the tokens; for the 32 values of a phase it is a
 * constant, which raises that logit for all tokens of the phase by as many standard deviations as it takes: in each
 * layer and phase another tenth of the experts by HOT, so that they get 60 % of the choices, and two tenths by WARM,
 * which get 25 %. Fed with the ids in their order, a model has other favourites every 512 tokens. */
#define PHASE_TOKENS 512u
#define PHASES 8u
#define PHASE_VALUES 256u /* a block of Q4_K */
#define HOT 1.885f
#define WARM 0.812f

static void put_phase(mg_buf *b, uint32_t phase) {
    unsigned char block[144] = {0};
    const uint16_t d = mg_f16(1.0f / 15);
    memcpy(block, &d, 2);
    block[4 + (phase < 4 ? phase : phase + 4)] = 1; /* the scale of 32 values; those of the others are 0 */
    memset(block + 16, 0xff, 128);
    mg_put(b, block, sizeof block);
}

/* token_embd: rows of a pool of random blocks, with the phase at their end. */
static int write_embedding(FILE *f, const tensor *t, const mg_buf *pool) {
    const size_t row = (size_t)(t->ne[0] / 256 - 1) * 144, n_rows = pool->n / row;
    mg_buf ends = {0};
    for (uint32_t phase = 0; phase < PHASES; phase++) put_phase(&ends, phase);
    int ok = t->type == MG_Q4_K && t->ne[0] % 256 == 0;
    for (uint64_t i = 0; ok && i < t->ne[1]; i++)
        ok = fwrite(pool->data + i % n_rows * row, 1, row, f) == row &&
             fwrite(ends.data + i / PHASE_TOKENS % PHASES * 144, 1, 144, f) == 144;
    mg_free(&ends);
    return ok;
}

static int write_router(FILE *f, const tensor *t) {
    const uint64_t n_in = t->ne[0], n_experts = t->ne[1], n_random = n_in - PHASE_VALUES;
    const uint32_t hot = (uint32_t)(n_experts + 5) / 10, warm = (uint32_t)(3 * n_experts + 5) / 10;
    const float deviation = t->d * sqrtf((float)n_random); /* of a logit, but for the norm */
    float *w = (float *)malloc(n_in * n_experts * sizeof *w);
    uint32_t *rank = (uint32_t *)malloc(n_experts * sizeof *rank);
    mg_rng rng = {t->offset};
    int ok = w && rank;
    for (uint64_t i = 0; ok && i < n_in * n_experts; i++) w[i] = 1.73f * t->d * mg_uniform(&rng);
    for (uint32_t phase = 0; ok && phase < PHASES; phase++) {
        for (uint32_t e = 0; e < n_experts; e++) rank[e] = e;
        for (uint32_t e = (uint32_t)n_experts - 1; e > 0; e--) {
            const uint32_t other = mg_below(&rng, e + 1), was = rank[e];
            rank[e] = rank[other], rank[other] = was;
        }
        for (uint32_t e = 0; e < n_experts; e++)
            for (uint32_t i = 0; i < 32; i++)
                w[e * n_in + n_random + phase * 32 + i] = (rank[e] < hot ? HOT : rank[e] < warm ? WARM : 0) * deviation / 32;
    }
    ok = ok && fwrite(w, sizeof *w, n_in * n_experts, f) == n_in * n_experts;
    free(w), free(rank);
    return ok;
}

int main(int argc, char **argv) {
    const shape *s = NULL;
    mg_buf head = {0};
    uint64_t offset = 0;
    if (argc < 4) return fprintf(stderr, "usage: make_model SHAPE MIX OUT.gguf [sparse]\n"), 2;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (strcmp(shapes[i].name, argv[1]) == 0) s = &shapes[i];
    int known = strstr("Q4_K_M Q5_K_M Q6_K Q8_0 F16 F32", argv[2]) != NULL;
    for (size_t p = 0; p < sizeof pure / sizeof pure[0]; p++) known |= strcmp(argv[2], pure[p].mix) == 0;
    if (!s || !known)
        return fprintf(stderr, "make_model: unknown shape or mix\n"), 2;
    add_all(argv[2], s);
    for (size_t i = 0; i < n_list; i++) list[i].offset = offset, offset += (list[i].size + 31) / 32 * 32;
    write_metadata(&head, s);
    FILE *f = fopen(argv[3], "wb");
    mg_buf pool = {0};
    int ok = f && fwrite(head.data, 1, head.n, f) == head.n;
    uint32_t pool_type = UINT32_MAX;
    float pool_d = -1;
    for (size_t i = 0; ok && argc < 5 && i < n_list; i++) {
        const tensor *t = &list[i];
        if (pool_type != t->type || pool_d != t->d) fill_pool(&pool, pool_type = t->type, pool_d = t->d);
        const int embedding = s->n_experts && i == 0, router = strstr(t->name, "ffn_gate_inp") != NULL;
        if (embedding) ok = write_embedding(f, t, &pool);
        if (router) ok = write_router(f, t);
        for (uint64_t left = embedding || router ? 0 : t->size, n; ok && left; left -= n) { /* whole blocks */
            n = left < pool.n ? left : pool.n;
            ok = fwrite(pool.data, 1, n, f) == n;
        }
        static const char zeros[32];
        uint64_t pad = (32 - t->size % 32) % 32;
        ok = ok && fwrite(zeros, 1, pad, f) == pad;
    }
    if (ok && argc > 4) ok = fseeko(f, (off_t)(head.n + offset - 1), SEEK_SET) == 0 && fputc(0, f) == 0;
    if (f) ok = fclose(f) == 0 && ok;
    if (!ok) return fprintf(stderr, "make_model: cannot write %s\n", argv[3]), 1;
    printf("%s: %s %s, %.2f GB of tensors\n", argv[3], s->name, argv[2], (double)offset * 1e-9);
    free(list), mg_free(&pool), mg_free(&head);
    return 0;
}
