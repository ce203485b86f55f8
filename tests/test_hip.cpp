/* test_hip.cpp: the device table of rocmforge_kernels.hip, driven directly with plans of a few ops made by hand.
 * References are float64 loops of this file; quantized weights are decoded here from the format descriptions, and
 * activations are quantized here. Linked with the emulated kernels (-DRF_TEST_EMU: waves 32 and 64, late execution,
 * injected failures) or with those of a real GPU.
 *     test_hip [--full] [SUBSTR|quick|slow]     --full: every combination instead of every pair of values */
#include "../rocmforge.h"
#ifdef RF_TEST_EMU
#include "hip_emu.h"
#endif
#include "rf_memory.h"
#include "rf_test.h"
#include "ref_types.h"
#include "ref_compress.h"
#include "ref_hyper.h"

#include <math.h>
#include <pthread.h>
#include <stdint.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ASAN 1
#endif
#endif

static const rf_device_api *api;
static int full, n_devices;
#ifdef __SANITIZE_ADDRESS__
enum : size_t { stride = 3 }; /* a sanitizer makes each shape three times as slow: it looks at every third */
#else
enum : size_t { stride = 1 };
#endif

/* ---- numbers ---- */

static uint64_t seed = 1;
static uint32_t rnd() {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}
static float uniform(float lo, float hi) { return lo + (hi - lo) * (float)((double)rnd() / 2147483648.0); }
static std::vector<float> values(size_t n) {
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++) v[i] = uniform(-1, 1) * (i % 17 == 3 ? 8.0f : 1.0f);
    return v;
}

static uint16_t to_half(double v) { /* round to nearest even */
    uint16_t sign = signbit(v) ? 0x8000 : 0;
    double a = fabs(v);
    int e;
    if (isnan(v)) return 0x7e00;
    if (a >= 65520) return (uint16_t)(sign | 0x7c00);
    if (a < ldexp(1, -14)) return (uint16_t)(sign | (uint16_t)nearbyint(ldexp(a, 24)));
    frexp(a, &e);
    return (uint16_t)(sign | ((e + 13) * 1024 + (int)nearbyint(ldexp(a, 11 - e))));
}
static const uint32_t types[] = {RF_TYPE_F32,  RF_TYPE_F16,  RF_TYPE_BF16, RF_TYPE_Q8_0, RF_TYPE_Q4_0, RF_TYPE_Q4_1,
                                 RF_TYPE_Q5_0, RF_TYPE_Q5_1, RF_TYPE_Q4_K, RF_TYPE_Q5_K, RF_TYPE_Q6_K,
                                 RF_TYPE_Q2_K, RF_TYPE_Q3_K, RF_TYPE_IQ4_NL, RF_TYPE_IQ4_XS, RF_TYPE_MXFP4,
                                 RF_TYPE_NVFP4, RF_TYPE_IQ3_XXS, RF_TYPE_IQ3_S, RF_TYPE_IQ2_XXS, RF_TYPE_IQ2_XS,
                                 RF_TYPE_IQ2_S, RF_TYPE_IQ1_S, RF_TYPE_IQ1_M, RF_TYPE_TQ1_0, RF_TYPE_TQ2_0,
                                 RF_TYPE_Q1_0, RF_TYPE_Q2_0};
#define N_TYPES 28

static void type_block(uint32_t type, uint32_t *elements, uint32_t *bytes, const char **name) {
#define CASE(NAME, id, text, n, size, runs) \
    if (type == id) *elements = n, *bytes = size, *name = text;
    RF_TYPE_TABLE(CASE)
#undef CASE
}
static uint32_t block_elements(uint32_t type) {
    uint32_t n = 0, b;
    const char *s;
    type_block(type, &n, &b, &s);
    return n;
}
static uint32_t block_bytes(uint32_t type) {
    uint32_t n, b = 0;
    const char *s;
    type_block(type, &n, &b, &s);
    return b;
}
static const char *type_name(uint32_t type) {
    uint32_t n, b;
    const char *s = "";
    type_block(type, &n, &b, &s);
    return s;
}
static bool is_float(uint32_t type) { return block_elements(type) == 1; }

static void put_half(uint8_t *p, double v) {
    uint16_t h = to_half(v);
    p[0] = (uint8_t)h, p[1] = (uint8_t)(h >> 8);
}

/* Random rows: any bits in the packed fields, scales of a size as in models (one in 50 is 0). */
static std::vector<uint8_t> random_rows(uint32_t type, uint64_t n_in, uint64_t n_rows) {
    uint64_t n = n_in * n_rows / block_elements(type);
    uint32_t bytes = block_bytes(type);
    std::vector<uint8_t> w(n * bytes);
    for (size_t i = 0; i < w.size(); i++) w[i] = (uint8_t)(rnd() >> 8);
    for (uint64_t i = 0; i < n; i++) {
        uint8_t *b = &w[i * bytes];
        double d = rnd() % 50 ? uniform(0.002f, 0.05f) * (rnd() % 2 ? 1 : -1) : 0;
        float f = uniform(-1, 1);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        switch (type) {
        case RF_TYPE_F32: memcpy(b, &f, 4); break;
        case RF_TYPE_F16: put_half(b, f); break;
        case RF_TYPE_BF16: b[0] = (uint8_t)(bits >> 16), b[1] = (uint8_t)(bits >> 24); break;
        case RF_TYPE_Q8_0: put_half(b, d / 10); break;
        case RF_TYPE_Q4_0: case RF_TYPE_Q5_0: put_half(b, d); break;
        case RF_TYPE_Q4_1: case RF_TYPE_Q5_1: put_half(b, d); put_half(b + 2, uniform(-0.4f, 0.4f)); break;
        case RF_TYPE_Q4_K: case RF_TYPE_Q5_K: put_half(b, d / 30); put_half(b + 2, uniform(0, 0.01f)); break;
        case RF_TYPE_Q6_K: put_half(b + 208, d / 60); break;
        case RF_TYPE_Q2_K: put_half(b + 80, d / 5); put_half(b + 82, uniform(0, 0.01f)); break;
        case RF_TYPE_Q3_K: put_half(b + 108, d / 20); break;
        case RF_TYPE_MXFP4: b[0] = (uint8_t)(114 + rnd() % 8); break;
        case RF_TYPE_NVFP4: break; /* any byte is a scale */
        case RF_TYPE_TQ1_0: put_half(b + 52, d); break;
        case RF_TYPE_TQ2_0: put_half(b + 64, d); break;
        case RF_TYPE_Q1_0: case RF_TYPE_Q2_0: put_half(b, d); break;
        case RF_TYPE_IQ1_M: /* d: the highest nibbles of four numbers; two of them are those of 2^-6 to 2^-3 */
            b[53] = (uint8_t)((b[53] & 15) | rnd() % 16 << 4), b[55] = (uint8_t)((b[55] & 15) | (rnd() % 2 ? 0x20 : 0xa0));
            break;
        default: put_half(b, d / 20); break; /* IQ4_NL, and types whose d has a scale beside it */
        }
    }
    return w;
}
static std::vector<double> decode(uint32_t type, const std::vector<uint8_t> &w) {
    uint64_t n = w.size() / block_bytes(type);
    std::vector<double> out(n * block_elements(type));
    for (uint64_t i = 0; i < n; i++) decode_block(type, &w[i * block_bytes(type)], &out[i * block_elements(type)]);
    return out;
}

/* x as int8 sees it: groups of 32, d = max|x| / 127, q = x / d to nearest even. */
static std::vector<double> quantized(const float *x, size_t n) {
    std::vector<double> out(n);
    for (size_t i = 0; i < n; i += 32) {
        float largest = 0;
        for (size_t k = 0; k < 32; k++) largest = fmaxf(largest, fabsf(x[i + k]));
        float d = largest / 127.0f, inverse = 1.0f / d;
        if (d < ldexpf(1, -126)) d = inverse = 0; /* 1 / d could overflow */
        for (size_t k = 0; k < 32; k++) out[i + k] = (double)d * nearbyintf(x[i + k] * inverse);
    }
    return out;
}

/* What one step of an int8 is worth where a GPU may round the other way, 0 elsewhere. The quotient x / d that is rounded
 * comes of at most seven float32 operations (weight of the norm, its factor, 127, 1 / d, the product; a GPU's division and
 * reciprocal may be off by two and a half units in the last place): 16 units of 2^-24 of it. It is 127 at most, so that
 * among ten thousand values about one lies so close to a tie. */
static std::vector<double> near_ties(const float *x, size_t n) {
    std::vector<double> out(n, 0.0);
    for (size_t i = 0; i < n; i += 32) {
        double largest = 0;
        for (size_t k = 0; k < 32; k++) largest = fmax(largest, fabs((double)x[i + k]));
        for (size_t k = 0; k < 32 && largest > 0; k++) {
            const double t = fabs((double)x[i + k]) / largest * 127, from_tie = fabs(t - floor(t) - 0.5);
            if (from_tie <= ldexp(t, -20)) out[i + k] = largest / 127;
        }
    }
    return out;
}

/* ---- pairs of values instead of all combinations ---- */

typedef std::vector<int> Row;
static std::vector<Row> combinations(const std::vector<int> &levels, bool all = full) {
    std::vector<Row> out;
    size_t k = levels.size();
    if (all) {
        Row r(k, 0);
        for (;;) {
            out.push_back(r);
            size_t i = 0;
            while (i < k && ++r[i] == levels[i]) r[i++] = 0;
            if (i == k) return out;
        }
    }
    std::set<std::vector<int> > open; /* {i, a, j, b}: not yet in a row */
    for (size_t i = 0; i < k; i++)
        for (size_t j = i + 1; j < k; j++)
            for (int a = 0; a < levels[i]; a++)
                for (int b = 0; b < levels[j]; b++) open.insert(std::vector<int>{(int)i, a, (int)j, b});
    while (!open.empty()) {
        Row best;
        size_t most = 0;
        for (int attempt = 0; attempt < 40; attempt++) {
            Row r(k);
            for (size_t i = 0; i < k; i++) r[i] = (int)(rnd() % (uint32_t)levels[i]);
            const std::vector<int> &p = *open.begin(); /* at least one new pair */
            r[(size_t)p[0]] = p[1], r[(size_t)p[2]] = p[3];
            size_t covered = 0;
            for (size_t i = 0; i < k; i++)
                for (size_t j = i + 1; j < k; j++)
                    covered += open.count(std::vector<int>{(int)i, r[i], (int)j, r[j]});
            if (covered > most) most = covered, best = r;
        }
        for (size_t i = 0; i < k; i++)
            for (size_t j = i + 1; j < k; j++) open.erase(std::vector<int>{(int)i, best[i], (int)j, best[j]});
        out.push_back(best);
    }
    return out;
}

/* ---- a plan and the memory it runs in ---- */

/* Bytes of n keys or values. */
static uint64_t row_bytes(uint32_t cache, uint32_t n) {
    return cache == RF_CACHE_Q8_0 ? n / 32 * 34 : (uint64_t)n * (cache == RF_CACHE_F32 ? 4 : 2);
}

struct Rig {
    rf_dev *dev;
    rf_queue *queue;
    rf_table *table;
    rf_prepared *prepared;
    bool own_device, whole; /* whole: all segments in one call */
    uint32_t missing;       /* a slot that is not written      */
    uint32_t n_slots;       /* of recurrent states             */
    std::vector<rf_op> ops;
    std::vector<rf_plan_buffer> buffers;
    std::vector<rf_plan_state> states;
    std::vector<rf_plan_weight> weights;
    std::vector<std::vector<uint8_t> > weight_bytes;
    std::vector<rf_mem> weight_mem;
    std::vector<float> tables;
    std::vector<uint64_t> buffer_offset, state_offset, state_bytes;
    std::vector<uint32_t> segment_ops, state_cells;
    rf_plan plan;
    rf_plan_bind bind;
    rf_error err;

    explicit Rig(rf_dev *d) : dev(d), queue(NULL), table(NULL), prepared(NULL), own_device(false),
                            whole(false), missing(RF_NONE), n_slots(0) {
        memset(&plan, 0, sizeof plan);
        memset(&bind, 0, sizeof bind);
        memset(&err, 0, sizeof err);
    }
    ~Rig() { close(); }
    Rig(const Rig &) = delete;
    Rig &operator=(const Rig &) = delete;

    uint32_t buffer(uint32_t width, uint32_t rows = RF_ROWS_TOKENS) {
        rf_plan_buffer b = {"b", rows, width};
        buffers.push_back(b);
        return (uint32_t)buffers.size() - 1;
    }
    uint32_t weight(uint32_t type, uint32_t n_in, uint32_t n_rows, const std::vector<uint8_t> &bytes, uint32_t n_experts = 0) {
        rf_plan_weight w;
        memset(&w, 0, sizeof w);
        snprintf(w.name, sizeof w.name, "w%d.%s", (int)weights.size(), type_name(type));
        w.type = type;
        w.n_in = n_in;
        w.n_rows = n_rows;
        w.n_experts = n_experts;
        w.slot = plan.n_slots;
        w.size_bytes = bytes.size() / rf_plan_weight_matrices(&w);
        plan.n_slots += rf_plan_weight_matrices(&w);
        weights.push_back(w);
        weight_bytes.push_back(bytes);
        return (uint32_t)weights.size() - 1;
    }
    uint32_t vector(const std::vector<float> &v, uint32_t type = RF_TYPE_F32) {
        std::vector<uint8_t> bytes(v.size() * block_bytes(type));
        for (size_t i = 0; i < v.size(); i++) {
            if (type == RF_TYPE_F32) memcpy(&bytes[4 * i], &v[i], 4);
            else if (type == RF_TYPE_F16) put_half(&bytes[2 * i], v[i]);
            else memcpy(&bytes[2 * i], reinterpret_cast<const uint8_t *>(&v[i]) + 2, 2);
        }
        return weight(type, (uint32_t)v.size(), 1, bytes);
    }
    rf_op *op(uint32_t kind, uint32_t rows = RF_ROWS_TOKENS) {
        rf_op o;
        memset(&o, 0, sizeof o);
        o.kind = kind;
        o.rows = rows;
        o.in = o.in2 = o.in3 = o.out = o.state = o.weight = o.bias = o.factor = RF_NONE;
        ops.push_back(o);
        return &ops.back();
    }
    /* The ops that most plans are made of, with as many rows as out has. */
    rf_op *matmul(uint32_t in, uint32_t out, uint32_t n_in, uint32_t n_out, uint32_t weight) {
        rf_op *o = op(RF_OP_MATMUL, buffers[out].rows);
        o->in = in, o->out = out, o->weight = weight, o->matmul.n_in = n_in, o->matmul.n_out = n_out;
        return o;
    }
    rf_op *norm(uint32_t in, uint32_t out, uint32_t n_groups, uint32_t n, uint32_t weight) {
        rf_op *o = op(RF_OP_RMS_NORM, buffers[out].rows);
        o->in = in, o->out = out, o->weight = weight, o->norm.n_groups = n_groups, o->norm.n = n, o->norm.eps = 1e-5f;
        return o;
    }
    rf_op *glu(uint32_t in, uint32_t in2, uint32_t out, uint32_t n) {
        rf_op *o = op(RF_OP_GLU, buffers[out].rows);
        o->in = in, o->in2 = in2, o->out = out, o->glu.n = n;
        return o;
    }
    rf_op *gather(uint32_t in, uint32_t out, uint32_t n) {
        rf_op *o = op(RF_OP_GATHER, RF_ROWS_LOGITS);
        o->in = in, o->out = out, o->gather.n = n;
        return o;
    }
    rf_op *embed(uint32_t out, uint32_t n, uint32_t weight) {
        rf_op *o = op(RF_OP_EMBED);
        o->out = out, o->weight = weight, o->embed.n = n;
        return o;
    }
    rf_op *rope(uint32_t x, uint32_t n_heads, uint32_t head_dim, uint32_t n_rot, float scale) {
        rf_op *o = op(RF_OP_ROPE);
        o->in = o->out = x, o->rope.n_heads = n_heads, o->rope.head_dim = head_dim, o->rope.n_rot = n_rot;
        o->rope.scale = scale;
        return o;
    }
    rf_op *kv_store(uint32_t k, uint32_t v, uint32_t state, uint32_t n_kv_heads, uint32_t head_dim, uint32_t head_dim_v) {
        rf_op *o = op(RF_OP_KV_STORE);
        o->in = k, o->in2 = v, o->state = state, o->kv_store.n_kv_heads = n_kv_heads;
        o->kv_store.head_dim = head_dim, o->kv_store.head_dim_v = head_dim_v;
        return o;
    }
    rf_op *attention(uint32_t in, uint32_t out, uint32_t state, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim) {
        rf_op *o = op(RF_OP_ATTENTION);
        o->in = in, o->out = out, o->state = state, o->attention.n_heads = n_heads, o->attention.n_kv_heads = n_kv_heads;
        o->attention.head_dim = o->attention.head_dim_v = head_dim, o->attention.slopes = RF_NONE;
        o->attention.scale = 1 / sqrtf((float)head_dim);
        return o;
    }
    uint32_t state(uint32_t n_kv_heads, uint32_t dk, uint32_t dv, uint32_t window = 0, uint32_t unit = 0) {
        rf_plan_state s = {0, n_kv_heads, dk, dv, window, 0, unit};
        states.push_back(s);
        return (uint32_t)states.size() - 1;
    }
    uint32_t recurrent_state(uint32_t width) {
        rf_plan_state s = {0, 0, 0, 0, 0, width, 0};
        states.push_back(s);
        return (uint32_t)states.size() - 1;
    }

    /* Memory with gaps between the buffers that nothing may touch. */
    void guard(bool on) {
#if defined(ASAN) && defined(RF_TEST_EMU)
        for (size_t i = 0; i < buffers.size(); i++) {
            uint64_t end = buffer_offset[i] + size_of(i),
                     next = i + 1 < buffers.size() ? buffer_offset[i + 1] : bind.scratch.size_bytes;
            hip_emu_guard((char *)bind.scratch.base + end, next - end, on);
        }
#else
        (void)on;
#endif
    }
    uint64_t size_of(size_t i) const {
        return (uint64_t)(buffers[i].rows == RF_ROWS_LOGITS ? bind.n_logits : bind.n_batch) * buffers[i].width * 4;
    }
    rf_result write_slot(uint32_t slot) {
        const rf_plan_weight &w = *rf_plan_weight_of(&plan, slot);
        const uint8_t *bytes = weight_bytes[&w - weights.data()].data() + (slot - w.slot) * w.size_bytes;
        rf_weight_layout layout = api->weight_layout(dev, &plan, &w);
        rf_mem scratch = {NULL, 0};
        rf_ticket ticket = {NULL, 0};
        rf_result r = api->mem_create(dev, layout.size_bytes, &weight_mem[slot], &err);
        if (r == RF_OK && layout.scratch_bytes) r = api->mem_create(dev, layout.scratch_bytes, &scratch, &err);
        /* two writes, so that row ranges are tested everywhere */
        uint32_t half = w.n_rows / 2;
        uint64_t row_bytes = w.size_bytes / w.n_rows;
        rf_weight_part part;
        memset(&part, 0, sizeof part);
        part.slot = slot;
        part.mem = &weight_mem[slot];
        part.scratch = &scratch;
        part.n_rows = half;
        part.src = bytes;
        if (r == RF_OK && half) r = api->weight_write(table, queue, &part, &ticket, &err);
        part.row0 = half;
        part.n_rows = w.n_rows - half;
        part.src = bytes + half * row_bytes;
        if (r == RF_OK) r = api->weight_write(table, queue, &part, &ticket, &err);
        if (r == RF_OK) r = api->ticket_wait(&ticket, 60000, &err);
        if (scratch.base) api->mem_release(dev, &scratch);
        return r;
    }
    rf_result open(uint32_t n_batch, uint32_t n_logits = 1, uint32_t n_ctx = 16, uint32_t n_seq = 1,
                   uint32_t cache = RF_CACHE_F16, uint32_t n_cells = 0) {
        plan.ops = ops.data(), plan.n_ops = (uint32_t)ops.size();
        plan.buffers = buffers.data(), plan.n_buffers = (uint32_t)buffers.size();
        plan.states = states.data(), plan.n_states = (uint32_t)states.size();
        plan.weights = weights.data(), plan.n_weights = (uint32_t)weights.size();
        plan.tables = tables.data(), plan.n_tables = (uint32_t)tables.size();
        plan.n_layers = 1;
        bind.plan = &plan;
        bind.n_ctx = n_ctx, bind.n_seq = n_seq, bind.n_batch = n_batch, bind.n_logits = n_logits,
        bind.cache_type = cache, bind.n_slots = n_slots;
        uint64_t at = 0;
        for (size_t i = 0; i < buffers.size(); i++) {
            buffer_offset.push_back(at);
            at = ((at + size_of(i) + 255) & ~(uint64_t)255) + 256;
        }
        uint64_t n_state = 0;
        for (size_t i = 0; i < states.size(); i++) {
            state_cells.push_back(n_cells && states[i].window ? n_cells : rf_state_cells_of(&states[i], n_ctx));
            uint64_t cells = (uint64_t)n_seq * states[i].n_kv_heads * state_cells.back();
            n_state = (n_state + 255) & ~(uint64_t)255;
            state_offset.push_back(n_state);
            if (states[i].width) state_bytes.push_back((uint64_t)n_slots * states[i].width * 4);
            else state_bytes.push_back(((cells * row_bytes(cache, states[i].head_dim) + 255) & ~(uint64_t)255) +
                                  cells * row_bytes(cache, states[i].head_dim_v));
            n_state += state_bytes.back(); /* one state: it ends where the allocation ends */
        }
        bind.buffer_offset = buffer_offset.data(), bind.state_offset = state_offset.data();
        if (n_cells) bind.state_cells = state_cells.data();
        weight_mem.assign(plan.n_slots, rf_mem());
        segment_ops.resize(ops.size() + 1);
        rf_result r = api->queue_create(dev, &queue, &err);
        if (r == RF_OK) r = api->mem_create(dev, at, &bind.scratch, &err);
        if (r == RF_OK && n_state) r = api->mem_create(dev, n_state, &bind.state, &err);
        if (r == RF_OK) r = api->table_create(dev, &plan, &table, &err);
        bind.table = table;
        for (uint32_t i = 0; r == RF_OK && i < plan.n_slots; i++)
            if (i != missing) r = write_slot(i);
        uint32_t n_segments = 0;
        if (r == RF_OK) r = api->plan_prepare(dev, &bind, segment_ops.data(), &n_segments, &prepared, &err);
        segment_ops.resize(n_segments);
        if (r == RF_OK) guard(true);
        return r;
    }
    void close() {
        if (queue) api->queue_release(queue); /* waits for its work, which uses the rest */
        if (prepared) guard(false), api->plan_release(prepared);
        for (size_t i = 0; i < weight_mem.size(); i++)
            if (weight_mem[i].base) api->weight_clear(table, (uint32_t)i), api->mem_release(dev, &weight_mem[i]);
        if (table) api->table_release(table);
        if (bind.scratch.base) api->mem_release(dev, &bind.scratch);
        if (bind.state.base) api->mem_release(dev, &bind.state);
        prepared = NULL, queue = NULL, table = NULL;
        weight_mem.clear();
    }

    rf_result set(uint32_t b, const std::vector<float> &v, uint64_t row = 0) {
        rf_ticket t;
        return v.empty() ? RF_OK
                         : api->mem_write(queue, &bind.scratch, buffer_offset[b] + row * buffers[b].width * 4,
                                          v.data(), v.size() * 4, &t, &err);
    }
    std::vector<float> get(uint32_t b) {
        rf_ticket t;
        std::vector<float> v(size_of(b) / 4, NAN);
        if (v.empty()) return v;
        rf_result r = api->mem_read(queue, &bind.scratch, buffer_offset[b], v.data(), v.size() * 4, &t, &err);
        if (r == RF_OK) r = api->ticket_wait(&t, 60000, &err);
        CHECK(r == RF_OK, "%s", err.text);
        return v;
    }
    rf_result run(const std::vector<rf_step_row> &rows,
                  const std::vector<uint32_t> &logit_rows = std::vector<uint32_t>(), uint32_t first_logits = 0,
                  const float *embeddings = NULL) {
        rf_step step = {
            rows.data(), embeddings, logit_rows.data(), (uint32_t)rows.size(), (uint32_t)logit_rows.size(),
            first_logits};
        rf_ticket t;
        rf_result r = RF_OK;
        uint32_t n_segments = (uint32_t)segment_ops.size();
        for (uint32_t s = 0; r == RF_OK && s < n_segments; s += whole ? n_segments : 1)
            r = api->plan_run(prepared, queue, s, whole ? n_segments : s + 1, &step, &t, &err);
        return r == RF_OK ? api->ticket_wait(&t, 60000, &err) : r;
    }
};

static std::vector<rf_dev *> devices;

static std::vector<rf_step_row> rows_of(uint32_t n, int32_t first_pos = 0) {
    std::vector<rf_step_row> rows;
    for (uint32_t i = 0; i < n; i++) {
        rf_step_row r = {0, 0, first_pos + (int32_t)i, -1};
        rows.push_back(r);
    }
    return rows;
}

/* max |d| / max |reference|, and the normalised mean square; NaN fails. `typical`: what sums of such terms come to, where
 * the references do not show it: there are few and they may cancel, or they were capped. */
static void compare(const std::vector<float> &found, const std::vector<double> &want, double max_relative,
                    double nmse, const char *what, double typical = 0, const std::vector<double> *allowed = NULL) {
    double worst = 0, largest = typical, square = 0, total = typical * typical;
    size_t at = 0;
    REQUIRE(found.size() >= want.size(), "%s: %zu values, want %zu", what, found.size(), want.size());
    for (size_t i = 0; i < want.size(); i++) {
        double d = fabs((double)found[i] - want[i]);
        if (allowed) d = d <= (*allowed)[i] ? 0 : d - (*allowed)[i]; /* NaN stays */
        if (d > worst || d != d) at = i;
        worst = rft_worst(worst, d);
        largest = fmax(largest, fabs(want[i]));
        square += d * d;
        total += want[i] * want[i];
    }
    if (largest < 1.2e-38) largest = total = 1; /* nothing that float32 must hold */
    CHECK(worst / largest <= max_relative && square / total <= nmse,
          "%s: value %zu is %g, want %g; relative %g, NMSE %g", what, at, (double)found[at], want[at],
          worst / largest, square / total);
}
static bool same_bits(const std::vector<float> &a, const std::vector<float> &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

/* float32 sums of up to some thousand values of one sign pattern: 1e-5 of the largest result is far above their
 * rounding
 * and far below any mistake in a weight, a scale or an index */
#define FLOAT_TOLERANCE 1e-5
#define NMSE_TOLERANCE 1e-10

/* ---- ops ---- */

static double to_bfloat(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, 4);
    return x;
}

/* Whether matmuls of many columns and quantized weights round both to bfloats: a weight of 1 in every row picks one
 * activation, and that is what comes out. */
static bool has_bfloats(uint32_t device) {
    const uint32_t n = 64, T = 65;
    std::vector<uint8_t> w(n * (n / 32) * 34, 0);
    for (uint32_t i = 0; i < n; i++) put_half(&w[(2 * i + i / 32) * 34], 1), w[(2 * i + i / 32) * 34 + 2 + i % 32] = 1;
    Rig g(devices[device]);
    const uint32_t in = g.buffer(n), out = g.buffer(n);
    g.matmul(in, out, n, n, g.weight(RF_TYPE_Q8_0, n, n, w));
    std::vector<float> x;
    for (uint32_t i = 0; i < n * T; i++) x.push_back((float)(i % 1021) / 7);
    CHECK(g.open(T, 1, T) == RF_OK, "%s", g.err.text);
    g.set(in, x);
    CHECK(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
    const std::vector<float> y = g.get(out);
    for (size_t i = 0; i < x.size(); i++)
        if (y[i] != (float)to_bfloat(x[i])) return false;
    return true;
}

/* x as a half, scaled by the power of two that brings the largest value of its row to [2^14, 2^15). */
static double to_scaled_half(float x, float largest) {
    const int up = 14 - (largest > 0 ? ilogbf(largest) : 0);
    uint8_t bytes[2];
    put_half(bytes, ldexpf(x, up));
    return ldexp(half_value(rd16(bytes)), -up);
}

/* Whether products of few rows with such weights read bfloats from 17 rows on, not from 33 on. */
static bool is_narrow(uint32_t type) {
    return type == RF_TYPE_Q8_0 || (type >= RF_TYPE_Q4_0 && type <= RF_TYPE_Q5_1) || type == RF_TYPE_Q2_K ||
           (type >= RF_TYPE_Q4_K && type <= RF_TYPE_Q6_K);
}

/* What a matmul sees of its input, [T, n], and how near its results must be to exact sums of that: bfloats of quantized
 * weights are up to 2^-8 off, each by itself: a sum's error is at most that part of it, as both add up as squares.
 * Weights of 16-bit floats are exact; the unit may truncate when it adds. pairs: they are experts'. */
struct Seen {
    std::vector<double> x;
    double tolerance, nmse;
    Seen(uint32_t device, uint32_t type, const float *from, uint32_t n, uint32_t T, uint32_t stride, bool pairs = false)
        : tolerance(FLOAT_TOLERANCE), nmse(NMSE_TOLERANCE) {
        const bool halves = type == RF_TYPE_F16, floats = halves || type == RF_TYPE_BF16,
                   rounded = (floats ? !pairs : !is_float(type)) && n % 64 == 0 &&
                             T > (is_narrow(type) && !pairs ? 16 : 32) && has_bfloats(device);
        if (rounded) tolerance = floats ? 1e-4 : ldexp(1, -7), nmse = floats ? 1e-9 : ldexp(1, -16);
        for (uint32_t t = 0; t < T; t++) {
            const float *row = from + (size_t)t * stride;
            float largest = 0;
            std::vector<double> v(row, row + n);
            if (!is_float(type)) v = quantized(row, n);
            for (uint32_t k = 0; k < n; k++) largest = fmaxf(largest, fabsf(row[k]));
            for (uint32_t k = 0; rounded && k < n; k++)
                v[k] = halves ? to_scaled_half(row[k], largest) : to_bfloat(row[k]);
            x.insert(x.end(), v.begin(), v.end());
        }
    }
};

struct MatmulCase {
    uint32_t type, n_in, n_out, n_rows, variant, device;
};

static void matmul_case(const MatmulCase &c) {
    char what[160];
    bool bias = c.variant == 1 || c.variant == 3 || c.variant > 4,
         accumulate = c.variant == 2 || c.variant == 3 || c.variant == 5, range = c.variant == 3,
         logits = c.variant == 4, factor = c.variant == 5, capped = c.variant == 6;
    const float scale = factor || capped ? 0.7f : 1.0f, cap = 3.0f;
    snprintf(what, sizeof what, "matmul %s n_in %u n_out %u rows %u variant %u device %u", type_name(c.type), c.n_in,
             c.n_out, c.n_rows, c.variant, c.device);
    uint32_t row0 = range ? 3 : 0, pad_in = c.variant == 2 ? 5 : 0, pad_out = c.variant == 2 ? 3 : 0,
             first = logits ? 2 : 0;
    Rig g(devices[c.device]);
    uint32_t rows = logits ? (uint32_t)RF_ROWS_LOGITS : (uint32_t)RF_ROWS_TOKENS;
    uint32_t in = g.buffer(c.n_in + pad_in, rows), out = g.buffer(c.n_out + pad_out, rows);
    std::vector<uint8_t> w = random_rows(c.type, c.n_in, c.n_out + row0 + range);
    rf_op *o = g.matmul(in, out, c.n_in, c.n_out, g.weight(c.type, c.n_in, c.n_out + row0 + range, w));
    o->matmul.first_row = row0;
    o->flags = accumulate ? RF_OP_ACCUMULATE : 0;
    std::vector<float> b = values(c.n_out + row0);
    if (bias) o->bias = g.vector(b, RF_TYPE_F32);
    if (factor) o->factor = g.vector(std::vector<float>(1, 1.5f), c.device ? RF_TYPE_F32 : RF_TYPE_F16);
    if (factor || capped) o->matmul.scale = scale;
    if (capped) o->matmul.softcap = cap;
    rf_result r = g.open(logits ? 1 : c.n_rows, logits ? c.n_rows + first : 1, c.n_rows < 128 ? 128 : c.n_rows);
    REQUIRE(r == RF_OK, "%s: %s", what, g.err.text);
    std::vector<float> x = values((size_t)c.n_rows * (c.n_in + pad_in)),
                       before = values((size_t)c.n_rows * (c.n_out + pad_out));
    if (c.n_rows > 2)
        for (uint32_t k = 0; k < 32 && k < c.n_in; k++) x[c.n_in + pad_in + k] = 0; /* a group of zeros */
    g.set(in, x, first);
    g.set(out, before, first);
    if (logits) r = g.run(rows_of(1), std::vector<uint32_t>(c.n_rows, 0), first);
    else r = g.run(rows_of(c.n_rows));
    REQUIRE(r == RF_OK, "%s: %s", what, g.err.text);
    std::vector<float> y = g.get(out);
    y.erase(y.begin(), y.begin() + (ptrdiff_t)(first * (c.n_out + pad_out)));
    std::vector<double> wd = decode(c.type, w), want;
    const Seen seen(c.device, c.type, x.data(), c.n_in, c.n_rows, c.n_in + pad_in);
    double typical = 0;
    for (uint32_t t = 0; t < c.n_rows; t++) {
        const double *xd = &seen.x[(size_t)t * c.n_in];
        for (uint32_t i = 0; i < c.n_out + pad_out; i++) {
            double sum = 0, old = before[(size_t)t * (c.n_out + pad_out) + i];
            for (uint32_t k = 0; i < c.n_out && k < c.n_in; k++) sum += wd[(size_t)(row0 + i) * c.n_in + k] * xd[k];
            if (factor) sum *= 1.5;
            if (bias && i < c.n_out) sum += b[row0 + i];
            sum *= scale;
            if (capped) typical = fmax(typical, fabs(sum)), sum = cap * tanh(sum / cap);
            want.push_back(i < c.n_out ? sum + (accumulate ? old : 0) : old);
        }
    }
    compare(y, want, seen.tolerance, seen.nmse, what, typical);
    if (accumulate) return;
    r = logits ? g.run(rows_of(1), std::vector<uint32_t>(c.n_rows, 0), first) : g.run(rows_of(c.n_rows));
    std::vector<float> again = g.get(out);
    again.erase(again.begin(), again.begin() + (ptrdiff_t)(first * (c.n_out + pad_out)));
    CHECK(r == RF_OK && same_bits(y, again), "%s: a repeated run gives other bits", what);
}

static void test_matmul() {
    static const uint32_t blocks[] = {1, 2, 3, 5, 9}, odd[] = {1, 33, 40, 64, 264}, outs[] = {1, 3, 64, 65, 130},
                          rows[] = {1, 2, 7, 8, 9, 33, 66};
    std::vector<Row> list = combinations(std::vector<int>{N_TYPES, 5, 5, 7, 7, n_devices});
    for (size_t i = 0; i < list.size(); i += stride) {
        const Row &r = list[i];
        uint32_t type = types[r[0]];
        MatmulCase c = {type,           is_float(type) ? odd[r[1]] : blocks[r[1]] * block_elements(type),
                        outs[r[2]],     rows[r[3]],
                        (uint32_t)r[4], (uint32_t)r[5]};
        matmul_case(c);
    }
}

/* One weight of 1 in every row picks one activation: its quantized value must be that of the rule, bit for bit. */
static void test_quantize_bits() {
    for (int d = 0; d < n_devices; d++) {
        const uint32_t n = 128;
        std::vector<uint8_t> w(n * (n / 32) * 34, 0);
        for (uint32_t i = 0; i < n; i++) {
            uint8_t *b = &w[(i * (n / 32) + i / 32) * 34];
            put_half(b, 1);
            b[2 + i % 32] = 1;
        }
        Rig g(devices[(size_t)d]);
        uint32_t in = g.buffer(n), out = g.buffer(n);
        g.matmul(in, out, n, n, g.weight(RF_TYPE_Q8_0, n, n, w));
        REQUIRE(g.open(8) == RF_OK, "%s", g.err.text);
        for (int round = 0; round < 20; round++) {
            std::vector<float> x = values(8 * n);
            for (size_t i = 0; i < x.size(); i++) {
                if (i % 32 == 0) x[i] = 12.7f * (float)(1 + i % 5); /* halves and near-halves: d is about 0.1 */
                else if (rnd() % 2) x[i] = 0.05f * (float)((int)(rnd() % 40) - 20);
                if (round == 3) x[i] *= 1e-38f; /* some d below, some above 2^-126 */
                if (round == 5) x[i] *= 2e-37f;
                if (round == 4) x[i] *= 1e30f;
            }
            g.set(in, x);
            REQUIRE(g.run(rows_of(8)) == RF_OK, "%s", g.err.text);
            std::vector<float> y = g.get(out);
            int bad = 0;
            for (size_t t = 0; t < 8; t++) {
                std::vector<double> q = quantized(&x[t * n], n);
                for (size_t i = 0; i < n; i++) bad += y[t * n + i] != (float)q[i];
            }
            CHECK(bad == 0, "device %d round %d: %d values differ", d, round, bad);
        }
    }
}

static void test_embed() {
    static const uint32_t ns[] = {1, 3, 9}, odd[] = {1, 40, 300};
    std::vector<Row> list = combinations(std::vector<int>{N_TYPES, 3, 3, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        static const uint32_t counts[] = {1, 7, 33};
        const Row &r = list[i];
        uint32_t type = types[r[0]], n = is_float(type) ? odd[r[1]] : ns[r[1]] * block_elements(type),
                 T = counts[r[2]], vocab = 11;
        Rig g(devices[(size_t)r[3]]);
        std::vector<uint8_t> w = random_rows(type, n, vocab);
        std::vector<float> own = values((size_t)T * n);
        uint32_t out = g.buffer(n), n_positions = 5 + T;
        const bool positions = i % 2, scaled = i / 2 % 2;
        std::vector<uint8_t> at = random_rows(type, n, n_positions);
        g.embed(out, n, g.weight(type, n, vocab, w))->embed.scale = scaled ? 1.5f : 0;
        if (positions) {
            rf_op *o = g.embed(out, n, g.weight(type, n, n_positions, at));
            o->flags = RF_OP_POSITIONS | RF_OP_ACCUMULATE, o->embed.scale = scaled ? 0.5f : 0;
        }
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        std::vector<rf_step_row> rows = rows_of(T, 5);
        for (uint32_t t = 0; t < T; t++) rows[t].token = t % 5 == 4 ? -1 : (int32_t)(rnd() % vocab);
        REQUIRE(g.run(rows, std::vector<uint32_t>(), 0, own.data()) == RF_OK, "%s", g.err.text);
        std::vector<double> wd = decode(type, w), pd = decode(type, at), want;
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t k = 0; k < n; k++) {
                double v = rows[t].token < 0 ? own[t * n + k] : wd[(size_t)rows[t].token * n + k] * (scaled ? 1.5 : 1);
                want.push_back(v + (positions ? pd[(5 + t) * n + k] * (scaled ? 0.5 : 1) : 0));
            }
        compare(g.get(out), want, 2e-7, 1e-13, type_name(type)); /* one rounding or two */
        rows[0].token = (int32_t)vocab;
        CHECK(g.run(rows, std::vector<uint32_t>(), 0, own.data()) == RF_ERR_ARGUMENT,
              "a token past the vocabulary was taken");
        rows[0].token = 0, rows[0].pos = (int32_t)n_positions;
        CHECK(!positions || g.run(rows, std::vector<uint32_t>(), 0, own.data()) == RF_ERR_ARGUMENT,
              "a position past the learned ones was taken");
    }
}

/* The stored blocks of every type and their values, by the reference implementation of the formats. */
static int have_goldens() {
    FILE *f = fopen("../shared/zoo/golden/dequant/q4_K.raw", "rb");
    if (f) fclose(f);
    return f != NULL;
}
static std::vector<uint8_t> read_file(const std::string &path) {
    std::vector<uint8_t> out;
    FILE *f = fopen(path.c_str(), "rb");
    if (!f) return out;
    int c;
    while ((c = getc(f)) != EOF) out.push_back((uint8_t)c);
    fclose(f);
    return out;
}
static void test_goldens() {
    for (int k = 0; k < N_TYPES; k++) {
        uint32_t type = types[k];
        std::string base = std::string("../shared/zoo/golden/dequant/") + type_name(type);
        std::vector<uint8_t> raw = read_file(base + ".raw"), expected = read_file(base + ".f32");
        if (type == RF_TYPE_F32) continue;
        REQUIRE(!raw.empty() && expected.size() % 4 == 0, "%s is missing", base.c_str());
        std::vector<double> mine = decode(type, raw);
        REQUIRE(mine.size() == expected.size() / 4, "%s", base.c_str());
        std::vector<float> golden(mine.size());
        memcpy(golden.data(), expected.data(), expected.size());
        double worst = 0;
        for (size_t i = 0; i < mine.size(); i++)
            if (!(isnan(mine[i]) && isnan(golden[i])) && mine[i] != golden[i])
                worst = rft_worst(worst, fabs(mine[i] - golden[i]) / fmax(fabs(mine[i]), 1e-30));
        CHECK(worst < 5e-7 || !isfinite(worst), "%s: this test's decoder is off by %g", type_name(type), worst);
        for (int d = 0; d < n_devices; d++) {
            uint32_t n = block_elements(type) == 1 ? 16 : block_elements(type), vocab = (uint32_t)(mine.size() / n);
            Rig g(devices[(size_t)d]);
            uint32_t out = g.buffer(n);
            const size_t n_bytes = (size_t)vocab * n / block_elements(type) * block_bytes(type);
            g.embed(out, n, g.weight(type, n, vocab, std::vector<uint8_t>(raw.begin(), raw.begin() + (ptrdiff_t)n_bytes)));
            REQUIRE(g.open(vocab, 1, vocab) == RF_OK, "%s", g.err.text);
            std::vector<rf_step_row> rows = rows_of(vocab);
            for (uint32_t t = 0; t < vocab; t++) rows[t].token = (int32_t)t;
            REQUIRE(g.run(rows) == RF_OK, "%s", g.err.text);
            std::vector<float> y = g.get(out);
            int bad = 0;
            for (size_t i = 0; i < y.size(); i++)
                bad +=
                    !(y[i] == golden[i] || (isnan(y[i]) && isnan(golden[i])) ||
                      fabs(y[i] - golden[i]) <= 4e-7 * (fabs((double)golden[i]) + fabs((double)golden[i / n * n])) ||
                      fabs(y[i] - golden[i]) <= 1e-6 * 64);
            CHECK(bad == 0, "%s device %d: %d values differ from the stored ones", type_name(type), d, bad);
        }
    }
}

static void test_rms_norm() {
    static const uint32_t ns[] = {1, 7, 64, 100, 256, 1000, 4300}, heads[] = {1, 3}, counts[] = {1, 7, 33};
    static const uint32_t w_types[] = {RF_TYPE_F32, RF_TYPE_F16, RF_TYPE_BF16};
    std::vector<Row> list = combinations(std::vector<int>{7, 2, 3, 3, 2, n_devices, 2, 3, 2, 2});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        uint32_t n = ns[r[0]], h = heads[r[1]], T = counts[r[2]];
        const uint32_t width = n * h + (r[9] ? 4 : 1); /* rows that are aligned, if n is, or are not */
        bool in_place = r[4] == 1, center = r[6] == 1 && n > 1, bias = r[7] == 1, bare = r[7] == 2, adds = r[8] == 1;
        Rig g(devices[(size_t)r[5]]);
        uint32_t in = g.buffer(width), out = in_place ? in : g.buffer(n * h);
        std::vector<float> w = values(n), x = values((size_t)T * width);
        rf_op *o = g.norm(in, out, h, n, RF_NONE);
        o->flags = (center ? RF_OP_CENTER : 0) | (adds ? RF_OP_ACCUMULATE : 0);
        std::vector<double> wd(n, 1), bd(n, 0);
        if (!bare) o->weight = g.vector(w, w_types[r[3]]), wd = decode(w_types[r[3]], g.weight_bytes[0]);
        if (bias) o->bias = g.vector(values(n), w_types[r[3]]), bd = decode(w_types[r[3]], g.weight_bytes[1]);
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        std::vector<float> before = in_place ? x : values((size_t)T * n * h);
        if (!in_place) g.set(out, before);
        g.set(in, x);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<double> want;
        for (uint32_t t = 0; t < T; t++) {
            for (uint32_t k = 0; k < h; k++) {
                const float *p = &x[(size_t)t * width + (size_t)k * n];
                double sum = 0, mean = 0;
                for (uint32_t j = 0; j < n; j++) mean += center ? (double)p[j] / n : 0;
                for (uint32_t j = 0; j < n; j++) sum += (p[j] - mean) * (p[j] - mean);
                for (uint32_t j = 0; j < n; j++)
                    want.push_back((p[j] - mean) / sqrt(sum / n + (double)1e-5f) * wd[j] + bd[j] +
                                   (adds ? before[want.size()] : 0));
            }
            for (uint32_t j = n * h; in_place && j < width; j++) want.push_back(x[(size_t)t * width + j]);
        }
        compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, "rms_norm");
    }
}

static void test_rope() {
    static const uint32_t dims[] = {32, 40, 64, 80, 96, 128, 256, 600}, heads[] = {1, 3, 8};
    static const int32_t firsts[] = {0, 5, 1000, 131000};
    std::vector<Row> list = combinations(std::vector<int>{8, 3, 4, 2, 2, 2, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        uint32_t dim = dims[r[0]], h = heads[r[1]], n_rot = r[4] ? dim / 2 / 2 * 2 : dim, T = 5;
        uint32_t begin = r[6] ? dim - n_rot : 0;
        bool neox = r[3], freqs = r[5];
        Rig g(devices[(size_t)r[7]]);
        uint32_t x = g.buffer(dim * h + 2);
        for (uint32_t k = 0; k < 3 + n_rot / 2; k++)
            g.tables.push_back((float)pow(10000.0, k < 3 ? 0 : -2.0 * (k - 3) / n_rot));
        std::vector<float> f(n_rot / 2), v = values((size_t)T * (dim * h + 2));
        for (size_t k = 0; k < f.size(); k++) f[k] = uniform(1, 8);
        rf_op *o = g.rope(x, h, dim, n_rot, 1.25f);
        const int shift = freqs ? -3 : 0;
        o->rope.table = 3, o->rope.shift = shift;
        o->flags = (neox ? RF_OP_NEOX : 0) | (r[6] ? RF_OP_LAST : 0);
        if (freqs) o->weight = g.vector(f);
        REQUIRE(g.open(T, 1, 140000) == RF_OK, "%s", g.err.text);
        g.set(x, v);
        REQUIRE(g.run(rows_of(T, firsts[r[2]])) == RF_OK, "%s", g.err.text);
        std::vector<double> want(v.begin(), v.end());
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t k = 0; k < h; k++)
                for (uint32_t j = 0; j < n_rot / 2; j++) {
                    double angle = (double)(firsts[r[2]] + (int32_t)t + shift) * g.tables[3 + j] / (freqs ? f[j] : 1.0f),
                           c = cos(angle) * 1.25, s = sin(angle) * 1.25;
                    size_t at = (size_t)t * (dim * h + 2) + (size_t)k * dim + begin, a = at + (neox ? j : 2 * j),
                           b = at + (neox ? j + n_rot / 2 : 2 * j + 1);
                    want[a] = v[a] * c - v[b] * s;
                    want[b] = v[a] * s + v[b] * c;
                }
        compare(g.get(x), want, 1e-6, 1e-12, "rope");
    }
}

/* Angles that have no meaning: cos and sin are NaN, and nothing is converted that no integer holds. */
static void test_rope_angles() {
    static const float angles[] = {1, 1e16f, -1e16f, 1e38f, INFINITY, NAN, 0};
    for (int i = 0; i < n_devices; i++) {
        Rig g(devices[(size_t)i]);
        const uint32_t n = (uint32_t)RFT_COUNT(angles), x = g.buffer(2 * n);
        g.tables.assign(angles, angles + n);
        g.rope(x, 1, 2 * n, 2 * n, 1);
        REQUIRE(g.open(1, 1, 8) == RF_OK, "%s", g.err.text);
        g.set(x, std::vector<float>(2 * n, 1.0f));
        REQUIRE(g.run(rows_of(1, 3)) == RF_OK, "%s", g.err.text);
        const std::vector<float> y = g.get(x);
        for (uint32_t k = 0; k < n; k++) {
            const bool sane = fabs(3 * (double)angles[k]) < RF_ROPE_ANGLE_MAX;
            CHECK(sane ? fabs(y[2 * k] - (cos(3 * angles[k]) - sin(3 * angles[k]))) < 1e-6 : y[2 * k] != y[2 * k], "angle %g: %g", 3 * (double)angles[k], (double)y[2 * k]);
        }
    }
}

static void test_glu_gather() {
    static const uint32_t ns[] = {1, 33, 256, 700}, counts[] = {1, 7, 33};
    std::vector<Row> list = combinations(std::vector<int>{4, 3, 2, n_devices, RF_ACT_COUNT, 2, 2});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const bool gelu = r[4] == RF_ACT_GELU, oai = r[4] == RF_ACT_OAI, least = r[4] == RF_ACT_SILU_MIN || r[4] == RF_ACT_MIN_SILU,
                   situ = r[4] == RF_ACT_SITU,
                   gated = r[5] == 0 || oai || least || situ;
        const uint32_t repeat = !gelu && gated && !oai && !least && !situ && r[6] && r[2] ? 3 : 1;
        uint32_t n = ns[r[0]], T = counts[r[1]], L = T < 3 ? 1 : 3, first = 2;
        const uint32_t begin = r[6] ? 5 : 0, nb = n + begin;
        const float factor = r[6] ? -1.75f : 1;
        Rig g(devices[(size_t)r[3]]);
        uint32_t a = g.buffer(n + 3), b = g.buffer(nb), out = r[2] ? a : g.buffer(n + 3),
                 l = g.buffer(n + 1, RF_ROWS_LOGITS);
        rf_op *o = g.glu(a, gated ? b : RF_NONE, out, n);
        o->glu.in2_at = gated ? begin : 0, o->glu.activation = (uint32_t)r[4];
        if (r[4] == RF_ACT_CLAMP || least || situ) o->glu.limit = 0.5f;
        o->glu.repeat = repeat;
        o->glu.alpha_p = 0.75f, o->glu.alpha_n = 1.25f, o->glu.beta = 0.5f, o->glu.eps = -1e-6f;
        const bool each = r[6] && r[2] == 0; /* divisors of each value */
        std::vector<float> divisors(n, 1);
        for (uint32_t k = 0; each && k < n; k++) divisors[k] = 0.5f + (float)(k % 7);
        if (r[6]) o->factor = g.vector(each ? divisors : std::vector<float>(1, factor));
        if (each) o->flags |= RF_OP_EACH_HEAD;
        g.gather(out, l, n)->layer = 1; /* another segment */
        REQUIRE(g.open(T, L + first, 64) == RF_OK && g.segment_ops.size() == 2, "%s", g.err.text);
        std::vector<float> x = values((size_t)T * (n + 3)), y = values((size_t)T * nb),
                           nothing((size_t)(L + first) * (n + 1), -5);
        x[0] = -200, y[begin] = 3; /* exp overflows there */
        for (uint32_t k = 1; oai && k < n; k++) x[k] *= 9, y[begin + k] *= 9; /* some beyond where they are cut */
        g.set(a, x), g.set(b, y), g.set(l, nothing);
        if (!r[2]) g.set(out, x);
        std::vector<uint32_t> pick;
        for (uint32_t k = 0; k < L; k++) pick.push_back(T - 1 - k * (T / 3));
        REQUIRE(g.run(rows_of(T), pick, first) == RF_OK, "%s", g.err.text);
        std::vector<double> want(x.begin(), x.end()), rows((size_t)(L + first) * (n + 1), -5);
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t k = 0; k < n; k++) {
                double v = x[t * (n + 3) + k], limited = fmax(-0.5, fmin(0.5, v)), u = sqrt(2 / acos(-1)) * (v + 0.044715 * v * v * v);
                double with = y[t * nb + begin + k / repeat], cut = fmin(v, 7), up = 1 + fmax(-7, fmin(7, with));
                double act = gelu                      ? 0.5 * v * (1 + tanh(u))
                             : r[4] == RF_ACT_NONE  ? v
                             : r[4] == RF_ACT_CLAMP ? limited
                             : r[4] == RF_ACT_SIGMOID ? 1 / (1 + exp(-v))
                             : r[4] == RF_ACT_XIELU ? (v > 0 ? 0.75 * v * v : 1.25 * (expm1(fmin(v, (double)-1e-6f)) - v)) + 0.5 * v
                             : r[4] == RF_ACT_RELU ? fmax(v, 0)
                             : r[4] == RF_ACT_RELU2 ? fmax(v, 0) * fmax(v, 0)
                             : r[4] == RF_ACT_SOFTPLUS ? fmax(v, 0) + log1p(exp(-fabs(v)))
                             : r[4] == RF_ACT_SILU_MIN ? fmin(v, 0.5) / (1 + exp(-fmin(v, 0.5)))
                             : situ                    ? 0.5 * tanh(v / 0.5) / (1 + exp(-v))
                             : r[4] == RF_ACT_MIN_SILU ? fmin(v / (1 + exp(-v)), 0.5)
                                                    : v / (1 + exp(-v));
                if (least) with = fmax(-0.5, fmin(0.5, with));
                if (situ) with = 0.5 * tanh(with / 0.5);
                const double times = each ? 1.0 / divisors[k] : factor;
                want[t * (n + 3) + k] = times * (oai ? cut / (1 + exp(-1.702 * cut)) * up : act * (gated ? with : 1));
            }
        std::vector<float> product = g.get(out);
        compare(product, want, 1e-6, 1e-12, "glu");
        for (uint32_t k = 0; k < L; k++)
            for (uint32_t j = 0; j < n; j++) rows[(first + k) * (n + 1) + j] = product[pick[k] * (n + 3) + j];
        compare(g.get(l), rows, 0, 0, "gather");
    }
}

static void test_argmax() {
    static const uint32_t ns[] = {1, 31, 1023, 1024, 1025, 8192, 20001}, counts[] = {1, 2, 7};
    static const float odd[] = {NAN, -INFINITY, INFINITY, 0.0f, -0.0f, 1.5f, -1.5f};
    std::vector<Row> list = combinations(std::vector<int>{7, 3, 10, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        uint32_t n = ns[r[0]], L = counts[r[1]], kind = (uint32_t)r[2];
        Rig g(devices[(size_t)r[3]]);
        uint32_t in = g.buffer(n + 1, RF_ROWS_LOGITS), out = g.buffer(2, RF_ROWS_LOGITS);
        rf_op *o = g.op(RF_OP_ARGMAX, RF_ROWS_LOGITS);
        o->in = in, o->out = out, o->argmax.n = n;
        REQUIRE(g.open(1, L + 1) == RF_OK, "%s", g.err.text);
        std::vector<float> x((size_t)L * (n + 1));
        for (size_t k = 0; k < x.size(); k++) /* the last of a row is not part of it */
            x[k] = k % (n + 1) == n ? INFINITY : kind < 3 ? odd[kind] : kind < 6 ? odd[rnd() % 7]
                   : kind < 8 ? (float)(int)(rnd() % 9) - 12 : -1 - (float)((k * 7 + kind) % (n + 1));
        g.set(in, x, 1);
        REQUIRE(g.run(rows_of(1), std::vector<uint32_t>(L, 0), 1) == RF_OK, "%s", g.err.text);
        std::vector<float> y = g.get(out);
        for (uint32_t t = 0; t < L; t++) {
            int32_t want = -1, found;
            const float *row = &x[(size_t)t * (n + 1)];
            for (uint32_t k = n; k-- > 0;)
                if (row[k] > -INFINITY && (want < 0 || row[k] >= row[want])) want = (int32_t)k;
            memcpy(&found, &y[(t + 1) * 2], 4);
            CHECK(found == want, "argmax of %u, row %u of kind %u, device %d: %d, want %d", n, t, kind, r[3], found, want);
        }
    }
}

/* State contents as float64, from its bytes. */
/* ---- experts ---- */

/* Ids by value, then by id, what is no number last. */
static std::vector<uint32_t> ranked(const std::vector<double> &score) {
    std::vector<uint32_t> ids(score.size());
    for (uint32_t i = 0; i < score.size(); i++) {
        size_t at = 0;
        for (uint32_t j = 0; j < score.size(); j++)
            at += std::isnan(score[i]) ? !std::isnan(score[j]) || j < i
                                       : score[j] > score[i] || (score[j] == score[i] && j < i);
        ids[at] = i;
    }
    return ids;
}

/* ROUTE in float64: ids, then weights; fixed: the ids, or NULL. */
static std::vector<double> routed(const rf_op &op, const float *logits, const float *bias, const int32_t *fixed = NULL) {
    const rf_route_params &r = op.route;
    uint32_t n = r.n_experts, groups = r.n_groups > 1 ? r.n_groups : 1, size = n / groups;
    std::vector<double> p(logits, logits + n), score, sums, out;
    double top = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++) top = fmax(top, p[i]);
    for (uint32_t i = 0; i < n; i++) sum += exp(p[i] - top);
    for (uint32_t i = 0; i < n; i++) {
        if (op.flags & RF_OP_SIGMOID) p[i] = 1 / (1 + exp(-p[i]));
        else if (op.flags & RF_OP_SQRT_SOFTPLUS) p[i] = sqrt(log1p(exp(p[i])));
        else if (!(op.flags & RF_OP_CHOSEN)) p[i] = exp(p[i] - top) / sum;
        score.push_back(p[i] + (bias ? bias[i] : 0));
    }
    for (uint32_t g = 0; g < groups; g++) {
        std::vector<double> own(score.begin() + g * size, score.begin() + (g + 1) * size);
        std::vector<uint32_t> best = ranked(own);
        sums.push_back(own[best[0]] + (size > 1 ? own[best[1]] : 0));
    }
    std::vector<uint32_t> order = ranked(sums), all = ranked(score);
    std::set<uint32_t> kept(order.begin(), order.begin() + (groups > 1 ? r.n_groups_used : 1));
    for (size_t i = 0; i < all.size() && out.size() < r.n_used; i++)
        if (fixed || kept.count(all[i] / size)) out.push_back(fixed ? (uint32_t)fixed[i] : all[i]);
    sum = 0, top = -INFINITY;
    for (uint32_t k = 0; k < r.n_used; k++) top = fmax(top, p[(size_t)out[k]]);
    for (uint32_t k = 0; k < r.n_used; k++) {
        double w = p[(size_t)out[k]];
        out.push_back(op.flags & RF_OP_CHOSEN ? exp(w - top) : w);
        sum += out.back();
    }
    for (uint32_t k = r.n_used; k < 2 * r.n_used; k++) {
        double chosen = op.flags & RF_OP_CHOSEN ? sum : 1, whole = op.flags & RF_OP_CHOSEN ? 1 : sum;
        out[k] = out[k] / chosen / (op.flags & RF_OP_NORMALIZE ? fmax(whole, 1.0 / 16384) : 1) * (r.scale != 0 ? r.scale : 1);
    }
    return out;
}

static void test_route() {
    static const uint32_t counts[] = {1, 4, 33, 64, 128, 1024}, used[] = {1, 2, 8}, Ts[] = {1, 5}, groups[] = {1, 2, 4},
                          gating[] = {0, RF_OP_SIGMOID, RF_OP_CHOSEN, RF_OP_SQRT_SOFTPLUS};
    std::vector<Row> list = combinations(std::vector<int>{6, 3, 2, 3, 4, 2, 4, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        uint32_t n = counts[r[0]], T = Ts[r[2]], n_used = used[r[1]] < n ? used[r[1]] : n, pad = 3;
        Rig g(devices[(size_t)r[7]]);
        uint32_t in = g.buffer(n + pad), out = g.buffer(2 * n_used + pad);
        std::vector<float> bias = values(n);
        rf_op *o = g.op(RF_OP_ROUTE);
        const uint32_t n_groups = n % groups[r[3]] ? 1 : groups[r[3]];
        o->in = in, o->out = out, o->route.n_experts = n, o->route.n_used = n_used, o->route.scale = r[5] ? 2.5f : 0;
        o->route.n_groups = n_groups;
        o->route.n_groups_used = n_groups > 1 && n / n_groups * (n_groups - 1) >= n_used ? n_groups - 1 : n_groups;
        o->flags = gating[r[4]] | (r[5] ? (uint32_t)RF_OP_NORMALIZE : 0);
        if (r[6] & 1) o->bias = g.vector(bias);
        const rf_op op = *o;
        REQUIRE(g.open(T) == RF_OK, "%s", g.err.text);
        std::vector<float> x = values((size_t)T * (n + pad)), before((size_t)T * (2 * n_used + pad), -7);
        for (size_t k = 0; r[6] == 2 && k < x.size(); k++) x[k] = (float)(int)(rnd() % 7) - 3; /* ties */
        for (size_t k = 0; r[6] == 2 && k < x.size(); k += 11) x[k] = NAN;
        g.set(in, x), g.set(out, before);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<float> y = g.get(out);
        for (uint32_t t = 0; t < T; t++) {
            std::vector<double> want = routed(op, &x[t * (n + pad)], r[6] & 1 ? bias.data() : NULL);
            bool nan = false; /* the sum of a softmax: then every score is */
            for (uint32_t k = 0; k < n; k++) nan = nan || std::isnan(x[t * (n + pad) + k]);
            for (uint32_t k = 0; k < n_used; k++) {
                uint32_t id;
                float found = y[t * (2 * n_used + pad) + n_used + k];
                double w = want[n_used + k];
                memcpy(&id, &y[t * (2 * n_used + pad) + k], 4);
                CHECK(id == want[k], "route of %u, %u used, %u groups, flags %x: choice %u is %u, want %g", n, n_used,
                      n_groups, op.flags, k, id, want[k]);
                CHECK(nan ? std::isnan(w) == std::isnan(found) : fabs(found - w) <= 3e-6 * fmax(1, fabs(w)),
                      "route of %u, flags %x: weight %u is %g, want %g", n, op.flags, k, (double)found, w);
            }
            for (uint32_t k = 0; k < pad; k++) CHECK(y[t * (2 * n_used + pad) + 2 * n_used + k] == -7, "past a row's end");
        }
    }
}

/* The experts of tokens: a row without a token chooses by its scores, an id that no expert has gives weights that are NaN. */
static void test_route_of_tokens() {
    enum { V = 4 };
    static const uint32_t counts[] = {3, 64, 300}, gating[] = {0, RF_OP_SIGMOID, RF_OP_CHOSEN, RF_OP_SQRT_SOFTPLUS};
    std::vector<Row> list = combinations(std::vector<int>{3, 4, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = counts[r[0]], n_used = 3, T = V + 1;
        Rig g(devices[(size_t)r[3]]);
        const uint32_t in = g.buffer(n), out = g.buffer(2 * n_used);
        std::vector<int32_t> ids;
        for (uint32_t k = 0; k < V * n_used; k++) ids.push_back((int32_t)((k * 7 + k / 3) % n));
        ids[n_used] = (int32_t)n, ids[2 * n_used + 1] = -5; /* of tokens 1 and 2 */
        std::vector<uint8_t> bytes(ids.size() * 4);
        memcpy(bytes.data(), ids.data(), bytes.size());
        rf_op *o = g.op(RF_OP_ROUTE);
        o->in = in, o->out = out, o->route.n_experts = n, o->route.n_used = n_used, o->route.scale = 1.5f;
        o->flags = gating[r[1]] | (r[2] ? (uint32_t)RF_OP_NORMALIZE : 0), o->factor = g.weight(RF_TYPE_I32, n_used, V, bytes);
        g.plan.n_vocab = V;
        const rf_op op = *o;
        REQUIRE(g.open(T) == RF_OK, "%s", g.err.text);
        const std::vector<float> x = values((size_t)T * n);
        std::vector<rf_step_row> rows = rows_of(T);
        for (uint32_t t = 0; t < T; t++) rows[t].token = t < V ? (int32_t)t : -1;
        g.set(in, x);
        REQUIRE(g.run(rows, std::vector<uint32_t>(), 0, x.data()) == RF_OK, "%s", g.err.text);
        const std::vector<float> y = g.get(out);
        for (uint32_t t = 0; t < T; t++) {
            std::vector<int32_t> fixed(ids.begin() + (t < V ? t : 0) * n_used, ids.begin() + (t < V ? t + 1 : 1) * n_used);
            const bool bad = t == 1 || t == 2;
            for (uint32_t k = 0; k < n_used; k++) fixed[k] = (uint32_t)fixed[k] < n ? fixed[k] : 0;
            const std::vector<double> want = routed(op, &x[t * n], NULL, t < V ? fixed.data() : NULL);
            for (uint32_t k = 0; k < n_used; k++) {
                const float w = y[t * 2 * n_used + n_used + k];
                uint32_t id;
                memcpy(&id, &y[t * 2 * n_used + k], 4);
                CHECK(id == want[k], "token %u, flags %x: choice %u is %u, want %g", t, op.flags, k, id, want[k]);
                const bool own = bad && k == (t == 1 ? 0u : 1u), all = bad && op.flags & (RF_OP_NORMALIZE | RF_OP_CHOSEN);
                CHECK(own ? std::isnan(w) : all || fabs(w - want[n_used + k]) <= 3e-6, "token %u, flags %x: weight %u is %g, want %g",
                      t, op.flags, k, (double)w, want[n_used + k]);
            }
        }
    }
}

struct ExpertsCase {
    uint32_t type, n_in, n_out, T, n_used, n_experts, device;
    bool per_choice, bias, glu, factor; /* factor: and rows from the second on */
    bool uneven;                        /* every row chooses the first expert, none the last */
    bool part;                          /* the first expert is another member's: it is not there, its results are 0 */
};

/* Logits of T rows. */
static std::vector<float> router(uint32_t T, uint32_t n_experts, bool uneven) {
    std::vector<float> v = values((size_t)T * n_experts);
    for (uint32_t t = 0; uneven && t < T; t++) v[(size_t)t * n_experts] = 9, v[(size_t)(t + 1) * n_experts - 1] = -9;
    return v;
}

/* A route of our making, the product of its experts, after a GLU that quantizes for it or not; then their mix. */
static void experts_case(const ExpertsCase &c) {
    char what[160];
    snprintf(what, sizeof what, "experts %s n_in %u n_out %u rows %u, %u of %u, device %u", type_name(c.type), c.n_in,
             c.n_out, c.T, c.n_used, c.n_experts, c.device);
    uint32_t width_in = c.n_in * (c.per_choice ? c.n_used : 1), width = c.n_used * c.n_out, pad = c.glu ? 0 : 5;
    Rig g(devices[c.device]);
    uint32_t in = g.buffer(width_in + pad), up = g.buffer(width_in), route = g.buffer(2 * c.n_used + 1),
             y = g.buffer(width + 3), logits = g.buffer(c.n_experts), x = g.buffer(c.n_out + 1),
             share = g.buffer(c.n_used + 1), shared = g.buffer(c.n_out), plain = g.buffer(c.n_out);
    const uint32_t row0 = c.factor ? 1 : 0, n_rows = c.n_out + row0;
    std::vector<uint8_t> w = random_rows(c.type, c.n_in, n_rows * c.n_experts);
    std::vector<float> b = values((size_t)c.n_experts * c.n_out), factors = values(c.n_experts);
    rf_op *o = g.op(RF_OP_ROUTE);
    o->in = logits, o->out = route, o->route.n_experts = c.n_experts, o->route.n_used = c.n_used;
    uint32_t weight = (uint32_t)g.weights.size(), twice = g.buffer(width);
    g.weight(c.type, c.n_in, n_rows, w, c.n_experts);
    uint32_t bias = g.weight(RF_TYPE_F32, c.n_out, c.n_experts, std::vector<uint8_t>((uint8_t *)b.data(), (uint8_t *)(b.data() + b.size())));
    const uint32_t factor = c.factor ? g.vector(factors) : RF_NONE;
    for (int k = 0; k < 2; k++) { /* the second finds the input as the first left it */
        if (k == 0 && c.glu) g.glu(in, up, in, width_in);
        o = g.op(RF_OP_EXPERTS);
        o->in = in, o->in2 = route, o->out = k ? twice : y, o->weight = weight, o->factor = factor;
        o->experts.n_in = c.n_in, o->experts.n_out = c.n_out, o->experts.first_row = row0;
        o->experts.n_experts = c.n_experts, o->experts.n_used = c.n_used;
        o->flags = c.per_choice ? (uint32_t)RF_OP_PER_CHOICE : 0;
        if (c.bias) o->bias = bias;
        if (c.part) o->experts.first_own = 1, o->experts.n_own = c.n_experts - 1;
    }
    if (c.part) g.missing = g.weights[weight].slot;
    o = g.op(RF_OP_MIX);
    o->in = twice, o->in2 = route, o->out = x, o->mix.n = c.n_out, o->mix.n_used = c.n_used;
    o->mix.scale = c.bias ? 0.5f : 0, o->flags = c.bias ? (uint32_t)RF_OP_ACCUMULATE : 0;
    rf_op mix = *o;
    o = g.op(RF_OP_MIX); /* the same by weights of 1 */
    *o = mix;
    o->in2 = RF_NONE, o->out = plain, o->flags = 0;
    o = g.op(RF_OP_MIX); /* the same by weights that are no route's */
    *o = mix;
    o->in2 = share, o->out = shared, o->flags = RF_OP_SIGMOID;
    rf_result r = g.open(c.T, 1, c.T < 128 ? 128 : c.T);
    REQUIRE(r == RF_OK, "%s: %s", what, g.err.text);
    std::vector<float> v = values((size_t)c.T * (width_in + pad)), u = values((size_t)c.T * width_in),
                       before = values((size_t)c.T * (width + 3)), old = values((size_t)c.T * (c.n_out + 1)),
                       shares = values((size_t)c.T * (c.n_used + 1));
    g.set(share, shares);
    g.set(in, v), g.set(up, u), g.set(y, before), g.set(x, old);
    g.set(logits, router(c.T, c.n_experts, c.uneven));
    REQUIRE(g.run(rows_of(c.T)) == RF_OK, "%s: %s", what, g.err.text);
    std::vector<float> found = g.get(y), again = g.get(twice), chosen = g.get(route), input = g.get(in);
    std::vector<double> wd = decode(c.type, w), want, sum, sum2, sum3;
    double typical = 0, typical3 = 0;
    std::vector<Seen> seen; /* by choice; if there is one vector a row, all are that */
    for (uint32_t k = 0; k < (c.per_choice ? c.n_used : 1); k++)
        seen.push_back(Seen(c.device, c.type, &input[k * c.n_in], c.n_in, c.T, width_in + pad, true));
    for (uint32_t t = 0; t < c.T; t++) {
        std::vector<double> mix(c.n_out, 0), mix2(c.n_out, 0), mix3(c.n_out, 0);
        for (uint32_t k = 0; k < c.n_used; k++) {
            uint32_t id;
            memcpy(&id, &chosen[t * (2 * c.n_used + 1) + k], 4);
            REQUIRE(id < c.n_experts, "%s: expert %u", what, id);
            const double *xd = &seen[c.per_choice ? k : 0].x[(size_t)t * c.n_in];
            for (uint32_t i = 0; i < c.n_out; i++) {
                double dot = 0, squares = 0;
                for (uint32_t j = 0; j < c.n_in; j++) {
                    const double term = wd[((size_t)id * n_rows + row0 + i) * c.n_in + j] * xd[j];
                    dot += term, squares += term * term;
                }
                const double share = 1 / (1 + exp(-(double)shares[t * (c.n_used + 1) + k])), by = c.factor ? factors[id] : 1;
                dot = c.part && id == 0 ? 0 : dot * by + (c.bias ? b[(size_t)id * c.n_out + i] : 0);
                want.push_back(dot);
                typical = fmax(typical, sqrt(squares) * fabs(by) * share * (c.bias ? 0.5 : 1));
                typical3 = fmax(typical3, sqrt(squares) * fabs(by) * (c.bias ? 0.5 : 1));
                mix2[i] += dot * share;
                mix3[i] += dot * (c.bias ? 0.5 : 1);
                mix[i] += (double)chosen[t * (2 * c.n_used + 1) + c.n_used + k] * dot;
            }
        }
        for (uint32_t i = 0; i < 3; i++) want.push_back(before[(size_t)t * (width + 3) + width + i]);
        for (uint32_t i = 0; i < c.n_out; i++) sum.push_back(c.bias ? old[t * (c.n_out + 1) + i] + 0.5 * mix[i] : mix[i]);
        sum.push_back(old[t * (c.n_out + 1) + c.n_out]);
        for (uint32_t i = 0; i < c.n_out; i++) sum2.push_back(c.bias ? 0.5 * mix2[i] : mix2[i]);
        sum3.insert(sum3.end(), mix3.begin(), mix3.end());
    }
    const double most = seen[0].tolerance, nmse = seen[0].nmse;
    compare(found, want, most, nmse, what);
    compare(g.get(x), sum, most, nmse, what);
    compare(g.get(shared), sum2, most, nmse, what, typical);
    compare(g.get(plain), sum3, most, nmse, what, typical3);
    for (uint32_t t = 0; t < c.T; t++)
        CHECK(!memcmp(&found[t * (width + 3)], &again[(size_t)t * width], width * 4), "%s: the same product gives other bits",
              what);
}

static void test_experts() {
    static const uint32_t outs[] = {1, 3, 64, 130}, Ts[] = {1, 3, 9, 20}, used[] = {1, 2, 5}, counts[] = {1, 3, 16};
    const int n_types = (int)(sizeof types / sizeof types[0]);
    std::vector<Row> list = combinations(std::vector<int>{n_types, 3, 4, 4, 3, 3, 16, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        static const uint32_t odd[] = {1, 40, 264};
        ExpertsCase c;
        c.type = types[r[0]];
        c.n_in = is_float(c.type) ? odd[r[1]] : block_elements(c.type) * (uint32_t)(1 + 2 * r[1]);
        c.n_out = outs[r[2]], c.T = Ts[r[3]], c.n_experts = counts[r[5]];
        c.n_used = used[r[4]] < c.n_experts ? used[r[4]] : c.n_experts;
        c.device = (uint32_t)r[7];
        c.per_choice = r[6] & 1, c.bias = (r[6] & 2) != 0, c.glu = (r[6] & 4) != 0, c.factor = (r[6] & 8) != 0;
        c.uneven = false;
        c.part = i % 3 == 0 && c.n_experts > 1;
        experts_case(c);
    }
}

/* Enough pairs for tiles: experts of more than a tile, of a part of one, of none; more experts than rows. Wave sizes by
 * turns. */
static void test_expert_tiles() {
    for (uint32_t d = 0; d < devices.size(); d++)
        for (size_t t = 1; t < N_TYPES; t += stride) {
            const uint32_t block = block_elements(types[t]), n = block == 1 ? 96 : block == 32 ? 160 : block;
            ExpertsCase many = {types[t], n, 65, 70, 2, 3, d, t % 4 < 2, t % 3 == 0, false, t % 3 == 1, true, t % 2 == 0},
                        few = {types[t], n, 5, 7, 4, 8, d, t % 4 >= 2, t % 3 == 1, true, t % 3 == 2, true, t % 2 == 1};
            const bool turn = (t + d) % 2 == 0;
            if (turn || full || devices.size() == 1) experts_case(many);
            if (!turn || full || devices.size() == 1) experts_case(few);
        }
}

/* A mixture with shared experts and their gate, of experts [first, first + n), and of a part of the shared columns. */
struct MixtureCase {
    uint32_t type, n_in, n_ff, n_used, n_experts, n_shared, device, T;
    bool bias, grouped; /* grouped: the choice has a launch of its own */
};
struct MixtureInputs {
    std::vector<uint8_t> w[3], shared[3];
    std::vector<float> b[3], x, logits, share, old;
};
static std::vector<float> mixture_part(const MixtureCase &c, const MixtureInputs &i, uint32_t first, uint32_t n,
                                       bool accumulate, bool shared) {
    Rig g(devices[c.device]);
    const uint32_t x = g.buffer(c.n_in), logits = g.buffer(c.n_experts), route = g.buffer(2 * c.n_used), share = g.buffer(1),
                   gates = g.buffer(c.n_used * c.n_ff), ups = g.buffer(c.n_used * c.n_ff), downs = g.buffer(c.n_used * c.n_in),
                   out = g.buffer(c.n_in), gate = g.buffer(c.n_shared), up = g.buffer(c.n_shared), z = g.buffer(c.n_in);
    rf_op *o = g.op(RF_OP_ROUTE);
    o->in = logits, o->out = route, o->route.n_experts = c.n_experts, o->route.n_used = c.n_used;
    if (c.grouped) o->route.n_groups = 2, o->route.n_groups_used = 2;
    const uint32_t in[3] = {x, x, gates}, to[3] = {gates, ups, downs};
    for (int k = 0; k < 3; k++) {
        const uint32_t n_in = k < 2 ? c.n_in : c.n_ff, n_out = k < 2 ? c.n_ff : c.n_in;
        if (k == 2) g.glu(gates, ups, gates, c.n_used * c.n_ff);
        o = g.op(RF_OP_EXPERTS);
        o->in = in[k], o->in2 = route, o->out = to[k], o->flags = k < 2 ? 0 : (uint32_t)RF_OP_PER_CHOICE;
        o->weight = g.weight(c.type, n_in, n_out, i.w[k], c.n_experts);
        o->experts.n_in = n_in, o->experts.n_out = n_out, o->experts.n_experts = c.n_experts, o->experts.n_used = c.n_used;
        if (n < c.n_experts) o->experts.first_own = first, o->experts.n_own = n;
        if (c.bias) o->bias = g.weight(RF_TYPE_F32, n_out, c.n_experts, std::vector<uint8_t>((const uint8_t *)i.b[k].data(), (const uint8_t *)(i.b[k].data() + i.b[k].size())));
    }
    o = g.op(RF_OP_MIX);
    o->in = downs, o->in2 = route, o->out = out, o->mix.n = c.n_in, o->mix.n_used = c.n_used;
    o->flags = accumulate ? (uint32_t)RF_OP_ACCUMULATE : 0;
    if (shared) {
        const uint32_t sg = g.weight(c.type, c.n_in, c.n_shared, i.shared[0]), su = g.weight(c.type, c.n_in, c.n_shared, i.shared[1]),
                       sd = g.weight(c.type, c.n_shared, c.n_in, i.shared[2]);
        g.matmul(x, gate, c.n_in, c.n_shared, sg), g.matmul(x, up, c.n_in, c.n_shared, su);
        g.glu(gate, up, gate, c.n_shared);
        g.matmul(gate, z, c.n_shared, c.n_in, sd);
        o = g.op(RF_OP_MIX);
        o->in = z, o->in2 = share, o->out = out, o->mix.n = c.n_in, o->mix.n_used = 1;
        o->flags = RF_OP_ACCUMULATE | RF_OP_SIGMOID;
    }
    const uint32_t slot = n < c.n_experts ? g.weights[0].slot + (first + n) % c.n_experts : RF_NONE;
    g.missing = slot; /* another member's */
    rf_result r = g.open(c.T, 1, 64);
    if (r == RF_OK) g.set(x, i.x), g.set(logits, i.logits), g.set(share, i.share), g.set(out, i.old);
    if (r == RF_OK) r = g.run(rows_of(c.T));
    CHECK(r == RF_OK, "%s", g.err.text);
    return r == RF_OK ? g.get(out) : std::vector<float>();
}

/* Members' parts of a mixture add up to the whole. Rows choose experts of one member, of the other, and of both. */
static void test_mixture_parts() {
    static const uint32_t kinds[] = {RF_TYPE_Q4_K, RF_TYPE_Q8_0, RF_TYPE_MXFP4, RF_TYPE_Q6_K, RF_TYPE_F16, RF_TYPE_IQ4_XS};
    for (uint32_t k = 0; k < sizeof kinds / sizeof *kinds * 2; k++) {
        const bool large = kinds[k / 2] == RF_TYPE_Q8_0; /* down reads more than its block quantizes at once */
        const uint32_t type = kinds[k / 2], block = block_elements(type), wide = large ? 512 : block < 64 ? 128 : block;
        const MixtureCase c = {type, wide, wide, large ? 8u : 3u, 8, wide, k % (uint32_t)devices.size(), k % 2 ? 5u : 1u + k / 2 % 2, k % 3 == 1, k % 4 == 3};
        MixtureInputs i;
        for (int j = 0; j < 3; j++) {
            i.w[j] = random_rows(type, wide, wide * c.n_experts), i.shared[j] = random_rows(type, wide, wide);
            i.b[j] = values((size_t)c.n_experts * wide);
        }
        i.x = values((size_t)c.T * wide), i.share = values(c.T), i.old = values((size_t)c.T * wide);
        for (uint32_t t = 0; t < c.T; t++)
            for (uint32_t e = 0; e < c.n_experts; e++) /* row 0: the last three, 1: the first three, later ones: some of both */
                i.logits.push_back((t == 0 ? (float)e : t == 1 ? -(float)e : (float)(e * 5 % 8)) / 4);
        const std::vector<float> whole = mixture_part(c, i, 0, 8, true, true), a = mixture_part(c, i, 0, 5, true, false),
                                 b = mixture_part(c, i, 5, 3, false, true);
        REQUIRE(whole.size() == a.size() && a.size() == b.size() && !whole.empty(), "no results");
        std::vector<double> sum;
        std::vector<float> parts;
        for (size_t j = 0; j < a.size(); j++) sum.push_back(whole[j]), parts.push_back(a[j] + b[j]);
        char what[80];
        snprintf(what, sizeof what, "parts of a mixture of %s, %u rows, device %u", type_name(type), c.T, c.device);
        compare(parts, sum, FLOAT_TOLERANCE, NMSE_TOLERANCE, what);
    }
}

/* What a row's experts give is the same bits in a step of other rows, and has no number in it if they are not there. */
static void expert_groups_case(uint32_t type, uint32_t device) {
    const uint32_t n_in = 256, n_out = 70, T = 150, part = 40, n_used = 3, n_experts = 6, missing = 0;
    Rig g(devices[device]);
    uint32_t in = g.buffer(n_in), route = g.buffer(2 * n_used), out = g.buffer(n_used * n_out),
             logits = g.buffer(n_experts), absent = 0;
    rf_op *o = g.op(RF_OP_ROUTE);
    o->in = logits, o->out = route, o->route.n_experts = n_experts, o->route.n_used = n_used;
    o = g.op(RF_OP_EXPERTS);
    o->in = in, o->in2 = route, o->out = out, o->weight = 0, o->experts.n_in = n_in, o->experts.n_out = n_out;
    o->experts.n_experts = n_experts, o->experts.n_used = n_used;
    g.weight(type, n_in, n_out, random_rows(type, n_in, n_out * n_experts), n_experts);
    g.missing = missing;
    REQUIRE(g.open(T, 1, 256) == RF_OK, "%s", g.err.text);
    std::vector<float> x = values((size_t)T * n_in), scores = router(T, n_experts, true);
    g.set(in, x), g.set(logits, scores);
    REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
    std::vector<float> all = g.get(out), chosen = g.get(route);
    for (uint32_t p = 0; p < T * n_used; p++) {
        uint32_t id, numbers = 0;
        memcpy(&id, &chosen[p / n_used * 2 * n_used + p % n_used], 4);
        for (uint32_t k = 0; k < n_out; k++) numbers += !std::isnan(all[(size_t)p * n_out + k]);
        absent += id == missing;
        CHECK(numbers == (id == missing ? 0 : n_out), "%s, pair %u of expert %u: %u numbers", type_name(type),
              p, id, numbers);
    }
    CHECK(absent == T, "%u pairs of the expert that is not there", absent);
    g.set(in, std::vector<float>(x.begin() + (T - part) * n_in, x.end()));
    g.set(logits, std::vector<float>(scores.begin() + (T - part) * n_experts, scores.end()));
    REQUIRE(g.run(rows_of(part)) == RF_OK, "%s", g.err.text);
    std::vector<float> again = g.get(out);
    CHECK(!memcmp(&again[0], &all[(size_t)(T - part) * n_used * n_out], (size_t)part * n_used * n_out * 4),
          "%s: in other company a row's experts give other bits", type_name(type));
}
static void test_expert_groups() {
    static const uint32_t kinds[] = {RF_TYPE_Q4_K, RF_TYPE_Q6_K, RF_TYPE_F16, RF_TYPE_BF16, RF_TYPE_IQ2_S};
    for (uint32_t i = 0; i < sizeof kinds / sizeof *kinds; i++) expert_groups_case(kinds[i], i % (uint32_t)devices.size());
}

/* Value k of a row of n keys or values. */
static double state_value(const std::vector<uint8_t> &s, uint64_t base, uint64_t row, uint32_t n, uint32_t k, uint32_t cache) {
    const uint64_t at = base + row * row_bytes(cache, n);
    float f;
    if (cache == RF_CACHE_F16) return half_value(rd16(&s[at + 2 * k]));
    if (cache == RF_CACHE_Q8_0) return (double)(int8_t)s[at + k] * half_value(rd16(&s[at + n + k / 32 * 2]));
    memcpy(&f, &s[at + 4 * k], 4);
    return f;
}
static void put_state(std::vector<uint8_t> &s, uint64_t base, uint64_t row, uint32_t n, uint32_t k, uint32_t cache, float f) {
    const uint64_t at = base + row * row_bytes(cache, n);
    if (cache == RF_CACHE_F16) put_half(&s[at + 2 * k], f);
    else if (cache == RF_CACHE_F32) memcpy(&s[at + 4 * k], &f, 4);
    else s[at + k] = (uint8_t)(int8_t)(isnan(f) ? 77 : f * 84);
    if (cache == RF_CACHE_Q8_0 && k % 32 == 0) put_half(&s[at + n + k / 16], 0.004f + 0.01f * fabsf(f));
}
/* What a step stored of n values: 32 of a scale, none of them off by more than half a step. */
static bool is_q8_of(const uint8_t *row, const float *x, uint32_t n) {
    bool good = true;
    for (uint32_t g = 0; g < n; g += 32) {
        float most = 0;
        uint8_t scale[2];
        for (uint32_t i = g; i < g + 32; i++) most = fmaxf(most, fabsf(x[i]));
        const double step = most / 127;
        put_half(scale, most / 127);
        good = good && rd16(scale) == rd16(row + n + g / 16);
        for (uint32_t i = g; i < g + 32; i++) good = good && fabs(x[i] - (int8_t)row[i] * step) <= 0.500001 * step;
    }
    return good;
}

static void test_kv_store() {
    static const uint32_t dims[] = {32, 40, 42, 128, 256}, heads[] = {1, 2, 5};
    std::vector<Row> list = combinations(std::vector<int>{5, 5, 3, 3, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        bool ring = r[0] == 0; /* of 256 cells, with positions beyond them */
        uint32_t dk = dims[r[0]], dv = dims[r[1]], h = heads[r[2]], cache = (uint32_t)r[3], n_ctx = ring ? 1000 : 9, n_seq = 3,
                 n_cells = ring ? 256 : 9;
        if (cache == RF_CACHE_Q8_0 && (dk % 32 || dv % 32)) continue;
        const bool latent = r[4]; /* k and v are parts of one key */
        Rig g(devices[(size_t)r[5]]);
        uint32_t k = g.buffer(h * dk + 1), v = g.buffer(h * dv);
        if (latent) g.kv_store(k, v, g.state(h, dk + dv, 0, ring ? 3 : 0), h, dk + dv, dk)->flags = RF_OP_MLA;
        else g.kv_store(k, v, g.state(h, dk, dv, ring ? 3 : 0), h, dk, dv);
        std::vector<rf_step_row> rows;
        static const int32_t places[][2] = {{0, 0}, {2, 7}, {2, 8}, {1, 3}, {0, 8}};
        for (size_t t = 0; t < 5; t++) {
            rf_step_row row = {0, places[t][0], places[t][1] * (ring ? 111 : 1), -1};
            rows.push_back(row);
        }
        REQUIRE(g.open(5, 1, n_ctx, n_seq, cache, n_cells) == RF_OK, "%s", g.err.text);
        std::vector<float> x = values(5 * (h * dk + 1)), y = values(5 * h * dv);
        for (size_t j = 0; j < y.size(); j++)
            y[j] =
                ldexpf(y[j], -(int)(rnd() % 30)) * (j % 11 == 0 ? 65520.0f : 1.0f); /* subnormal halves, infinity */
        y[0] = 65519.0f, y[1] = ldexpf(1, -25), y[2] = ldexpf(3, -25), y[3] = 1.00048828125f,
        y[4] = 1.00146484375f; /* ties and the largest half */
        g.set(k, x), g.set(v, y);
        rf_ticket ticket;
        REQUIRE(api->mem_fill(g.queue, &g.bind.state, 0, 0xab, g.bind.state.size_bytes, &ticket, &g.err) == RF_OK &&
                    g.run(rows) == RF_OK,
                "%s", g.err.text);
        std::vector<uint8_t> found(g.bind.state.size_bytes), want(g.bind.state.size_bytes, 0xab);
        REQUIRE(api->mem_read(g.queue, &g.bind.state, 0, found.data(), found.size(), &ticket, &g.err) == RF_OK, "%s",
                g.err.text);
        uint64_t v_base = latent ? 0 : ((uint64_t)n_seq * h * n_cells * row_bytes(cache, dk) + 255) / 256 * 256;
        bool good = true;
        for (size_t t = 0; t < 5; t++)
            for (uint32_t head = 0; head < h; head++) {
                uint64_t cell = ((uint64_t)rows[t].seq * h + head) * n_cells + (uint64_t)rows[t].pos % n_cells;
                const uint32_t widths[2] = {latent ? dk + dv : dk, latent ? 0 : dv}; /* of rows */
                std::vector<float> values(dk + dv);
                for (uint32_t j = 0; j < dk + dv; j++)
                    values[j] = j < dk ? x[t * (h * dk + 1) + head * dk + j] : y[t * h * dv + head * dv + j - dk];
                for (int part = 0; part < 2; part++) {
                    const uint32_t n = widths[part], first = part ? dk : 0;
                    const uint64_t base = part ? v_base : 0, at = base + cell * row_bytes(cache, n);
                    for (uint32_t j = 0; j < n && cache != RF_CACHE_Q8_0; j++)
                        put_state(want, base, cell, n, j, cache, values[first + j]);
                    if (cache != RF_CACHE_Q8_0 || n == 0) continue;
                    good = good && is_q8_of(&found[at], &values[first], n);
                    memcpy(&want[at], &found[at], row_bytes(cache, n));
                }
            }
        CHECK(good && found == want, "kv_store %u %u heads %u cache %u latent %d", dk, dv, h, cache, latent);
    }
}

struct AttentionCase {
    uint32_t group, n_kv_heads, dk, dv, length, n_rows, cache, mixed, device, window, special; /* softcap, temperature, sinks, slopes */
    bool latent, ring;
    bool both;     /* to later positions, too                              */
    uint32_t unit; /* only to listed blocks of so many positions; 0: to all */
    uint32_t dense; /* with unit: rows at positions below attend to all        */
};

static void attention_case(const AttentionCase &c) {
    char what[200];
    snprintf(what, sizeof what,
             "attention group %u kv heads %u dims %u %u length %u rows %u cache %u mixed %u device %u window %u special %u%s%s",
             c.group, c.n_kv_heads, c.dk, c.dv, c.length, c.n_rows, c.cache, c.mixed, c.device, c.window, c.special,
             c.latent ? " latent" : "", c.ring ? " ring" : "");
    uint32_t heads = c.group * c.n_kv_heads, n_ctx = c.length, n_seq = c.mixed ? 2 : 1;
    Rig g(devices[c.device]);
    uint32_t q = g.buffer(heads * c.dk + 1), out = g.buffer(heads * c.dv + 2);
    const uint32_t kept = g.state(c.n_kv_heads, c.dk, c.latent ? 0 : c.dv, c.window);
    rf_op *o = g.attention(q, out, kept, heads, c.n_kv_heads, c.dk);
    o->attention.head_dim_v = c.dv, o->attention.window = c.window;
    if (c.latent) o->flags = RF_OP_MLA;
    if (c.both) o->flags |= RF_OP_BOTH_WAYS;
    const uint32_t n_listed = c.unit ? c.length / c.unit + 2 : 0;
    if (c.unit)
        o->in2 = g.buffer(n_listed), o->attention.n_lists = 1, o->attention.n_listed = n_listed, o->attention.list_unit = c.unit,
        o->attention.n_dense = c.dense;
    if (c.special & 1) o->attention.softcap = 2.5f;
    if (c.special & 2) o->attention.temperature = 0.3f, o->attention.temperature_length = 20;
    std::vector<float> sinks = values(heads);
    if (c.special & 4) o->weight = g.vector(sinks);
    if (c.special & 8) o->attention.slopes = 0;
    for (uint32_t h = 0; h < heads; h++) g.tables.push_back(ldexpf(1, -(int)(h % 9)));
    /* rows: the last positions of sequence 0, or two sequences in turn of three rows */
    std::vector<rf_step_row> rows;
    uint32_t T = c.n_rows < c.length ? c.n_rows : c.length;
    for (uint32_t t = 0; t < T; t++) {
        rf_step_row row = {0, c.mixed ? (int32_t)(t / 3 % 2) : 0, (int32_t)(c.length - T + t), -1};
        rows.push_back(row);
    }
    uint32_t n_cells = c.ring && c.window ? (c.window + T - 1 + 255) / 256 * 256 : n_ctx;
    if (n_cells > n_ctx) n_cells = n_ctx;
    REQUIRE(g.open(T, 1, n_ctx, n_seq, c.cache, n_cells) == RF_OK, "%s: %s", what, g.err.text);
    std::vector<float> x = values((size_t)T * (heads * c.dk + 1)), before((size_t)T * (heads * c.dv + 2), 7);
    g.set(q, x), g.set(out, before);
    /* two blocks of three, the last of them cut off by the row's own position */
    std::vector<float> lists((size_t)T * n_listed);
    for (uint32_t t = 0; c.unit && t < T; t++)
        for (uint32_t k = 0, e = 0; k < n_listed; k++, e++) {
            while (e % 3 == t % 3 && e * c.unit <= (uint32_t)rows[t].pos) e++;
            const int32_t id = e * c.unit <= (uint32_t)rows[t].pos ? (int32_t)e : -1;
            memcpy(&lists[t * n_listed + k], &id, 4);
        }
    if (c.unit) g.set(o->in2, lists);
    uint64_t cells = (uint64_t)n_seq * c.n_kv_heads * n_cells, v_base = (cells * row_bytes(c.cache, c.dk) + 255) / 256 * 256;
    const uint32_t v_row = c.latent ? c.dk : c.dv; /* values in rows of keys, or in rows of their own */
    std::vector<uint8_t> state(g.bind.state.size_bytes, 0);
    if (c.latent) v_base = 0;
    for (int part = 0; part < (c.latent ? 1 : 2); part++)
        for (uint64_t row = 0; row < cells; row++) {
            /* cells of a ring that no row sees hold what they may */
            const uint64_t first = (uint64_t)(c.length - T + 1 - c.window) % n_cells;
            bool stale = n_cells < n_ctx && (row % n_cells + n_cells - first) % n_cells >= T + c.window - 1;
            for (uint32_t k = 0, n = part ? c.dv : c.dk; k < n; k++)
                put_state(state, part ? v_base : 0, row, n, k, c.cache, stale ? NAN : uniform(-1.5f, 1.5f));
        }
    rf_ticket ticket;
    REQUIRE(api->mem_write(g.queue, &g.bind.state, 0, state.data(), state.size(), &ticket, &g.err) == RF_OK &&
                g.run(rows) == RF_OK,
            "%s: %s", what, g.err.text);
    std::vector<double> want(before.begin(), before.end()), p;
    for (uint32_t t = 0; t < T; t++)
        for (uint32_t h = 0; h < heads; h++) {
            uint64_t cell0 = ((uint64_t)rows[t].seq * c.n_kv_heads + h / c.group) * n_cells;
            const uint32_t own = (uint32_t)rows[t].pos;
            uint32_t n = own + 1;
            for (uint32_t k = t; c.both && k < T; k++)
                if (rows[k].seq == rows[t].seq) n = (uint32_t)rows[k].pos + 1;
            double largest = c.special & 4 ? (double)sinks[h] : -INFINITY, sum = 0;
            p.assign(n, 0);
            for (uint32_t i = 0; i < n; i++) {
                const uint32_t far = i > own ? i - own : own - i;
                if ((c.window && far > (c.both ? c.window / 2 : c.window - 1)) || (c.unit && own >= c.dense && i / c.unit % 3 == t % 3)) {
                    p[i] = -INFINITY;
                    continue;
                }
                for (uint32_t k = 0; k < c.dk; k++)
                    p[i] += (double)x[(size_t)t * (heads * c.dk + 1) + (size_t)h * c.dk + k] *
                            state_value(state, 0, cell0 + i % n_cells, c.dk, k, c.cache);
                p[i] *= o->attention.scale;
                if (c.special & 2) p[i] *= 1 + (double)0.3f * log(1 + floor(rows[t].pos / 20.0));
                if (c.special & 1) p[i] = 2.5 * tanh(p[i] / 2.5);
                if (c.special & 8) p[i] -= g.tables[h] * (double)far;
                largest = fmax(largest, p[i]);
            }
            for (uint32_t i = 0; i < n; i++) sum += p[i] = exp(p[i] - largest);
            if (c.special & 4) sum += exp(sinks[h] - largest);
            double *y = &want[(size_t)t * (heads * c.dv + 2) + (size_t)h * c.dv];
            for (uint32_t k = 0; k < c.dv; k++) {
                y[k] = 0;
                for (uint32_t i = 0; i < n; i++)
                    if (p[i] > 0) y[k] += p[i] / sum * state_value(state, v_base, cell0 + i % n_cells, v_row, k, c.cache);
            }
        }
    std::vector<float> y = g.get(out);
    compare(y, want, FLOAT_TOLERANCE, NMSE_TOLERANCE, what);
    CHECK(g.run(rows) == RF_OK && same_bits(y, g.get(out)), "%s: a repeated run gives other bits", what);
    if (!c.unit) return;
    /* the last row alone, whose heads may lie in more blocks */
    g.set(q, std::vector<float>(x.end() - (heads * c.dk + 1), x.end()));
    g.set(o->in2, std::vector<float>(lists.end() - n_listed, lists.end()));
    CHECK(g.run(std::vector<rf_step_row>(1, rows.back())) == RF_OK, "%s: %s", what, g.err.text);
    const std::vector<float> alone = g.get(out), last(y.end() - (heads * c.dv + 2), y.end());
    CHECK(same_bits(std::vector<float>(alone.begin(), alone.begin() + heads * c.dv), std::vector<float>(last.begin(), last.end() - 2)),
          "%s: a row alone gives other bits", what);
}

/* To later positions too, as encoders do, and to listed positions only. */
static void test_attention_both_ways_and_lists() {
    static const uint32_t groups[] = {1, 3}, dims[] = {32, 64, 7}, lengths[] = {1, 33, 257, 700}, windows[] = {0, 9}, units[] = {1, 16, 128};
    std::vector<Row> list = combinations(std::vector<int>{2, 3, 4, 2, 2, 2, n_devices, 4, 2}, false);
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t unit = r[7] ? units[r[7] - 1] : 0, dim = dims[r[1]];
        AttentionCase c = {groups[r[0]], 2, dim, dim, lengths[r[2]], 19, (uint32_t)r[5], (uint32_t)r[4], (uint32_t)r[6],
                           unit ? 0 : windows[r[3]], unit ? 4u : r[8] ? 8u : 0u, false, false, unit == 0, unit, i % 4 == 1 ? 9u : 0u};
        if (unit && c.length < 3) continue; /* nothing is listed */
        if (dim % 32 == 0 && i % 3 == 0) c.cache = RF_CACHE_Q8_0;
        attention_case(c);
    }
    AttentionCase latent = {4, 1, 96, 64, 300, 9, RF_CACHE_F32, 0, 0, 0, 0, true, false, false, 4},
                  many = {20, 1, 576, 512, 70, 9, RF_CACHE_F16, 0, 0, 0, 0, true, false, false, 4}; /* heads for three blocks */
    for (uint32_t d = 0; d < (uint32_t)n_devices; d++) {
        latent.device = many.device = d;
        attention_case(latent), attention_case(many);
    }
}

/* To positions in a window and to blocks, all of them or listed ones, of which only every so many positions' rows are kept. */
static void test_attention_to_blocks() {
    static const uint32_t heads[] = {1, 4}, dims[] = {32, 20, 512}, windows[] = {1, 9, 0}, units[] = {2, 4, 128};
    std::vector<Row> list = combinations(std::vector<int>{2, 3, 3, 3, 2, 3, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n_heads = heads[r[0]], dim = dims[r[1]], window = windows[r[2]], unit = units[r[3]], step = r[4] ? 23 : 5,
                       cache = r[5] == RF_CACHE_Q8_0 && dim % 32 ? (uint32_t)RF_CACHE_F16 : (uint32_t)r[5], n_ctx = 150, n_seq = 2,
                       n_listed = r[6] ? 4 : 0, n_dense = 3 * unit, n_cells = (n_ctx - 1) / unit + 1;
        char what[160];
        snprintf(what, sizeof what, "attention to blocks of %u, %u heads of %u, window %u, cache %u, listed %u, steps of %u, device %d", unit,
                 n_heads, dim, window, cache, n_listed, step, r[7]);
        Rig g(devices[(size_t)r[7]]);
        const uint32_t q = g.buffer(n_heads * dim + 1), k = g.buffer(dim), b = g.buffer(dim + 3), ids = g.buffer(n_listed + 1),
                       out = g.buffer(n_heads * dim), raw = g.state(1, dim, 0, window), blocks = g.state(1, dim, 0, 0, unit);
        g.kv_store(k, RF_NONE, raw, 1, dim, dim)->flags = RF_OP_MLA;
        g.kv_store(b, RF_NONE, blocks, 1, dim, 0);
        const std::vector<float> sinks = values(n_heads);
        const uint32_t sink = g.vector(sinks);
        rf_op *o = g.attention(q, out, raw, n_heads, 1, dim);
        o->flags = RF_OP_MLA, o->weight = sink, o->attention.window = window;
        o->attention.block_unit = unit, o->attention.blocks = blocks;
        if (n_listed) o->in2 = ids, o->attention.n_lists = 1, o->attention.n_listed = n_listed, o->attention.list_unit = unit, o->attention.n_dense = n_dense;
        const double scale = (double)o->attention.scale;
        REQUIRE(g.open(step, 1, n_ctx, n_seq, cache) == RF_OK, "%s: %s", what, g.err.text);
        std::vector<float> keys[2]; /* of a sequence's blocks */
        int32_t pos[2] = {0, 0};
        for (uint32_t turn = 0; turn < 7; turn++) {
            std::vector<rf_step_row> rows;
            const std::vector<float> x = values(step * (n_heads * dim + 1)), kx = values(step * dim), bx = values(step * (dim + 3));
            std::vector<float> lists(step * (n_listed + 1));
            for (uint32_t t = 0; t < step; t++) {
                const int32_t seq = turn % 3 == 2 && t < step / 2;
                const rf_step_row row = {0, seq, pos[seq]++, -1, 0, 0};
                rows.push_back(row);
                if ((uint32_t)pos[seq] % unit == 0) keys[seq].insert(keys[seq].end(), &bx[t * (dim + 3)], &bx[t * (dim + 3)] + dim);
                uint32_t n = 0;
                for (int32_t id = 0; n + 1 < n_listed && id < pos[seq] / (int32_t)unit; id++)
                    if (id % 3 != (int32_t)t % 3) memcpy(&lists[t * (n_listed + 1) + n++], &id, 4);
                const int32_t own = pos[seq] % (int32_t)unit ? pos[seq] / (int32_t)unit : -1, none = -1;
                if (n_listed && own >= 0) memcpy(&lists[t * (n_listed + 1) + n++], &own, 4); /* not complete */
                while (n < n_listed) memcpy(&lists[t * (n_listed + 1) + n++], &none, 4);
            }
            g.set(q, x), g.set(k, kx), g.set(b, bx), g.set(ids, lists);
            REQUIRE(g.run(rows) == RF_OK, "%s: %s", what, g.err.text);
            std::vector<uint8_t> state(g.bind.state.size_bytes);
            rf_ticket ticket;
            REQUIRE(api->mem_read(g.queue, &g.bind.state, 0, state.data(), state.size(), &ticket, &g.err) == RF_OK, "%s", g.err.text);
            bool kept = true; /* a block's row is that of its last position */
            for (uint32_t seq = 0; seq < 2; seq++)
                for (size_t c = 0; c < keys[seq].size() / dim; c++) {
                    const float *key = &keys[seq][c * dim];
                    const uint64_t row = (uint64_t)seq * n_cells + c, base = g.state_offset[1];
                    if (cache == RF_CACHE_Q8_0) kept = kept && is_q8_of(&state[base + row * row_bytes(cache, dim)], key, dim);
                    for (uint32_t e = 0; cache != RF_CACHE_Q8_0 && e < dim; e++)
                        kept = kept && state_value(state, base, row, dim, e, cache) == (cache == RF_CACHE_F16 ? half_value(to_half(key[e])) : (double)key[e]);
                }
            CHECK(kept, "%s: other rows are kept", what);
            std::vector<double> want(step * n_heads * dim);
            for (uint32_t t = 0; t < step; t++)
                for (uint32_t h = 0; h < n_heads; h++) {
                    const uint32_t n = (uint32_t)rows[t].pos + 1, seq = (uint32_t)rows[t].seq;
                    std::vector<std::pair<uint64_t, uint64_t> > seen; /* base of a state, row */
                    for (uint32_t p = window && n > window ? n - window : 0; p < n; p++) seen.push_back(std::make_pair(g.state_offset[0], (uint64_t)seq * n_ctx + p));
                    for (uint32_t c = 0, at = 0; c < n / unit; c++) {
                        int32_t id = -1;
                        if (at < n_listed) memcpy(&id, &lists[t * (n_listed + 1) + at], 4);
                        const bool listed = id == (int32_t)c;
                        at += listed;
                        if (!n_listed || n <= n_dense || listed) seen.push_back(std::make_pair(g.state_offset[1], (uint64_t)seq * n_cells + c));
                    }
                    double sum = exp(sinks[h]), *y = &want[(t * n_heads + h) * dim];
                    for (size_t j = 0; j < seen.size(); j++) {
                        double dot = 0;
                        for (uint32_t e = 0; e < dim; e++) dot += (double)x[t * (n_heads * dim + 1) + h * dim + e] * state_value(state, seen[j].first, seen[j].second, dim, e, cache);
                        const double w = exp(dot * scale);
                        sum += w;
                        for (uint32_t e = 0; e < dim; e++) y[e] += w * state_value(state, seen[j].first, seen[j].second, dim, e, cache);
                    }
                    for (uint32_t e = 0; e < dim; e++) y[e] /= sum;
                }
            compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, what);
        }
    }
}

static void test_attention() {
    static const uint32_t groups[] = {1, 2, 4, 8, 3, 12}, kv[] = {1, 2},
                          dims[] = {32, 40, 64, 80, 96, 128, 256, 36, 7};
    static const uint32_t lengths[] = {1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025},
                          counts[] = {1, 7, 33};
    static const uint32_t windows[] = {0, 1, 7, 64, 300};
    std::vector<Row> list = combinations(std::vector<int>{6, 2, 9, 2, 14, 3, 2, 2, n_devices, 5, 16}, false);
    if (full) { /* every combination of what is not an option of its own: other value dims, mixed sequences */
        std::vector<Row> more = combinations(std::vector<int>{6, 2, 9, 1, 14, 3, 2, 1, n_devices, 1, 1}, true);
        list.insert(list.end(), more.begin(), more.end());
    }
    for (size_t i = 0; i < list.size(); i += stride) {
        const Row &r = list[i];
        uint32_t dk = dims[r[2]];
        AttentionCase c = {groups[r[0]],
                           kv[r[1]],
                           dk,
                           r[3] ? dims[(r[2] + 3) % 9] : dk,
                           lengths[r[4]],
                           counts[r[5]],
                           (uint32_t)r[6],
                           (uint32_t)r[7],
                           (uint32_t)r[8],
                           windows[r[9]],
                           (uint32_t)r[10],
                           false,
                           i % 2 == 0};
        if (c.length > 1000 && c.n_rows == 33)
            c.n_rows = 9, c.n_kv_heads = 1; /* past the split rows is what matters */
        if (c.dk % 32 == 0 && c.dv % 32 == 0 && i % 3 == 0) c.cache = RF_CACHE_Q8_0;
        attention_case(c);
    }
}

/* Keys and values of more than 256 values, and values that are parts of keys. */
static void test_wide_attention() {
    static const uint32_t dims[][2] = {{576, 512}, {288, 256}, {40, 32}, {300, 7}, {33, 21}, {257, 257}, {640, 512}},
                          groups[] = {1, 4, 10}, lengths[] = {1, 65, 300, 520}, counts[] = {1, 7, 33};
    std::vector<Row> list = combinations(std::vector<int>{7, 3, 4, 3, 2, 2, n_devices}, false);
    for (size_t i = 0; i < list.size(); i += stride) {
        const Row &r = list[i];
        AttentionCase c = {groups[r[1]], 1, dims[r[0]][0], dims[r[0]][1], lengths[r[2]], counts[r[3]], (uint32_t)r[4],
                           (uint32_t)r[5], (uint32_t)r[6], 0, 0, dims[r[0]][0] != dims[r[0]][1], false};
        if (c.length > 64 && c.n_rows == 33) c.n_rows = 17;
        if (c.dk % 32 == 0 && c.dv % 32 == 0 && i % 3 == 0) c.cache = RF_CACHE_Q8_0;
        attention_case(c);
    }
}

/* A matrix for each head, and values that none takes. */
struct HeadsCase {
    uint32_t type, n_in, n_out, T, n, rest, device;
};
static void heads_case(const HeadsCase &c) {
    const uint32_t dim = c.n_in + c.rest, width = c.n * (c.n_out + c.rest) + 1, in_width = c.n * dim + 3;
    char what[128];
    snprintf(what, sizeof what, "heads %s n_in %u n_out %u rows %u heads %u rest %u device %u", type_name(c.type), c.n_in,
             c.n_out, c.T, c.n, c.rest, c.device);
    Rig g(devices[c.device]);
    const uint32_t in = g.buffer(in_width), y = g.buffer(width), twice = g.buffer(width);
    const uint32_t row0 = c.T % 3, head_rows = c.n_out + c.n % 2 * 3, n_rows = row0 + c.n * head_rows;
    std::vector<uint8_t> w = random_rows(c.type, c.n_in, n_rows);
    const uint32_t weight = g.weight(c.type, c.n_in, n_rows, w);
    for (int k = 0; k < 2; k++) {
        rf_op *o = g.op(RF_OP_HEADS);
        o->in = in, o->out = k ? twice : y, o->weight = weight;
        o->heads = rf_heads_params{c.n, dim, c.n_in, c.n_out, row0, head_rows};
    }
    REQUIRE(g.open(c.T, 1, c.T < 128 ? 128 : c.T) == RF_OK, "%s: %s", what, g.err.text);
    std::vector<float> x = values((size_t)c.T * in_width), before = values((size_t)c.T * width);
    g.set(in, x), g.set(y, before), g.set(twice, before);
    REQUIRE(g.run(rows_of(c.T)) == RF_OK, "%s: %s", what, g.err.text);
    std::vector<double> wd = decode(c.type, w), want(before.begin(), before.end());
    double tolerance = 0, nmse = 0;
    for (uint32_t h = 0; h < c.n; h++) {
        const Seen seen(c.device, c.type, x.data() + (size_t)h * dim, c.n_in, c.T, in_width, true);
        tolerance = seen.tolerance, nmse = seen.nmse;
        for (uint32_t t = 0; t < c.T; t++) {
            double *to = &want[(size_t)t * width + (size_t)h * (c.n_out + c.rest)];
            for (uint32_t k = 0; k < c.n_out; k++) {
                const double *row = &wd[(row0 + (size_t)h * head_rows + k) * c.n_in];
                to[k] = 0;
                for (uint32_t j = 0; j < c.n_in; j++) to[k] += row[j] * seen.x[(size_t)t * c.n_in + j];
            }
            for (uint32_t k = 0; k < c.rest; k++) to[c.n_out + k] = x[(size_t)t * in_width + (size_t)h * dim + c.n_in + k];
        }
    }
    compare(g.get(y), want, tolerance, nmse, what);
    CHECK(same_bits(g.get(y), g.get(twice)), "%s: the same product gives other bits", what);
}
static void test_heads() {
    static const uint32_t outs[] = {1, 3, 34, 130}, Ts[] = {1, 3, 9, 17, 66, 150}, counts[] = {1, 2, 5};
    const int n_types = (int)(sizeof types / sizeof types[0]);
    std::vector<Row> list = combinations(std::vector<int>{n_types, 3, 4, 6, 3, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        static const uint32_t odd[] = {1, 40, 264};
        const uint32_t type = types[r[0]];
        HeadsCase c = {type, is_float(type) ? odd[r[1]] : block_elements(type) * (uint32_t)(1 + 2 * r[1]), outs[r[2]], Ts[r[3]],
                       counts[r[4]], r[5] ? 12u : 0, (uint32_t)r[6]};
        heads_case(c);
    }
    for (uint32_t d = 0; d < (uint32_t)n_devices; d++) { /* of 16-bit floats, on matrix units */
        const HeadsCase halves = {RF_TYPE_F16, 96, 70, 66, 3, 12, d}, bfloats = {RF_TYPE_BF16, 64, 130, 150, 2, 0, d};
        heads_case(halves), heads_case(bfloats);
    }
}

/* The same with matrices whose rows go with the values, which stay floats. */
static void test_heads_across() {
    static const uint32_t ins[] = {1, 17, 34}, Ts[] = {1, 3}, counts[] = {1, 3}, blocks32[] = {1, 3, 17}, blocks256[] = {1, 2, 3};
    const int n_types = (int)(sizeof types / sizeof types[0]);
    std::vector<Row> list = combinations(std::vector<int>{n_types, 3, 3, 2, 2, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        static const uint32_t odd[] = {1, 40, 600};
        const uint32_t type = types[r[0]], n_out = is_float(type)                    ? odd[r[1]]
                                                   : block_elements(type) >= 256 ? block_elements(type) * blocks256[r[1]]
                                                                                 : block_elements(type) * blocks32[r[1]],
                       n_in = ins[r[2]], T = Ts[r[3]], n = counts[r[4]], rest = r[5] ? 12 : 0, dim = n_in + rest,
                       width = n * (n_out + rest) + 1, row0 = i % 3, head_rows = n_in + (uint32_t)(i % 2) * 3,
                       n_rows = row0 + n * head_rows;
        char what[128];
        snprintf(what, sizeof what, "heads across %s n_in %u n_out %u rows %u heads %u rest %u device %u", type_name(type), n_in,
                 n_out, T, n, rest, (uint32_t)r[6]);
        Rig g(devices[(size_t)r[6]]);
        const uint32_t in_width = n * dim + (rest ? 0 : 3), in = g.buffer(in_width), y = g.buffer(width);
        std::vector<uint8_t> w = random_rows(type, n_out, n_rows);
        rf_op *o = g.op(RF_OP_HEADS);
        o->flags = RF_OP_ACROSS;
        o->in = in, o->out = y, o->weight = g.weight(type, n_out, n_rows, w);
        o->heads = rf_heads_params{n, dim, n_in, n_out, row0, head_rows};
        REQUIRE(g.open(T, 1, 128) == RF_OK, "%s: %s", what, g.err.text);
        std::vector<float> x = values((size_t)T * in_width), before = values((size_t)T * width);
        g.set(in, x), g.set(y, before);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s: %s", what, g.err.text);
        std::vector<double> wd = decode(type, w), want;
        for (uint32_t t = 0; t < T; t++) {
            for (uint32_t h = 0; h < n; h++) {
                const float *xt = &x[(size_t)t * in_width + (size_t)h * dim];
                for (uint32_t k = 0; k < n_out; k++) {
                    double dot = 0;
                    for (uint32_t j = 0; j < n_in; j++) dot += wd[(row0 + (size_t)h * head_rows + j) * n_out + k] * xt[j];
                    want.push_back(dot);
                }
                want.insert(want.end(), xt + n_in, xt + dim);
            }
            want.push_back(before[(size_t)t * width + width - 1]);
        }
        compare(g.get(y), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, what);
    }
}

/* ---- recurrent layers, and parts of heads ---- */

enum { N_SLOTS = 4, N_RECURRENT_ROWS = 6, N_RECURRENT_SEQS = 40 };

/* Steps of sequences that go on from a slot or begin, leave states in the middle and at their end, in another slot or in the
 * same one; of one row, as in decoding, or one each; and of many, also between rows of others. */
static std::vector<rf_step_row> recurrent_rows(int which) {
    static const rf_step_row mixed[] = {{0, 1, 3, -1, 1, 0}, {0, 0, 0, -1, 0, 0}, {0, 0, 1, -1, 0, 2}, {0, 1, 4, -1, 0, 0},
                                        {0, 0, 2, -1, 0, 0}, {0, 1, 5, -1, 0, 3}, {0, 0, 3, -1, 0, 4}},
                             next[] = {{0, 0, 7, -1, 2, 2}}, first[] = {{0, 1, 0, -1, 0, 1}},
                             each[] = {{0, 39, 5, -1, 1, 1}, {0, 0, 0, -1, 0, 2}, {0, 12, 9, -1, 3, 4}};
    if (which == 0) return std::vector<rf_step_row>(mixed, mixed + sizeof mixed / sizeof *mixed);
    if (which == 1 || which == 2) return std::vector<rf_step_row>(1, which == 1 ? next[0] : first[0]);
    if (which == 3) return std::vector<rf_step_row>(each, each + sizeof each / sizeof *each);
    std::vector<rf_step_row> many;
    int32_t pos[2] = {0, 9};
    for (uint32_t t = 0; which == 4 && t < 50; t++) { /* a prompt that begins at row 1, and a row each of two others */
        const uint32_t seq = t == 0 ? 31 : t == 33 ? 39 : 7;
        const rf_step_row row = {0, (int32_t)seq, seq == 7 ? pos[0]++ : 20, -1, seq == 31 ? 1u : seq == 39 ? 3u : 0u,
                                 seq == 31 ? 1u : seq == 39 ? 3u : t == 40 ? 2u : t == 49 ? 4u : 0u};
        many.push_back(row);
    }
    if (which == 4) return many;
    for (uint32_t t = 0; t < 75; t++) { /* the last row of sequence 0 is row 74, of sequence 1 row 61 */
        const int32_t seq = t / 3 % 4 == 0 && t > 40;
        rf_step_row row = {0, seq, pos[seq], -1, seq && pos[seq] == 9 ? 1u : 0u, t == 38 ? 2u : t == 61 ? 3u : t == 74 ? 4u : 0u};
        pos[seq]++;
        many.push_back(row);
    }
    return many;
}

/* A plan of one op with a recurrent state: run it, and compare what comes out, and all slots, with the reference: `row`
 * computes row t in double precision from the sequence's state, which it moves on. */
template <typename F>
static void recurrent_case(Rig &g, uint32_t in, uint32_t out, const std::vector<float> &x, int which, const char *what, F row) {
    const std::vector<rf_step_row> rows = recurrent_rows(which);
    const size_t width = g.states[0].width, n_out = g.buffers[out].width;
    const std::vector<float> before = values(N_SLOTS * width);
    std::vector<float> after(before.size());
    std::vector<double> want(rows.size() * n_out), slots(before.begin(), before.end());
    std::map<int32_t, std::vector<double> > state;
    rf_ticket t;
    g.set(in, x);
    rf_result r = api->mem_write(g.queue, &g.bind.state, 0, before.data(), before.size() * 4, &t, &g.err);
    if (r == RF_OK) r = g.run(rows);
    if (r == RF_OK) r = api->mem_read(g.queue, &g.bind.state, 0, after.data(), after.size() * 4, &t, &g.err);
    if (r == RF_OK) r = api->ticket_wait(&t, 60000, &g.err);
    REQUIRE(r == RF_OK, "%s: %s", what, g.err.text);
    for (size_t i = 0; i < rows.size(); i++) {
        std::vector<double> &s = state[rows[i].seq];
        if (s.empty() && rows[i].from) s.assign(before.begin() + (rows[i].from - 1) * width, before.begin() + rows[i].from * width);
        s.resize(width);
        row(i, s, &want[i * n_out]);
        if (rows[i].to) std::copy(s.begin(), s.end(), slots.begin() + (rows[i].to - 1) * width);
    }
    std::vector<float> found = g.get(out);
    found.resize(want.size());
    compare(found, want, FLOAT_TOLERANCE, NMSE_TOLERANCE, what);
    compare(after, slots, FLOAT_TOLERANCE, NMSE_TOLERANCE, what);
}

/* A vector in a type, as the kernel reads it. */
static std::vector<double> rounded(const std::vector<float> &v, uint32_t type) {
    std::vector<double> out(v.begin(), v.end());
    for (size_t i = 0; i < v.size(); i++) {
        uint32_t bits;
        float cut;
        memcpy(&bits, &v[i], 4);
        bits &= 0xffff0000u;
        memcpy(&cut, &bits, 4);
        if (type != RF_TYPE_F32) out[i] = type == RF_TYPE_F16 ? half_value(to_half(v[i])) : cut;
    }
    return out;
}
static const uint32_t vector_types[] = {RF_TYPE_F32, RF_TYPE_F16, RF_TYPE_BF16};

static void test_conv() {
    static const uint32_t widths[] = {1, 61, 256, 321}, all_taps[] = {2, 3, 4, 8};
    std::vector<Row> list = combinations(std::vector<int>{4, 4, 2, 2, 3, N_RECURRENT_ROWS, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = widths[r[0]], taps = all_taps[r[1]], type = vector_types[r[4]];
        const bool silu = r[2], biased = r[3], mean = taps == 4 && !silu && biased;
        const uint32_t apart = taps == 8 ? 1 + silu : taps == 4 && silu ? 3 : 1, reach = (taps - 1) * apart;
        char what[128];
        snprintf(what, sizeof what, "conv %s n %u taps %u silu %d bias %d rows %d device %d", type_name(type), n, taps, silu, biased,
                 r[5], r[6]);
        Rig g(devices[(size_t)r[6]]);
        g.n_slots = N_SLOTS;
        const uint32_t in = g.buffer(n), out = i % 2 ? in : g.buffer(n), state = g.recurrent_state(reach * n);
        const std::vector<float> w = values((size_t)n * taps), b = values(n), x = values(recurrent_rows(r[5]).size() * n);
        const std::vector<double> wd = rounded(w, type), bd = rounded(b, type);
        rf_op *o = g.op(RF_OP_CONV);
        o->in = in, o->out = out, o->state = state, o->weight = g.vector(w, type), o->bias = biased ? g.vector(b, type) : RF_NONE;
        o->conv.n = n, o->conv.n_taps = taps, o->conv.activation = silu ? RF_ACT_SILU : RF_ACT_NONE;
        o->conv.dilation = apart > 1 ? apart : 0;
        if (mean) o->weight = RF_NONE;
        REQUIRE(g.open(75, 1, 128, N_RECURRENT_SEQS) == RF_OK, "%s: %s", what, g.err.text);
        recurrent_case(g, in, out, x, r[5], what, [&](size_t t, std::vector<double> &past, double *y) {
            past.insert(past.end(), x.begin() + t * n, x.begin() + (t + 1) * n);
            for (uint32_t c = 0; c < n; c++) {
                double sum = biased ? bd[c] : 0;
                for (uint32_t j = 0; j < taps; j++)
                    sum += (mean ? 0.25 : wd[(size_t)c * taps + j]) * past[(size_t)j * apart * n + c];
                y[c] = silu ? sum / (1 + exp(-sum)) : sum;
            }
            past.erase(past.begin(), past.begin() + n);
        });
    }
}

/* One row of a head's delta rule: S [dk][dv] decays, takes in k and v, and is read with q. */
static void delta_row(const rf_delta_params &p, const float *q, const float *k, const float *v, const double *decay, double beta,
                      double *S, double *out) {
    double kk = p.eps, qq = p.eps;
    for (uint32_t i = 0; i < p.head_dim; i++) kk += (double)k[i] * k[i], qq += (double)q[i] * q[i];
    for (uint32_t j = 0; j < p.head_dim_v; j++) {
        double d = v[j];
        out[j] = 0;
        for (uint32_t i = 0; i < p.head_dim; i++) {
            double &s = S[(size_t)i * p.head_dim_v + j];
            s *= decay[i];
            d -= s * k[i] / sqrt(kk);
        }
        for (uint32_t i = 0; i < p.head_dim; i++) {
            double &s = S[(size_t)i * p.head_dim_v + j];
            s += k[i] / sqrt(kk) * beta * d;
            out[j] += s * q[i] / sqrt(qq) * p.scale;
        }
    }
}

/* The delta rule of every size; gated: with the norm of each head's result and its gate, which a decode step fuses. */
static void test_delta() {
    /* the sizes of models, the largest, and odd ones */
    static const uint32_t dims[][2] = {{40, 24}, {128, 128}, {64, 64}, {256, 256}, {200, 72}, {1, 3}}, heads[][2] = {{6, 3}, {2, 1}, {3, 3}};
    std::vector<Row> list = combinations(std::vector<int>{6, 3, 2, 3, N_RECURRENT_ROWS, n_devices, 4, 2});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const rf_delta_params p = {heads[r[1]][0], heads[r[1]][1], dims[r[0]][0], dims[r[0]][1], 0.4f, 0.03f,
                                   r[6] ? dims[r[0]][0] : 1, r[6] == 2 ? -3.0f : r[6] == 3 ? 2.0f : 0.0f};
        const uint32_t n = p.n_heads, type = vector_types[r[3]], n_keys = p.n_k_heads * p.head_dim, width = 2 * n_keys + n * p.head_dim_v;
        const bool cyclic = r[2], gated = r[7];
        const size_t T = recurrent_rows(r[4]).size();
        char what[128];
        snprintf(what, sizeof what, "delta %s dims %u %u heads %u %u cyclic %d rows %d device %d gated %d", type_name(type),
                 p.head_dim, p.head_dim_v, n, p.n_k_heads, cyclic, r[4], r[5], gated);
        Rig g(devices[(size_t)r[5]]);
        g.n_slots = N_SLOTS;
        const uint32_t in = g.buffer(width), beta = g.buffer(n), alpha = g.buffer(n * p.n_decays), out = g.buffer(n * p.head_dim_v),
                       state = g.recurrent_state(n * p.head_dim * p.head_dim_v);
        std::vector<float> a = values(n);
        for (uint32_t h = 0; h < n; h++) a[h] = -0.2f - fabsf(a[h]);
        const uint32_t nd = p.n_decays;
        const std::vector<float> b = values(n * nd), xb = values(T * n), xa = values(T * n * nd);
        const std::vector<double> ad = rounded(a, type), bd = rounded(b, type);
        std::vector<float> x = values(T * width);
        for (size_t t = 0; t < T; t++) /* queries near their keys: a product that cancels has no digits to compare */
            for (uint32_t k = 0; k < n_keys; k++) x[t * width + k] = 0.5f * (x[t * width + k] + x[t * width + n_keys + k]);
        rf_op *o = g.op(RF_OP_DELTA);
        o->flags = cyclic ? RF_OP_CYCLIC : 0;
        o->in = in, o->in2 = beta, o->in3 = alpha, o->out = out, o->state = state;
        o->weight = g.vector(a, type), o->bias = g.vector(b, type), o->delta = p;
        const uint32_t n_out = n * p.head_dim_v, gate = gated ? g.buffer(n_out) : out;
        const std::vector<float> norm = values(p.head_dim_v), gates = values(T * n_out);
        if (gated) {
            g.norm(out, out, n, p.head_dim_v, g.vector(norm));
            g.glu(gate, out, gate, n_out)->glu.activation = cyclic ? RF_ACT_SILU : RF_ACT_SIGMOID;
        }
        REQUIRE(g.open(75, 1, 128, N_RECURRENT_SEQS) == RF_OK, "%s: %s", what, g.err.text);
        g.set(beta, xb), g.set(alpha, xa);
        if (gated) g.set(gate, gates);
        recurrent_case(g, in, gate, x, r[4], what, [&](size_t t, std::vector<double> &S, double *y) {
            for (uint32_t h = 0; h < n; h++) {
                const float *row = &x[t * width], *q = row + (cyclic ? h % p.n_k_heads : h / (n / p.n_k_heads)) * p.head_dim;
                const double open = 1 / (1 + exp(-(double)xb[t * n + h]));
                std::vector<double> decay(p.head_dim);
                for (uint32_t k = 0; k < p.head_dim; k++) {
                    const size_t at = h * nd + (nd > 1 ? k : 0);
                    const double v = xa[t * n * nd + at] + bd[at];
                    decay[k] = exp(p.lower_bound < 0   ? p.lower_bound / (1 + exp(-v * ad[h]))
                                   : p.lower_bound > 0 ? -p.lower_bound / (1 + exp(v * ad[h]))
                                                        : log1p(exp(v)) * ad[h]);
                }
                delta_row(p, q, q + n_keys, row + 2 * n_keys + h * p.head_dim_v, decay.data(), open,
                          &S[(size_t)h * p.head_dim * p.head_dim_v], y + h * p.head_dim_v);
                double squares = 1e-5 * p.head_dim_v;
                for (uint32_t j = 0; j < p.head_dim_v; j++) squares += y[h * p.head_dim_v + j] * y[h * p.head_dim_v + j];
                for (uint32_t j = 0; gated && j < p.head_dim_v; j++) {
                    const double z = gates[t * n_out + h * p.head_dim_v + j], open_gate = (cyclic ? z : 1) / (1 + exp(-z));
                    y[h * p.head_dim_v + j] *= norm[j] / sqrt(squares / p.head_dim_v) * open_gate;
                }
            }
        });
    }
    Rig g(devices[0]); /* wider heads have no kernel here, and are refused as that */
    g.n_slots = 1;
    const uint32_t in = g.buffer(2 * 264 + 8), one = g.buffer(1), out = g.buffer(8), state = g.recurrent_state(264 * 8);
    rf_op *o = g.op(RF_OP_DELTA);
    o->in = in, o->in2 = o->in3 = one, o->out = out, o->state = state;
    o->weight = g.vector(values(1)), o->bias = g.vector(values(1)), o->delta = rf_delta_params{1, 1, 264, 8, 1, 0, 1, 0};
    CHECK(g.open(1) == RF_ERR_UNSUPPORTED && strstr(g.err.text, "delta"), "'%s'", g.err.text);
}

static void test_scan() {
    /* heads, groups, values of a head, states: Mamba-2's sizes, Mamba's, the largest, and odd ones */
    static const uint32_t sizes[][4] = {{6, 3, 24, 40}, {2, 1, 64, 128}, {70, 1, 1, 16}, {3, 1, 8, 256}, {5, 5, 7, 3}};
    std::vector<Row> list = combinations(std::vector<int>{5, 2, 3, N_RECURRENT_ROWS, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t *z = sizes[r[0]], type = vector_types[r[2]];
        const rf_scan_params p = {z[0], z[1], z[2], z[3], r[1] ? z[3] : 1, 0};
        const uint32_t n = p.n_heads, n_x = n * p.head_dim, n_b = p.n_groups * p.n_state, width = n_x + 2 * n_b;
        const size_t T = recurrent_rows(r[3]).size();
        char what[128];
        snprintf(what, sizeof what, "scan %s heads %u %u dim %u states %u decays %u rows %d device %d", type_name(type), n, p.n_groups,
                 p.head_dim, p.n_state, p.n_decays, r[3], r[4]);
        Rig g(devices[(size_t)r[4]]);
        g.n_slots = N_SLOTS;
        const uint32_t in = g.buffer(width), step = g.buffer(n), out = g.buffer(n_x), state = g.recurrent_state(n_x * p.n_state);
        std::vector<float> a = values((size_t)n * p.n_decays);
        for (size_t k = 0; k < a.size(); k++) a[k] = -0.2f - fabsf(a[k]);
        const std::vector<float> b = values(n), d = values(n), x = values(T * width), steps = values(T * n);
        const std::vector<double> ad = rounded(a, type), bd = rounded(b, type), dd = rounded(d, type);
        rf_op *o = g.op(RF_OP_SCAN);
        o->in = in, o->in2 = step, o->out = out, o->state = state, o->weight = g.vector(a, type), o->bias = g.vector(b, type),
        o->factor = g.vector(d, type), o->scan = p;
        REQUIRE(g.open(75, 1, 128, N_RECURRENT_SEQS) == RF_OK, "%s: %s", what, g.err.text);
        g.set(step, steps);
        recurrent_case(g, in, out, x, r[3], what, [&](size_t t, std::vector<double> &S, double *y) {
            for (uint32_t h = 0; h < n; h++) {
                const float *row = &x[t * width], *write = row + n_x + h / (n / p.n_groups) * p.n_state, *read = write + n_b;
                const double dt = log1p(exp(steps[t * n + h] + bd[h]));
                for (uint32_t j = 0; j < p.head_dim; j++) {
                    double &sum = y[h * p.head_dim + j] = dd[h] * row[h * p.head_dim + j];
                    for (uint32_t m = 0; m < p.n_state; m++) {
                        double &s = S[((size_t)h * p.n_state + m) * p.head_dim + j];
                        s = s * exp(dt * ad[(size_t)h * p.n_decays + (p.n_decays > 1 ? m : 0)]) + dt * write[m] * row[h * p.head_dim + j];
                        sum += s * read[m];
                    }
                }
            }
        });
    }
}

static void test_compress() {
    static const uint32_t ns[] = {1, 24, 300}, units[] = {2, 4, 128};
    std::vector<Row> list = combinations(std::vector<int>{3, 3, 2, 3, N_RECURRENT_ROWS, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = ns[r[0]], unit = units[r[1]], overlap = (uint32_t)r[2], type = vector_types[r[3]], n_in = n << overlap;
        const std::vector<rf_step_row> rows = recurrent_rows(r[4]);
        const size_t T = rows.size();
        char what[128];
        snprintf(what, sizeof what, "compress %s %u by %u overlap %u rows %d device %d", type_name(type), n, unit, overlap, r[4], r[5]);
        Rig g(devices[(size_t)r[5]]);
        g.n_slots = N_SLOTS;
        const uint32_t in = g.buffer(n_in), scores = g.buffer(n_in), out = g.buffer(n), state = g.recurrent_state((overlap ? 9 : 3) * n);
        const std::vector<float> w = values((size_t)unit * n_in), x = values(T * n_in);
        std::vector<float> s = values(T * n_in);
        for (size_t k = 0; k < s.size(); k++) s[k] *= 8;
        const std::vector<double> wd = rounded(w, type);
        rf_op *o = g.op(RF_OP_COMPRESS);
        o->in = in, o->in2 = scores, o->out = out, o->state = state, o->weight = g.vector(w, type);
        o->compress.n = n, o->compress.unit = unit, o->compress.overlap = overlap;
        REQUIRE(g.open(75, 1, 128, N_RECURRENT_SEQS) == RF_OK, "%s: %s", what, g.err.text);
        g.set(scores, s);
        recurrent_case(g, in, out, x, r[4], what, [&](size_t t, std::vector<double> &S, double *y) {
            ref_compress_row(S.data(), n, unit, (int)overlap, (uint32_t)rows[t].pos, &x[t * n_in], &s[t * n_in], wd.data(), y);
        });
    }
}

/* Queries, weights and keys are small integers, so that floats add them exactly and many scores are equal; keys of Q8_0
 * have scales that are powers of two. */
static void test_index() {
    /* heads, dim, lists, unit, local, by the last position */
    static const uint32_t kinds[][6] = {{3, 12, 1, 1, 0, 0}, {64, 128, 1, 1, 0, 0}, {2, 32, 2, 4, 1, 0}, {4, 256, 4, 128, 2, 0},
                                        {5, 64, 1, 4, 0, 1}, {1, 7, 1, 3, 0, 1}, {9, 96, 1, 1, 3, 0}};
    static const uint32_t lengths[] = {1, 5, 33, 300, 1030}, listed[] = {2, 9, 64};
    std::vector<Row> list = combinations(std::vector<int>{7, 5, 3, 3, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t *z = kinds[r[0]], n = lengths[r[1]], T = n < 19 ? n : r[4] ? 19 : 1, heads = z[0], dim = z[1], unit = z[3];
        const uint32_t cache = (uint32_t)r[3] == RF_CACHE_Q8_0 && dim % 32 ? (uint32_t)RF_CACHE_F16 : (uint32_t)r[3];
        const rf_index_params p = {heads, dim, z[2], listed[r[2]], unit, z[4] < listed[r[2]] ? z[4] : listed[r[2]]};
        const uint32_t width = p.n_lists * p.n_listed, weights = p.n_lists == 1 && i % 3;
        char what[160];
        snprintf(what, sizeof what, "index heads %u dim %u lists %u of %u unit %u local %u last %u length %u rows %u cache %u device %d", heads,
                 dim, p.n_lists, p.n_listed, unit, p.n_local, z[5], n, T, cache, r[5]);
        Rig g(devices[(size_t)r[5]]);
        const uint32_t in = g.buffer(heads * dim + 1), w = g.buffer(heads + 2), out = g.buffer(width + 1),
                       state = g.state(1, dim, 0, 0, z[5] ? unit : 0), n_cells = rf_state_cells_of(&g.states[0], n);
        rf_op *o = g.op(RF_OP_INDEX);
        o->in = in, o->in2 = weights ? w : RF_NONE, o->out = out, o->state = state, o->flags = z[5] ? RF_OP_LAST : 0, o->index = p;
        REQUIRE(g.open(T, 1, n, 2, cache) == RF_OK, "%s: %s", what, g.err.text);
        std::vector<float> x((size_t)T * (heads * dim + 1)), wx((size_t)T * (heads + 2));
        for (size_t k = 0; k < x.size(); k++) x[k] = (float)(rnd() % 5) - 2;
        for (size_t k = 0; k < wx.size(); k++) wx[k] = (float)(rnd() % 7) - 2;
        g.set(in, x), g.set(w, wx), g.set(out, std::vector<float>((size_t)T * (width + 1), 7));
        std::vector<uint8_t> keys(g.bind.state.size_bytes, 0);
        for (uint64_t row = 0; row < 2 * (uint64_t)n_cells; row++)
            for (uint32_t k = 0; k < dim; k++) {
                const float v = (float)(rnd() % 3) - 1;
                put_state(keys, 0, row, dim, k, cache, v);
                if (cache == RF_CACHE_Q8_0) keys[row * row_bytes(cache, dim) + k] = (uint8_t)(int8_t)v;
                if (cache == RF_CACHE_Q8_0 && k % 32 == 0) put_half(&keys[row * row_bytes(cache, dim) + dim + k / 16], 0.5f);
            }
        std::vector<rf_step_row> rows = rows_of(T, (int32_t)(n - T));
        for (uint32_t t = 0; t < T; t++) rows[t].seq = 1;
        rf_ticket ticket;
        REQUIRE(api->mem_write(g.queue, &g.bind.state, 0, keys.data(), keys.size(), &ticket, &g.err) == RF_OK && g.run(rows) == RF_OK,
                "%s: %s", what, g.err.text);
        const std::vector<float> found = g.get(out);
        uint32_t wrong = 0;
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t l = 0; l < p.n_lists; l++) {
                const uint32_t end = (uint32_t)rows[t].pos + 1, n_blocks = z[5] ? end / unit : (end + unit - 1) / unit;
                std::vector<std::pair<double, uint32_t> > best;
                for (uint32_t b = 0; b < n_blocks; b++) {
                    double score = -INFINITY;
                    for (uint32_t at = z[5] ? b : b * unit; z[5] ? at == b : at < end && at < (b + 1) * unit; at++) {
                        double sum = 0;
                        for (uint32_t h = p.n_lists > 1 ? l : 0; h < (p.n_lists > 1 ? l + 1 : heads); h++) {
                            double dot = 0;
                            for (uint32_t k = 0; k < dim; k++)
                                dot += x[(size_t)t * (heads * dim + 1) + h * dim + k] * state_value(keys, 0, n_cells + at, dim, k, cache);
                            sum += p.n_lists > 1 ? dot : (weights ? wx[t * (heads + 2) + h] : 1) * fmax(dot, 0);
                        }
                        score = fmax(score, sum);
                    }
                    best.push_back(std::make_pair(b + p.n_local >= n_blocks ? -INFINITY : -score, b));
                }
                std::sort(best.begin(), best.end());
                const uint32_t most = p.n_listed - z[5];
                if (best.size() > most) best.resize(most);
                std::vector<int32_t> want;
                for (size_t k = 0; k < best.size(); k++) want.push_back((int32_t)best[k].second);
                std::sort(want.begin(), want.end());
                if (z[5] && end % unit) want.push_back((int32_t)n_blocks);
                want.resize(p.n_listed, -1);
                wrong += memcmp(&found[(size_t)t * (width + 1) + l * p.n_listed], want.data(), 4 * want.size()) != 0;
            }
        CHECK(wrong == 0, "%s: %u lists differ", what, wrong);
        for (uint32_t t = 0; t < T; t++) CHECK(found[(size_t)t * (width + 1) + width] == 7.0f, "%s: beyond the row", what);
    }
}

static void test_blend() {
    static const uint32_t ns[] = {1, 33, 256, 700}, banks[] = {1, 4, 17}, Ts[] = {1, 7};
    std::vector<Row> list = combinations(std::vector<int>{4, 3, 2, 3, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = ns[r[0]], k = banks[r[1]], T = Ts[r[2]], type = vector_types[r[3]];
        Rig g(devices[(size_t)r[5]]);
        const uint32_t in = g.buffer(k * n + 3), own = g.buffer(n + 1), out = r[4] ? own : g.buffer(n + 1);
        const std::vector<float> w = values(n), x = values((size_t)T * (k * n + 3)), y = values((size_t)T * (n + 1));
        const std::vector<double> wd = rounded(w, type);
        rf_op *o = g.op(RF_OP_BLEND);
        o->in = in, o->in2 = own, o->out = out, o->weight = g.vector(w, type), o->blend = rf_blend_params{n, k, 0.02f};
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        g.set(in, x), g.set(own, y), g.set(out, y);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<double> want(y.begin(), y.end());
        for (uint32_t t = 0; t < T; t++) {
            std::vector<double> p(k + 1);
            double most = -INFINITY, sum = 0;
            for (uint32_t b = 0; b <= k; b++) {
                const float *v = b < k ? &x[(size_t)t * (k * n + 3) + b * n] : &y[(size_t)t * (n + 1)];
                double squares = 0, dot = 0;
                for (uint32_t j = 0; j < n; j++) squares += (double)v[j] * v[j], dot += wd[j] * v[j];
                most = fmax(most, p[b] = dot / sqrt(squares / n + (double)0.02f));
            }
            for (uint32_t b = 0; b <= k; b++) sum += p[b] = exp(p[b] - most);
            for (uint32_t j = 0; j < n; j++) {
                double v = p[k] * y[(size_t)t * (n + 1) + j];
                for (uint32_t b = 0; b < k; b++) v += p[b] * x[(size_t)t * (k * n + 3) + b * n + j];
                want[(size_t)t * (n + 1) + j] = v / sum;
            }
        }
        compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, "blend");
    }
}

static void test_hyper() {
    static const uint32_t streams[] = {2, 4, 16, 64}, Ts[] = {1, 7};
    std::vector<Row> list = combinations(std::vector<int>{4, 3, 2, 3, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t S = streams[r[0]], parts = S > RF_HYPER_STREAMS ? 1 + (uint32_t)r[1] % 2 : 1 + (uint32_t)r[1], T = Ts[r[2]],
                       type = vector_types[r[3]], n = parts < 3 ? parts * S : (2 + S) * S, n_out = parts < 3 ? 2 * S : n, rounds = 1 + (uint32_t)i % 3;
        Rig g(devices[(size_t)r[4]]);
        const uint32_t in = g.buffer(n + 1), out = g.buffer(n_out + 3);
        const std::vector<float> scale = values(parts), base = values(n), x = values((size_t)T * (n + 1)), y = values((size_t)T * (n_out + 3));
        const std::vector<double> sd = rounded(scale, type), bd = rounded(base, type);
        rf_op *o = g.op(RF_OP_HYPER);
        o->in = in, o->out = out, o->weight = g.vector(scale, type), o->bias = g.vector(base, type);
        o->hyper = rf_hyper_params{S, parts, 2.5f, 0.125f, rounds};
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        g.set(in, x), g.set(out, y);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<double> want(y.begin(), y.end());
        for (uint32_t t = 0; t < T; t++) {
            double *to = &want[(size_t)t * (n_out + 3)];
            const float *from = &x[(size_t)t * (n + 1)];
            for (uint32_t k = 0; k < 2 * S; k++) {
                const uint32_t part = k < S, at = part * S + k % S;
                const double v = part < parts ? from[at] * sd[part] + bd[at] : 0;
                to[k] = part < parts ? (part ? 2.5 : 1) / (1 + exp(-v)) + (part && parts == 3 ? 0 : 0.125) : 0;
            }
            if (parts == 3) ref_hyper_matrix(to + 2 * S, S, from + 2 * S, sd[2], &bd[2 * S], 0.125, rounds);
        }
        compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, "hyper");
    }
}

static void test_spread() {
    static const uint32_t ns[] = {1, 37, 256, 700}, streams[] = {2, 5}, Ts[] = {1, 7};
    std::vector<Row> list = combinations(std::vector<int>{4, 2, 2, 4, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = ns[r[0]], S = streams[r[1]], T = Ts[r[2]], all = n * S, first = i % 3, width = all + first * n + 1;
        const int by = r[3];
        const bool add = r[4];
        Rig g(devices[(size_t)r[5]]);
        const uint32_t in = g.buffer(n + 2), a = g.buffer(all + 3), b = g.buffer(all), out = g.buffer(width);
        const std::vector<float> x = values((size_t)T * (n + 2)), p = values((size_t)T * (all + 3)), q = values((size_t)T * all),
                                 y = values((size_t)T * width);
        rf_op *o = g.op(RF_OP_SPREAD);
        o->in = in, o->in2 = by ? a : RF_NONE, o->in3 = by == 2 ? b : RF_NONE, o->out = out;
        o->flags = (add ? RF_OP_ACCUMULATE : 0) | (by == 1 ? RF_OP_SIGMOID : 0), o->spread = rf_spread_params{n, S, add ? 2.0f : 0.0f, first};
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        g.set(in, x), g.set(a, p), g.set(b, q), g.set(out, y);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<double> want(y.begin(), y.end());
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t s = 0; s < S; s++) {
                double v = p[(size_t)t * (all + 3) + s], dot = 0;
                for (uint32_t j = 0; j < n; j++) dot += (double)p[(size_t)t * (all + 3) + s * n + j] * q[(size_t)t * all + s * n + j];
                dot /= sqrt(n);
                if (by == 2) v = (dot > 0 ? 1 : -1) * sqrt(fmax(fabs(dot), 1e-6));
                v = by == 3 ? v : by ? 1 / (1 + exp(-v)) : 1;
                for (uint32_t j = 0; j < n; j++) {
                    double &w = want[(size_t)t * width + (first + s) * n + j];
                    w = (add ? w : 0) + (add ? 2 : 1) * v * x[(size_t)t * (n + 2) + j];
                }
            }
        compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, "spread");
    }
}

static void test_mix_of_streams() {
    static const uint32_t ns[] = {1, 37, 256, 700}, outs[] = {1, 4, 5}, Ts[] = {1, 7};
    std::vector<Row> list = combinations(std::vector<int>{4, 3, 2, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = ns[r[0]], S = outs[r[1]], used = 3, T = Ts[r[2]], width = n * S + 1;
        const bool add = r[3];
        Rig g(devices[(size_t)r[4]]);
        const uint32_t in = g.buffer(n * used), by = g.buffer(S * used + 2), out = g.buffer(width);
        const std::vector<float> x = values((size_t)T * n * used), w = values((size_t)T * (S * used + 2)), y = values((size_t)T * width);
        rf_op *o = g.op(RF_OP_MIX);
        o->in = in, o->in2 = by, o->out = out, o->flags = add ? RF_OP_ACCUMULATE : 0, o->mix = rf_mix_params{n, used, add ? 2.0f : 0.0f, S};
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        g.set(in, x), g.set(by, w), g.set(out, y);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<double> want(y.begin(), y.end());
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t j = 0; j < n * S; j++) {
                double sum = 0, &to = want[(size_t)t * width + j];
                for (uint32_t k = 0; k < used; k++)
                    sum += (double)w[(size_t)t * (S * used + 2) + j / n * used + k] * x[((size_t)t * used + k) * n + j % n];
                to = add ? to + 2 * sum : sum;
            }
        compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, "mix of streams");
    }
}

static void test_match() {
    static const uint32_t ns[] = {1, 37, 256, 700}, groups[] = {1, 3}, Ts[] = {1, 7};
    std::vector<Row> list = combinations(std::vector<int>{4, 2, 2, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = ns[r[0]], S = groups[r[1]], T = Ts[r[2]], width = n * S + 1;
        Rig g(devices[(size_t)r[4]]);
        const uint32_t in = g.buffer(width), as = g.buffer(n + 2), out = r[3] ? in : g.buffer(width);
        const std::vector<float> x = values((size_t)T * width), a = values((size_t)T * (n + 2));
        rf_op *o = g.op(RF_OP_MATCH);
        o->in = in, o->in2 = as, o->out = out, o->match = rf_match_params{S, n};
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        g.set(in, x), g.set(as, a), g.set(out, x);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<double> want(x.begin(), x.end());
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t s = 0; s < S; s++) {
                double found = 0, length = 0;
                double *w = &want[(size_t)t * width + s * n];
                for (uint32_t j = 0; j < n; j++) found += w[j] * w[j], length += pow(a[(size_t)t * (n + 2) + j], 2);
                for (uint32_t j = 0; j < n; j++) w[j] *= sqrt(length / found);
            }
        compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, "match");
    }
}

static void test_trim() {
    static const uint32_t ns[] = {2, 37, 256, 1000}, Ts[] = {1, 7};
    static const float cutoffs[] = {-0.5f, 0, 1.25f};
    std::vector<Row> list = combinations(std::vector<int>{4, 3, 2, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = ns[r[0]], T = Ts[r[2]], width = n + 1;
        Rig g(devices[(size_t)r[4]]);
        const uint32_t in = g.buffer(width), out = r[3] ? in : g.buffer(width);
        const std::vector<float> x = values((size_t)T * width);
        rf_op *o = g.op(RF_OP_TRIM);
        o->in = in, o->out = out, o->trim = rf_trim_params{n, cutoffs[r[1]]};
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        g.set(in, x), g.set(out, x);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<double> want(x.begin(), x.end());
        for (uint32_t t = 0; t < T; t++) {
            double mean = 0, squares = 0, *w = &want[(size_t)t * width];
            for (uint32_t j = 0; j < n; j++) mean += w[j] / n;
            for (uint32_t j = 0; j < n; j++) squares += (w[j] - mean) * (w[j] - mean) / (n - 1);
            for (uint32_t j = 0; j < n; j++) w[j] = fmax(w[j] - mean - (double)cutoffs[r[1]] * sqrt(squares), 0);
        }
        compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, "trim");
    }
}

/* A sum over members, of which there is one: rows of more than a block, wider than what is summed. */
static void test_sum() {
    static const uint32_t ns[] = {4, 36, 1000}, Ts[] = {1, 7};
    std::vector<Row> list = combinations(std::vector<int>{3, 2, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t n = ns[r[0]], T = Ts[r[1]], width = n + 4;
        Rig g(devices[(size_t)r[3]]);
        const uint32_t in = g.buffer(width), out = g.buffer(width);
        const std::vector<float> x = values((size_t)T * width), y = values((size_t)T * width);
        rf_op *o = g.op(RF_OP_SUM);
        o->in = in, o->out = out, o->sum = rf_sum_params{n}, o->flags = r[2] ? RF_OP_ACCUMULATE : 0;
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        g.set(in, x), g.set(out, y);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        std::vector<double> want(y.begin(), y.end());
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t j = 0; j < n; j++) {
                const size_t at = (size_t)t * width + j;
                want[at] = x[at] + (r[2] ? (double)y[at] : 0);
            }
        compare(g.get(out), want, FLOAT_TOLERANCE, NMSE_TOLERANCE, "sum");
    }
}

static void test_slice() {
    static const uint32_t dims[] = {5, 64, 300}, counts[] = {1, 3}, Ts[] = {1, 7, 33};
    std::vector<Row> list = combinations(std::vector<int>{3, 2, 3, 3, 2, n_devices});
    for (size_t i = 0; i < list.size(); i++) {
        const Row &r = list[i];
        const uint32_t dim = dims[r[0]], heads = counts[r[1]], T = Ts[r[2]], n = r[3] == 0 ? dim : dim / 2,
                       at = r[3] == 2 ? dim - n : 0, out_at = r[4] ? 9 : 0, in_width = heads * dim + 2, width = out_at + heads * n + 3;
        Rig g(devices[(size_t)r[5]]);
        const uint32_t in = g.buffer(in_width), out = g.buffer(width);
        rf_op *o = g.op(RF_OP_SLICE);
        o->in = in, o->out = out;
        o->slice.n_heads = heads, o->slice.head_dim = dim, o->slice.at = at, o->slice.n = n, o->slice.out_at = out_at;
        REQUIRE(g.open(T, 1, 64) == RF_OK, "%s", g.err.text);
        const std::vector<float> x = values((size_t)T * in_width);
        std::vector<float> want = values((size_t)T * width);
        g.set(in, x), g.set(out, want);
        REQUIRE(g.run(rows_of(T)) == RF_OK, "%s", g.err.text);
        for (uint32_t t = 0; t < T; t++)
            for (uint32_t k = 0; k < heads * n; k++)
                want[(size_t)t * width + out_at + k] = x[(size_t)t * in_width + k / n * dim + at + k % n];
        CHECK(same_bits(g.get(out), want), "slice of %u at %u of %u, heads %u rows %u to %u", n, at, dim, heads, T, out_at);
    }
}

/* Ops that become one launch, and inputs that the op before quantizes: x -> norm -> 4 products of one type and one of
 * another; glu -> product. What each reads is read back from the device, so that every result has
 * its own reference. `readers`: of the floats that are quantized; without them these need not be there, and the
 * results are only returned. */
static std::vector<float> together_case(uint32_t type, uint32_t other, uint32_t n, uint32_t T, uint32_t device, bool readers) {
    const uint32_t widths[6] = {96, 32, 33, 70, 32, 40};
    char what[96];
    snprintf(what, sizeof what, "together %s %s %u rows %u device %u", type_name(type), type_name(other), n, T, device);
    Rig g(devices[device]);
    uint32_t x = g.buffer(n), xn = g.buffer(n + 4), glu = g.buffer(n), up = g.buffer(n), out[6];
    std::vector<float> norm = values(n);
    g.norm(x, xn, 1, n, g.vector(norm));
    for (int i = 0; i < 6; i++) {
        if (i == 5) g.glu(glu, up, glu, n);
        uint32_t t = i == 2 || i == 4 ? other : type; /* the third one between others of its input */
        out[i] = g.buffer(widths[i] + 1);
        rf_op *o = g.matmul(i == 5 ? glu : xn, out[i], n, widths[i], g.weight(t, n, widths[i], random_rows(t, n, widths[i])));
        o->flags = i == 1 ? RF_OP_ACCUMULATE : 0;
        if (i == 2) o->bias = g.vector(values(widths[i]));
    }
    for (int i = 0; readers && i < 2; i++)
        g.matmul(i ? glu : xn, g.buffer(1), n, 1, g.weight(RF_TYPE_F32, n, 1, std::vector<uint8_t>(4 * n)));
    std::vector<float> results;
    rf_result r = g.open(T, 1, T < 64 ? 64 : T);
    CHECK(r == RF_OK, "%s: %s", what, g.err.text);
    if (r != RF_OK) return results;
    std::vector<float> xs = values((size_t)T * n), a = values((size_t)T * n), b = values((size_t)T * n),
                       old = values((size_t)T * (widths[1] + 1));
    g.set(x, xs), g.set(glu, a), g.set(up, b), g.set(out[1], old);
    r = g.run(rows_of(T));
    CHECK(r == RF_OK, "%s: %s", what, g.err.text);
    for (int i = 0; i < 6; i++) {
        const std::vector<float> y = g.get(out[i]);
        for (uint32_t t = 0; t < T; t++)
            results.insert(results.end(), &y[t * (widths[i] + 1)], &y[t * (widths[i] + 1)] + widths[i]);
    }
    if (!readers) return results;
    std::vector<float> in[2] = {g.get(xn), g.get(glu)};
    std::vector<double> want_in[2];
    for (uint32_t t = 0; t < T; t++) {
        double sum = 0;
        for (uint32_t k = 0; k < n; k++) sum += (double)xs[t * n + k] * xs[t * n + k];
        for (uint32_t k = 0; k < n; k++) want_in[0].push_back(xs[t * n + k] / sqrt(sum / n + 1e-5) * norm[k]);
        for (uint32_t k = 0; k < n; k++)
            want_in[1].push_back(a[t * n + k] / (1 + exp(-(double)a[t * n + k])) * b[t * n + k]);
        in[0].erase(in[0].begin() + (ptrdiff_t)((t + 1) * n),
                    in[0].begin() + (ptrdiff_t)((t + 1) * n + 4)); /* the row's padding */
    }
    for (int i = 0; i < 2; i++) compare(in[i], want_in[i], 1e-6, 1e-12, what);
    for (int i = 0; i < 6; i++) {
        uint32_t slot = i < 3 ? 1 + (uint32_t)i : 2 + (uint32_t)i; /* the bias lies between */
        std::vector<double> w = decode(g.weights[slot].type, g.weight_bytes[slot]), bias, want;
        if (i == 2) bias = decode(RF_TYPE_F32, g.weight_bytes[slot + 1]);
        std::vector<float> y = g.get(out[i]), packed;
        const Seen seen(device, g.weights[slot].type, in[i == 5].data(), n, T, n);
        for (uint32_t t = 0; t < T; t++) {
            const double *v = &seen.x[(size_t)t * n];
            for (uint32_t k = 0; k < widths[i]; k++) {
                double sum = i == 1 ? old[t * (widths[1] + 1) + k] : i == 2 ? bias[k] : 0;
                for (uint32_t j = 0; j < n; j++) sum += w[(size_t)k * n + j] * v[j];
                want.push_back(sum);
                packed.push_back(y[t * (widths[i] + 1) + k]);
            }
        }
        compare(packed, want, seen.tolerance, seen.nmse, what);
    }
    return results;
}
static void test_together() {
    static const uint32_t pairs[][2] = {{RF_TYPE_Q8_0, RF_TYPE_Q4_K},
                                        {RF_TYPE_Q4_K, RF_TYPE_Q6_K},
                                        {RF_TYPE_F16, RF_TYPE_Q5_0},
                                        {RF_TYPE_Q4_1, RF_TYPE_BF16},
                                        {RF_TYPE_IQ4_XS, RF_TYPE_Q6_K},
                                        {RF_TYPE_Q4_K, RF_TYPE_Q2_K}},
                          rows[] = {1, 3, 12, 33};
    for (uint32_t i = 0; i < 6; i++)
        for (uint32_t t = 0; t < 4; t++) {
            const uint32_t d = (i + t) % (uint32_t)n_devices, n = i < 2 && t == 3 ? 1280 : 256; /* norms of whole blocks */
            const uint64_t begin = seed;
            const std::vector<float> with = together_case(pairs[i][0], pairs[i][1], n, rows[t], d, true);
            seed = begin;
            CHECK(same_bits(with, together_case(pairs[i][0], pairs[i][1], n, rows[t], d, false)),
                  "%s %s rows %u: other bits where nobody reads the floats", type_name(pairs[i][0]),
                  type_name(pairs[i][1]), rows[t]);
        }
}

/* product -> norm -> product, where the first is cut in its depth: joining its tiles and the norm are one launch, if
 * the norm is a simple one. kind: 1: it is added to what is there; 2: and has a bias; 3: the norm is in place; 4: the
 * second product reads int8; 5: and another one floats; 6: the norm is another segment's, and not joined, for whether a
 * call goes on to it depends on what is loaded; 7: the second product is another segment's, 8: and each segment a call.
 * Returns the second product. */
static std::vector<float> joined_norm_case(uint32_t type, uint32_t n, uint32_t T, uint32_t kind, uint32_t device) {
    const uint32_t n_in = 2048;
    const bool int8 = kind == 4 || kind == 5;
    char what[96];
    snprintf(what, sizeof what, "norm after %s %u rows %u kind %u device %u", type_name(type), n, T, kind, device);
    Rig g(devices[device]);
    g.whole = kind != 8;
    const uint32_t x = g.buffer(n_in), y = g.buffer(n), yn = kind == 3 ? y : g.buffer(n), z = g.buffer(8);
    const std::vector<uint8_t> w = random_rows(type, n_in, n), w2 = random_rows(int8 ? RF_TYPE_Q8_0 : RF_TYPE_F32, n, 8);
    const std::vector<float> norm = values(n), bias = values(n), xs = values((size_t)T * n_in),
                             old = values((size_t)T * n);
    rf_op *o = g.matmul(x, y, n_in, n, g.weight(type, n_in, n, w));
    o->flags = kind == 1 || kind == 2 ? RF_OP_ACCUMULATE : 0;
    o->matmul.scale = 0.25f;
    if (kind == 2) o->bias = g.vector(bias);
    g.norm(y, yn, 1, n, g.vector(norm))->layer = kind == 6;
    g.matmul(yn, z, n, 8, g.weight(int8 ? RF_TYPE_Q8_0 : RF_TYPE_F32, n, 8, w2))->layer = kind >= 6;
    if (kind == 5) g.matmul(yn, g.buffer(1), n, 1, g.vector(values(n)));
    std::vector<float> none;
    CHECK(g.open(T, 1, T) == RF_OK, "%s: %s", what, g.err.text);
    if (rft_bad) return none;
    g.set(x, xs), g.set(y, old);
    const uint32_t before = (uint32_t)api->plan_stats(g.prepared).launches;
    CHECK(g.run(rows_of(T)) == RF_OK, "%s: %s", what, g.err.text);
    if (rft_bad) return none;
    /* the step's values (64 rows a launch), quantize, tiles, join with norm or both, the second product, whose tiles are
     * joined if it is deep */
    const uint32_t launches = (uint32_t)api->plan_stats(g.prepared).launches - before - (T + 63) / 64,
                   want_launches = kind == 2 || kind >= 5 || n % 4 || n > 4096 ? 5 : 4;
    CHECK(kind > 6 || launches == want_launches, "%s: %u launches, want %u", what, launches, want_launches);
    std::vector<double> wd = decode(type, w), sums, normed;
    const Seen seen(device, type, xs.data(), n_in, T, n_in);
    for (uint32_t t = 0; t < T; t++) {
        const double *v = &seen.x[(size_t)t * n_in];
        double squares = 0;
        for (uint32_t i = 0; i < n; i++) {
            double sum = kind == 2 ? bias[i] : 0;
            for (uint32_t k = 0; k < n_in; k++) sum += wd[(size_t)i * n_in + k] * v[k];
            sums.push_back(0.25 * sum + (kind == 1 || kind == 2 ? old[t * n + i] : 0));
            squares += sums.back() * sums.back();
        }
        for (uint32_t i = 0; i < n; i++) normed.push_back(sums[t * n + i] / sqrt(squares / n + 1e-5) * norm[i]);
    }
    if (kind != 3) compare(g.get(y), sums, seen.tolerance, seen.nmse, what);
    const std::vector<float> found = g.get(z);
    if (kind == 4) return found; /* nobody reads its floats */
    const std::vector<float> made = g.get(yn);
    compare(made, normed, seen.tolerance, seen.nmse, what);
    if (!int8) return found;
    const std::vector<double> w2d = decode(RF_TYPE_Q8_0, w2);
    std::vector<double> products;
    const Seen again(device, RF_TYPE_Q8_0, made.data(), n, T, n);
    for (uint32_t t = 0; t < T; t++)
        for (uint32_t i = 0; i < 8; i++) {
            products.push_back(0);
            for (uint32_t k = 0; k < n; k++) products.back() += w2d[(size_t)i * n + k] * again.x[t * n + k];
        }
    compare(found, products, again.tolerance, again.nmse, what);
    return found;
}
/* Of so few rows, launches of a step in one call begin early where the device has wgmma. */
static void joined_norm_by_segments(uint32_t device) {
    seed = 78;
    const std::vector<float> whole = joined_norm_case(RF_TYPE_Q8_0, 256, 33, 7, device);
    seed = 78;
    CHECK(same_bits(whole, joined_norm_case(RF_TYPE_Q8_0, 256, 33, 8, device)), "device %u: other bits by segments", device);
}
static void test_joined_norm() {
    static const uint32_t list[][4] = {{RF_TYPE_Q8_0, 256, 70, 0}, {RF_TYPE_Q4_K, 192, 66, 1},
                                       {RF_TYPE_Q4_0, 100, 66, 1}, {RF_TYPE_Q6_K, 64, 33, 2},
                                       {RF_TYPE_Q8_0, 102, 33, 1},  {RF_TYPE_Q5_K, 96, 70, 3},
                                       {RF_TYPE_Q8_0, 288, 33, 5},  {RF_TYPE_Q4_K, 256, 70, 5},
                                       {RF_TYPE_Q8_0, 256, 33, 6}
#ifndef RF_TEST_EMU /* whose device is too small to cut so many tiles */
                                       , {RF_TYPE_Q8_0, 4200, 66, 1}
#endif
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const uint32_t d = (uint32_t)(i % (size_t)n_devices), *c = list[i];
        seed = 77;
        const std::vector<float> z = joined_norm_case(c[0], c[1], c[2], c[3], d);
        if (c[3] != 5) continue;
        seed = 77;
        CHECK(same_bits(z, joined_norm_case(c[0], c[1], c[2], 4, d)), "%ux%u: floats that nobody reads change bits", c[1], c[2]);
    }
    for (uint32_t d = 0; d < (uint32_t)n_devices; d++) joined_norm_by_segments(d);
}

/* Activations from 2^-90 to 2^108, one of which may be 10^4 times the others of its row, a row of zeros, and weights among
 * which are subnormal ones: each row of results is right for its own size, in both kinds of weights. So many rows are tiles.
 * Weights behind the first 64 of a row are 2^12 times as large, their activations 2^-12 times. */
static void float_ranges(uint32_t type, uint32_t device, uint32_t n_in, uint32_t n_out, uint32_t n_rows) {
    const uint32_t n_small = 10; /* rows of W with small weights */
    Rig g(devices[device]);
    uint32_t in = g.buffer(n_in), out = g.buffer(n_out);
    std::vector<float> w_values = values((size_t)n_in * n_out), x = values((size_t)n_in * n_rows);
    const size_t size = type == RF_TYPE_F32 ? 4 : 2;
    std::vector<uint8_t> w(size * w_values.size());
    for (size_t i = 0; i < w_values.size(); i++) {
        float v = ldexpf(w_values[i], (i < (size_t)n_small * n_in ? -16 : 0) + (i % n_in < 64 ? 0 : 12));
        uint32_t bits;
        memcpy(&bits, &v, 4);
        uint16_t packed = type == RF_TYPE_F16 ? to_half(v) : (uint16_t)(bits >> 16);
        memcpy(&w[size * i], type == RF_TYPE_F32 ? (void *)&bits : (void *)&packed, size);
    }
    for (size_t i = 0; i < x.size(); i++) {
        uint32_t row = (uint32_t)(i / n_in) % 12;
        x[i] = row == 5 ? 0 : ldexpf(i % n_in == row ? 1e4f * x[i] : x[i], 18 * ((int)row - 5) - (i % n_in < 64 ? 0 : 12));
    }
    g.matmul(in, out, n_in, n_out, g.weight(type, n_in, n_out, w));
    REQUIRE(g.open(n_rows, 1, n_rows) == RF_OK, "%s", g.err.text);
    g.set(in, x);
    REQUIRE(g.run(rows_of(n_rows)) == RF_OK, "%s", g.err.text);
    std::vector<float> y = g.get(out);
    std::vector<double> wd = decode(type, w);
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t part = 0; part < 2; part++) {
            std::vector<float> found;
            std::vector<double> want;
            for (uint32_t i = part * n_small; i < (part + 1) * n_small; i++) {
                double sum = 0;
                for (uint32_t k = 0; k < n_in; k++) sum += wd[(size_t)i * n_in + k] * x[(size_t)t * n_in + k];
                found.push_back(y[(size_t)t * n_out + i]);
                want.push_back(sum);
            }
            char what[80];
            snprintf(what, sizeof what, "%s, row %u, %s weights, device %u", type_name(type), t, part ? "usual" : "small",
                     device);
            compare(found, want, FLOAT_TOLERANCE, NMSE_TOLERANCE, what);
        }
}

/* Products of one sign, whose errors do not cancel out in the sum. */
static void float_sums(uint32_t n_in, uint32_t n_out, uint32_t n_rows, uint32_t device) {
    Rig g(devices[device]);
    const uint32_t in = g.buffer(n_in), out = g.buffer(n_out);
    std::vector<float> w = values((size_t)n_in * n_out), x = values((size_t)n_in * n_rows);
    std::vector<double> want;
    for (size_t i = 0; i < w.size(); i++) w[i] = fabsf(w[i]);
    for (size_t i = 0; i < x.size(); i++) x[i] = fabsf(x[i]);
    const uint8_t *bytes = (const uint8_t *)w.data();
    g.matmul(in, out, n_in, n_out, g.weight(RF_TYPE_F32, n_in, n_out, std::vector<uint8_t>(bytes, bytes + 4 * w.size())));
    REQUIRE(g.open(n_rows, 1, n_rows) == RF_OK, "%s", g.err.text);
    g.set(in, x);
    REQUIRE(g.run(rows_of(n_rows)) == RF_OK, "%s", g.err.text);
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t i = 0; i < n_out; i++) {
            double sum = 0;
            for (uint32_t k = 0; k < n_in; k++) sum += (double)w[(size_t)i * n_in + k] * x[(size_t)t * n_in + k];
            want.push_back(sum);
        }
    compare(g.get(out), want, 2e-6, 2e-13, "sums of products of one sign");
}

/* Many columns of every quantized type on wgmma: rows and columns that fill no tile, depths of one step, of a few and of
 * several blocks; products that share a launch, and a norm and a glu that leave bfloats; experts. */
static void bfloats_cases(uint32_t device) {
    static const uint32_t depths[] = {64, 256, 1280}, outs[] = {5, 130, 257}, rows[] = {40, 70, 200};
    for (size_t t = 1; t < N_TYPES; t++) { /* the first is F32 */
        const uint32_t block = block_elements(types[t]), n = depths[t % 3] < block ? block : depths[t % 3];
        MatmulCase c = {types[t], n, outs[t / 3 % 3], rows[t / 2 % 3], (uint32_t)t % 7, device};
        matmul_case(c);
        if (t % 3 != 2) continue; /* experts of a tile of pairs and a part, of a part, of none */
        ExpertsCase some = {types[t], block < 64 ? 64 : block, 20, 70, 2, 4, device, t % 2 == 0, t % 4 == 0, t % 4 == 3,
                            t % 5 == 0, t % 2 == 0, t % 4 < 2};
        experts_case(some);
    }
    ExpertsCase many = {RF_TYPE_Q4_K, 512, 130, 140, 2, 4, device, true, true, true, false, true, false}; /* three tiles */
    experts_case(many);
    many.part = true;
    experts_case(many);
    MatmulCase halves = {RF_TYPE_F16, 1280, 70, 140, 2, device}, bfloats = {RF_TYPE_BF16, 640, 70, 140, 3, device},
               five = {RF_TYPE_Q4_K, 512, 130, 530, 1, device}; /* columns for 5 tiles of 128 */
    matmul_case(halves), matmul_case(bfloats), matmul_case(five);
    /* several tiles a block: of odd numbers of steps, of a single one, of steps that share units */
    const MatmulCase wide[] = {{RF_TYPE_F16, 192, 700, 300, 1, device}, {RF_TYPE_Q8_0, 64, 1500, 300, 2, device},
                               {RF_TYPE_Q8_0, 320, 700, 300, 0, device}, {RF_TYPE_Q6_K, 512, 700, 300, 3, device},
                               {RF_TYPE_IQ4_NL, 192, 700, 300, 1, device}, {RF_TYPE_Q3_K, 512, 700, 300, 2, device},
                               {RF_TYPE_Q4_K, 2048, 300, 300, 1, device}, {RF_TYPE_MXFP4, 320, 700, 300, 0, device}};
    for (int i = 0; i < 8; i++) matmul_case(wide[i]);
    /* float32 in two halves: several tiles a block, half a tile, splits, rows of W from the fourth on */
    const MatmulCase split[] = {{RF_TYPE_F32, 128, 1030, 260, 1, device}, {RF_TYPE_F32, 64, 1100, 270, 2, device},
                                {RF_TYPE_F32, 768, 1024, 33, 3, device}, {RF_TYPE_F32, 192, 1030, 130, 0, device}};
    for (int i = 0; i < 4; i++) matmul_case(split[i]);
    float_ranges(RF_TYPE_F32, device, 128, 1024, 34);
    float_sums(512, 1024, 34, device);
    /* weights decoded in registers: several tiles a block, rows that end in the middle of a step, splits, columns of pairs
     * that have several vectors, more than a tile of pairs */
    const MatmulCase narrow[] = {{RF_TYPE_Q8_0, 320, 2600, 64, 1, device}, {RF_TYPE_Q5_1, 192, 300, 33, 2, device},
                                 {RF_TYPE_Q4_K, 2048, 300, 60, 3, device}, {RF_TYPE_Q6_K, 768, 1100, 50, 0, device},
                                 /* of 32 columns */
                                 {RF_TYPE_Q8_0, 320, 2600, 32, 1, device}, {RF_TYPE_Q5_1, 192, 300, 17, 2, device},
                                 {RF_TYPE_Q4_K, 2048, 300, 25, 3, device}, {RF_TYPE_Q6_K, 768, 1100, 31, 0, device}};
    for (int i = 0; i < 8; i++) matmul_case(narrow[i]);
    const uint32_t pairs[] = {40, 70, 200};
    for (int i = 0; i < 3; i++) {
        ExpertsCase some = {RF_TYPE_Q8_0, 192, 260, pairs[i], 2, 4, device, true, true, true, false, true, i != 1};
        experts_case(some);
    }
    together_case(RF_TYPE_Q4_K, RF_TYPE_IQ4_XS, 256, 50, device, true); /* of one input, in two orders */
    expert_groups_case(RF_TYPE_Q5_K, device);
    MatmulCase odd = {RF_TYPE_Q8_0, 96, 20, 70, 0, device}; /* half a step: int8 */
    matmul_case(odd);
    together_case(RF_TYPE_Q4_K, RF_TYPE_Q6_K, 256, 66, device, true);
    for (uint32_t kind = 0; kind < 7; kind++)
        joined_norm_case(kind % 2 ? RF_TYPE_Q4_K : RF_TYPE_Q6_K, 256, 70, kind, device);
    const HeadsCase heads[] = {{RF_TYPE_Q8_0, 128, 130, 70, 3, 64, device}, {RF_TYPE_Q4_K, 512, 33, 200, 2, 0, device}};
    heads_case(heads[0]), heads_case(heads[1]); /* of MLA: keys with parts that rotate, values */
}
#ifndef RF_TEST_EMU
static void test_bfloats() { /* and as many steps and heads as models have */
    for (uint32_t d = 0; d < (uint32_t)n_devices; d++) {
        const MatmulCase large[] = {{RF_TYPE_Q4_K, 4096, 1000, 150, 2, d}, {RF_TYPE_Q6_K, 14336, 130, 200, 0, d},
                                    {RF_TYPE_Q8_0, 2048, 2500, 70, 1, d}};
        const bool bfloats = has_bfloats(d);
        printf("    device %u: %s\n", d, bfloats ? "bfloats" : "no bfloats");
        if (bfloats) bfloats_cases(d);
        for (int i = 0; bfloats && i < 3; i++) matmul_case(large[i]);
        const AttentionCase many = {4, 36, 128, 128, 130, 40, RF_CACHE_F16, 0, d}; /* blocks enough for rfk_flash_wgmma */
        if (bfloats) attention_case(many);
        if (bfloats) float_sums(14336, 1024, 130, d);
    }
}
#endif

/* x -> norm -> gate, up -> glu, one row: one launch, which also writes the normed values and those of up. */
static void glu_case(uint32_t type, uint32_t n, uint32_t n_out, uint32_t device, bool bias) {
    char what[96];
    snprintf(what, sizeof what, "glu %s %u x %u device %u bias %d", type_name(type), n, n_out, device, bias);
    Rig g(devices[device]);
    uint32_t x = g.buffer(n), xn = g.buffer(n), out[2] = {g.buffer(n_out + 1), g.buffer(n_out)};
    std::vector<float> norm = values(n), xs = values(n), b[2] = {values(n_out), values(n_out)};
    std::vector<double> w[2], want_xn, sums[2];
    g.norm(x, xn, 1, n, g.vector(norm));
    for (int i = 0; i < 2; i++) {
        std::vector<uint8_t> bytes = random_rows(type, n, n_out);
        w[i] = decode(type, bytes);
        rf_op *o = g.matmul(xn, out[i], n, n_out, g.weight(type, n, n_out, bytes));
        if (bias) o->bias = g.vector(b[i]);
    }
    g.glu(out[0], out[1], out[0], n_out);
    g.matmul(xn, g.buffer(1), n, 1, g.vector(values(n))); /* without a reader the normed values need not be there */
    REQUIRE(g.open(1) == RF_OK, "%s: %s", what, g.err.text);
    g.set(x, xs);
    REQUIRE(g.run(rows_of(1)) == RF_OK, "%s: %s", what, g.err.text);
    std::vector<float> found = g.get(xn), y = g.get(out[0]);
    double sum = 0;
    for (uint32_t k = 0; k < n; k++) sum += (double)xs[k] * xs[k];
    for (uint32_t k = 0; k < n; k++) want_xn.push_back(xs[k] / sqrt(sum / n + 1e-5) * norm[k]);
    compare(found, want_xn, 1e-6, 1e-12, what);
    const std::vector<double> v = quantized(found.data(), n), ties = near_ties(found.data(), n);
    std::vector<double> want, flips[2], y_flips;
    for (uint32_t r = 0; r < n_out; r++) {
        for (int i = 0; i < 2; i++) {
            double dot = bias ? b[i][r] : 0, flip = 0;
            for (uint32_t k = 0; k < n; k++) {
                dot += w[i][(size_t)r * n + k] * v[k];
                flip += fabs(w[i][(size_t)r * n + k]) * ties[k];
            }
            sums[i].push_back(dot);
            flips[i].push_back(flip);
        }
        const double silu = sums[0][r] / (1 + exp(-sums[0][r]));
        want.push_back(silu * sums[1][r]);
        /* silu's slope is 1.1 at most */
        y_flips.push_back(1.1 * flips[0][r] * (fabs(sums[1][r]) + flips[1][r]) + fabs(silu) * flips[1][r]);
    }
    /* thousands of terms whose minimums nearly cancel */
    double tolerance = n > 1000 ? 10 * FLOAT_TOLERANCE : FLOAT_TOLERANCE, nmse = n > 1000 ? 1e-8 : NMSE_TOLERANCE;
    compare(g.get(out[1]), sums[1], tolerance, nmse, what, 0, &flips[1]);
    y.resize(n_out);
    compare(y, want, tolerance, nmse, what, 0, &y_flips);
}
static void test_glu_launch() {
    for (int k = 3; k < N_TYPES; k++)
        for (int d = 0; d < n_devices; d++) {
            glu_case(types[k], 256, 70, (uint32_t)d, k % 2 == 0);
            glu_case(types[k], 256 * 21, 5, (uint32_t)d, false); /* several strips a lane, more than fit in flight */
        }
}

/* ---- a decoder: what decode steps launch, against the ops one by one ---- */

struct DecoderShape {
    uint32_t type, more; /* more: of the values and of the last matmul of a layer */
    uint32_t n_heads, n_kv_heads, dim, cache;
    bool norms, neox;
    bool scaled;    /* and capped matmuls */
    int windowed;   /* attention of one layer with a window and a cap; 2: in a ring, with sinks and a rope of its own;
                     * 3: without any of it, in a long context that was there before */
    bool post_norms; /* the results of attention and of the last matmul of a layer are normed, then added */
};
enum : uint32_t { decoder_vocab = 24, decoder_ring = 256, decoder_window = 150 };

/* Values of a token. Not a multiple of 4 with floats alone: norms are not joined with products then, a block a row, which takes
 * most of the time to emulate and is no part of attention. */
static uint32_t decoder_n(const DecoderShape &c) { return is_float(c.type) && is_float(c.more) ? 126 : 256; }

static uint32_t decoder_model(Rig &g, const DecoderShape &c) {
    seed = 4711;
    const uint32_t n = decoder_n(c), nq = c.n_heads * c.dim, nk = c.n_kv_heads * c.dim;
    uint32_t x = g.buffer(n), xn = g.buffer(n), q = g.buffer(nq), k = g.buffer(nk), v = g.buffer(nk),
             att = g.buffer(nq), gate = g.buffer(2 * n), up = g.buffer(2 * n), xl = g.buffer(n, RF_ROWS_LOGITS),
             logits = g.buffer(decoder_vocab, RF_ROWS_LOGITS), top = g.buffer(1, RF_ROWS_LOGITS), y = g.buffer(n);
    for (uint32_t i = 0; i < c.dim; i++) g.tables.push_back(powf(i < c.dim / 2 ? 1000.0f : 50.0f, -(float)(i % (c.dim / 2)) / (float)(c.dim / 2)));
    const uint32_t table = g.weight(RF_TYPE_F16, n, decoder_vocab, random_rows(RF_TYPE_F16, n, decoder_vocab));
    g.embed(x, n, table)->layer = -1;
    for (int32_t il = 0; il < 3; il++) {
        size_t first = g.ops.size();
        const bool ring = c.windowed == 2 && il == 1;
        if (il == 2) g.gather(x, xl, n);
        const uint32_t ins[6] = {xn, xn, xn, att, xn, xn}, outs[6] = {q, k, v, c.post_norms ? y : x, gate, up},
                       widths[6] = {nq, nk, nk, n, 2 * n, 2 * n};
        for (int i = 0; i < 6; i++) {
            if (i == 0 || i == 4) g.norm(il < 2 ? x : xl, il < 2 ? xn : xl, 1, n, g.vector(values(n)));
            if (il == 2) break;
            if (i == 3) { /* between the projections and the output */
                for (int h = 0; c.norms && h < 2; h++)
                    g.norm(h ? k : q, h ? k : q, h ? c.n_kv_heads : c.n_heads, c.dim, g.vector(values(c.dim)));
                for (int h = 0; h < 2; h++) {
                    rf_op *o = g.rope(h ? k : q, h ? c.n_kv_heads : c.n_heads, c.dim, c.dim, ring ? 1 : 1.5f);
                    o->rope.table = ring ? c.dim / 2 : 0, o->flags = c.neox ? RF_OP_NEOX : 0;
                }
                uint32_t state = g.state(c.n_kv_heads, c.dim, c.dim, ring ? (uint32_t)decoder_window : 0);
                g.kv_store(k, v, state, c.n_kv_heads, c.dim, c.dim);
                rf_op *o = g.attention(q, att, state, c.n_heads, c.n_kv_heads, c.dim);
                if (c.windowed && il == 1)
                    o->attention.window = ring ? (uint32_t)decoder_window : 20, o->attention.softcap = 5;
                if (ring) o->weight = g.vector(values(c.n_heads));
            }
            uint32_t type = i == 2 ? c.more : c.type, n_in = i == 3 ? nq : n;
            rf_op *o = g.matmul(ins[i], outs[i], n_in, widths[i],
                                g.weight(type, n_in, widths[i], random_rows(type, n_in, widths[i])));
            o->flags = i == 3 && !c.post_norms ? RF_OP_ACCUMULATE : 0;
            if (c.scaled && i == 3) o->matmul.scale = 0.4f;
            if (i < 2) o->bias = g.vector(values(widths[i]));
            if (i == 3 && c.post_norms) g.norm(y, x, 1, n, g.vector(values(n)))->flags = RF_OP_ACCUMULATE;
        }
        if (il < 2) g.glu(gate, up, gate, 2 * n)->glu.activation = il ? RF_ACT_GELU : RF_ACT_SILU;
        const uint32_t n_in = il < 2 ? 2 * n : n, n_out = il < 2 ? n : (uint32_t)decoder_vocab;
        rf_op *o = g.matmul(il < 2 ? gate : xl, il == 2 ? logits : c.post_norms ? y : x, n_in, n_out,
                            g.weight(c.more, n_in, n_out, random_rows(c.more, n_in, n_out)));
        o->flags = il < 2 && !c.post_norms ? RF_OP_ACCUMULATE : 0;
        if (c.scaled) o->matmul.scale = 0.7f, o->matmul.softcap = il < 2 ? 0 : 2.0f;
        if (il < 2 && c.post_norms) g.norm(y, x, 1, n, g.vector(values(n)))->flags = RF_OP_ACCUMULATE;
        for (size_t i = first; i < g.ops.size(); i++) g.ops[i].layer = il;
    }
    rf_op *o = g.op(RF_OP_ARGMAX, RF_ROWS_LOGITS);
    o->in = logits, o->out = top, o->argmax.n = decoder_vocab, o->layer = 2;
    g.plan.logits = logits, g.plan.argmax = top, g.plan.n_vocab = decoder_vocab;
    return logits;
}

/* The prompt's end, and where the steps after it are: one by one; with a ring, where it begins again, three times. */
static std::vector<uint32_t> decoder_places(const DecoderShape &c) {
    static const uint32_t places[] = {70, 70, 71, 72},
                          around[] = {20, decoder_ring - 1, decoder_ring, 2 * decoder_ring - 1, 2 * decoder_ring + 3, 3 * decoder_ring},
                          far[] = {3, 1090, 2112, 4095}; /* more than 16, 32 and 63 splits */
    if (c.windowed == 3) return std::vector<uint32_t>(far, far + 4);
    return c.windowed == 2 ? std::vector<uint32_t>(around, around + 6) : std::vector<uint32_t>(places, places + 4);
}

/* Sequences alike hold the same keys and values, at places where no step has been, too. */
static void fill_states(Rig &g, const DecoderShape &c, uint32_t n_seq) {
    for (size_t i = 0; i < g.states.size(); i++) {
        std::vector<uint8_t> bytes(g.state_bytes[i]);
        const uint32_t cells = c.n_kv_heads * g.state_cells[i];
        const uint64_t v_base = ((uint64_t)n_seq * cells * row_bytes(c.cache, c.dim) + 255) & ~(uint64_t)255;
        for (uint32_t part = 0; part < 2; part++)
            for (uint32_t row = 0; row < cells; row++)
                for (uint32_t k = 0; k < c.dim; k++) {
                    const float x = uniform(-0.5f, 0.5f);
                    for (uint32_t q = 0; q < n_seq; q++) put_state(bytes, part ? v_base : 0, (uint64_t)q * cells + row, c.dim, k, c.cache, x);
                }
        rf_ticket t;
        CHECK(api->mem_write(g.queue, &g.bind.state, g.state_offset[i], bytes.data(), bytes.size(), &t, &g.err) == RF_OK &&
                  api->ticket_wait(&t, 60000, &g.err) == RF_OK, "%s", g.err.text);
    }
}

/* Two tokens of a prompt, then tokens one by one. Two sequences alike in one step: kernels of several rows; one: those of one row;
 * whole: from a graph. Returns the logits of all steps; *launches becomes how many the last one had. */
static std::vector<float> decoder_run(rf_dev *d, const DecoderShape &c, uint32_t n_seq, bool whole, uint64_t *launches = NULL) {
    std::vector<float> all;
    Rig g(d);
    uint32_t logits = decoder_model(g, c);
    const std::vector<uint32_t> places = decoder_places(c);
    g.whole = whole;
    if (g.open(2 * n_seq, n_seq, places.back() + 1, n_seq, c.cache, c.windowed == 2 ? (uint32_t)decoder_ring : 0) != RF_OK) {
        CHECK(0, "%s", g.err.text);
        return all;
    }
    fill_states(g, c, n_seq);
    for (size_t i = 0; i < places.size(); i++) {
        const uint32_t end = places[i] + (i > 0), from = i > 0 ? places[i] : end - 2; /* what is before was there */
        std::vector<rf_step_row> rows;
        std::vector<uint32_t> last;
        for (uint32_t s = 0; s < n_seq; s++) {
            for (uint32_t pos = from; pos < end; pos++) {
                rf_step_row row = {(int32_t)(pos * 7 % decoder_vocab), (int32_t)s, (int32_t)pos, -1};
                rows.push_back(row);
            }
            last.push_back((uint32_t)rows.size() - 1);
        }
        const uint64_t before = api->plan_stats(g.prepared).launches;
        CHECK(g.run(rows, last) == RF_OK, "%s", g.err.text);
        if (launches) *launches = api->plan_stats(g.prepared).launches - before;
        std::vector<float> y = g.get(logits);
        for (uint32_t s = 1; s < n_seq; s++)
            CHECK(memcmp(&y[0], &y[(size_t)s * decoder_vocab], decoder_vocab * 4) == 0, "sequences alike differ");
        all.insert(all.end(), y.begin(), y.begin() + decoder_vocab);
    }
    return all;
}

/* Decode attention in as many splits as a large GPU has, and last blocks that join them. */
static void test_many_splits() {
    static const DecoderShape shapes[] = {
        {RF_TYPE_F32, RF_TYPE_F32, 8, 1, 128, RF_CACHE_F16, false, true, false, 3},
        {RF_TYPE_F32, RF_TYPE_F32, 5, 1, 256, RF_CACHE_F32, false, false, false, 3},
        {RF_TYPE_F32, RF_TYPE_F32, 2, 1, 64, RF_CACHE_Q8_0, false, false, false, 3},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (uint32_t index = 0; index < devices.size(); index++) {
            const DecoderShape &c = shapes[i];
#ifdef RF_TEST_EMU
            rf_error err;
            rf_dev *d = NULL;
            hip_emu_units(80);
            const rf_result opened = api->device_open(index, NULL, &d, &err);
            hip_emu_units(5);
            REQUIRE(opened == RF_OK, "%s", err.text);
#else
            rf_dev *d = devices[index];
#endif
            const std::vector<float> ops = decoder_run(d, c, 2, false), one = decoder_run(d, c, 1, false);
            const std::vector<double> want(ops.begin(), ops.end());
            const bool exact = c.cache == RF_CACHE_F32;
            compare(one, want, exact ? 3e-5 : 1e-2, exact ? 1e-9 : 1e-5, "many splits");
            CHECK(same_bits(one, decoder_run(d, c, 1, true)), "a graph gives other bits: shape %zu", i);
#ifdef RF_TEST_EMU
            api->device_close(d);
#endif
        }
}

static void test_decode_step() {
    static const DecoderShape shapes[] = {
        /* no quantized matmul: attention is all that changes, up to the order of sums */
        {RF_TYPE_F32, RF_TYPE_F32, 4, 2, 64, RF_CACHE_F32, false, false, false, 0},
        {RF_TYPE_F32, RF_TYPE_F16, 4, 4, 32, RF_CACHE_F32, true, true, false, 0},
        {RF_TYPE_F16, RF_TYPE_F32, 8, 1, 80, RF_CACHE_F32, true, false, false, 0},
        {RF_TYPE_F32, RF_TYPE_F32, 3, 1, 256, RF_CACHE_F16, false, true, false, 0},
        {RF_TYPE_Q4_K, RF_TYPE_Q6_K, 4, 2, 64, RF_CACHE_F16, false, false, false, 0},
        {RF_TYPE_Q5_K, RF_TYPE_Q4_0, 4, 1, 128, RF_CACHE_F16, true, true, false, 0},
        {RF_TYPE_Q8_0, RF_TYPE_Q5_0, 4, 4, 64, RF_CACHE_F16, false, true, false, 0},
        {RF_TYPE_Q4_1, RF_TYPE_Q5_1, 8, 2, 32, RF_CACHE_F32, false, false, false, 0},
        {RF_TYPE_Q8_0, RF_TYPE_F16, 2, 2, 128, RF_CACHE_F16, false, false, false, 0},
        {RF_TYPE_Q4_K, RF_TYPE_Q6_K, 4, 2, 64, RF_CACHE_F16, true, true, true, 0},
        {RF_TYPE_Q8_0, RF_TYPE_Q4_0, 8, 2, 32, RF_CACHE_F16, false, true, true, 1},
        {RF_TYPE_Q3_K, RF_TYPE_Q5_K, 4, 2, 64, RF_CACHE_F16, true, false, false, 0},
        {RF_TYPE_F32, RF_TYPE_F32, 4, 2, 64, RF_CACHE_F32, true, true, false, 2},
        {RF_TYPE_F16, RF_TYPE_F32, 3, 1, 256, RF_CACHE_F16, false, false, false, 2},
        {RF_TYPE_Q4_K, RF_TYPE_Q6_K, 4, 2, 64, RF_CACHE_Q8_0, true, true, false, 0},
        {RF_TYPE_F32, RF_TYPE_F32, 5, 1, 128, RF_CACHE_Q8_0, false, true, false, 0},
        {RF_TYPE_F32, RF_TYPE_F32, 2, 2, 256, RF_CACHE_Q8_0, true, true, false, 2},
        {RF_TYPE_Q8_0, RF_TYPE_Q8_0, 4, 2, 32, RF_CACHE_Q8_0, false, true, false, 0}, /* heads that are not fused */
        {RF_TYPE_F32, RF_TYPE_Q8_0, 1, 1, 64, RF_CACHE_F16, false, false, false, 0}, /* norms joined with products of floats */
        {RF_TYPE_Q4_K, RF_TYPE_Q6_K, 4, 2, 64, RF_CACHE_F16, true, true, false, 0, true},
        {RF_TYPE_Q8_0, RF_TYPE_Q4_0, 4, 1, 128, RF_CACHE_F16, false, true, true, 1, true},
        {RF_TYPE_Q3_K, RF_TYPE_Q5_K, 4, 2, 64, RF_CACHE_F16, true, false, false, 0, true},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i += stride)
        for (size_t d = 0; d < devices.size(); d++) {
            if (!full && devices.size() > 1 && i % devices.size() != d) continue; /* wave sizes in turn */
            const DecoderShape &c = shapes[i];
            std::vector<float> ops = decoder_run(devices[d], c, 2, false), one = decoder_run(devices[d], c, 1, false);
            std::vector<double> want(ops.begin(), ops.end());
            /* a sum in another order rounds an int8 or half value to the other side here and there */
            bool exact = is_float(c.type) && is_float(c.more) && c.cache == RF_CACHE_F32;
            compare(one, want, exact ? 3e-5 : 1e-2, exact ? 1e-9 : 1e-5, type_name(c.type));
#ifdef RF_TEST_EMU
            uint64_t before = hip_emu_get_counts().replays;
            uint64_t launches = 0;
            CHECK(same_bits(one, decoder_run(devices[d], c, 1, true, &launches)), "a graph gives other bits: shape %zu", i);
            const uint64_t steps = c.cache == RF_CACHE_Q8_0 && c.dim == 32 ? 0 : decoder_places(c).size() - 1;
            CHECK(hip_emu_get_counts().replays - before == steps, "steps were not replayed: shape %zu", i);
            if (c.post_norms) { /* only the last one, behind which rows are gathered, is a launch of its own */
                DecoderShape plain = c;
                uint64_t fewer = 0;
                plain.post_norms = false;
                (void)decoder_run(devices[d], plain, 1, true, &fewer);
                CHECK(launches == fewer + 1, "%u launches with post-norms, %u without: shape %zu", (uint32_t)launches, (uint32_t)fewer, i);
            }
#else
            CHECK(same_bits(one, decoder_run(devices[d], c, 1, true)), "a graph gives other bits: shape %zu", i);
#endif
        }
}

/* ---- attention of a step's rows, of many sequences ---- */

struct RowsCase {
    uint32_t n_heads, n_kv_heads, dim, cache;
    bool norms, neox;
    uint32_t window; /* in a ring, with sinks and a cap; 0: all positions */
    uint32_t n_rows, each; /* each: rows of a sequence */
    uint32_t units;  /* of the emulated GPU: how many splits and shares there are */
    bool far;        /* sequences that a cluster takes, and longer ones */
    uint32_t ctx() const { return far ? 2560 : 640; }
};

/* Tokens of a sequence before the step: around the ends of splits, and a long one among short ones. */
static uint32_t rows_before(const RowsCase &c, uint32_t seq) {
    static const uint32_t before[] = {63, 600, 0, 64, 3, 130, 257, 62}, far[] = {2400, 63, 2047, 1100, 2048};
    if (c.far) return far[seq % 5];
    return seq == 1 ? 600 : before[seq % 8] % 600;
}

/* A row's head, normed and rotated. */
static std::vector<double> rows_head(const Rig &g, const RowsCase &c, const float *x, const float *weight, int32_t pos) {
    std::vector<double> y(x, x + c.dim);
    double squares = 0;
    for (uint32_t i = 0; i < c.dim; i++) squares += y[i] * y[i];
    for (uint32_t i = 0; c.norms && i < c.dim; i++) y[i] *= weight[i] / sqrt(squares / c.dim + (double)1e-5f);
    const uint32_t n_rot = c.dim / 4 * 2; /* the rest of a head is not rotated */
    for (uint32_t i = 0; i < n_rot / 2; i++) {
        const uint32_t at[2] = {c.neox ? i : 2 * i, c.neox ? i + n_rot / 2 : 2 * i + 1};
        const double angle = (double)pos * g.tables[i], a = y[at[0]], b = y[at[1]];
        y[at[0]] = a * cos(angle) - b * sin(angle), y[at[1]] = a * sin(angle) + b * cos(angle);
    }
    return y;
}

static void rows_case(const RowsCase &c, rf_dev *d, uint32_t wave) {
    char what[160];
    snprintf(what, sizeof what, "%u rows, %u of a sequence, %u heads, %u KV heads of %u, cache %u, window %u, %u units, waves of %u", c.n_rows,
             c.each, c.n_heads, c.n_kv_heads, c.dim, c.cache, c.window, c.units, wave);
    seed = 31;
    Rig g(d);
    const uint32_t nq = c.n_heads * c.dim, nk = c.n_kv_heads * c.dim, n_seq = (c.n_rows + c.each - 1) / c.each,
                   q = g.buffer(nq), k = g.buffer(nk), v = g.buffer(nk), out = g.buffer(nq),
                   n_cells = c.window ? (c.window + c.n_rows - 1 + 255) / 256 * 256 : c.ctx(),
                   state = g.state(c.n_kv_heads, c.dim, c.dim, c.window);
    const std::vector<float> norm[2] = {values(c.dim), values(c.dim)}, sinks = values(c.n_heads);
    for (uint32_t i = 0; i < c.dim / 4; i++) g.tables.push_back(powf(500.0f, -(float)i / (float)(c.dim / 4)));
    for (int h = 0; c.norms && h < 2; h++) g.norm(h ? k : q, h ? k : q, h ? c.n_kv_heads : c.n_heads, c.dim, g.vector(norm[h]));
    for (int h = 0; h < 2; h++)
        g.rope(h ? k : q, h ? c.n_kv_heads : c.n_heads, c.dim, c.dim / 4 * 2, 1)->flags = c.neox ? RF_OP_NEOX : 0;
    g.kv_store(k, v, state, c.n_kv_heads, c.dim, c.dim);
    rf_op *o = g.attention(q, out, state, c.n_heads, c.n_kv_heads, c.dim);
    if (c.window) o->attention.window = c.window, o->attention.softcap = 5, o->weight = g.vector(sinks);
    REQUIRE(g.open(c.n_rows, 1, c.ctx(), n_seq, c.cache, c.window ? n_cells : 0) == RF_OK, "%s: %s", what, g.err.text);

    std::vector<rf_step_row> rows;
    for (uint32_t i = 0; i < c.n_rows; i++) {
        rf_step_row row = {0, (int32_t)(i / c.each), (int32_t)(rows_before(c, i / c.each) + i % c.each), -1};
        rows.push_back(row);
    }
    const std::vector<float> xq = values((size_t)c.n_rows * nq), xk = values((size_t)c.n_rows * nk), xv = values((size_t)c.n_rows * nk);
    const uint64_t cells = (uint64_t)n_seq * c.n_kv_heads * n_cells, v_base = (cells * row_bytes(c.cache, c.dim) + 255) / 256 * 256;
    std::vector<uint8_t> before(g.bind.state.size_bytes), after(before.size());
    for (uint32_t part = 0; part < 2; part++)
        for (uint64_t cell = 0; cell < cells; cell++) /* those of later positions hold what they may */
            for (uint32_t i = 0; i < c.dim; i++)
                put_state(before, part ? v_base : 0, cell, c.dim, i, c.cache,
                          cell % n_cells > rows_before(c, (uint32_t)(cell / n_cells / c.n_kv_heads)) ? NAN : uniform(-1.5f, 1.5f));
    rf_ticket t;
    REQUIRE(api->mem_write(g.queue, &g.bind.state, 0, before.data(), before.size(), &t, &g.err) == RF_OK, "%s: %s", what, g.err.text);
    g.set(q, xq), g.set(k, xk), g.set(v, xv);
    REQUIRE(g.run(rows) == RF_OK, "%s: %s", what, g.err.text);
    const std::vector<float> y = g.get(out);
    REQUIRE(api->mem_read(g.queue, &g.bind.state, 0, after.data(), after.size(), &t, &g.err) == RF_OK && api->ticket_wait(&t, 60000, &g.err) == RF_OK,
            "%s: %s", what, g.err.text);

    double worst = 0; /* of what is stored, in units of the cache's precision */
    std::vector<double> want((size_t)c.n_rows * nq), p;
    for (uint32_t r = 0; r < c.n_rows; r++)
        for (uint32_t h = 0; h < c.n_kv_heads; h++) {
            const uint64_t head = ((uint64_t)rows[r].seq * c.n_kv_heads + h) * n_cells, own = head + (uint32_t)rows[r].pos % n_cells;
            const float *xv_row = &xv[(size_t)r * nk + h * c.dim];
            const std::vector<double> key = rows_head(g, c, &xk[(size_t)r * nk + h * c.dim], norm[1].data(), rows[r].pos), value(xv_row, xv_row + c.dim);
            for (uint32_t part = 0; part < 2; part++) {
                const std::vector<double> &x = part ? value : key;
                double largest = 0;
                for (uint32_t i = 0; i < c.dim; i++) largest = fmax(largest, fabs(x[i]));
                for (uint32_t i = 0; i < c.dim; i++)
                    worst = rft_worst(worst, fabs(state_value(after, part ? v_base : 0, own, c.dim, i, c.cache) - x[i]) / largest *
                                            (c.cache == RF_CACHE_F32 ? 1e5 : c.cache == RF_CACHE_F16 ? 1e3 : 200));
            }
            memcpy(&before[own * row_bytes(c.cache, c.dim)], &after[own * row_bytes(c.cache, c.dim)], row_bytes(c.cache, c.dim));
            memcpy(&before[v_base + own * row_bytes(c.cache, c.dim)], &after[v_base + own * row_bytes(c.cache, c.dim)], row_bytes(c.cache, c.dim));
            const uint32_t n = (uint32_t)rows[r].pos + 1, first = c.window && n > c.window ? n - c.window : 0, group = c.n_heads / c.n_kv_heads;
            for (uint32_t j = h * group; j < (h + 1) * group; j++) {
                const std::vector<double> query = rows_head(g, c, &xq[(size_t)r * nq + j * c.dim], norm[0].data(), rows[r].pos);
                double top = c.window ? (double)sinks[j] : -INFINITY, sum = 0;
                p.assign(n, 0);
                for (uint32_t pos = first; pos < n; pos++) {
                    for (uint32_t i = 0; i < c.dim; i++) p[pos] += query[i] * state_value(after, 0, head + pos % n_cells, c.dim, i, c.cache);
                    p[pos] *= (double)o->attention.scale;
                    if (c.window) p[pos] = 5 * tanh(p[pos] / 5);
                    top = fmax(top, p[pos]);
                }
                for (uint32_t pos = first; pos < n; pos++) sum += p[pos] = exp(p[pos] - top);
                if (c.window) sum += exp((double)sinks[j] - top);
                for (uint32_t pos = first; pos < n; pos++)
                    for (uint32_t i = 0; i < c.dim; i++)
                        want[(size_t)r * nq + j * c.dim + i] += p[pos] / sum * state_value(after, v_base, head + pos % n_cells, c.dim, i, c.cache);
            }
        }
    CHECK(worst < 1, "%s: a key or value is stored wrong, %g", what, worst);
    CHECK(before == after, "%s: other cells are written", what);
    compare(y, want, FLOAT_TOLERANCE, NMSE_TOLERANCE, what);

    const uint64_t launches = api->plan_stats(g.prepared).launches;
    g.set(q, xq), g.set(k, xk);
    CHECK(g.run(rows) == RF_OK && same_bits(y, g.get(out)), "%s: a repeated run gives other bits", what);
    const uint64_t fused = api->plan_stats(g.prepared).launches - launches;
    if (c.n_rows <= 128) CHECK(fused == 2u + (c.each > 1), "%s: %u launches", what, (uint32_t)fused); /* angles, keys, attention */
    for (uint32_t r = 0; c.n_rows <= 16 && r < c.n_rows; r++) {
        g.set(q, std::vector<float>(&xq[(size_t)r * nq], &xq[(size_t)r * nq] + nq));
        g.set(k, std::vector<float>(&xk[(size_t)r * nk], &xk[(size_t)r * nk] + nk));
        g.set(v, std::vector<float>(&xv[(size_t)r * nk], &xv[(size_t)r * nk] + nk));
        CHECK(g.run(std::vector<rf_step_row>(1, rows[r])) == RF_OK, "%s: %s", what, g.err.text);
        const std::vector<float> alone = g.get(out);
        CHECK(memcmp(alone.data(), &y[(size_t)r * nq], nq * sizeof(float)) == 0, "%s: row %u alone gives other bits", what, r);
    }
}

static void test_attention_of_rows() {
    static const RowsCase cases[] = {
        {4, 2, 64, RF_CACHE_F32, true, true, 0, 16, 1, 5},
        {4, 1, 128, RF_CACHE_F16, false, false, 0, 64, 1, 33},
        {3, 1, 32, RF_CACHE_F16, true, true, 150, 128, 1, 5},
        {8, 1, 128, RF_CACHE_Q8_0, true, true, 0, 33, 1, 5},
        {5, 1, 256, RF_CACHE_F32, false, true, 150, 16, 1, 33},
        {2, 2, 64, RF_CACHE_Q8_0, false, false, 150, 16, 2, 5},
        {6, 1, 256, RF_CACHE_F16, true, false, 0, 48, 3, 9},
        {8, 2, 80, RF_CACHE_F16, false, true, 0, 17, 1, 80},
        {4, 1, 128, RF_CACHE_Q8_0, false, true, 0, 9, 1, 9},
        {2, 1, 256, RF_CACHE_Q8_0, true, false, 150, 40, 2, 33},
        {1, 1, 64, RF_CACHE_F16, false, false, 0, 130, 1, 5}, /* by ops, as larger steps */
        {4, 2, 96, RF_CACHE_F32, true, false, 0, 100, 5, 80},
        {2, 1, 256, RF_CACHE_F32, true, false, 0, 4, 4, 5}, /* few positions: splits of a cluster */
        {2, 1, 128, RF_CACHE_F32, true, false, 0, 4, 4, 5},
        {2, 1, 256, RF_CACHE_F32, true, false, 0, 4, 4, 9},
        {4, 1, 64, RF_CACHE_F16, true, true, 0, 16, 1, 9}, /* blocks take several splits of a row in turn, where clusters are */
        {8, 2, 128, RF_CACHE_F16, true, true, 0, 16, 1, 33},
        {8, 1, 128, RF_CACHE_F16, false, true, 0, 10, 2, 20},
        {4, 1, 64, RF_CACHE_F16, false, false, 150, 16, 1, 20},
        {3, 1, 80, RF_CACHE_F16, true, false, 0, 6, 3, 10},
        {4, 1, 256, RF_CACHE_F16, true, false, 0, 12, 4, 9},
        {2, 1, 64, RF_CACHE_F16, true, true, 0, 12, 1, 9}, /* two queries: not in turn */
        {16, 4, 128, RF_CACHE_F16, true, true, 0, 16, 1, 33}, /* in turn on a GPU of 132 units, too */
        {2, 1, 128, RF_CACHE_Q8_0, false, true, 0, 5, 1, 33, true},
        {4, 1, 64, RF_CACHE_F16, true, true, 0, 5, 1, 133, true}, /* alone, a column has one query */
        {3, 1, 64, RF_CACHE_F32, true, true, 0, 5, 1, 5, true},
        {2, 1, 64, RF_CACHE_F16, false, false, 2100, 5, 1, 20, true}, /* whose window no cluster takes */
        {3, 1, 256, RF_CACHE_F16, true, false, 0, 5, 1, 20, true},
        {8, 2, 128, RF_CACHE_F16, false, true, 0, 5, 1, 133, true},
        {4, 1, 64, RF_CACHE_F16, false, true, 0, 16, 1, 9, true},
        {4, 1, 128, RF_CACHE_F16, true, true, 0, 10, 2, 20, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += stride)
        for (uint32_t index = 0; index < devices.size(); index++) {
            if (!full && devices.size() > 1 && i % devices.size() != index) continue; /* wave sizes in turn */
            rf_dev *d = devices[index];
#ifdef RF_TEST_EMU
            rf_error err;
            hip_emu_units((int)cases[i].units);
            const rf_result opened = api->device_open(index, NULL, &d, &err);
            hip_emu_units(5);
            REQUIRE(opened == RF_OK, "%s", err.text);
#endif
            rows_case(cases[i], d, index ? 64 : 32);
#ifdef RF_TEST_EMU
            api->device_close(d);
#endif
        }
}

/* ---- launch configs of a decode step ---- */

/* norm -> three products; [x += norm of the third;] norm -> gate, up -> glu -> down, added to x [normed, too], and half a norm ->
 * logits. second: the type of the second of the three products. Returns what they write. */
static std::vector<uint32_t> ways_model(Rig &g, uint32_t type, uint32_t second, uint32_t n, uint32_t n_ff) {
    const bool post_norms = n_ff != n;
    const uint32_t widths[8] = {1, 33, post_norms ? n : 70, n_ff, n_ff, n, n, 40}, x = g.buffer(n), xn = g.buffer(n);
    std::vector<uint32_t> out;
    g.embed(x, n, g.weight(RF_TYPE_F16, n, widths[7], random_rows(RF_TYPE_F16, n, widths[7])));
    for (int i = 0; i < 8; i++) {
        out.push_back(i == 5 && !post_norms ? x : g.buffer(widths[i], i < 6 ? RF_ROWS_TOKENS : RF_ROWS_LOGITS));
        if (i == 6) g.gather(x, out[6], n);
        if (i == 0 || i == 3 || i == 6) g.norm(i < 6 ? x : out[6], i < 6 ? xn : out[6], 1, n, g.vector(values(n)));
        if (i == 6) continue;
        if (i == 5) g.glu(out[3], out[4], out[3], n_ff)->glu.activation = n_ff == n ? RF_ACT_SILU : RF_ACT_GELU;
        const uint32_t n_in = i == 5 ? n_ff : n, t = n_in % block_elements(type) ? (uint32_t)RF_TYPE_Q4_0 : i == 1 ? second : type;
        g.matmul(i < 5 ? xn : i == 5 ? out[3] : out[6], out.back(), n_in, widths[i],
                 g.weight(t, n_in, widths[i], random_rows(t, n_in, widths[i])))
            ->flags = i == 5 && !post_norms ? RF_OP_ACCUMULATE : 0;
        if (post_norms && (i == 2 || i == 5)) g.norm(out[i], x, 1, n, g.vector(values(n)))->flags = RF_OP_ACCUMULATE;
    }
    if (post_norms) out.push_back(x);
    g.plan.logits = out[7], g.plan.n_vocab = widths[7];
    return out;
}

/* A step again and again, until it ran in each of its configs, or until they are timed: the same bits in each of them, of all that
 * it writes. */
static void ways_case(uint32_t type, uint32_t second, uint32_t n, uint32_t n_ff, rf_dev *d, uint32_t wave, bool to_end) {
    char what[96];
    snprintf(what, sizeof what, "configs %s beside %s %u x %u, waves of %u", type_name(type), type_name(second), n, n_ff, wave);
    Rig g(d);
    const std::vector<uint32_t> out = ways_model(g, type, second, n, n_ff);
    g.whole = true;
    REQUIRE(g.open(1) == RF_OK, "%s: %s", what, g.err.text);
    const bool two = type == RF_TYPE_Q4_0 || type == RF_TYPE_Q4_1 || type == RF_TYPE_Q5_0 || type == RF_TYPE_Q5_1 ||
                     type == RF_TYPE_Q4_K || type == RF_TYPE_Q5_K || type == RF_TYPE_Q6_K || n_ff % block_elements(type);
    const uint32_t n_configs = two ? 4 : 2;
    std::vector<float> first;
    std::set<uint32_t> seen;
    rf_session_stats st = api->plan_stats(g.prepared);
    CHECK(st.n_configs == n_configs && st.config == 0 && !st.config_is_timed, "%s: %u configs, config %u", what, st.n_configs, st.config);
    for (int step = 0; step < 120 && (to_end ? !st.config_is_timed : seen.size() < n_configs); step++) { /* three rounds of five visits of six steps, and some */
        for (size_t i = 0; i < out.size(); i++) /* a row that is left out is not that of the step before */
            g.set(out[i], std::vector<float>(g.size_of(out[i]) / 4, NAN));
        REQUIRE(g.run(rows_of(1), std::vector<uint32_t>(1, 0)) == RF_OK, "%s: %s", what, g.err.text);
        std::vector<float> found;
        for (size_t i = 0; i < out.size(); i++) {
            if (i == 6) continue; /* the norm's place: a launch may keep it to itself */
            const std::vector<float> y = g.get(out[i]);
            found.insert(found.end(), y.begin(), y.end());
        }
        st = api->plan_stats(g.prepared);
        seen.insert(st.config);
        if (step == 0) first = found;
        CHECK(same_bits(first, found), "%s: step %d, in config %u, gives other bits", what, step, st.config);
    }
    for (size_t i = 0; i < first.size(); i++) REQUIRE(!isnan(first[i]), "%s: value %zu is not written", what, i);
    CHECK((st.config_is_timed || !to_end) && seen.size() == n_configs, "%s: %zu of %u configs were tried", what, seen.size(), n_configs);
}
static void test_ways() {
    for (uint32_t run = 0; run < devices.size() + (devices.size() > 1); run++) {
        const uint32_t index = run % 2; /* emulated: waves of 32, of 64, and NVIDIA's, which take rows in pairs */
        rf_dev *d = devices[index];
#ifdef RF_TEST_EMU
        if (run == 2) hip_emu_matrix_unit(0, HIP_EMU_SM80);
        rf_error err;
        memset(&err, 0, sizeof err);
        hip_emu_units(2);
        const rf_result opened = api->device_open(index, NULL, &d, &err);
        hip_emu_units(5);
        REQUIRE(opened == RF_OK, "%s", err.text);
        hip_emu_stale_graphs(index == 1); /* by graphs, and by launches */
        hip_emu_elapsed(1); /* one round will do */
#endif
        const uint32_t wave = index ? 64 : 32;
        for (uint32_t k = 3; k < N_TYPES; k += stride) { /* those from 11 on share a kernel, but NVIDIA's */
            const bool own = k < 12 || k == 22 || full, to_end = full || k == 3 || k == 4; /* of two configs, and of four */
            if (own || run == 2) ways_case(types[k], types[k], 256, 256, d, wave, to_end); /* rows of less than a turn of the lanes */
            if (own) ways_case(types[k], types[k], 64 * (2 * wave + 8), 64, d, wave, to_end); /* and of more than two */
        }
        ways_case(RF_TYPE_Q4_0, RF_TYPE_Q8_0, 256, 256, d, wave, false); /* a launch of two types */
        ways_case(RF_TYPE_IQ4_XS, RF_TYPE_Q3_K, 256, 256, d, wave, false);
#ifdef RF_TEST_EMU
        rf_device_info info;
        hip_emu_elapsed(-1);
        hip_emu_stale_graphs(0);
        CHECK(api->device_info(d, &info, &err) == RF_OK && (info.note[0] != 0) == (index == 1), "'%s'", info.note);
        api->device_close(d);
        hip_emu_matrix_unit(0, 4);
#endif
    }
}

/* ---- a small model: two layers of everything ---- */

struct Small {
    uint32_t x, out;
    enum : uint32_t { n = 64, vocab = 20 };
};

static Small small_model(Rig &g, uint32_t type) {
    Small s;
    seed = 99;
    uint32_t n = Small::n, x = g.buffer(n), xn = g.buffer(n), q = g.buffer(n), k = g.buffer(n / 2),
             v = g.buffer(n / 2), att = g.buffer(n), up = g.buffer(n);
    uint32_t xl = g.buffer(n, RF_ROWS_LOGITS), out = g.buffer(Small::vocab, RF_ROWS_LOGITS), st = g.state(2, 16, 16);
    for (uint32_t i = 0; i < 8; i++) g.tables.push_back(powf(100.0f, -(float)i / 8));
    g.embed(x, n, g.weight(RF_TYPE_F16, n, Small::vocab, random_rows(RF_TYPE_F16, n, Small::vocab)))->layer = -1;
    g.norm(x, xn, 1, n, g.vector(values(n)));
    uint32_t outs[4] = {q, k, v, up}, widths[4] = {n, n / 2, n / 2, n};
    for (int i = 0; i < 4; i++)
        g.matmul(xn, outs[i], n, widths[i], g.weight(type, n, widths[i], random_rows(type, n, widths[i])));
    g.rope(q, 4, 16, 16, 1);
    g.rope(k, 2, 16, 16, 1);
    g.kv_store(k, v, st, 2, 16, 16);
    g.attention(q, att, st, 4, 2, 16);
    g.glu(att, up, att, n);
    rf_op *o = g.matmul(att, x, n, n, g.weight(type, n, n, random_rows(type, n, n)));
    o->flags = RF_OP_ACCUMULATE, o->bias = g.vector(values(n));
    g.gather(x, xl, n)->layer = 1;
    g.matmul(xl, out, n, Small::vocab, g.weight(type, n, Small::vocab, random_rows(type, n, Small::vocab)))->layer = 1;
    s.x = x, s.out = out;
    return s;
}

static std::vector<rf_step_row> prompt(uint32_t n, int32_t pos, int32_t first_token) {
    std::vector<rf_step_row> rows = rows_of(n, pos);
    for (uint32_t t = 0; t < n; t++) rows[t].token = (first_token + (int32_t)t * 7) % (int32_t)Small::vocab;
    return rows;
}

/* Several steps, each waited for: what every other way of running must equal. */
static std::vector<float> small_steps(rf_dev *d, uint32_t type) {
    Rig g(d);
    Small s = small_model(g, type);
    std::vector<float> all;
    if (g.open(12, 1, 600) != RF_OK) {
        CHECK(0, "%s", g.err.text);
        return all;
    }
    for (int i = 0; i < 4; i++) {
        std::vector<rf_step_row> rows = i == 0 ? prompt(12, 0, 3) : prompt(1, 11 + i, 5 * i);
        CHECK(g.run(rows, std::vector<uint32_t>(1, (uint32_t)rows.size() - 1)) == RF_OK, "%s", g.err.text);
        std::vector<float> y = g.get(s.out);
        all.insert(all.end(), y.begin(), y.end());
    }
    return all;
}

/* The same model in float64, for float weights: a prompt of 12, then 3 tokens. */
static void test_small_model() {
    const uint32_t n = Small::n, widths[4] = {n, n / 2, n / 2, n};
    Rig g(devices[0]);
    small_model(g, RF_TYPE_F16);
    std::vector<std::vector<double> > w, xs, ks, vs;
    for (size_t i = 0; i < g.weights.size(); i++) w.push_back(decode(g.weights[i].type, g.weight_bytes[i]));
    for (int32_t pos = 0; pos < 15; pos++) {
        int32_t token = pos < 12 ? (3 + pos * 7) % (int32_t)Small::vocab : 5 * (pos - 11) % (int32_t)Small::vocab;
        std::vector<double> x(w[0].begin() + token * (int32_t)n, w[0].begin() + (token + 1) * (int32_t)n), xn(n),
            out[4], att(n, 0);
        double sum = 0;
        for (uint32_t k = 0; k < n; k++) sum += x[k] * x[k];
        for (uint32_t k = 0; k < n; k++) xn[k] = x[k] / sqrt(sum / n + 1e-5) * w[1][k];
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t r = 0; r < widths[i]; r++) {
                double y = 0;
                for (uint32_t k = 0; k < n; k++) y += w[2 + i][r * n + k] * xn[k];
                out[i].push_back(y);
            }
        for (uint32_t i = 0; i < 2; i++)
            for (uint32_t h = 0; h < (i ? 2u : 4u); h++)
                for (uint32_t j = 0; j < 8; j++) {
                    double angle = pos * (double)g.tables[j], a = out[i][h * 16 + 2 * j],
                           b = out[i][h * 16 + 2 * j + 1];
                    out[i][h * 16 + 2 * j] = a * cos(angle) - b * sin(angle);
                    out[i][h * 16 + 2 * j + 1] = a * sin(angle) + b * cos(angle);
                }
        for (size_t i = 0; i < out[1].size(); i++)
            out[1][i] = half_value(to_half(out[1][i])), out[2][i] = half_value(to_half(out[2][i]));
        ks.push_back(out[1]), vs.push_back(out[2]);
        for (uint32_t h = 0; h < 4; h++) {
            std::vector<double> p;
            double total = 0;
            for (size_t i = 0; i < ks.size(); i++) {
                double s = 0;
                for (uint32_t k = 0; k < 16; k++) s += out[0][h * 16 + k] * ks[i][h / 2 * 16 + k];
                p.push_back(exp(s * 0.25)), total += p.back();
            }
            for (size_t i = 0; i < ks.size(); i++)
                for (uint32_t k = 0; k < 16; k++) att[h * 16 + k] += p[i] / total * vs[i][h / 2 * 16 + k];
        }
        for (uint32_t k = 0; k < n; k++) att[k] = att[k] / (1 + exp(-att[k])) * out[3][k];
        for (uint32_t r = 0; r < n; r++) {
            for (uint32_t k = 0; k < n; k++) x[r] += w[6][r * n + k] * att[k];
            x[r] += w[7][r];
        }
        xs.push_back(x);
    }
    std::vector<double> want;
    for (size_t t = 11; t < 15; t++)
        for (uint32_t r = 0; r < Small::vocab; r++) {
            double y = 0;
            for (uint32_t k = 0; k < n; k++) y += w[8][r * n + k] * xs[t][k];
            want.push_back(y);
        }
    /* a key or value may round to the other half here and there: one part in 2048 of one of 15 positions */
    for (size_t d = 0; d < devices.size(); d++)
        compare(small_steps(devices[d], RF_TYPE_F16), want, 1e-4, 1e-8, "small model");
}

/* The same steps queued one after the other without waiting: values of a step must not be overwritten in flight, and
 * results are copied away on the device and read at the end. */
static void test_queued_steps() {
    for (size_t d = 0; d < devices.size(); d++) {
        std::vector<float> want = small_steps(devices[d], RF_TYPE_Q8_0);
        Rig g(devices[d]);
        Small s = small_model(g, RF_TYPE_Q8_0);
        REQUIRE(g.open(12, 1, 600) == RF_OK, "%s", g.err.text);
        rf_mem keep;
        rf_ticket t;
        void *host = NULL;
        REQUIRE(api->mem_create(g.dev, 4 * Small::vocab * 4, &keep, &g.err) == RF_OK &&
                    api->host_create(g.dev, keep.size_bytes, &host, &g.err) == RF_OK,
                "%s", g.err.text);
        for (int i = 0; i < 4; i++) {
            std::vector<rf_step_row> rows = i == 0 ? prompt(12, 0, 3) : prompt(1, 11 + i, 5 * i);
            std::vector<uint32_t> last(1, (uint32_t)rows.size() - 1);
            rf_step step = {rows.data(), NULL, last.data(), (uint32_t)rows.size(), 1, 0};
            for (uint32_t k = 0; k < g.segment_ops.size(); k++)
                CHECK(api->plan_run(g.prepared, g.queue, k, k + 1, &step, &t, &g.err) == RF_OK, "%s", g.err.text);
            const rf_mem_at to = {&keep, (uint64_t)i * Small::vocab * 4},
                            from = {&g.bind.scratch, g.buffer_offset[s.out]};
            CHECK(api->mem_copy(g.queue, to, from, Small::vocab * 4, &t, &g.err) == RF_OK,
                  "%s", g.err.text);
            memset(rows.data(), 0x7f, rows.size() * sizeof rows[0]); /* rf_step is read during the call only */
            last[0] = 77;
        }
        CHECK(api->mem_read(g.queue, &keep, 0, host, keep.size_bytes, &t, &g.err) == RF_OK &&
                  api->ticket_wait(&t, 60000, &g.err) == RF_OK,
              "%s", g.err.text);
        CHECK(api->ticket_done(&t), "a ticket that was waited for is not done");
        CHECK(want.size() == 4 * Small::vocab && memcmp(host, want.data(), keep.size_bytes) == 0,
              "queued steps give other values");
        api->host_release(g.dev, host);
        api->mem_release(g.dev, &keep);
    }
}

/* Greedy steps of `n_seq` sequences, each waited for, or all queued, where the device takes the tokens that it has chosen:
 * those of all rows but every third one, which gets its first token again and again. */
static std::vector<float> chosen_steps(rf_dev *d, uint32_t n_seq, bool whole, bool queued) {
    enum { STEPS = 7 };
    Rig g(d);
    Small s = small_model(g, RF_TYPE_Q8_0);
    std::vector<float> all;
    const uint32_t top = g.buffer(1, RF_ROWS_LOGITS);
    rf_op *o = g.op(RF_OP_ARGMAX, RF_ROWS_LOGITS);
    o->in = s.out, o->out = top, o->argmax.n = Small::vocab, o->layer = 1;
    g.plan.logits = s.out, g.plan.argmax = top, g.plan.n_vocab = Small::vocab;
    rf_mem keep = {NULL, 0};
    rf_ticket t;
    const uint64_t row_bytes = (uint64_t)n_seq * Small::vocab * 4;
    if (g.open(n_seq, n_seq, 64, n_seq) != RF_OK || api->mem_create(d, STEPS * row_bytes, &keep, &g.err) != RF_OK) {
        CHECK(0, "%s", g.err.text);
        return all;
    }
    std::vector<int32_t> tokens(n_seq);
    std::vector<uint32_t> last(n_seq);
    for (uint32_t i = 0; i < n_seq; i++) tokens[i] = (int32_t)(3 + i), last[i] = i;
    for (int32_t k = 0; k < STEPS; k++) {
        std::vector<rf_step_row> rows(n_seq);
        std::vector<uint32_t> chosen(n_seq);
        for (uint32_t i = 0; i < n_seq; i++) {
            const bool again = i % 3 == 2;
            const rf_step_row row = {again ? (int32_t)(3 + i) : queued && k ? 0 : tokens[i], (int32_t)i, k, (int32_t)i, 0, 0};
            rows[i] = row;
            chosen[i] = again || !queued || k == 0 ? 0 : 1 + (uint32_t)(g.buffer_offset[top] / 4) + i;
        }
        rf_step step = {rows.data(), NULL, last.data(), n_seq, n_seq, 0, chosen.data(), n_seq, NULL, NULL};
        const uint32_t n = (uint32_t)g.segment_ops.size();
        for (uint32_t at = 0; at < n; at += whole ? n : 1)
            CHECK(api->plan_run(g.prepared, g.queue, at, whole ? n : at + 1, &step, &t, &g.err) == RF_OK, "%s", g.err.text);
        const rf_mem_at to = {&keep, k * row_bytes}, from = {&g.bind.scratch, g.buffer_offset[s.out]};
        CHECK(api->mem_copy(g.queue, to, from, row_bytes, &t, &g.err) == RF_OK, "%s", g.err.text);
        if (!queued)
            CHECK(api->mem_read(g.queue, &g.bind.scratch, g.buffer_offset[top], tokens.data(), n_seq * 4, &t, &g.err) == RF_OK &&
                      api->ticket_wait(&t, 60000, &g.err) == RF_OK, "%s", g.err.text);
    }
    all.resize((size_t)(STEPS * row_bytes / 4));
    CHECK(api->mem_read(g.queue, &keep, 0, all.data(), STEPS * row_bytes, &t, &g.err) == RF_OK && api->ticket_wait(&t, 60000, &g.err) == RF_OK,
          "%s", g.err.text);
    const uint32_t beyond = (uint32_t)(g.bind.scratch.size_bytes / 4) + 1;
    std::vector<rf_step_row> rows = rows_of(1, STEPS);
    rf_step step = {rows.data(), NULL, last.data(), 1, 1, 0, &beyond, 1, NULL, NULL};
    g.err.code = RF_OK;
    CHECK(api->plan_run(g.prepared, g.queue, 0, 1, &step, &t, &g.err) == RF_ERR_ARGUMENT && strstr(g.err.text, "row 0: its token"), "%s", g.err.text);
    api->mem_release(d, &keep);
    return all;
}

static void test_chosen_tokens() {
    for (size_t d = 0; d < devices.size(); d++)
        for (uint32_t n_seq = 1; n_seq <= 5; n_seq += 4)
            for (int whole = 0; whole < 2; whole++) {
                const std::vector<float> want = chosen_steps(devices[d], n_seq, whole, false), found = chosen_steps(devices[d], n_seq, whole, true);
                CHECK(!want.empty() && want.size() == found.size() && memcmp(want.data(), found.data(), want.size() * sizeof want[0]) == 0,
                      "device %zu, %u sequences%s: other values", d, n_seq, whole ? ", whole steps" : "");
            }
}

static void test_times() {
    Rig g(devices[0]);
    Small s = small_model(g, RF_TYPE_Q8_0);
    REQUIRE(g.open(12, 1, 600) == RF_OK, "%s", g.err.text);
    (void)s;
    std::vector<float> us(g.ops.size(), -1);
    REQUIRE(api->times(g.prepared, NULL, 1, &g.err) == RF_OK, "%s", g.err.text);
    REQUIRE(g.run(prompt(12, 0, 3), std::vector<uint32_t>(1, 11)) == RF_OK, "%s", g.err.text);
    REQUIRE(api->times(g.prepared, us.data(), (uint32_t)us.size(), &g.err) == RF_OK, "%s", g.err.text);
    float total = 0;
    for (size_t i = 0; i < us.size(); i++) {
        CHECK(us[i] >= 0 && us[i] < 1e7f, "op %zu took %g us", i, (double)us[i]);
        total += us[i];
    }
    CHECK(total > 0, "no op took any time");
    CHECK(api->times(g.prepared, NULL, 0, &g.err) == RF_OK, "%s", g.err.text);
}

/* mem_sum against a loop: from one load of 16 bytes to more than what all lanes take at once. */
static void sum_case(rf_dev *d, uint64_t offset, uint64_t n) {
    const uint64_t before = 0xfedcba9876543210u;
    std::vector<uint64_t> words((size_t)(offset + n) / 8 + 2), found(3, before);
    rf_mem src = {NULL, 0}, sum = {NULL, 0};
    rf_queue *q = NULL;
    rf_ticket t;
    rf_error err;
    memset(&err, 0, sizeof err);
    for (size_t i = 0; i < words.size(); i++) words[i] = (uint64_t)rnd() << 33 ^ (uint64_t)rnd() << 11 ^ rnd();
    uint64_t want = before;
    for (uint64_t i = 0; i < n / 8; i++) want += words[(size_t)(offset / 8 + i)];
    rf_result r = api->queue_create(d, &q, &err);
    if (r == RF_OK) r = api->mem_create(d, words.size() * 8, &src, &err);
    if (r == RF_OK) r = api->mem_create(d, 24, &sum, &err);
    if (r == RF_OK) r = api->mem_write(q, &src, 0, words.data(), words.size() * 8, &t, &err);
    if (r == RF_OK) r = api->mem_write(q, &sum, 0, found.data(), 24, &t, &err);
    if (r == RF_OK) r = api->mem_sum(q, rf_mem_at{&src, offset}, n, rf_mem_at{&sum, 8}, &t, &err);
    if (r == RF_OK) r = api->mem_read(q, &sum, 0, found.data(), 24, &t, &err);
    if (r == RF_OK) r = api->ticket_wait(&t, 60000, &err);
    CHECK(r == RF_OK && found[1] == want && found[0] == before && found[2] == before,
          "%llu bytes at %llu: %016llx, want %016llx; %s", (unsigned long long)n, (unsigned long long)offset,
          (unsigned long long)found[1], (unsigned long long)want, err.text);
    const struct { uint64_t offset, n, sum_offset; } bad[] = {{8, n, 0}, {offset, n + 8, 0}, {offset, n, 4},
                                                              {offset, n, 24}, {offset, n + 32, 0}};
    for (size_t i = 0; i < RFT_COUNT(bad); i++) {
        err.code = RF_OK;
        const rf_mem_at from = {&src, bad[i].offset}, to = {&sum, bad[i].sum_offset};
        CHECK(api->mem_sum(q, from, bad[i].n, to, &t, &err) == RF_ERR_ARGUMENT &&
                  strstr(err.text, "mem_sum"),
              "bad sum %zu: '%s'", i, err.text);
    }
    if (q) api->queue_release(q);
    if (src.base) api->mem_release(d, &src);
    if (sum.base) api->mem_release(d, &sum);
}
static void test_mem_sum() {
    const uint64_t sizes[] = {0, 16, 4096, 65552, 3000016};
    for (size_t d = 0; d < devices.size(); d++)
        for (size_t i = 0; i < RFT_COUNT(sizes); i++) sum_case(devices[d], i % 2 ? 48 : 0, sizes[i]);
}

/* More tickets than a queue keeps events for; all of them stay valid. */
static void test_many_tickets() {
    Rig g(devices[0]);
    small_model(g, RF_TYPE_F16);
    REQUIRE(g.open(12, 1, 600) == RF_OK, "%s", g.err.text);
    std::vector<rf_ticket> tickets(300);
    for (size_t i = 0; i < tickets.size(); i++)
        REQUIRE(api->mem_fill(g.queue, &g.bind.scratch, g.buffer_offset[0], (uint8_t)i, 64, &tickets[i], &g.err) ==
                    RF_OK,
                "%s", g.err.text);
    for (size_t i = tickets.size(); i-- > 0;)
        CHECK(api->ticket_wait(&tickets[i], 60000, &g.err) == RF_OK && api->ticket_done(&tickets[i]), "%s",
              g.err.text);
}

static void test_refusals() {
    rf_error err;
    for (int kind = 0; kind < 10; kind++) {
        Rig g(devices[0]);
        uint32_t in = g.buffer(64), out = g.buffer(64), type = kind == 2 ? RF_TYPE_Q8_1 : RF_TYPE_Q4_0;
        rf_op *o = g.matmul(in, out, 64, 64, g.weight(type, 64, 64, std::vector<uint8_t>(64 * 36)));
        if (kind == 0) o->matmul.n_out = 65;
        if (kind == 1) o->in = 9;
        if (kind == 3) o->matmul.first_row = 1;
        if (kind == 4) o->matmul.first_row = 0xffffffffu;
        if (kind == 5) o->rows = RF_ROWS_LOGITS;
        if (kind == 6) o->weight = 5;
        if (kind == 7) o->bias = g.vector(values(63));
        if (kind == 8) o->kind = 77;
        if (kind == 9) o->out = o->in;
        g.plan.ops = g.ops.data(), g.plan.n_ops = 1, g.plan.buffers = g.buffers.data(), g.plan.n_buffers = 2;
        g.plan.weights = g.weights.data(), g.plan.n_weights = (uint32_t)g.weights.size();
        memset(&err, 0, sizeof err);
        rf_result r = api->op_supported(g.dev, &g.plan, &g.ops[0], &err), want = kind == 2 ? RF_ERR_UNSUPPORTED : RF_ERR_ARGUMENT;
        CHECK(r == want && err.code == r && strstr(err.text, "op 0"), "kind %d: %d '%s'", kind, r, err.text);
    }
    { /* what no kernel knows: further flags and activations, and flags of other kinds */
        Rig g(devices[0]);
        small_model(g, RF_TYPE_Q8_0);
        REQUIRE(g.open(4, 1, 8) == RF_OK, "%s", g.err.text);
        for (size_t i = 0; i < g.ops.size(); i++) {
            const rf_op saved = g.ops[i];
            const rf_op_spec spec = rf_op_get_spec(&g.plan, &saved);
            for (uint32_t bit = 0; bit < 32; bit++) {
                if (spec.flags >> bit & 1) continue;
                g.ops[i].flags = saved.flags | 1u << bit;
                rf_result r = api->op_supported(g.dev, &g.plan, &g.ops[i], &err);
                CHECK(r == RF_ERR_ARGUMENT, "op %zu, flag %u: %d '%s'", i, bit, r, err.text);
            }
            g.ops[i] = saved;
            if (saved.kind == RF_OP_GLU) g.ops[i].glu.activation = 99;
            rf_result r = api->op_supported(g.dev, &g.plan, &g.ops[i], &err);
            CHECK(r == (saved.kind == RF_OP_GLU ? RF_ERR_ARGUMENT : RF_OK), "op %zu: %d '%s'", i, r, err.text);
            g.ops[i] = saved;
        }
    }
    Rig g(devices[0]);
    small_model(g, RF_TYPE_Q8_0);
    REQUIRE(g.open(4, 1, 8) == RF_OK, "%s", g.err.text);
    static const int32_t bad[][3] = {{0, 0, 8}, {0, 1, 0}, {20, 0, 0}, {-1, 0, 0}, {0, -1, 0}, {0, 0, -1}};
    for (size_t i = 0; i < 6; i++) {
        std::vector<rf_step_row> rows = rows_of(1);
        rows[0].token = bad[i][0], rows[0].seq = bad[i][1], rows[0].pos = bad[i][2];
        g.err.code = RF_OK;
        CHECK(g.run(rows) == RF_ERR_ARGUMENT, "row %zu was taken", i);
    }
    CHECK(g.run(rows_of(5)) == RF_ERR_ARGUMENT, "too many rows were taken");
    CHECK(g.run(rows_of(2), std::vector<uint32_t>(1, 2)) == RF_ERR_ARGUMENT, "logits of a row that is not there");
    CHECK(g.run(rows_of(2), std::vector<uint32_t>(1, 1), 1) == RF_ERR_ARGUMENT, "logits past their buffer");
    g.err.code = RF_OK;
    g.whole = true;
    CHECK(g.run(rows_of(2)) == RF_OK, "%s", g.err.text); /* all weights were there once */
    api->weight_clear(g.table, 2);
    CHECK(g.run(rows_of(2)) == RF_ERR_ARGUMENT && strstr(g.err.text, "w2."), "an empty slot was read: %s",
          g.err.text);
    rf_mem small = {g.bind.scratch.base, 16};
    rf_ticket t;
    float f[8] = {0};
    CHECK(api->mem_write(g.queue, &small, 8, f, 12, &t, NULL) == RF_ERR_ARGUMENT &&
              api->mem_read(g.queue, &small, 17, f, 1, &t, NULL) == RF_ERR_ARGUMENT,
          "range");
}

struct Thread {
    rf_dev *dev;
    std::vector<float> found;
};
static void *thread_main(void *arg) {
    Thread *t = static_cast<Thread *>(arg);
    Rig g(t->dev);
    uint32_t in = g.buffer(64), out = g.buffer(32);
    uint64_t own = 12345;
    std::vector<uint8_t> w(32 * 2 * 34);
    for (size_t i = 0; i < w.size(); i++) own = own * 6364136223846793005u + 1, w[i] = (uint8_t)(own >> 40);
    for (size_t i = 0; i < w.size(); i += 34) put_half(&w[i], 0.01);
    g.matmul(in, out, 64, 32, g.weight(RF_TYPE_Q8_0, 64, 32, w));
    if (g.open(3) != RF_OK) return NULL;
    std::vector<float> x(3 * 64);
    for (size_t i = 0; i < x.size(); i++) x[i] = (float)(int)(i * 37 % 101) - 50;
    for (int round = 0; round < 20; round++) {
        g.set(in, x);
        if (g.run(rows_of(3)) != RF_OK) return NULL;
        std::vector<float> y(3 * 32);
        rf_ticket ticket;
        if (api->mem_read(g.queue, &g.bind.scratch, g.buffer_offset[out], y.data(), y.size() * 4, &ticket, &g.err) !=
            RF_OK)
            return NULL;
        if (round == 0) t->found = y;
        else if (!same_bits(t->found, y)) t->found.clear();
    }
    return NULL;
}
static void test_threads() {
    Thread a[3];
    pthread_t id[3];
    for (size_t i = 0; i < 3; i++) a[i].dev = devices[i % devices.size()];
    for (int i = 0; i < 3; i++) REQUIRE(pthread_create(&id[i], NULL, thread_main, &a[i]) == 0, "thread");
    for (int i = 0; i < 3; i++) pthread_join(id[i], NULL);
    CHECK(!a[0].found.empty() && same_bits(a[0].found, a[2].found) ==
                                     (devices[0] == devices[2 % devices.size()] || same_bits(a[0].found, a[2].found)),
          "threads differ");
    for (int i = 0; i < 3; i++) CHECK(a[i].found.size() == 96, "thread %d failed", i);
}

#ifdef RF_TEST_EMU

/* ---- what only the emulator can show ---- */

/* Waves of 32 in blocks of 512 threads are RDNA's; those of 1024, and waves of 64 in blocks of 512, run everywhere else. */
static void test_blocks_of_512() {
    hip_emu_fused_block(0, 512);
    for (int k = 3; k < N_TYPES; k++) {
        glu_case(types[k], 256, 70, 0, k % 2 == 0);
        glu_case(types[k], 256 * 21, 5, 0, false);
    }
    test_together();
    test_joined_norm();
    test_small_model();
    hip_emu_fused_block(0, 1024);
}

static bool leaks(const hip_emu_counts &a, const hip_emu_counts &b) {
    return a.allocations != b.allocations || a.host_allocations != b.host_allocations || a.streams != b.streams ||
           a.events != b.events || a.graphs != b.graphs;
}

/* Device `index`, opened with another matrix unit, right ones or wrong ones, in the place of the usual one while this
 * lives. */
struct OtherUnits {
    uint32_t index;
    rf_dev *usual;
    OtherUnits(uint32_t i, int kind, int wrong) : index(i), usual(devices[i]) {
        rf_error err;
        memset(&err, 0, sizeof err);
        hip_emu_matrix_unit((int)index, kind);
        hip_emu_wrong_units(wrong);
        CHECK(api->device_open(index, NULL, &devices[index], &err) == RF_OK, "%s", err.text);
    }
    ~OtherUnits() {
        if (devices[index] != usual) api->device_close(devices[index]);
        devices[index] = usual;
        hip_emu_wrong_units(0), hip_emu_matrix_unit(0, 4), hip_emu_matrix_unit(1, 2);
    }
    OtherUnits(const OtherUnits &) = delete;
    OtherUnits &operator=(const OtherUnits &) = delete;
};

/* Products of one input whose types have different kernels in a step of several rows. */
static void test_together_by_mma() {
    OtherUnits units(0, HIP_EMU_SM80, 0);
    test_together();
}

/* Tiles on every matrix unit there is, and on none; what the emulated device had comes back. */
/* Types up to IQ4_NL: those after it share the kernels of the last three. */
static void test_matrix_units() {
    static const int kinds[][2] = {{0, 0}, {0, 1}, {0, 4}, {0, 5}, {1, 0}, {1, 2}, {1, 3}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        OtherUnits units((uint32_t)kinds[k][0], kinds[k][1], 0);
        for (size_t t = 3 + k % stride; t < 14; t += stride) {
            uint32_t block = block_elements(types[t]);
            MatmulCase small = {types[t], block == 32 ? 5 * block : 2 * block, 130, 20, 1, (uint32_t)kinds[k][0]};
            MatmulCase large = {types[t], block == 32 ? 9 * block : block, 65, 70, 2, (uint32_t)kinds[k][0]};
            ExpertsCase experts = {types[t],   large.n_in, 20,    40,   2,   3, large.device,
                                   k % 2 == 0, true,       false, true, true, t % 2 == 0};
            matmul_case(small);
            matmul_case(large);
            if ((t + k) % 3 == 0) experts_case(experts);
        }
        for (uint32_t t = 0; t < 3; t++) {
            const uint32_t type = t == 2 ? RF_TYPE_F32 : t ? RF_TYPE_BF16 : RF_TYPE_F16, device = (uint32_t)kinds[k][0];
            MatmulCase rows = {type, 96, 130, 20, 1, device}, cols = {type, 32, 5, 66, 2, device},
                       deep = {type, 1056, 17, 20, 0, device}; /* whose depth is cut over several blocks */
            matmul_case(rows);
            matmul_case(cols);
            ExpertsCase experts = {type, 96, 20, 40, 2, 3, device, k % 2 == 0, true, false, true, true, t == 1};
            experts_case(experts);
            if (k % 2 == t || t == 2 || stride == 1) matmul_case(deep);
            float_ranges(type, device, 64, 20, 24);
        }
        AttentionCase prompts[] = {{4, 2, 128, 128, 70, 40, RF_CACHE_F16, 0, (uint32_t)kinds[k][0]},
                                   {3, 1, 80, 80, 33, 33, RF_CACHE_F16, 0, (uint32_t)kinds[k][0]},
                                   {1, 2, 16, 16, 100, 64, RF_CACHE_F16, 0, (uint32_t)kinds[k][0]},
                                   /* windows, in rings of 256 cells; caps and sinks */
                                   {3, 1, 80, 80, 300, 33, RF_CACHE_F16, 0, (uint32_t)kinds[k][0], 40, 5, false, true},
                                   {4, 1, 64, 64, 530, 20, RF_CACHE_Q8_0, 0, (uint32_t)kinds[k][0], 33, 4, false, true},
                                   {2, 2, 128, 128, 75, 36, RF_CACHE_Q8_0, 0, (uint32_t)kinds[k][0], 0, 1, false, false},
                                   /* heads that waves share, with windows, ALiBi and scales of positions */
                                   {2, 1, 256, 256, 75, 36, RF_CACHE_F16, 0, (uint32_t)kinds[k][0], 0, 10},
                                   {3, 2, 192, 192, 300, 33, RF_CACHE_F16, 0, (uint32_t)kinds[k][0], 40, 5, false, true},
                                   {2, 1, 256, 256, 40, 20, RF_CACHE_Q8_0, 0, (uint32_t)kinds[k][0], 0, 8},
                                   {2, 1, 512, 512, 70, 36, RF_CACHE_F16, 0, (uint32_t)kinds[k][0], 33, 4, false, true}};
        for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) attention_case(prompts[i]);
    }
}

static void test_bfloats() {
    OtherUnits units(0, HIP_EMU_SM90, 0);
    CHECK(has_bfloats(0), "no bfloats");
    bfloats_cases(0);
    joined_norm_by_segments(0);
    /* attention by wgmma: 128 queries and more of heads of 65 to 128 values in halves */
    AttentionCase prompts[] = {{4, 2, 128, 128, 130, 40, RF_CACHE_F16, 0, 0},
                               {3, 1, 80, 80, 100, 70, RF_CACHE_F16, 0, 0, 0, 11},
                               {8, 1, 96, 96, 300, 40, RF_CACHE_F16, 0, 0, 40, 5, false, true},
                               {1, 2, 128, 128, 200, 200, RF_CACHE_F16, 0, 0, 70, 8, false, true}};
    for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) attention_case(prompts[i]);
}

/* Units that give lanes the results of others: found when the device is opened, for every instruction there is; products
 * and attention are right without them, and the device says so. */
static void test_wrong_units() {
    static const int kinds[][2] = {{0, 1}, {0, 4}, {0, 5}, {1, 2}, {1, 3}};
    static const char *const named[] = {"", "bytes here", "halves here", "bytes and halves here"};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int wrong = 0; wrong < 4; wrong++) {
            const uint32_t index = (uint32_t)kinds[k][0];
            OtherUnits units(index, kinds[k][1], wrong);
            rf_error err;
            rf_device_info info;
            memset(&err, 0, sizeof err);
            REQUIRE(api->device_info(devices[index], &info, &err) == RF_OK, "%s", err.text);
            CHECK(wrong ? strstr(info.note, named[wrong]) != NULL : !info.note[0], "units %d, wrong %d: '%s'",
                  kinds[k][1], wrong, info.note);
            MatmulCase product = {RF_TYPE_Q6_K, 512, 65, 20, 1, index};
            AttentionCase prompt = {3, 1, 80, 80, 33, 33, RF_CACHE_F16, 0, index, 0, 0};
            MatmulCase halves = {RF_TYPE_F16, 64, 65, 20, 1, index}, bfloats = {RF_TYPE_BF16, 64, 65, 20, 1, index};
            ExpertsCase experts = {RF_TYPE_Q4_K, 512, 5, 20, 1, 2, index, false, true, false, false, true, false};
            if (wrong == 1) matmul_case(product);
            if (wrong) experts_case(experts);
            if (wrong == 2) attention_case(prompt), matmul_case(halves), matmul_case(bfloats);
        }
    OtherUnits units(0, HIP_EMU_SM90, 4);
    rf_error err;
    rf_device_info info;
    memset(&err, 0, sizeof err);
    REQUIRE(api->device_info(devices[0], &info, &err) == RF_OK, "%s", err.text);
    CHECK(strstr(info.note, "wgmma gives wrong products") && !strstr(info.note, "matrix"), "'%s'", info.note);
    MatmulCase product = {RF_TYPE_Q6_K, 512, 65, 70, 1, 0};
    CHECK(!has_bfloats(0), "wrong products were used");
    matmul_case(product);
}

/* A driver that replays graphs with old values: found at the first replay, results are right, the device says so. */
static void test_stale_graphs() {
    DecoderShape c = {RF_TYPE_Q8_0, RF_TYPE_Q8_0, 4, 2, 64, RF_CACHE_F16, false, false, false, 0};
    std::vector<float> want = decoder_run(devices[0], c, 1, false);
    rf_error err;
    rf_dev *d = NULL;
    rf_device_info info;
    memset(&err, 0, sizeof err);
    REQUIRE(api->device_open(0, NULL, &d, &err) == RF_OK, "%s", err.text);
    hip_emu_stale_graphs(1);
    uint64_t before = hip_emu_get_counts().replays;
    std::vector<float> found = decoder_run(d, c, 1, true);
    CHECK(same_bits(found, want), "stale replays were used");
    CHECK(hip_emu_get_counts().replays - before == 1, "replayed on after a failed check");
    CHECK(api->device_info(d, &info, &err) == RF_OK && strstr(info.note, "graphs are off"), "'%s'", info.note);
    hip_emu_stale_graphs(0);
    api->device_close(d);
}

/* Two products, and what it takes to decode with them. */
struct Tuned {
    Rig g;
    uint32_t x;
    std::vector<float> values_of_x;
    Tuned(rf_dev *d, uint32_t n_out) : g(d) {
        const uint32_t y = (x = g.buffer(64), g.buffer(64)), yl = g.buffer(64, RF_ROWS_LOGITS), logits = g.buffer(n_out, RF_ROWS_LOGITS);
        seed = 31;
        g.matmul(x, y, 64, 64, g.weight(RF_TYPE_Q4_0, 64, 64, random_rows(RF_TYPE_Q4_0, 64, 64)));
        g.gather(y, yl, 64);
        const uint32_t weight = g.weight(RF_TYPE_Q4_0, 64, n_out, random_rows(RF_TYPE_Q4_0, 64, n_out));
        g.matmul(yl, logits, 64, n_out, weight)->layer = 1;
        g.plan.logits = logits, g.plan.n_vocab = n_out;
        values_of_x = values(64);
        g.whole = true;
    }
    rf_result open() {
        rf_result r = g.open(1);
        return r == RF_OK ? g.set(x, values_of_x) : r;
    }
    rf_session_stats stats() const { return api->plan_stats(g.prepared); }
    /* A step, the last one having taken ms[its config]. */
    rf_result step(const float *ms, uint32_t n_logits = 1) {
        hip_emu_elapsed(ms[stats().config]);
        const rf_result r = g.run(rows_of(1), std::vector<uint32_t>(n_logits, 0));
        hip_emu_elapsed(-1);
        return r;
    }
    bool tune(const float *ms, int most = 60) {
        for (int i = 0; i < most && !stats().config_is_timed; i++)
            if (step(ms) != RF_OK) return false;
        return stats().config_is_timed == 1;
    }
};

/* Another device of that kind, which knows no shape yet. */
struct FreshDevice {
    rf_dev *dev;
    explicit FreshDevice(uint32_t index) : dev(NULL) {
        rf_error err;
        memset(&err, 0, sizeof err);
        CHECK(api->device_open(index, NULL, &dev, &err) == RF_OK, "%s", err.text);
    }
    ~FreshDevice() { api->device_close(dev); }
    FreshDevice(const FreshDevice &) = delete;
    FreshDevice &operator=(const FreshDevice &) = delete;
};

/* The fastest launch config is taken, and known to later sessions of that shape; with graphs and, where they do not work, without. */
static void test_fastest_way() {
    static const struct { float ms[4]; uint32_t config; } list[] = {
        {{0.5f, 1, 1, 1}, 0}, {{1, 0.5f, 1, 1}, 1}, {{1, 1, 0.5f, 0.6f}, 2}, {{1, 0.7f, 0.9f, 0.6f}, 3},
        {{1, 1, 1, 1}, 0}, {{1, 0.995f, 0.992f, 1}, 0}, {{1, 0.995f, 1, 0.98f}, 3}, {{0, 0, 0, 0}, 0}, {{1, 0, 1, 1}, 0}};
    for (uint32_t i = 0; i < RFT_COUNT(list) * 2; i++) {
        const bool stale = i % 3 == 2;
        const float *ms = list[i / 2].ms;
        const uint32_t config = list[i / 2].config;
        FreshDevice d(i % 2);
        hip_emu_stale_graphs(stale);
        {
            Tuned a(d.dev, 33);
            REQUIRE(a.open() == RF_OK, "%s", a.g.err.text);
            const uint32_t events = hip_emu_get_counts().events;
            REQUIRE(a.tune(ms), "%u: not timed", i);
            const rf_session_stats st = a.stats();
            CHECK(st.config == config, "%u: config %u, want %u", i, st.config, config);
            std::set<std::pair<uint32_t, uint32_t> > configs;
            for (uint32_t k = 0; k < 4; k++) {
                CHECK(st.configs[k].us == ms[k] * 1e3f, "%u: config %u took %g us", i, k, (double)st.configs[k].us);
                configs.insert(std::make_pair(st.configs[k].in_flight, st.configs[k].blocks_per_cu));
            }
            CHECK(configs.size() == 4, "%u: %zu different configs", i, configs.size());
            CHECK(hip_emu_get_counts().events + 2 == events, "%u: events are left", i);
            Tuned same(d.dev, 33), other(d.dev, 34);
            REQUIRE(same.open() == RF_OK && other.open() == RF_OK, "%s", other.g.err.text);
            const rf_session_stats known = same.stats(), new_one = other.stats();
            CHECK(known.config_is_timed && known.config == config && known.configs[3].us == ms[3] * 1e3f, "%u: config %u", i, known.config);
            CHECK(!new_one.config_is_timed && new_one.config == 0 && new_one.configs[3].us == 0, "%u: config %u", i, new_one.config);
            REQUIRE(same.step(ms) == RF_OK && a.step(ms) == RF_OK, "%s", same.g.err.text);
            CHECK(same_bits(same.g.get(3), a.g.get(3)), "%u: other bits", i);
        }
        hip_emu_stale_graphs(0);
    }
}

/* A step whose launch fails is not timed; what the default's second visit shows to have been slowed by something else is
 * timed again. */
static void test_disturbed_ways() {
    static const float ms[4] = {1, 0.7f, 0.5f, 0.6f}, slow[4] = {4, 2.8f, 2, 2.4f}, less[4] = {1, 0.7f, 0.4f, 0.6f},
                       none[4] = {0.001f, 0.001f, 0.001f, 0.001f};
    uint32_t n_failed = 0;
    for (uint32_t call = 0; call < 8; call++) {
        FreshDevice d(0);
        Tuned a(d.dev, 33);
        REQUIRE(a.open() == RF_OK, "%s", a.g.err.text);
        while (a.stats().config < 2 || a.stats().configs[2].us == 0) REQUIRE(a.step(call ? ms : slow) == RF_OK, "%s", a.g.err.text);
        const uint64_t replays = hip_emu_get_counts().replays;
        if (call) {
            hip_emu_fail_call(call, 0);
            const bool failed = a.step(less) != RF_OK;
            hip_emu_fail_call(0, 0);
            /* after the time of the step before was taken, and before this one ran */
            if (!failed || a.stats().configs[2].us != 400 || hip_emu_get_counts().replays != replays) continue;
            n_failed++;
            REQUIRE(a.step(none) == RF_OK, "%s", a.g.err.text);
        }
        REQUIRE(a.tune(ms) && a.stats().config == 2, "%u: config %u", call, a.stats().config);
        for (uint32_t k = 0; k < 4; k++)
            CHECK(a.stats().configs[k].us == (call ? less : ms)[k] * 1e3f, "%u: config %u took %g us", call, k, (double)a.stats().configs[k].us);
    }
    CHECK(n_failed == 1, "%u launches failed", n_failed);
}

/* What is no decode step of the whole plan, or is after one that still runs, is not timed. Of two sessions the first to end
 * decides for both. Each config's graphs are checked; old shapes are forgotten. */
static void test_untimed_ways() {
    static const float ms[2][4] = {{1, 0.5f, 1, 1}, {1, 1, 1, 0.5f}};
    FreshDevice d(0);
    {
        Tuned a(d.dev, 33), b(d.dev, 33);
        REQUIRE(a.open() == RF_OK && b.open() == RF_OK, "%s", a.g.err.text);
        a.g.whole = false;
        CHECK(!a.tune(ms[0]) && a.stats().configs[0].us == 0, "steps in parts were timed");
        a.g.whole = true;
        for (int i = 0; i < 40; i++) REQUIRE(a.step(ms[0], 0) == RF_OK, "%s", a.g.err.text);
        CHECK(a.stats().configs[0].us == 0, "steps without logits were timed");
        const std::vector<rf_step_row> rows = rows_of(1);
        const uint32_t last = 0;
        rf_step step = {rows.data(), NULL, &last, 1, 1, 0};
        rf_ticket t;
        for (int i = 0; i < 40; i++) REQUIRE(api->plan_run(a.g.prepared, a.g.queue, 0, (uint32_t)a.g.segment_ops.size(), &step, &t, &a.g.err) == RF_OK, "%s", a.g.err.text);
        CHECK(api->ticket_wait(&t, 60000, &a.g.err) == RF_OK && a.stats().configs[0].us == 0 && a.stats().config == 0, "queued steps were timed");
        REQUIRE(b.step(ms[1]) == RF_OK, "%s", b.g.err.text);
        CHECK(a.tune(ms[0]) && a.stats().config == 1, "config %u", a.stats().config);
        CHECK(!b.stats().config_is_timed && b.tune(ms[1]) && b.stats().config == 1, "config %u", b.stats().config);
        CHECK(same_bits(a.g.get(3), b.g.get(3)), "other bits");
        for (uint32_t n = 34; n < 49; n++) {
            Tuned next(d.dev, n);
            REQUIRE(next.open() == RF_OK && next.tune(ms[1]), "%s", next.g.err.text);
        }
        for (int k = 0; k < 2; k++) {
            Tuned again(d.dev, 33), next(d.dev, 49);
            REQUIRE(again.open() == RF_OK && again.stats().config_is_timed == (k == 0), "%d: %s", k, again.g.err.text);
            REQUIRE(next.open() == RF_OK && next.tune(ms[1]), "%s", next.g.err.text);
        }
    }
    rf_device_info info;
    Tuned late(d.dev, 50);
    REQUIRE(late.open() == RF_OK, "%s", late.g.err.text);
    while (late.stats().config == 0) REQUIRE(late.step(ms[0]) == RF_OK && !late.stats().config_is_timed, "%s", late.g.err.text);
    CHECK(api->device_info(d.dev, &info, &late.g.err) == RF_OK && !info.note[0], "'%s'", info.note);
    hip_emu_stale_graphs(1);
    const std::vector<float> want = late.g.get(3), zeros(64, 0);
    while (late.stats().config == 1) {
        late.g.set(1, zeros); /* what the kernel that is left out would write */
        REQUIRE(late.step(ms[0]) == RF_OK, "%s", late.g.err.text);
    }
    hip_emu_stale_graphs(0);
    CHECK(api->device_info(d.dev, &info, &late.g.err) == RF_OK && strstr(info.note, "graphs are off"), "'%s'", info.note);
    CHECK(same_bits(late.g.get(3), want), "stale replays were used");
    CHECK(late.tune(ms[0]) && late.stats().config == 1, "config %u", late.stats().config);
}

/* The n-th call of the runtime fails while configs are timed, for every n: the call says so, or nothing has changed. */
static void test_failing_ways() {
    static const float ms[4] = {1, 0.7f, 0.5f, 0.6f};
    std::vector<float> want;
    uint64_t calls = 1, untimed = 0, failed = 0;
    const hip_emu_counts before = hip_emu_get_counts();
    for (uint64_t n = 0; n <= calls; n += full || n < 20 ? 1 : 5 + n % 11) {
        FreshDevice d(1);
        {
            Tuned a(d.dev, 33);
            rf_result r = a.open();
            REQUIRE(r == RF_OK, "%s", a.g.err.text);
            api->plan_release(a.g.prepared), a.g.prepared = NULL;
            const uint64_t first = hip_emu_get_counts().calls;
            uint32_t n_segments;
            hip_emu_fail_call(n, 0);
            r = api->plan_prepare(d.dev, &a.g.bind, a.g.segment_ops.data(), &n_segments, &a.g.prepared, &a.g.err);
            for (int i = 0; i < 30 && r == RF_OK; i++) r = a.step(ms);
            hip_emu_fail_call(0, 0);
            if (n == 0) calls = hip_emu_get_counts().calls - first, want = a.g.get(3);
            failed += r != RF_OK;
            if (r == RF_OK) { /* without graphs it begins anew */
                a.tune(ms);
                const rf_session_stats st = a.stats();
                untimed += !st.config_is_timed;
                CHECK(st.config == (st.config_is_timed ? 2 : 0) && st.n_configs == 4, "call %d: config %u", (int)n, st.config);
                CHECK(same_bits(a.g.get(3), want), "call %d: other bits", (int)n);
            } else CHECK(a.g.err.code == RF_ERR_DEVICE && strstr(a.g.err.text, "hip"), "call %d: '%s'", (int)n, a.g.err.text);
        }
    }
    CHECK(untimed > 0 && failed > 3, "%d failures of timing, %d of others", (int)untimed, (int)failed);
    CHECK(!leaks(before, hip_emu_get_counts()), "a leak");
}

/* A consumer on another queue without queue_after reads garbage under late execution; with it the values
 * are right. */
static void test_missing_wait() {
    for (int waits = 0; waits < 2; waits++) {
        rf_queue *a = NULL, *b = NULL;
        rf_mem m;
        rf_error err;
        rf_ticket t;
        void *src = NULL, *dst = NULL;
        memset(&err, 0, sizeof err);
        REQUIRE(api->queue_create(devices[0], &a, &err) == RF_OK &&
                    api->queue_create(devices[0], &b, &err) == RF_OK &&
                    api->mem_create(devices[0], 64, &m, &err) == RF_OK &&
                    api->host_create(devices[0], 64, &src, &err) == RF_OK &&
                    api->host_create(devices[0], 64, &dst, &err) == RF_OK,
                "%s", err.text);
        memset(src, 5, 64);
        memset(dst, 0, 64);
        CHECK(api->mem_write(a, &m, 0, src, 64, &t, &err) == RF_OK, "%s", err.text);
        if (waits) CHECK(api->queue_after(b, &t, &err) == RF_OK, "%s", err.text);
        CHECK(!api->ticket_done(&t), "a late copy is done at once");
        CHECK(api->mem_read(b, &m, 0, dst, 64, &t, &err) == RF_OK && api->ticket_wait(&t, 60000, &err) == RF_OK, "%s",
              err.text);
        CHECK((memcmp(src, dst, 64) == 0) == (waits == 1), "waits %d", waits);
        api->queue_release(a);
        api->queue_release(b);
        api->mem_release(devices[0], &m);
        api->host_release(devices[0], src);
        api->host_release(devices[0], dst);
    }
}

static void test_orders() {
    for (size_t d = 0; d < devices.size(); d++) {
        std::vector<float> want = small_steps(devices[d], RF_TYPE_Q5_0);
        for (uint32_t i = 0; i < 5; i++) {
            hip_emu_order(i == 0 ? HIP_EMU_EAGER : HIP_EMU_SHUFFLED, i);
            CHECK(same_bits(want, small_steps(devices[d], RF_TYPE_Q5_0)), "order %u", i);
        }
        hip_emu_order(HIP_EMU_LATE, 0);
    }
}

/* Everything once: open, load, run, read, close. The values, or nothing and *err. */
static std::vector<float> everything(rf_error *err) {
    std::vector<float> out;
    rf_dev *d = NULL;
    rf_device_info info;
    memset(err, 0, sizeof *err);
    if (api->device_open(1, NULL, &d, err) != RF_OK) return out;
    if (api->device_info(d, &info, err) == RF_OK) {
        Rig g(d);
        Small s = small_model(g, RF_TYPE_Q8_0);
        std::vector<float> own = values(2 * Small::n);
        void *host = NULL;
        rf_ticket t;
        rf_queue *second = NULL;
        rf_result r = g.open(12, 1, 600);
        if (r == RF_OK) r = api->host_create(d, Small::vocab * 4, &host, &g.err);
        if (r == RF_OK) r = api->times(g.prepared, NULL, 1, &g.err);
        if (r == RF_OK) r = api->queue_create(d, &second, &g.err);
        if (r == RF_OK) r = g.run(prompt(12, 0, 3), std::vector<uint32_t>(1, 11));
        std::vector<rf_step_row> rows = prompt(2, 12, 3);
        rows[1].token = -1;
        if (r == RF_OK) r = g.run(rows, std::vector<uint32_t>(1, 1), 0, own.data());
        float us[4];
        if (r == RF_OK) r = api->times(g.prepared, us, 4, &g.err);
        rf_step step = {rows.data(), own.data(), NULL, 2, 0, 0};
        if (r == RF_OK) r = api->plan_run(g.prepared, g.queue, 0, 1, &step, &t, &g.err);
        if (r == RF_OK) r = api->queue_after(second, &t, &g.err);
        if (r == RF_OK)
            r = api->mem_read(second, &g.bind.scratch, g.buffer_offset[s.out], host, Small::vocab * 4, &t, &g.err);
        if (r == RF_OK) r = api->ticket_wait(&t, 60000, &g.err);
        if (r == RF_OK) out.assign(static_cast<float *>(host), static_cast<float *>(host) + Small::vocab);
        if (r != RF_OK) *err = g.err;
        if (second) api->queue_release(second);
        if (host) api->host_release(d, host);
    }
    api->device_close(d);
    return out;
}

/* The n-th call of the runtime fails, for every n: a text that names the call, nothing lost, and all works
 * afterwards. */
static void test_failing_calls() {
    rf_error err;
    hip_emu_counts before = hip_emu_get_counts();
    std::vector<float> want = everything(&err);
    REQUIRE(want.size() == Small::vocab, "%s", err.text);
    uint64_t calls = hip_emu_get_counts().calls - before.calls, failed = 0, tried = 0;
    CHECK(!leaks(before, hip_emu_get_counts()), "a leak without any failure");
    for (uint64_t n = 1; n <= calls; n += full || n < 20 ? 1 : 1 + n % 7) {
        hip_emu_fail_call(n, 0);
        std::vector<float> found = everything(&err);
        hip_emu_fail_call(0, 0);
        failed += found.empty();
        tried++;
        if (found.empty())
            CHECK(err.code == RF_ERR_DEVICE && strstr(err.text, "hip") && err.text[10], "call %d: %d '%s'", (int)n,
                  err.code, err.text);
        else CHECK(same_bits(found, want), "call %d failed silently and gave other values", (int)n);
        REQUIRE(!leaks(before, hip_emu_get_counts()), "call %d: a leak (%s)", (int)n, err.text);
        if (!full && n % 4) continue;
        found = everything(&err);
        REQUIRE(same_bits(found, want), "after a failure of call %d: %s", (int)n, err.text);
    }
    /* the others were releases, and putting the thread's device back */
    CHECK(failed > tried / 4, "only %d of %d failures were noticed", (int)failed, (int)tried);
}

/* Work that fails on the device is reported where it is waited for; the device is lost until the process is new. */
static void test_failing_work() {
    rf_error err;
    hip_emu_counts before = hip_emu_get_counts();
    std::vector<float> want = everything(&err);
    int reported = 0;
    for (uint64_t n = 1; n < 400; n += 7) {
        hip_emu_fail_work(n);
        std::vector<float> found = everything(&err);
        hip_emu_fail_work(0);
        hip_emu_recover();
        reported += found.empty();
        CHECK(found.empty() ? err.code == RF_ERR_DEVICE && err.sys == 719 : same_bits(found, want),
              "item %d: %d '%s'", (int)n, err.code, err.text);
        REQUIRE(!leaks(before, hip_emu_get_counts()), "item %d: a leak (%s)", (int)n, err.text);
    }
    CHECK(reported > 5, "only %d failures were reported", reported);
    CHECK(same_bits(everything(&err), want), "%s", err.text);
    /* lost is told */
    Rig g(devices[0]);
    small_model(g, RF_TYPE_Q8_0);
    REQUIRE(g.open(4) == RF_OK, "%s", g.err.text);
    rf_device_info info;
    hip_emu_fail_work(3);
    CHECK(g.run(rows_of(2)) == RF_ERR_DEVICE, "a lost device ran a plan");
    CHECK(api->device_info(devices[0], &info, &err) == RF_ERR_DEVICE && info.lost == 1, "lost %u", info.lost);
    hip_emu_fail_work(0);
    hip_emu_recover();
}

/* What a plan takes of the device's memory is known before, to the byte; what it was given to run is counted: prompts,
 * decode steps by launches, by graphs (when they are captured, checked and replayed), with timing. */
static void test_plan_accounts() {
    for (size_t d = 0; d < devices.size(); d++) {
        Rig g(devices[d]);
        small_model(g, d ? RF_TYPE_Q4_0 : RF_TYPE_F16);
        REQUIRE(g.open(12, 2, 600) == RF_OK, "%s", g.err.text);
        uint64_t forecast = 0, before = hip_emu_get_counts().bytes;
        rf_plan_bind sizes = g.bind;
        sizes.scratch.base = sizes.state.base = NULL, sizes.table = NULL;
        sizes.buffer_offset = sizes.state_offset = NULL, sizes.state_cells = NULL;
        CHECK(api->plan_bytes(devices[d], &sizes, &forecast, &g.err) == RF_OK && forecast > 0, "%s", g.err.text);
        CHECK(hip_emu_get_counts().bytes == before, "plan_bytes has taken memory");
        api->plan_release(g.prepared);
        CHECK(before - hip_emu_get_counts().bytes == forecast, "%llu bytes, forecast %llu",
              (unsigned long long)(before - hip_emu_get_counts().bytes), (unsigned long long)forecast);
        uint32_t n_segments;
        REQUIRE(api->plan_prepare(g.dev, &g.bind, g.segment_ops.data(), &n_segments, &g.prepared, &g.err) == RF_OK, "%s",
                g.err.text);
        uint64_t calls = 0, launches = hip_emu_get_counts().launches, replays = hip_emu_get_counts().replays;
        g.whole = true;
        for (int i = 0; i < 8; i++) {
            std::vector<rf_step_row> rows = i == 0 || i == 5 ? prompt(12, i * 12, 3) : prompt(1, 11 + i, 5 * i);
            REQUIRE(g.run(rows, std::vector<uint32_t>(1, (uint32_t)rows.size() - 1)) == RF_OK, "%s", g.err.text);
            rf_session_stats st = api->plan_stats(g.prepared);
            uint64_t ran = hip_emu_get_counts().launches - launches, graphs = hip_emu_get_counts().replays - replays;
            CHECK(st.launches == ran, "step %d: %d launches are counted, %d ran", i, (int)st.launches, (int)ran);
            CHECK(st.submissions > calls && st.submissions <= st.launches && st.submissions >= graphs &&
                      (graphs == 0 || st.submissions < st.launches),
                  "step %d: %d submissions, %d launches, %d graphs", i, (int)st.submissions, (int)ran, (int)graphs);
            calls = st.submissions;
        }
    }
}

static void test_device_list() {
    rf_device_info info[4];
    rf_error err;
    uint32_t n = 0;
    memset(&err, 0, sizeof err);
    CHECK(api->device_list(info, 4, &n, &err) == RF_OK && n == 2 && !strcmp(info[0].name, "hip:0") &&
              info[0].usable && info[0].is_gpu && info[0].wave_size == 32 && !strcmp(info[0].arch, "gfx1100"),
          "%u %s", n, err.text);
    CHECK(info[1].wave_size == 64 && !strcmp(info[1].arch, "gfx90a") && info[1].total_bytes > 0 &&
              info[1].compute_units > 0,
          "%s", info[1].arch);
    CHECK(api->device_list(info, 0, &n, NULL) == RF_OK && n == 2, "%u", n);
    rf_dev *d = NULL;
    CHECK(api->device_open(7, NULL, &d, &err) == RF_ERR_NOT_FOUND && !d, "%s", err.text);
    hip_emu_devices(0, 100);
    err.code = RF_OK;
    CHECK(api->device_list(info, 4, &n, NULL) == RF_OK && n == 1 && !info[0].usable &&
              strstr(info[0].note, "hipErrorNoDevice"),
          "%s", info[0].note);
    CHECK(api->device_open(0, NULL, &d, &err) == RF_ERR_DEVICE && strstr(err.text, "hipErrorNoDevice"), "%s",
          err.text);
    hip_emu_devices(2, 0);
    hip_emu_no_kernels(1);
    hip_emu_counts before = hip_emu_get_counts();
    err.code = RF_OK;
    CHECK(api->device_open(0, NULL, &d, &err) == RF_ERR_DEVICE && strstr(err.text, "--offload-arch=gfx1100") &&
              strstr(err.text, "hip:0"),
          "%s", err.text);
    CHECK(!leaks(before, hip_emu_get_counts()), "a leak");
    hip_emu_no_kernels(0);
}

/* The host's allocator: every block comes from it and goes back; the n-th failing is an error. */
static void test_host_memory() {
    rf_device_desc desc;
    memset(&desc, 0, sizeof desc);
    memory mem = memory();
    desc.allocator = memory_allocator(&mem);
    for (int n = 1, done = 0; !done; n++) {
        rf_error err;
        rf_dev *d = NULL;
        memset(&err, 0, sizeof err);
        mem.calls = 0, mem.fail_at = n;
        rf_result r = api->device_open(0, &desc, &d, &err);
        if (r == RF_OK) {
            Rig g(d);
            small_model(g, RF_TYPE_Q8_0);
            r = g.open(4);
            err = g.err;
            done = r == RF_OK && mem.calls < n;
        }
        CHECK(r == RF_OK || (r == RF_ERR_MEMORY && err.code == RF_ERR_MEMORY), "allocation %d: %d '%s'", n, r,
              err.text);
        if (d) api->device_close(d);
        REQUIRE(mem.live == 0 && n < 1000, "allocation %d: %d blocks are left", n, (int)mem.live);
    }
}
#endif

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "--full")) full = 1, argv[1] = argv[0], argv++, argc--;
    RFT_BEGIN(argc, argv);
    api = rocmforge_hip_api();
    rf_device_info info[8];
    rf_error err;
    uint32_t n = 0;
    memset(&err, 0, sizeof err);
    if (api->size_bytes != sizeof *api || api->version != RF_DEVICE_API_VERSION || api->op_bytes != sizeof(rf_op) ||
        api->step_bytes != sizeof(rf_step)) {
        printf("the kernels were compiled with another rocmforge.h\n");
        return 1;
    }
    api->device_list(info, 8, &n, &err);
    for (uint32_t i = 0; i < n && i < 8; i++) {
        rf_dev *d = NULL;
        printf("%s: %s, %s, waves of %u, %u units, %.1f GB %s\n", info[i].name, info[i].text, info[i].arch,
               info[i].wave_size, info[i].compute_units, (double)info[i].total_bytes * 1e-9, info[i].note);
        if (!info[i].usable) continue;
        if (api->device_open(i, NULL, &d, &err) != RF_OK) {
            printf("%s\n", err.text);
            return 1;
        }
        devices.push_back(d);
    }
    n_devices = (int)devices.size();
    if (n_devices == 0) {
        printf("no usable device\n");
        return 1;
    }
    RUN(test_matmul);
    RUN(test_quantize_bits);
    RUN(test_embed);
    RUN_IF(have_goldens(), test_goldens, "no ../shared");
    RUN(test_rms_norm);
    RUN(test_rope);
    RUN(test_rope_angles);
    RUN(test_glu_gather);
    RUN(test_argmax);
    RUN(test_route);
    RUN(test_route_of_tokens);
    RUN_SLOW(test_experts);
    RUN_SLOW(test_expert_tiles);
    RUN(test_expert_groups);
    RUN_SLOW(test_mixture_parts);
    RUN(test_kv_store);
    RUN(test_attention);
    RUN(test_attention_both_ways_and_lists);
    RUN(test_attention_to_blocks);
    RUN_SLOW(test_wide_attention);
    RUN_SLOW(test_heads);
    RUN(test_heads_across);
    RUN(test_conv);
    RUN(test_delta);
    RUN(test_scan);
    RUN(test_slice);
    RUN(test_compress);
    RUN(test_index);
    RUN(test_blend);
    RUN(test_spread);
    RUN(test_hyper);
    RUN(test_mix_of_streams);
    RUN(test_match);
    RUN(test_trim);
    RUN(test_sum);
    RUN(test_together);
    RUN(test_joined_norm);
    RUN(test_glu_launch);
    RUN_SLOW(test_decode_step);
    RUN_SLOW(test_ways);
    RUN_SLOW(test_many_splits);
    RUN(test_attention_of_rows);
    RUN(test_small_model);
    RUN(test_queued_steps);
    RUN(test_chosen_tokens);
    RUN(test_times);
    RUN(test_mem_sum);
    RUN(test_many_tickets);
    RUN(test_refusals);
    RUN(test_threads);
    RUN_SLOW(test_bfloats);
#ifdef RF_TEST_EMU
    RUN_SLOW(test_blocks_of_512);
    RUN_SLOW(test_together_by_mma);
    RUN_SLOW(test_matrix_units);
    RUN(test_wrong_units);
    RUN(test_stale_graphs);
    RUN(test_fastest_way);
    RUN(test_disturbed_ways);
    RUN(test_untimed_ways);
    RUN_SLOW(test_failing_ways);
    RUN(test_missing_wait);
    RUN(test_orders);
    RUN(test_failing_calls);
    RUN(test_failing_work);
    RUN(test_plan_accounts);
    RUN(test_device_list);
    RUN(test_host_memory);
#endif
    for (size_t i = 0; i < devices.size(); i++) api->device_close(devices[i]);
#ifdef RF_TEST_EMU
    hip_emu_counts c = hip_emu_get_counts();
    if (c.allocations || c.host_allocations || c.streams || c.events || c.graphs) {
        printf("left: %u allocations, %u pinned, %u streams, %u events, %u graphs\n", c.allocations,
               c.host_allocations, c.streams, c.events, c.graphs);
        return 1;
    }
#endif
    RFT_END();
}
