/* The small operations between the large ones: norms, activations, rotation with the KV write.
 *
 * Each is a loop over tokens, a few of which are an item for a thread. */
#include "activation.h"

static const float OVERFLOWN = 6e4f; /* as in engine/worker/model/attention.py */
enum { TOKENS = 16 };

/* Tokens [first, end) of an item. */
#define FOR_TOKENS(item, num_tokens)                                                            \
    for (int64_t token = (item) * TOKENS,                                                       \
                 end = token + TOKENS < (num_tokens) ? token + TOKENS : (num_tokens);           \
         token < end; token++)

static int64_t items_of(int64_t num_tokens) { return (num_tokens + TOKENS - 1) / TOKENS; }

/* x = factor * (x + alpha * added), where something is added; then out = x / rms(x) * weight, rounded
 * to the type of x after the product with a float32 weight, and before it too with a weight of the
 * type of x. */
INLINE void norm_row(void *out, void *x, const void *added, const void *weight, int64_t dim,
                     float alpha, float factor, float eps, int type, int weight_type)
{
    vec squares = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        vec value = load_upto(at(x, i, type), dim - i, type);
        if (added != NULL) {
            value = rounded(value + alpha * load_upto(at(added, i, type), dim - i, type), type);
            if (factor != 1)
                value = rounded(value * factor, type);
            store_upto(at(x, i, type), value, dim - i, type);
        }
        squares += value * value;
    }
    if (out == NULL)
        return;
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec value = load_upto(at(x, i, type), dim - i, type);
        const vec factors = load_upto(at(weight, i, weight_type), dim - i, weight_type);
        store_upto(at(out, i, type), rounded(value * scale, weight_type) * factors, dim - i, type);
    }
}

typedef struct {
    void *out, *x, *added, *weight;
    int64_t type, weight_type, num_tokens, num_rows, dim, out_stride, x_stride;
    float alpha, factor, eps;
} norm;

static void norm_tokens(void *context, int64_t item)
{
    const norm *n = context;
    const int type = (int)n->type, weight_type = (int)n->weight_type;
    FOR_TOKENS(item, n->num_tokens)
        for (int64_t row = 0; row < n->num_rows; row++) {
            const int64_t first = token * n->x_stride + row * n->dim;
            void *to =
                n->out == NULL ? NULL : at(n->out, token * n->out_stride + row * n->dim, type);
            void *from = at(n->x, first, type);
            const void *more = n->added == NULL ? NULL : at(n->added, first, type);
            const void *factors =
                to == NULL ? NULL : at(n->weight, row * n->dim, weight_type);
            if (type == FLOAT32)
                norm_row(to, from, more, factors, n->dim, n->alpha, n->factor, n->eps,
                         FLOAT32, FLOAT32);
            else if (weight_type == FLOAT32)
                norm_row(to, from, more, factors, n->dim, n->alpha, n->factor, n->eps,
                         BFLOAT16, FLOAT32);
            else
                norm_row(to, from, more, factors, n->dim, n->alpha, n->factor, n->eps,
                         BFLOAT16, BFLOAT16);
        }
}

/* rms_norm(out, x, added, weight, type, weight_type, num_tokens, num_rows, dim, out_stride,
 *          x_stride, num_threads, alpha, factor, eps)
 *
 * x is num_tokens times num_rows rows of dim: tokens x_stride apart, rows adjacent; `added`, or 0, is
 * laid out as x, out likewise with out_stride. weight has one row for each of num_rows. out may be x,
 * or 0: then nothing is done but the addition.
 */
KERNEL(rms_norm, "ppppiiiiiiiifff")
{
    norm n;
    int64_t num_threads;
    read_words(words, rms_norm_format, &n.out, &n.x, &n.added, &n.weight, &n.type, &n.weight_type,
               &n.num_tokens, &n.num_rows, &n.dim, &n.out_stride, &n.x_stride, &num_threads,
               &n.alpha, &n.factor, &n.eps);
    parallel_for(num_threads, items_of(n.num_tokens), norm_tokens, &n);
    return 0;
}

INLINE void gate_row(void *out, const void *gates, const void *up, int64_t width, int activation,
                     int type)
{
    for (int64_t i = 0; i < width; i += LANES) {
        const vec gate = load_upto(at(gates, i, type), width - i, type);
        const vec factor = load_upto(at(up, i, type), width - i, type);
        store_upto(at(out, i, type), gated_by(gate, factor, activation, type), width - i, type);
    }
}

typedef struct {
    void *out, *gates, *up;
    int64_t type, num_tokens, width, gate_stride, up_stride, activation;
} gate;

static void gate_tokens(void *context, int64_t item)
{
    const gate *g = context;
    FOR_TOKENS(item, g->num_tokens) {
        void *to = at(g->out, token * g->width, (int)g->type);
        const void *from = at(g->gates, token * g->gate_stride, (int)g->type);
        const void *up = at(g->up, token * g->up_stride, (int)g->type);
        if (g->type == FLOAT32 && g->activation == SILU)
            gate_row(to, from, up, g->width, SILU, FLOAT32);
        else if (g->type == FLOAT32)
            gate_row(to, from, up, g->width, (int)g->activation, FLOAT32);
        else
            gate_row(to, from, up, g->width, (int)g->activation, BFLOAT16);
    }
}

/* gated(out, gates, up, type, num_tokens, width, gate_stride, up_stride, activation, num_threads)
 *
 * out [num_tokens, width] = activation of gates times up, or times one more than that, where both are
 * clamped; rows of gates and up, each of width values, are their strides apart. */
KERNEL(gated, "pppiiiiiii")
{
    gate g;
    int64_t num_threads;
    read_words(words, gated_format, &g.out, &g.gates, &g.up, &g.type, &g.num_tokens, &g.width,
               &g.gate_stride, &g.up_stride, &g.activation, &num_threads);
    parallel_for(num_threads, items_of(g.num_tokens), gate_tokens, &g);
    return 0;
}

typedef struct {
    char *qkv, *gates;
    const char *x;
    int64_t num_tokens, num_heads, head_bytes, rest_bytes;
} gate_split;

static void split_tokens(void *context, int64_t item)
{
    const gate_split *g = context;
    const int64_t heads_bytes = g->num_heads * g->head_bytes;
    FOR_TOKENS(item, g->num_tokens) {
        char *to = g->qkv + token * (heads_bytes + g->rest_bytes);
        char *gates = g->gates + token * heads_bytes;
        const char *from = g->x + token * (2 * heads_bytes + g->rest_bytes);
        for (int64_t i = 0; i < heads_bytes; i += g->head_bytes) {
            memcpy(to + i, from + 2 * i, (size_t)g->head_bytes);
            memcpy(gates + i, from + 2 * i + g->head_bytes, (size_t)g->head_bytes);
        }
        memcpy(to + heads_bytes, from + 2 * heads_bytes, (size_t)g->rest_bytes);
    }
}

/* split_gates(qkv, gates, x, num_tokens, num_heads, head_bytes, rest_bytes, num_threads)
 *
 * x are rows of num_heads queries, each before its gate, and keys and values, of rest_bytes. The gates
 * go to rows of their own, the others to rows of qkv. */
KERNEL(split_gates, "pppiiiii")
{
    gate_split g;
    int64_t num_threads;
    read_words(words, split_gates_format, &g.qkv, &g.gates, &g.x, &g.num_tokens, &g.num_heads,
               &g.head_bytes, &g.rest_bytes, &num_threads);
    parallel_for(num_threads, items_of(g.num_tokens), split_tokens, &g);
    return 0;
}

/* Turn the pairs (i, i + dim / 2) of a head; the first half of the sines is negated. */
INLINE void rotate_head(void *head, const void *cosines, const void *sines, int64_t dim, int type)
{
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t j = i + half, count = half - i;
        const vec a = load_upto(at(head, i, type), count, type);
        const vec b = load_upto(at(head, j, type), count, type);
        const vec turned_a = rounded(a * load_upto(at(cosines, i, type), count, type), type) +
                             rounded(b * load_upto(at(sines, i, type), count, type), type);
        const vec turned_b = rounded(b * load_upto(at(cosines, j, type), count, type), type) +
                             rounded(a * load_upto(at(sines, j, type), count, type), type);
        store_upto(at(head, i, type), turned_a, count, type);
        store_upto(at(head, j, type), turned_b, count, type);
    }
}

/* Keys or values as others will read them: finite, whatever they are. */
INLINE vec load_finite(const void *from, int64_t count, int type)
{
    vec value = load_upto(from, count, type);
    value = choose(value == value, value, all(0));
    value = choose(value > OVERFLOWN, all(OVERFLOWN), value);
    return choose(value < -OVERFLOWN, all(-OVERFLOWN), value);
}

/* Copy keys or values to where others will read them. */
INLINE void keep_row(void *to, const void *from, int64_t dim, int type)
{
    for (int64_t i = 0; i < dim; i += LANES)
        store_upto(at(to, i, type), load_finite(at(from, i, type), dim - i, type), dim - i, type);
}

/* The same of one head as codes; returns what they are to be multiplied by: the largest becomes 127
 * or -127. engine/worker/model/attention.py does the same, bit for bit. */
INLINE float keep_codes(int8_t *to, const void *from, int64_t dim, int type)
{
    vec top = all(0);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec value = load_finite(at(from, i, type), dim - i, type);
        top = larger(top, larger(value, -value));
    }
    const float scale = largest_of(top) / 127;
    const float divisor = scale > 0 ? scale : 1;
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec value = load_finite(at(from, i, type), dim - i, type) / divisor;
        int8_t codes[LANES];
        store_codes(codes, smaller(all(127), larger(all(-127), value))); /* of denormals, too */
        memcpy(to + i, codes, (size_t)(dim - i < LANES ? dim - i : LANES));
    }
    return scale;
}

typedef struct {
    void *qkv, *kv;
    const void *cosines, *sines;
    const int64_t *positions, *token_slots;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
    int64_t block_size, num_layers, layer;
    int64_t plane_bytes; /* of a layer's keys in a block, and of its values */
} placement;

/* One token's keys or values to their place in a plane. */
INLINE void keep_token(const placement *p, char *plane, int64_t offset, const void *from, int type,
                       int kv_type)
{
    const int64_t width = p->num_kv_heads * p->head_dim;
    if (kv_type != INT8) {
        keep_row(at(plane, offset * width, type), from, width, type);
        return;
    }
    char *scales = plane + p->block_size * width + offset * (int64_t)sizeof(float);
    for (int64_t head = 0; head < p->num_kv_heads; head++) {
        int8_t *codes = (int8_t *)plane + offset * width + head * p->head_dim;
        const float scale = keep_codes(codes, at(from, head * p->head_dim, type), p->head_dim, type);
        memcpy(scales + head * p->block_size * (int64_t)sizeof(float), &scale, sizeof scale);
    }
}

INLINE void place_item(const placement *p, int64_t item, int type, int kv_type)
{
    const int64_t kv_width = p->num_kv_heads * p->head_dim;
    const int64_t q_width = p->num_heads * p->head_dim;
    FOR_TOKENS(item, p->num_tokens) {
        char *row = at(p->qkv, token * (q_width + 2 * kv_width), type);
        const int64_t angle = p->positions[token] * p->rotary_dim;
        for (int64_t head = 0; p->rotary_dim && head < p->num_heads + p->num_kv_heads; head++)
            rotate_head(at(row, head * p->head_dim, type), at(p->cosines, angle, type),
                        at(p->sines, angle, type), p->rotary_dim, type);
        const int64_t slot = p->token_slots[token];
        const int64_t block = slot / p->block_size, offset = slot % p->block_size;
        char *keys = (char *)p->kv + (block * p->num_layers + p->layer) * 2 * p->plane_bytes;
        keep_token(p, keys, offset, at(row, q_width, type), type, kv_type);
        keep_token(p, keys + p->plane_bytes, offset, at(row, q_width + kv_width, type), type,
                   kv_type);
    }
}

#define PLACE(name, type, kv_type) \
    static void name(void *context, int64_t item) { place_item(context, item, type, kv_type); }
PLACE(place_float32, FLOAT32, FLOAT32)
PLACE(place_bfloat16, BFLOAT16, BFLOAT16)
PLACE(place_float32_codes, FLOAT32, INT8)
PLACE(place_bfloat16_codes, BFLOAT16, INT8)

/* place(qkv, kv, cosines, sines, positions, token_slots, type, num_tokens, num_heads, num_kv_heads,
 *       head_dim, rotary_dim, block_size, num_layers, layer, kv_type, plane_bytes, num_threads)
 *
 * Turn the queries and keys of qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim] in place, by
 * the rows `positions` of the tables [num_positions, rotary_dim] (not at all where rotary_dim is 0),
 * and write keys and values to their places in the pool, which attend() describes. */
KERNEL(place, "ppppppiiiiiiiiiiii")
{
    placement p;
    int64_t type, kv_type, num_threads;
    read_words(words, place_format, &p.qkv, &p.kv, &p.cosines, &p.sines, &p.positions,
               &p.token_slots, &type, &p.num_tokens, &p.num_heads, &p.num_kv_heads, &p.head_dim,
               &p.rotary_dim, &p.block_size, &p.num_layers, &p.layer, &kv_type, &p.plane_bytes,
               &num_threads);
    const parallel_body same = type == FLOAT32 ? place_float32 : place_bfloat16;
    const parallel_body codes = type == FLOAT32 ? place_float32_codes : place_bfloat16_codes;
    parallel_for(num_threads, items_of(p.num_tokens), kv_type == INT8 ? codes : same, &p);
    return 0;
}

typedef struct {
    void *rows;
    const void *factors;
    int64_t type, num_tokens, width, stride;
} growth;

INLINE void grow_item(const growth *g, int64_t item, int type)
{
    FOR_TOKENS(item, g->num_tokens) {
        const float factor = load_part(at(g->factors, token, type), 1, type)[0];
        char *row = at(g->rows, token * g->stride, type);
        for (int64_t i = 0; i < g->width; i += LANES) {
            const vec value = load_upto(at(row, i, type), g->width - i, type);
            store_upto(at(row, i, type), value * factor, g->width - i, type);
        }
    }
}

static void grow_tokens(void *context, int64_t item)
{
    const growth *g = context;
    if (g->type == FLOAT32)
        grow_item(g, item, FLOAT32);
    else
        grow_item(g, item, BFLOAT16);
}

/* grow(rows, factors, type, num_tokens, width, stride, num_threads)
 *
 * Multiply the first width values of rows, which are stride apart, by their token's of factors
 * [num_tokens]; in place. */
KERNEL(grow, "ppiiiii")
{
    growth g;
    int64_t num_threads;
    read_words(words, grow_format, &g.rows, &g.factors, &g.type, &g.num_tokens, &g.width, &g.stride,
               &num_threads);
    parallel_for(num_threads, items_of(g.num_tokens), grow_tokens, &g);
    return 0;
}
