/* The families without experts: every flag of an architecture and every key that it reads, on small models against the
 * float64 evaluator of ref_family.h, at once and token by token; and what is wrong with such files.
 *
 * Tolerances are fractions of the largest |logit|, as in test_model.c: float32 rounds to 6e-8, 2e-6 is measured. */
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"

#include "make_gguf.h"
#include "ref_model.h"
#include "ref_family.h"
#include "rf_test.h"
#include "rf_rig.h"

#define FLOAT_TOLERANCE 4e-6
#define INT8_MARGIN 1e-4
#define N_TOKENS 40u

static void gemma_window(mg_gguf *w) { (void)w, mg_uint("attention.sliding_window", 7); }
static void gemma2_keys(mg_gguf *w) {
    gemma_window(w);
    mg_real("attn_logit_softcapping", 0.5f);
    mg_real("final_logit_softcapping", 2);
    mg_real("rope.freq_base_swa", 300);
    mg_uint("attention.sliding_window_pattern", 3);
}
static void gemma3_keys(mg_gguf *w) {
    gemma_window(w);
    mg_real("rope.freq_base", 1e6f);
    mg_real("rope.scaling.factor", 8);
    mg_real("final_logit_softcapping", 2);
}
static void window_list(mg_gguf *w) {
    const uint8_t local[3] = {0, 1, 0};
    gemma_window(w);
    mg_kv_arr(w, mg_key("attention.sliding_window_pattern"), MG_KV_BOOL, local, 3, 3);
}
static void all_local(mg_gguf *w) {
    gemma_window(w);
    mg_uint("attention.sliding_window_pattern", 0);
    mg_real("rope.freq_base_swa", 77);
}
static void no_softcaps(mg_gguf *w) {
    (void)w;
    mg_real("attn_logit_softcapping", 0);
    mg_real("final_logit_softcapping", 0);
}
static void long_rope(mg_gguf *w) {
    (void)w;
    mg_uint("rope.scaling.original_context_length", 256);
    mg_real("rope.scaling.attn_factor", 1.19f);
}
static void partial_rope(mg_gguf *w) { (void)w, mg_uint("rope.dimension_count", 8); }
static void temperature(mg_gguf *w) {
    mg_kv_str(w, mg_key("rope.scaling.type"), "yarn");
    mg_real("rope.scaling.factor", 4);
    mg_uint("rope.scaling.original_context_length", 12);
    mg_real("rope.scaling.yarn_log_multiplier", 0.7f);
    mg_real("rope.scaling.yarn_beta_fast", 4);
    mg_real("rope.scaling.yarn_beta_slow", 0.5f);
    mg_real("attention.temperature_scale", 0.3f);
}
static void granite_keys(mg_gguf *w) {
    (void)w;
    mg_real("embedding_scale", 6);
    mg_real("residual_scale", 0.4f);
    mg_real("attention.scale", 0.1f);
    mg_real("logit_scale", 2);
}
static void no_rope(mg_gguf *w) {
    mg_real("logit_scale", 1);
    mg_kv_bool(w, mg_key("rope.scaling.finetuned"), 0);
}
static void logit_scale(mg_gguf *w) { (void)w, mg_real("logit_scale", 0.4f); }
static void parallel(mg_gguf *w) { mg_kv_bool(w, mg_key("use_parallel_residual"), 1); }
static void sequential(mg_gguf *w) { mg_kv_bool(w, mg_key("use_parallel_residual"), 0); }
static void olmo3(mg_gguf *w) {
    gemma_window(w);
    mg_kv_str(w, mg_key("rope.scaling.type"), "yarn");
    mg_real("rope.scaling.factor", 8);
    mg_uint("rope.scaling.original_context_length", 64);
}

enum { STARCODER = MG_LAYER_NORM | MG_NO_GATE | MG_BIASES };
static const struct {
    const char *what;
    mg_family f;
    uint32_t n_ctx; /* 0: the model's */
} cases[] = {
    {"gemma2 as it is", {.arch = "gemma2", .has = MG_POST_NORM}, 0},
    {"gemma2, all keys", {.arch = "gemma2", .has = MG_POST_NORM, .n_layers = 4, .more_kv = gemma2_keys}, 0},
    {"gemma2 without caps", {.arch = "gemma2", .has = MG_POST_NORM, .more_kv = no_softcaps}, 0},
    {"gemma2, all layers local", {.arch = "gemma2", .has = MG_POST_NORM, .more_kv = all_local}, 0},
    {"gemma2 of 46 layers", {.arch = "gemma2", .has = MG_POST_NORM, .n_layers = 46}, 0},
    {"gemma3 without a window", {.arch = "gemma3", .has = MG_POST_NORM | MG_QK_NORM}, 0},
    {"gemma3", {.arch = "gemma3", .has = MG_POST_NORM | MG_QK_NORM, .n_layers = 7, .more_kv = gemma3_keys}, 0},
    {"gemma3, listed windows", {.arch = "gemma3", .has = MG_POST_NORM | MG_QK_NORM, .n_layers = 3, .more_kv = window_list}, 0},
    {"phi3", {.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE | MG_UNTIED}, 0},
    {"phi3, a short context", {.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE | MG_LONG_ROPE, .more_kv = long_rope}, 255},
    {"phi3, a long context", {.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE | MG_LONG_ROPE, .more_kv = long_rope}, 257},
    {"glm4", {.arch = "glm4", .has = MG_FUSED_GATE | MG_POST_NORM | MG_BIASES | MG_UNTIED, .more_kv = partial_rope}, 0},
    {"mistral3", {.arch = "mistral3", .has = MG_UNTIED, .more_kv = temperature}, 0},
    {"smollm3", {.arch = "smollm3", .n_layers = 5}, 0},
    {"smollm3 with factors", {.arch = "smollm3", .n_layers = 4, .has = MG_FACTORS | MG_BIASES | MG_UNTIED}, 0},
    {"granite", {.arch = "granite", .more_kv = granite_keys}, 0},
    {"granite with biases", {.arch = "granite", .has = MG_BIASES | MG_UNTIED, .more_kv = granite_keys}, 0},
    {"granite without rope", {.arch = "granite", .more_kv = no_rope}, 0},
    {"olmo2", {.arch = "olmo2", .has = MG_NO_PRE_NORM | MG_POST_NORM | MG_QK_NORM_WIDE | MG_UNTIED}, 0},
    {"olmo3", {.arch = "olmo2", .has = MG_NO_PRE_NORM | MG_POST_NORM | MG_QK_NORM_WIDE, .n_layers = 5, .more_kv = olmo3}, 0},
    {"command-r", {.arch = "command-r", .has = MG_LAYER_NORM | MG_NO_FFN_NORM, .more_kv = logit_scale}, 0},
    {"stablelm", {.arch = "stablelm", .has = MG_LAYER_NORM | MG_BIASES | MG_UNTIED, .more_kv = partial_rope}, 0},
    {"stablelm in parallel", {.arch = "stablelm", .has = MG_LAYER_NORM | MG_NO_FFN_NORM | MG_UNTIED}, 0},
    {"starcoder2", {.arch = "starcoder2", .has = STARCODER}, 0},
    {"phi2", {.arch = "phi2", .has = STARCODER | MG_NO_FFN_NORM | MG_UNTIED, .more_kv = partial_rope}, 0},
    {"gptneox in parallel", {.arch = "gptneox", .has = STARCODER | MG_QKV | MG_UNTIED, .more_kv = parallel}, 0},
    {"gptneox in sequence", {.arch = "gptneox", .has = STARCODER | MG_QKV | MG_UNTIED, .more_kv = sequential}, 0},
    {"gpt2", {.arch = "gpt2", .has = STARCODER | MG_QKV | MG_POSITIONS}, 0},
    {"falcon", {.arch = "falcon", .has = MG_LAYER_NORM | MG_NO_GATE | MG_QKV | MG_NO_FFN_NORM | MG_UNTIED}, 0},
    {"falcon with two norms", {.arch = "falcon", .has = STARCODER | MG_QKV | MG_NO_FFN_NORM | MG_NORM_2}, 0},
};

/* Logits of n tokens on the CPU, n_call of them at a time; 1 if it worked. */
static int logits_of(const mg_buf *file, const int32_t *tokens, uint32_t n, uint32_t n_call, uint32_t n_ctx, float *out,
                     rf_error *err) {
    rf_gguf *g = NULL;
    rf_device *d = NULL;
    rf_model *m = NULL;
    rf_session *s = NULL;
    rf_token_row rows[N_TOKENS] = {{0}};
    rf_device_desc dd = {.n_threads = 2};
    rf_session_desc sd = {.n_ctx = n_ctx, .n_logits_max = n_call, .cache_type = RF_CACHE_F32};
    int ok = rf_gguf_open_memory(file->data, file->n, NULL, &g, err) == RF_OK && rf_device_open("cpu", &dd, &d, err) == RF_OK &&
             rf_model_open(g, d, NULL, &m, err) == RF_OK && rf_session_open(m, &sd, &s, err) == RF_OK;
    for (uint32_t at = 0; ok && at < n; at += n_call) {
        const uint32_t k = n - at < n_call ? n - at : n_call, n_vocab = rf_model_get_info(m).n_vocab;
        for (uint32_t i = 0; i < k; i++)
            rows[i] = (rf_token_row){.token = tokens[at + i], .pos = RF_POS_NEXT, .want_logits = 1};
        ok = rf_session_eval(s, rows, k, err) == RF_OK;
        for (uint32_t i = 0; ok && i < k; i++)
            memcpy(out + (size_t)(at + i) * n_vocab, rft_logits(s, i), n_vocab * sizeof *out);
    }
    rf_session_close(s, NULL);
    rf_model_close(m, NULL);
    rf_device_close(d, NULL);
    rf_gguf_close(g, NULL);
    return ok;
}

/* Reference logits, and tokens whose rounded inputs keep away from ties. */
static double *reference(const mg_buf *file, int32_t *tokens, uint32_t n, uint32_t n_ctx, uint32_t *n_vocab) {
    rf_gguf *g;
    ref_model m;
    ref_margins margins = {0};
    double *logits = NULL;
    if (rf_gguf_open_memory(file->data, file->n, NULL, &g, NULL) != RF_OK) ref_die("the fixture does not open");
    ref_open(&m, g);
    for (uint64_t seed = 0; margins.int8 < INT8_MARGIN && seed < 200; seed++) {
        mg_rng r = {seed};
        free(logits);
        for (uint32_t i = 0; i < n; i++) tokens[i] = (int32_t)mg_below(&r, 310);
        logits = ref_family_eval(&m, tokens, n, n_ctx, &(ref_options){.int8_acts = 1}, &margins);
    }
    CHECK(margins.int8 >= INT8_MARGIN, "no tokens keep away from ties");
    *n_vocab = m.n_vocab;
    ref_close(&m);
    rf_gguf_close(g, NULL);
    return logits;
}

static void test_families(void) {
    static float got[N_TOKENS * 320], steps[N_TOKENS * 320];
    double worst = 0;
    for (size_t i = 0; i < RFI_COUNT(cases); i++)
        for (int quantized = 0; quantized < 2; quantized++) {
            mg_family f = cases[i].f;
            mg_buf file = {0};
            rf_error err;
            int32_t tokens[N_TOKENS];
            uint32_t n = quantized ? 3 : N_TOKENS, n_vocab = 0, n_ctx = cases[i].n_ctx ? cases[i].n_ctx : 256;
            if (quantized && f.n_layers > 8) continue;
            f.type = quantized ? MG_Q8_0 : MG_F32;
            f.seed = 99 + i;
            mg_family_model(&file, &f);
            double *want = reference(&file, tokens, n, n_ctx, &n_vocab);
            int ok = logits_of(&file, tokens, n, n, cases[i].n_ctx, got, &err);
            CHECK(ok, "%s: %s", cases[i].what, err.text);
            double allowed = FLOAT_TOLERANCE * (f.n_layers > 8 ? 4 : 1); /* errors of many layers add up */
            double off = ok ? ref_distance(got, want, (size_t)n * n_vocab) : 0;
            CHECK(off <= allowed, "%s, %s: logits are off by %.3g", cases[i].what, quantized ? "q8_0" : "f32", off);
            ok = ok && logits_of(&file, tokens, n, 1, cases[i].n_ctx, steps, &err);
            CHECK(ok && !memcmp(got, steps, (size_t)n * n_vocab * sizeof *got), "%s: token by token other bits", cases[i].what);
            worst = rft_worst(worst, off);
            free(want);
            mg_free(&file);
        }
    printf("    families: worst %.2g of the largest logit\n", worst);
}

/* Keys that must matter: without them the reference is elsewhere by far more than the tolerance. */
static void test_keys_matter(void) {
    for (size_t i = 0; i < RFI_COUNT(cases); i++) {
        mg_family f = cases[i].f, plain = f;
        mg_buf file = {0}, other = {0};
        int32_t tokens[N_TOKENS];
        uint32_t n_vocab;
        rf_error err;
        static float got[N_TOKENS * 320];
        if (!f.more_kv || strcmp(f.arch, "gptneox") == 0 || strcmp(f.arch, "command-r") == 0) continue; /* required */
        f.seed = plain.seed = 99 + i;
        plain.more_kv = strcmp(f.arch, "granite") ? NULL : logit_scale;
        mg_family_model(&file, &f);
        mg_family_model(&other, &plain);
        double *want = reference(&file, tokens, N_TOKENS, cases[i].n_ctx ? cases[i].n_ctx : 256, &n_vocab);
        int ok = logits_of(&other, tokens, N_TOKENS, N_TOKENS, cases[i].n_ctx, got, &err);
        CHECK(ok && ref_distance(got, want, (size_t)N_TOKENS * n_vocab) > 1000 * FLOAT_TOLERANCE, "%s: the keys change nothing: %s",
              cases[i].what, ok ? "" : err.text);
        free(want);
        mg_free(&file), mg_free(&other);
    }
}

/* ---- what is wrong with a file ---- */

static void window_text(mg_gguf *w) { mg_kv_str(w, mg_key("attention.sliding_window"), "7"); }
static void window_huge(mg_gguf *w) { (void)w, mg_uint("attention.sliding_window", UINT32_MAX); }
static void short_list(mg_gguf *w) {
    const uint8_t local[1] = {1};
    gemma_window(w);
    mg_kv_arr(w, mg_key("attention.sliding_window_pattern"), MG_KV_BOOL, local, 1, 1);
}
static void number_list(mg_gguf *w) {
    gemma_window(w);
    mg_kv_arr_u32(w, mg_key("attention.sliding_window_pattern"), (uint32_t[]){1, 0}, 2);
}
static void window_none(mg_gguf *w) { (void)w, mg_uint("attention.sliding_window", 0); }
static void cap_nan(mg_gguf *w) { (void)w, mg_real("attn_logit_softcapping", NAN); }
static void cap_negative(mg_gguf *w) { (void)w, mg_real("final_logit_softcapping", -1); }
static void cap_tiny(mg_gguf *w) { (void)w, mg_real("final_logit_softcapping", 1e-20f); }
static void base_zero(mg_gguf *w) { gemma_window(w), mg_real("rope.freq_base_swa", 0); }
static void base_half(mg_gguf *w) { (void)w, mg_real("rope.freq_base", 0.5f); }
static void base_tiny(mg_gguf *w) { gemma_window(w), mg_real("rope.freq_base_swa", 1e-30f); }
static void rope_tiny(mg_gguf *w) { (void)w, mg_real("rope.scaling.factor", 1e-38f); }
static void rope_inf(mg_gguf *w) { (void)w, mg_real("rope.scaling.factor", INFINITY); }
static void rope_old_tiny(mg_gguf *w) { (void)w, mg_real("rope.scale_linear", 1e-4f); }
static void yarn_huge(mg_gguf *w) { (void)w, mg_real("rope.scaling.yarn_log_multiplier", 1e30f); }
static void logits_inf(mg_gguf *w) { (void)w, mg_real("logit_scale", INFINITY); }
static void logits_huge(mg_gguf *w) { (void)w, mg_real("logit_scale", 1e12f); }
static void rope_number(mg_gguf *w) { (void)w, mg_real("logit_scale", 1), mg_uint("rope.scaling.finetuned", 0); }
static void parallel_number(mg_gguf *w) { (void)w, mg_uint("use_parallel_residual", 1); }
static void temperature_huge(mg_gguf *w) { (void)w, mg_real("attention.temperature_scale", 1e30f); }
static void factor_nan(mg_gguf *w) { (void)w, mg_real("rope.scaling.attn_factor", NAN); }

static void experts_keys(void) {
    mg_uint("expert_count", 4);
    mg_uint("expert_used_count", 2);
    mg_uint("expert_feed_forward_length", 32);
}
static void latent_keys(uint32_t key_length, uint32_t kv_heads) {
    experts_keys();
    mg_uint("attention.kv_lora_rank", 24);
    mg_uint("rope.dimension_count", 8);
    mg_uint("attention.key_length", key_length);
    mg_uint("attention.value_length", 24);
    mg_uint("attention.key_length_mla", 16 + (kv_heads == 2 ? 0 : 4));
    mg_uint("attention.value_length_mla", 12);
}
static void latent_two_heads(mg_gguf *w) { (void)w, latent_keys(32, 2); }
static void latent_other_key(mg_gguf *w) { (void)w, latent_keys(40, 1); }
static void latent_no_rank(mg_gguf *w) { (void)w, experts_keys(); }
static void latent_groups(mg_gguf *w) {
    (void)w;
    latent_keys(32, 1);
    mg_uint("expert_group_count", 4);
    mg_uint("expert_group_used_count", 1);
}
static void layered_keys(void) {
    const uint8_t local[2] = {1, 0};
    gemma_window(mg_family_file);
    mg_kv_arr(mg_family_file, mg_key("attention.sliding_window_pattern"), MG_KV_BOOL, local, 2, 2);
}
static void shared_all(mg_gguf *w) { (void)w, layered_keys(), mg_uint("attention.shared_kv_layers", 2); }
static void shared_none_before(mg_gguf *w) {
    (void)w;
    layered_keys();
    mg_uint("attention.shared_kv_layers", 1);
}
static void layer_inputs(mg_gguf *w) { (void)w, layered_keys(), mg_uint("embedding_length_per_layer_input", 8); }
static void odd_rope(mg_gguf *w) { (void)w, layered_keys(), mg_uint("rope.dimension_count_swa", 7); }
static void alibi_zero(mg_gguf *w) { (void)w, mg_real("attention.max_alibi_bias", 0); }
static void shared_experts(mg_gguf *w) {
    (void)w;
    experts_keys();
    mg_uint("expert_shared_feed_forward_length", 40);
}

static const struct {
    mg_family f;
    rf_result code;
    const char *text; /* the message names it */
} errors[] = {
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = window_text}, RF_ERR_FORMAT, "attention.sliding_window"},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = window_huge}, RF_ERR_FORMAT, "attention.sliding_window"},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = window_none}, RF_OK, ""},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = short_list}, RF_ERR_FORMAT, "sliding_window_pattern"},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = number_list}, RF_OK, ""},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = cap_nan}, RF_ERR_FORMAT, "attn_logit_softcapping"},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = cap_negative}, RF_ERR_FORMAT, "final_logit_softcapping"},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = cap_tiny}, RF_ERR_FORMAT, "final_logit_softcapping"},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = base_zero}, RF_ERR_FORMAT, "rope.freq_base_swa"},
    {{.arch = "gemma2", .has = MG_POST_NORM, .more_kv = base_tiny}, RF_ERR_FORMAT, "rope.freq_base_swa"},
    {{.arch = "mistral3", .more_kv = base_half}, RF_ERR_FORMAT, "rope.freq_base"},
    {{.arch = "mistral3", .more_kv = rope_tiny}, RF_ERR_FORMAT, "rope.scaling.factor"},
    {{.arch = "mistral3", .more_kv = rope_inf}, RF_ERR_FORMAT, "rope.scaling.factor"},
    {{.arch = "mistral3", .more_kv = rope_old_tiny}, RF_ERR_FORMAT, "rope.scale_linear"},
    {{.arch = "mistral3", .more_kv = yarn_huge}, RF_ERR_FORMAT, "rope.scaling.yarn_log_multiplier"},
    {{.arch = "gemma2", .has = 0}, RF_ERR_NOT_FOUND, "blk.0.post_attention_norm.weight"},
    {{.arch = "gemma3", .has = MG_POST_NORM}, RF_ERR_NOT_FOUND, "blk.0.attn_q_norm.weight"},
    {{.arch = "gemma3", .has = MG_POST_NORM | MG_QK_NORM_WIDE}, RF_ERR_FORMAT, "blk.0.attn_q_norm.weight"},
    {{.arch = "phi3", .has = MG_QKV}, RF_ERR_FORMAT, "blk.0.ffn_up.weight"},
    {{.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE, .more_kv = factor_nan}, RF_ERR_FORMAT, "rope.scaling.attn_factor"},
    {{.arch = "mistral3", .more_kv = temperature_huge}, RF_ERR_FORMAT, "attention.temperature_scale"},
    {{.arch = "granite"}, RF_ERR_NOT_FOUND, "granite.logit_scale"},
    {{.arch = "granite", .more_kv = logits_inf}, RF_ERR_FORMAT, "granite.logit_scale"},
    {{.arch = "granite", .more_kv = logits_huge}, RF_ERR_FORMAT, "granite.logit_scale"},
    {{.arch = "granite", .more_kv = rope_number}, RF_ERR_FORMAT, "rope.scaling.finetuned"},
    {{.arch = "olmo2", .has = MG_NO_PRE_NORM | MG_POST_NORM | MG_QK_NORM}, RF_ERR_FORMAT, "blk.0.attn_q_norm.weight"},
    {{.arch = "command-r", .has = MG_NO_FFN_NORM, .more_kv = logit_scale}, RF_ERR_NOT_FOUND, "attention.layer_norm_epsilon"},
    {{.arch = "command-r", .has = MG_LAYER_NORM | MG_NO_FFN_NORM | MG_QK_NORM, .more_kv = logit_scale},
     RF_ERR_UNSUPPORTED, "blk.0.attn_q_norm.weight"}, /* one vector for all heads */
    {{.arch = "gptneox", .has = STARCODER | MG_QKV}, RF_ERR_NOT_FOUND, "use_parallel_residual"},
    {{.arch = "gptneox", .has = STARCODER | MG_QKV, .more_kv = parallel_number}, RF_ERR_FORMAT, "use_parallel_residual"},
    {{.arch = "gptneox", .has = STARCODER | MG_QKV | MG_NO_FFN_NORM, .more_kv = parallel}, RF_ERR_NOT_FOUND, "blk.0.ffn_norm.weight"},
    {{.arch = "gpt2", .has = STARCODER | MG_QKV}, RF_ERR_NOT_FOUND, "position_embd.weight"},
    {{.arch = "cohere2", .has = MG_LAYER_NORM | MG_NO_FFN_NORM}, RF_ERR_NOT_FOUND, "cohere2.logit_scale"},
    {{.arch = "deepseek2"}, RF_ERR_NOT_FOUND, "deepseek2.expert_count"},
    {{.arch = "deepseek2", .more_kv = latent_no_rank}, RF_ERR_NOT_FOUND, "attention.kv_lora_rank"},
    {{.arch = "deepseek2", .more_kv = latent_two_heads}, RF_ERR_FORMAT, "attention.head_count_kv 1"},
    {{.arch = "deepseek2", .more_kv = latent_other_key}, RF_ERR_FORMAT, "want attention.key_length 32"},
    {{.arch = "deepseek2", .more_kv = latent_groups}, RF_ERR_FORMAT, "deepseek2.expert_group_count"},
    {{.arch = "qwen2moe", .more_kv = shared_experts}, RF_ERR_NOT_FOUND, "blk.0.ffn_gate_inp_shexp.weight"},
    {{.arch = "gemma4", .has = MG_POST_NORM | MG_QK_NORM, .more_kv = gemma_window}, RF_ERR_NOT_FOUND, "sliding_window_pattern"},
    {{.arch = "gemma4", .has = MG_POST_NORM | MG_QK_NORM, .more_kv = shared_all}, RF_ERR_FORMAT, "shared_kv_layers"},
    {{.arch = "gemma4", .has = MG_POST_NORM | MG_QK_NORM, .more_kv = shared_none_before}, RF_ERR_FORMAT, "shared_kv_layers"},
    {{.arch = "gemma4", .has = MG_POST_NORM | MG_QK_NORM, .more_kv = layer_inputs}, RF_ERR_NOT_FOUND, "per_layer_token_embd"},
    {{.arch = "gemma4", .has = MG_POST_NORM | MG_QK_NORM, .more_kv = odd_rope}, RF_ERR_FORMAT, "rope.dimension_count_swa"},
    {{.arch = "mpt", .has = STARCODER | MG_QKV}, RF_OK, ""},
    {{.arch = "mpt", .has = STARCODER | MG_QKV, .more_kv = alibi_zero}, RF_OK, ""},
    {{.arch = "bloom", .has = STARCODER | MG_QKV}, RF_ERR_NOT_FOUND, "token_embd_norm.weight"},
    {{.arch = "cohere9", .has = MG_LAYER_NORM | MG_NO_FFN_NORM}, RF_ERR_UNSUPPORTED, "'cohere9'"},
};

static void test_errors(void) {
    for (size_t i = 0; i < RFI_COUNT(errors); i++) {
        mg_buf file = {0};
        rf_error err = {0};
        float logits[320];
        int32_t token = 1;
        mg_family_model(&file, &errors[i].f);
        int ok = logits_of(&file, &token, 1, 1, 0, logits, &err);
        CHECK(ok == (errors[i].code == RF_OK) && (ok || (err.code == errors[i].code && strstr(err.text, errors[i].text))),
              "case %zu, %s: %s, want %s: %s", i, errors[i].f.arch, rf_result_name(err.code), rf_result_name(errors[i].code), err.text);
        mg_free(&file);
    }
}

/* Learned positions end: a longer session is refused. */
static void test_positions(void) {
    mg_buf file = {0};
    rf_error err;
    float logits[320];
    int32_t token = 1;
    mg_family_model(&file, &(mg_family){.arch = "gpt2", .has = STARCODER | MG_QKV | MG_POSITIONS});
    CHECK(logits_of(&file, &token, 1, 1, 256, logits, &err), "%s", err.text);
    CHECK(!logits_of(&file, &token, 1, 1, 257, logits, &err) && err.code == RF_ERR_ARGUMENT && strstr(err.text, "256 positions"),
          "%s", err.text);
    mg_free(&file);
}

/* Keys of a session with short rope factors are of no use to one with long ones. */
static void test_saved_longrope(void) {
    static saved stream;
    static const rf_session_io io = {saved_write, saved_read, &stream};
    mg_family f = {.arch = "phi3", .has = MG_QKV | MG_FUSED_GATE | MG_LONG_ROPE, .more_kv = long_rope};
    mg_buf file = {0};
    rf_gguf *g = NULL;
    rf_device *d = NULL;
    rf_model *m = NULL;
    rf_session *s[3] = {NULL};
    rf_error err;
    const int32_t tokens[3] = {5, 6, 7};
    mg_family_model(&file, &f);
    int ok = rf_gguf_open_memory(file.data, file.n, NULL, &g, &err) == RF_OK && rf_device_open("cpu", NULL, &d, &err) == RF_OK &&
             rf_model_open(g, d, NULL, &m, &err) == RF_OK;
    for (uint32_t i = 0; ok && i < 3; i++)
        ok = rf_session_open(m, &(rf_session_desc){.n_ctx = 100 + 100 * i}, &s[i], &err) == RF_OK;
    CHECK(ok && rf_session_forward(s[0], tokens, 3, NULL, &err) == RF_OK && rf_session_save(s[0], 0, &io, &err) == RF_OK, "%s", err.text);
    if (ok) {
        CHECK(rf_session_restore(s[1], 0, &io, &err) == RF_OK, "%s", err.text);
        stream.at = 0;
        CHECK(rf_session_restore(s[2], 0, &io, &err) == RF_ERR_UNSUPPORTED, "%s", err.text);
    }
    for (int i = 0; i < 3; i++) rf_session_close(s[i], NULL);
    rf_model_close(m, NULL);
    rf_device_close(d, NULL);
    rf_gguf_close(g, NULL);
    mg_free(&file);
}

int main(int argc, char **argv) {
    RFT_BEGIN(argc, argv);
    RUN(test_families);
    RUN(test_keys_matter);
    RUN(test_errors);
    RUN(test_positions);
    RUN(test_saved_longrope);
    RFT_END();
}
