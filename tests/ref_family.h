/* ref_family.h: the families without experts in float64, for the tests, on the pieces of ref_model.h. Written from the
 * architecture notes, each family spelled out by name; it shares no plan, kernel or decoder with the library.
 *     double *logits = ref_family_eval(&m, tokens, n, n_ctx, &options, NULL);    [n][m.n_vocab]; free(logits)
 * n_ctx is the context of the session: longrope depends on it. Include ref_model.h first. */
#ifndef REF_FAMILY_H
#define REF_FAMILY_H

REF_FN int ref_is(const ref_model *m, const char *names) { /* "gemma2 gemma3" */
    size_t n = strlen(m->arch);
    for (const char *at = names; (at = strstr(at, m->arch)) != NULL; at += n)
        if ((at == names || at[-1] == ' ') && (at[n] == ' ' || at[n] == 0)) return 1;
    return 0;
}

REF_FN const double *ref_in_layer(ref_model *m, int il, const char *name, const char *suffix) {
    char full[80];
    if (il >= 0) snprintf(full, sizeof full, "blk.%d.%s.%s", il, name, suffix);
    else snprintf(full, sizeof full, "%s.%s", name, suffix);
    return ref_tensor(m, full, NULL);
}

/* y = norm(x) of groups of `width` values: LayerNorm where the file states its epsilon, else RMS */
REF_FN void ref_any_norm(ref_model *m, int il, const char *name, double *y, const double *x, uint64_t width,
                         uint64_t n_groups) {
    const double *w = ref_in_layer(m, il, name, "weight"), *b = ref_in_layer(m, il, name, "bias");
    int layer_norm = !isinf(ref_key(m, "attention.layer_norm_epsilon", 0, INFINITY));
    double eps = ref_key(m, layer_norm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon", 0, NAN);
    if (!w) ref_die("no %s in layer %d", name, il);
    for (uint64_t g = 0; g < n_groups; g++, x += width, y += width) {
        double mean = 0, square = 0;
        for (uint64_t i = 0; layer_norm && i < width; i++) mean += x[i];
        mean /= (double)width;
        for (uint64_t i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
        double by = sqrt(square / (double)width + eps);
        for (uint64_t i = 0; i < width; i++) y[i] = (x[i] - mean) / by * w[i] + (b ? b[i] : 0);
    }
}

/* y = W x + bias of a layer's matrix of `rows` rows, from row0 on; NAME.scale multiplies the product alone */
REF_FN void ref_linear(ref_model *m, const ref_options *o, int il, const char *name, uint64_t rows, uint64_t row0, double *y,
                       uint64_t n_out, const double *x, uint64_t n_in, uint32_t n) {
    char weight[80];
    const double *bias = ref_in_layer(m, il, name, "bias"), *scale = ref_in_layer(m, il, name, "scale");
    if (il >= 0) snprintf(weight, sizeof weight, "blk.%d.%s.weight", il, name);
    else snprintf(weight, sizeof weight, "%s.weight", name);
    ref_matmul(m, o, weight, NULL, rows, row0, y, n_out, x, n_in, n, 0);
    for (uint64_t i = 0; i < n * n_out; i++)
        y[i] = y[i] * (scale ? *scale : 1) + (bias ? bias[row0 + i % n_out] : 0);
}

typedef struct ref_rotation {
    double base, factor, magnitude;
    int yarn, neox;
    const double *divide; /* [n_rot / 2] or NULL */
} ref_rotation;

REF_FN void ref_rotate(ref_model *m, const ref_rotation *t, double *x, uint32_t n, uint32_t n_heads, uint32_t dim) {
    const uint32_t n_rot = (uint32_t)ref_key(m, "rope.dimension_count", 0, dim);
    const double n0 = ref_key(m, "rope.scaling.original_context_length", 0, ref_key(m, "context_length", 0, NAN));
    const double fast = ref_is(m, "mistral3") ? ref_key(m, "rope.scaling.yarn_beta_fast", 0, 32) : 32,
                 slow = ref_is(m, "mistral3") ? ref_key(m, "rope.scaling.yarn_beta_slow", 0, 1) : 1;
    const double turns = 2 * acos(-1), lo = fmax(0, floor(n_rot * log(n0 / (turns * fast)) / (2 * log(t->base)))),
                 hi = fmin(n_rot - 1, ceil(n_rot * log(n0 / (turns * slow)) / (2 * log(t->base))));
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t h = 0; h < n_heads; h++, x += dim)
            for (uint32_t i = 0; i < n_rot / 2; i++) {
                double ramp = 1 - fmin(1, fmax(0, (i - lo) / fmax(0.001, hi - lo))), angle = r * pow(t->base, -2.0 * i / n_rot);
                if (t->divide) angle /= t->divide[i];
                angle *= t->yarn ? (1 - ramp) / t->factor + ramp : 1 / t->factor;
                double *a = x + (t->neox ? i : 2 * i), *b = t->neox ? a + n_rot / 2 : a + 1, a0 = *a, b0 = *b;
                *a = t->magnitude * (a0 * cos(angle) - b0 * sin(angle));
                *b = t->magnitude * (a0 * sin(angle) + b0 * cos(angle));
            }
}

/* Does layer il look at a window only? */
REF_FN uint32_t ref_window(const ref_model *m, uint32_t il) {
    uint32_t period = ref_is(m, "gemma2") ? 2 : ref_is(m, "gemma3") ? 6 : ref_is(m, "olmo2") ? 4 : 0, w;
    char name[80];
    rf_kv kv;
    if (!period) return 0;
    w = (uint32_t)ref_key(m, "attention.sliding_window", 0, ref_is(m, "gemma2") ? 4096 : 0);
    snprintf(name, sizeof name, "%s.attention.sliding_window_pattern", m->arch);
    if (rf_gguf_find_kv(m->g, name, &kv, NULL) == RF_OK && kv.type == RF_KV_ARRAY)
        return ref_key(m, "attention.sliding_window_pattern", il, NAN) != 0 ? w : 0;
    period = (uint32_t)ref_key(m, "attention.sliding_window_pattern", 0, period);
    return period == 0 || (il + 1) % period ? w : 0;
}

REF_FN ref_rotation ref_rotation_of(ref_model *m, uint32_t il, uint32_t n_ctx) {
    ref_rotation t = {ref_key(m, "rope.freq_base", 0, 10000), ref_key(m, "rope.scaling.factor", 0, 1), 1, 0, 0, NULL};
    double n0 = ref_key(m, "rope.scaling.original_context_length", 0, ref_key(m, "context_length", 0, NAN));
    char name[80];
    rf_kv kv;
    rf_string type = {"", 0};
    snprintf(name, sizeof name, "%s.rope.scaling.type", m->arch);
    if (rf_gguf_find_kv(m->g, name, &kv, NULL) == RF_OK) rf_kv_text(&kv, NULL, &type, NULL);
    t.neox = ref_is(m, "gemma2 gemma3 phi3 olmo2 stablelm starcoder2 phi2 gptneox falcon");
    t.yarn = type.len == 4 && !memcmp(type.data, "yarn", 4);
    t.magnitude = ref_key(m, "rope.scaling.attn_factor", 0, 1);
    if (type.len == 4 && !memcmp(type.data, "none", 4)) t.factor = 1;
    if (t.yarn)
        t.magnitude *= (0.1 * log(t.factor) + 1) /
                       (0.1 * ref_key(m, "rope.scaling.yarn_log_multiplier", 0, 0) * log(t.factor) + 1);
    if (ref_is(m, "phi3"))
        t.divide = ref_tensor(m, (n_ctx + 255) / 256 * 256 > n0 ? "rope_factors_long.weight" : "rope_factors_short.weight",
                              NULL);
    if (ref_window(m, il)) {
        t.base = ref_key(m, "rope.freq_base_swa", 0, ref_is(m, "gemma3") ? 10000 : t.base);
        if (ref_is(m, "gemma3 olmo2")) t.factor = t.magnitude = 1, t.yarn = 0;
    }
    return t;
}

/* a[n][n_heads][dim] */
REF_FN void ref_attend(ref_model *m, uint32_t il, double *a, const double *q, const double *k, const double *v, uint32_t n,
                       uint32_t n_heads, uint32_t n_kv, uint32_t dim) {
    double scale = ref_is(m, "granite") ? ref_key(m, "attention.scale", 0, 0) : 0, *p = ref_zeros(n);
    double cap = ref_is(m, "gemma2") ? ref_key(m, "attn_logit_softcapping", 0, 50) : 0;
    double heat = ref_is(m, "mistral3") ? ref_key(m, "attention.temperature_scale", 0, 0) : 0;
    double n0 = ref_key(m, "rope.scaling.original_context_length", 0, ref_key(m, "context_length", 0, NAN));
    uint32_t window = ref_window(m, il);
    if (scale == 0) scale = 1 / sqrt(dim);
    if ((ref_is(m, "gemma2") && m->n_layers == 46) || (ref_is(m, "gemma3") && m->n_layers == 62))
        scale = 1 / sqrt((double)m->n_embd / n_heads);
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t h = 0; h < n_heads; h++) {
            double sum = 0, *y = a + ((uint64_t)r * n_heads + h) * dim;
            for (uint32_t j = 0; j <= r; j++) {
                const double *key = k + ((uint64_t)j * n_kv + h * n_kv / n_heads) * dim;
                double s = 0;
                for (uint32_t i = 0; i < dim; i++) s += q[((uint64_t)r * n_heads + h) * dim + i] * key[i];
                s *= scale * (1 + heat * log(1 + floor(r / n0)));
                if (cap > 0) s = cap * tanh(s / cap);
                p[j] = !window || r - j < window ? exp(s) : 0;
                sum += p[j];
            }
            for (uint32_t i = 0; i < dim; i++) y[i] = 0;
            for (uint32_t j = 0; j <= r; j++)
                for (uint32_t i = 0; i < dim; i++)
                    y[i] += p[j] / sum * v[((uint64_t)j * n_kv + h * n_kv / n_heads) * dim + i];
        }
    free(p);
}

/* Keys or values, rounded to 127ths of the largest of 32 and multiplied by that step in half precision. */
REF_FN void ref_round_q8(ref_model *m, double *x, uint64_t n) {
    for (uint64_t at = 0; at < n; at += 32) {
        double most = 0;
        for (uint64_t i = at; i < at + 32; i++) most = fmax(most, fabs(x[i]));
        for (uint64_t i = at; i < at + 32 && most > 0; i++) {
            const double steps = x[i] / (most / 127);
            m->margins.int8 = fmin(m->margins.int8, fabs(steps - floor(steps) - 0.5));
            x[i] = floor(steps + 0.5) * (double)rfi_f16_to_f32(rfi_f32_to_f16((float)(most / 127)));
        }
    }
}

/* out[n][n_embd] of h */
REF_FN void ref_attention_block(ref_model *m, const ref_options *o, uint32_t il, uint32_t n_ctx, double *out,
                                const double *h, uint32_t n) {
    uint32_t nh = (uint32_t)ref_key(m, "attention.head_count", 0, NAN), nkv = (uint32_t)ref_key(m, "attention.head_count_kv", 0, nh);
    uint32_t dim = (uint32_t)ref_key(m, "attention.key_length", 0, m->n_embd / nh), rows[3] = {nh * dim, nkv * dim, nkv * dim};
    const char *const names[3] = {"attn_q", "attn_k", "attn_v"};
    double *qkv[3], *a = ref_zeros((uint64_t)n * nh * dim);
    int fused = ref_in_layer(m, (int)il, "attn_qkv", "weight") != NULL;
    for (uint32_t i = 0, row0 = 0; i < 3; row0 += rows[i++]) {
        qkv[i] = ref_zeros((uint64_t)n * rows[i]);
        ref_linear(m, o, (int)il, fused ? "attn_qkv" : names[i], fused ? rows[0] + rows[1] + rows[2] : rows[i],
                   fused ? row0 : 0, qkv[i], rows[i], h, m->n_embd, n);
    }
    for (int i = 0; i < 2; i++) {
        const char *norm = i ? "attn_k_norm" : "attn_q_norm";
        if (ref_is(m, "gemma3")) ref_any_norm(m, (int)il, norm, qkv[i], qkv[i], dim, (uint64_t)n * (i ? nkv : nh));
        if (ref_is(m, "olmo2")) ref_any_norm(m, (int)il, norm, qkv[i], qkv[i], rows[i], n);
        int unrotated = ref_is(m, "gpt2") || (ref_is(m, "smollm3") && il % 4 == 3) ||
                        (ref_is(m, "granite") && ref_key(m, "rope.scaling.finetuned", 0, 1) == 0);
        ref_rotation t = ref_rotation_of(m, il, n_ctx);
        if (!unrotated) ref_rotate(m, &t, qkv[i], n, i ? nkv : nh, dim);
    }
    for (int i = 1; i < 3 && o->kv_q8; i++) ref_round_q8(m, qkv[i], (uint64_t)n * rows[i]);
    ref_attend(m, il, a, qkv[0], qkv[1], qkv[2], n, nh, nkv, dim);
    ref_linear(m, o, (int)il, "attn_output", m->n_embd, 0, out, m->n_embd, a, (uint64_t)nh * dim, n);
    free(qkv[0]), free(qkv[1]), free(qkv[2]), free(a);
}

REF_FN void ref_ffn_block(ref_model *m, const ref_options *o, int il, double *out, const double *h, uint32_t n) {
    uint64_t ff = (uint64_t)ref_key(m, "feed_forward_length", 0, NAN), n_embd = m->n_embd;
    double *gate = ref_zeros(n * ff), *up = ref_zeros(n * ff);
    int gelu = ref_is(m, "gemma2 gemma3 starcoder2 phi2 gptneox gpt2 falcon"), fused = ref_is(m, "phi3 glm4"),
        gated = !ref_is(m, "starcoder2 phi2 gptneox gpt2 falcon");
    if (fused) ref_linear(m, o, il, "ffn_up", 2 * ff, 0, gate, ff, h, n_embd, n);
    else ref_linear(m, o, il, gated ? "ffn_gate" : "ffn_up", ff, 0, gate, ff, h, n_embd, n);
    if (gated) ref_linear(m, o, il, "ffn_up", fused ? 2 * ff : ff, fused ? ff : 0, up, ff, h, n_embd, n);
    for (uint64_t i = 0; i < n * ff; i++) {
        double g = gate[i];
        g = gelu ? g / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (g + 0.044715 * pow(g, 3)))) : g / (1 + exp(-g));
        gate[i] = gated ? g * up[i] : g;
    }
    ref_linear(m, o, il, "ffn_down", n_embd, 0, out, n_embd, gate, ff, n);
    free(gate), free(up);
}

REF_FN void ref_family_layer(ref_model *m, const ref_options *o, uint32_t layer, uint32_t n_ctx, double *x, uint32_t n) {
    const int il = (int)layer, post = ref_is(m, "gemma2 gemma3 glm4 olmo2"), bare = ref_is(m, "olmo2");
    const uint64_t n_embd = m->n_embd, all = n * n_embd;
    double *in = ref_zeros(all), *ffn_in = ref_zeros(all), *att = ref_zeros(all), *ffn = ref_zeros(all);
    double residual = ref_is(m, "granite") ? ref_key(m, "residual_scale", 0, 1) : 1;
    int shared = ref_is(m, "command-r phi2 falcon") ||
                 (ref_is(m, "stablelm") && !ref_in_layer(m, il, "ffn_norm", "weight")),
        apart = ref_is(m, "gptneox") && ref_key(m, "use_parallel_residual", 0, NAN) != 0;
    memcpy(in, x, all * sizeof *in);
    if (!bare) ref_any_norm(m, il, "attn_norm", in, x, n_embd, n);
    memcpy(ffn_in, in, all * sizeof *in);
    if (ref_is(m, "falcon") && ref_in_layer(m, il, "attn_norm_2", "weight"))
        ref_any_norm(m, il, "attn_norm_2", in, x, n_embd, n);
    if (apart) ref_any_norm(m, il, "ffn_norm", ffn_in, x, n_embd, n);
    ref_attention_block(m, o, layer, n_ctx, att, in, n);
    if (post) ref_any_norm(m, il, "post_attention_norm", att, att, n_embd, n);
    for (uint64_t i = 0; i < all; i++) x[i] += residual * att[i];
    if (bare) memcpy(ffn_in, x, all * sizeof *x);
    else if (!shared && !apart) ref_any_norm(m, il, "ffn_norm", ffn_in, x, n_embd, n);
    ref_ffn_block(m, o, il, ffn, ffn_in, n);
    if (post) ref_any_norm(m, il, "post_ffw_norm", ffn, ffn, n_embd, n);
    for (uint64_t i = 0; i < all; i++) x[i] += residual * ffn[i];
    free(in), free(ffn_in), free(att), free(ffn);
}

REF_FN double *ref_family_eval(ref_model *m, const int32_t *tokens, uint32_t n, uint32_t n_ctx, const ref_options *o,
                               ref_margins *margins) {
    rf_tensor_info t;
    const double *embd = ref_tensor(m, "token_embd.weight", &t), *places = ref_tensor(m, "position_embd.weight", NULL);
    if (!embd) ref_die("no token_embd.weight");
    m->n_layers = (uint32_t)ref_key(m, "block_count", 0, NAN);
    m->n_embd = (uint32_t)t.ne[0];
    m->n_vocab = (uint32_t)t.ne[1];
    m->margins.int8 = 0.5;
    m->margins.choice = INFINITY;
    const uint32_t n_embd = m->n_embd, n_vocab = m->n_vocab;
    double *x = ref_zeros((uint64_t)n * n_embd), *logits = ref_zeros((uint64_t)n * n_vocab);
    double scale = ref_is(m, "gemma2 gemma3") ? sqrt(n_embd) : ref_is(m, "granite") ? ref_key(m, "embedding_scale", 0, 1) : 1;
    for (uint32_t i = 0; i < n * n_embd; i++)
        x[i] = scale * embd[(uint64_t)(uint32_t)tokens[i / n_embd] * n_embd + i % n_embd] + (places ? places[i] : 0);
    for (uint32_t il = 0; il < m->n_layers; il++) ref_family_layer(m, o, il, n_ctx, x, n);
    ref_any_norm(m, -1, "output_norm", x, x, n_embd, n);
    int tied = !ref_tensor(m, "output.weight", NULL);
    ref_linear(m, o, -1, tied ? "token_embd" : "output", n_vocab, 0, logits, n_vocab, x, n_embd, n);
    double cap = ref_is(m, "gemma2 gemma3") ? ref_key(m, "final_logit_softcapping", 0, ref_is(m, "gemma2") ? 30 : 0) : 0;
    for (uint64_t i = 0; i < (uint64_t)n * n_vocab; i++) {
        if (ref_is(m, "granite")) logits[i] /= ref_key(m, "logit_scale", 0, NAN);
        if (ref_is(m, "command-r")) logits[i] *= ref_key(m, "logit_scale", 0, NAN);
        if (cap > 0) logits[i] = cap * tanh(logits[i] / cap);
    }
    if (margins) *margins = m->margins;
    free(x);
    return logits;
}

#endif
