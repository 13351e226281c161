/* A layer of Gated DeltaNet: a convolution, then states that every token decays and corrects.
 *
 * A value head keeps a state [key_dim, value_dim]. A token multiplies it by its decay, reads what it
 * holds for the token's key, writes beta times the difference to the token's value there, and reads
 * the output by its query. Tokens go through a state one after the other, whether they are a prompt's
 * or decoded: a state has the same bits wherever its tokens were cut into steps. Columns of a state do
 * not depend on each other: a few of them, which stay in the first cache, take the tokens of a tile. One
 * way through them writes what a token changes, and reads for the next one.
 *
 * All arithmetic is float32. A key head, with its value heads, of a sequence is an item for a thread.
 */
#if !defined(__AVX2__) /* elsewhere what is fused is written so: both have to be so wherever they are */
#pragma GCC optimize("fp-contract=off")
#endif
#include "simd.h"

enum {
    TILE_TOKENS = 32,
    VECTORS = LANES == 16 ? 4 : 2, /* as many sums as there are registers for */
    COLUMNS = VECTORS * LANES,
    USUAL_TAPS = 4,
    MAX_TAPS = 16, /* tokens of a convolution; engine/checkpoint/delta_config.py refuses more */
};
static const float UNIT_EPS = 1e-6f; /* of queries and keys */

/* A layer's, as engine/worker/model/delta.py fills it. Steps count elements from a key head to the next. */
struct layer {
    int64_t num_key_heads, ratio; /* value heads of a key head */
    int64_t key_dim, value_dim, conv_size;
    int64_t first_value;                                   /* of the layer's part of a record */
    int64_t inputs_stride, gates_stride, betas_stride;     /* from a token to the next */
    int64_t keys_step, values_step, gates_step, betas_step;
    int64_t conv;             /* float32 [conv_size, all queries, then keys, then values] */
    int64_t decay, step_bias; /* float32 [num_value_heads] */
    int64_t norm;             /* float32 [value_dim] */
    int64_t out_key_step, out_step; /* heads of the output: from a key head to the next, and within */
};

typedef struct {
    const struct layer *layer;
    char *out, *pool;
    const int64_t *sequences; /* [num_sequences, 3]; see attend */
    const int64_t *records;   /* [num_sequences, 2, record_blocks], or NULL */
    const char *q, *k, *v, *z, *b, *a;
    int64_t record_blocks, block_bytes;
    int type;
    float eps;
} step;

/* One item: sizes to whole vectors, and a thread's memory for it. Its channels are the query's, the
 * key's, and those of its values. */
typedef struct {
    int64_t head, key_width, value_width, width, first_row;
    const int64_t *read, *written; /* blocks of the record; NULL: none */
    float *inputs;                 /* before the next token: [conv_size - 1, width], oldest first */
    float *mixed;                  /* [TILE_TOKENS, width] */
    float *outputs;                /* [TILE_TOKENS, value_width] */
    float *states; /* by value head, then COLUMNS at a time: [key_dim, COLUMNS] */
    float *row;    /* of a state, [value_width] */
    float products[TILE_TOKENS], kept[TILE_TOKENS], betas[TILE_TOKENS];
} work;

INLINE int64_t up_to(int64_t size, int64_t whole) { return (size + whole - 1) / whole * whole; }

INLINE vec multiply_add(vec sum, vec a, vec b)
{
#if LANES == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }

/* Channels of the whole layer: all queries, then keys, then values. */
INLINE int64_t conv_width_of(const struct layer *l)
{
    return l->num_key_heads * (2 * l->key_dim + l->ratio * l->value_dim);
}

INLINE float read_one(const char *base, int64_t i, int type)
{
    uint32_t bits = 0;
    char *high = (char *)&bits + sizeof bits - size_of(type); /* bfloat16 is the upper half */
    memcpy(high, at(base, i, type), (size_t)size_of(type));
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Copies values [first, first + count) of a record: to them, or from them. What is not there is 0. */
static void copy_record(const step *s, const int64_t *blocks, int64_t first, int64_t count,
                        float *values, int is_read)
{
    if (blocks == NULL && is_read)
        memset(values, 0, (size_t)count * sizeof *values);
    const int64_t block_values = s->block_bytes / (int64_t)sizeof *values;
    while (blocks != NULL && count > 0) {
        const int64_t offset = first % block_values;
        const int64_t some = count < block_values - offset ? count : block_values - offset;
        char *place = s->pool + blocks[first / block_values] * s->block_bytes +
                      offset * (int64_t)sizeof *values;
        if (is_read)
            memcpy(values, place, (size_t)some * sizeof *values);
        else
            memcpy(place, values, (size_t)some * sizeof *values);
        values += some;
        first += some;
        count -= some;
    }
}

/* One of an item's runs of channels: where they lie among all of the layer's, in a row of the
 * projections, and among the item's. */
typedef struct {
    const char *from;
    int64_t channel, own, count, width;
} run;

static run run_of(const step *s, const work *w, int64_t number)
{
    const struct layer *l = s->layer;
    const int64_t all_keys = l->num_key_heads * l->key_dim;
    if (number < 2) {
        const char *from = at(number == 0 ? s->q : s->k, w->head * l->keys_step, s->type);
        return (run){from, number * all_keys + w->head * l->key_dim, number * w->key_width,
                     l->key_dim, w->key_width};
    }
    const int64_t value_head = number - 2;
    return (run){at(s->v, w->head * l->values_step + value_head * l->value_dim, s->type),
                 2 * all_keys + (w->head * l->ratio + value_head) * l->value_dim,
                 2 * w->key_width + value_head * w->value_width, l->value_dim, w->value_width};
}

/* The inputs before the sequence's new tokens, between the record and the first rows of `inputs`. */
static void copy_tail(const step *s, const work *w, int is_read)
{
    const struct layer *l = s->layer;
    const int64_t conv_width = conv_width_of(l);
    for (int64_t row = 0; row < l->conv_size - 1; row++)
        for (int64_t i = 0; i < 2 + l->ratio; i++) {
            const run r = run_of(s, w, i);
            copy_record(s, is_read ? w->read : w->written,
                        l->first_value + row * conv_width + r.channel, r.count,
                        w->inputs + row * w->width + r.own, is_read);
        }
}

/* The item's states, between the record and memory where COLUMNS of them lie together. */
static void copy_states(const step *s, const work *w, int is_read)
{
    const struct layer *l = s->layer;
    const int64_t conv_width = conv_width_of(l);
    const int64_t size = l->key_dim * l->value_dim;
    for (int64_t i = 0; i < l->ratio * l->key_dim; i++) {
        const int64_t head = i / l->key_dim, row = i % l->key_dim;
        const int64_t first = l->first_value + (l->conv_size - 1) * conv_width +
                              (w->head * l->ratio + head) * size + row * l->value_dim;
        float *state = w->states + head * l->key_dim * w->value_width + row * COLUMNS;
        if (is_read)
            copy_record(s, w->read, first, l->value_dim, w->row, 1);
        for (int64_t column = 0; column < w->value_width; column += COLUMNS) {
            float *place = state + column * l->key_dim;
            memcpy(is_read ? place : w->row + column, is_read ? w->row + column : place,
                   COLUMNS * sizeof *place);
        }
        if (!is_read)
            copy_record(s, w->written, first, l->value_dim, w->row, 0);
    }
}

/* The convolution of a tile's tokens over their inputs and those before, and SiLU; LANES channels of a
 * run from c on. */
INLINE void convolve_lanes(const work *w, const run *r, int64_t c, const char *from, int64_t stride,
                           const float *weights, int64_t conv_width, int64_t count, int64_t taps,
                           int type)
{
    const int64_t left = r->count - c;
    vec factors[MAX_TAPS], newest[MAX_TAPS];
    float *before = w->inputs + r->own + c, *to = w->mixed + r->own + c;
#pragma GCC unroll 4
    for (int64_t place = 0; place < taps; place++) {
        factors[place] = load_upto(weights + place * conv_width + c, left, FLOAT32);
        newest[place] = place + 1 < taps ? load(before + place * w->width, FLOAT32) : all(0);
    }
    for (int64_t t = 0; t < count; t++, from += stride * size_of(type), to += w->width) {
        newest[taps - 1] = load_upto(at(from, c, type), left, type);
        vec sum = {0};
#pragma GCC unroll 4
        for (int64_t place = 0; place < taps; place++)
            sum = multiply_add(sum, newest[place], factors[place]);
        store(to, silu(sum), FLOAT32);
#pragma GCC unroll 4
        for (int64_t place = 0; place < taps - 1; place++)
            newest[place] = newest[place + 1];
    }
#pragma GCC unroll 4
    for (int64_t place = 0; place < taps - 1; place++)
        store(before + place * w->width, newest[place], FLOAT32);
}

INLINE void convolve(const step *s, const work *w, int64_t first_row, int64_t count, int type)
{
    const struct layer *l = s->layer;
    const int64_t conv_width = conv_width_of(l);
    for (int64_t i = 0; i < 2 + l->ratio; i++) {
        const run r = run_of(s, w, i);
        const float *weights = (const float *)(uintptr_t)l->conv + r.channel;
        const char *from = at(r.from, first_row * l->inputs_stride, type);
        for (int64_t c = 0; c < r.count; c += LANES)
            if (l->conv_size == USUAL_TAPS)
                convolve_lanes(w, &r, c, from, l->inputs_stride, weights, conv_width, count,
                               USUAL_TAPS, type);
            else
                convolve_lanes(w, &r, c, from, l->inputs_stride, weights, conv_width, count,
                               l->conv_size, type);
    }
}

INLINE float dot(const float *a, const float *b, int64_t width)
{
    vec sum = {0};
    for (int64_t i = 0; i < width; i += LANES)
        sum = multiply_add(sum, load(a + i, FLOAT32), load(b + i, FLOAT32));
    return sum_of(sum);
}

/* Queries and keys of length 1, queries scaled; and the product of each token's two. */
static void norm_keys(const struct layer *l, work *w, int64_t count)
{
    float q_factors[TILE_TOKENS], k_factors[TILE_TOKENS];
    for (int64_t t = 0; t < count; t++) {
        const float *q = w->mixed + t * w->width, *k = q + w->key_width;
        q_factors[t] = dot(q, q, w->key_width);
        k_factors[t] = dot(k, k, w->key_width);
    }
    const float root = sqrtf((float)l->key_dim);
    for (int64_t t = 0; t < count; t++) {
        q_factors[t] = 1.0f / sqrtf(q_factors[t] + UNIT_EPS) / root;
        k_factors[t] = 1.0f / sqrtf(k_factors[t] + UNIT_EPS);
    }
    for (int64_t t = 0; t < count; t++) {
        float *q = w->mixed + t * w->width, *k = q + w->key_width;
        vec sum = {0};
        for (int64_t i = 0; i < w->key_width; i += LANES) {
            const vec query = load(q + i, FLOAT32) * q_factors[t];
            const vec key = load(k + i, FLOAT32) * k_factors[t];
            store(q + i, query, FLOAT32);
            store(k + i, key, FLOAT32);
            sum = multiply_add(sum, query, key);
        }
        w->products[t] = sum_of(sum);
    }
}

/* log(1 + e^x) of each lane. With y = e^-|x|, log(1 + y) is twice the series of y / (2 + y). */
INLINE vec softplus(vec x)
{
    const vec y = exponential(smaller(x, -x));
    const vec part = y / (2.0f + y), square = part * part;
    vec sum = all(1.0f / 15);
#pragma GCC unroll 6
    for (int i = 13; i > 1; i -= 2)
        sum = sum * square + 1.0f / (float)i;
    return larger(x, all(0)) + 2 * (part * (sum * square + 1.0f));
}

/* What a token leaves of a value head's state, and how much of the difference it writes. */
static void open_gates(const step *s, work *w, int64_t value_head, int64_t first_row, int64_t count)
{
    const struct layer *l = s->layer;
    const int64_t number = w->head * l->ratio + value_head;
    const float decay = ((const float *)(uintptr_t)l->decay)[number];
    const float bias = ((const float *)(uintptr_t)l->step_bias)[number];
    for (int64_t t = 0; t < count; t++) {
        const int64_t i = (first_row + t) * l->betas_stride + w->head * l->betas_step + value_head;
        w->kept[t] = read_one(s->a, i, s->type) + bias;
        w->betas[t] = read_one(s->b, i, s->type);
    }
    for (int64_t t = 0; t < count; t += LANES) {
        store(w->kept + t, exponential(decay * softplus(load(w->kept + t, FLOAT32))), FLOAT32);
        store(w->betas + t, 1.0f / (1.0f + exponential(-load(w->betas + t, FLOAT32))), FLOAT32);
    }
}

/* One way through some columns of a state: decays and changes it by a token, or not; and adds up what it
 * then holds for the next token's key and query, or not. */
INLINE void pass(float *state, int64_t key_dim, int updates, float kept, const float *k,
                 const vec *change, int reads, const float *next_k, const float *next_q, vec *held,
                 vec *seen)
{
    for (int j = 0; j < VECTORS; j++)
        held[j] = seen[j] = all(0);
    for (int64_t i = 0; i < key_dim; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            float *place = state + i * COLUMNS + j * LANES;
            vec value = load(place, FLOAT32);
            if (updates) {
                value = multiply_add(value * kept, all(k[i]), change[j]);
                store(place, value, FLOAT32);
            }
            if (reads) {
                held[j] = multiply_add(held[j], all(next_k[i]), value);
                seen[j] = multiply_add(seen[j], all(next_q[i]), value);
            }
        }
}

/* A tile's tokens through COLUMNS columns of a state, whose values and outputs are rows of them. */
static void run_columns(const work *w, int64_t key_dim, int64_t count, float *state,
                        const float *values, float *outputs)
{
    const float *q = w->mixed, *k = q + w->key_width;
    vec held[VECTORS], seen[VECTORS], change[VECTORS];
    pass(state, key_dim, 0, 0, NULL, NULL, 1, k, q, held, seen);
    for (int64_t t = 0; t < count; t++, q += w->width, k += w->width, values += w->width) {
        for (int j = 0; j < VECTORS; j++) {
            const vec value = load(values + j * LANES, FLOAT32);
            change[j] = multiply_add(value, held[j], all(-w->kept[t])) * w->betas[t];
            store(outputs + t * w->value_width + j * LANES,
                  multiply_add(seen[j] * w->kept[t], change[j], all(w->products[t])), FLOAT32);
        }
        if (t + 1 < count)
            pass(state, key_dim, 1, w->kept[t], k, change, 1, k + w->width, q + w->width, held,
                 seen);
        else
            pass(state, key_dim, 1, w->kept[t], k, change, 0, NULL, NULL, held, seen);
    }
}

/* The outputs of a value head to the step's: normed, and times SiLU of their gates. */
INLINE void write_outputs(const step *s, const work *w, int64_t value_head, int64_t first_row,
                          int64_t count, int type)
{
    const struct layer *l = s->layer;
    const float *norm = (const float *)(uintptr_t)l->norm;
    const int64_t number = w->head * l->out_key_step + value_head * l->out_step;
    float scales[TILE_TOKENS];
    for (int64_t t = 0; t < count; t++)
        scales[t] = dot(w->outputs + t * w->value_width, w->outputs + t * w->value_width,
                        w->value_width);
    for (int64_t t = 0; t < count; t++)
        scales[t] = 1.0f / sqrtf(scales[t] / (float)l->value_dim + s->eps);
    for (int64_t t = 0; t < count; t++) {
        const float *from = w->outputs + t * w->value_width;
        const float scale = scales[t];
        const char *gates = at(s->z, (first_row + t) * l->gates_stride + w->head * l->gates_step +
                                         value_head * l->value_dim, type);
        char *to = at(s->out, ((first_row + t) * l->num_key_heads * l->ratio + number) *
                                  l->value_dim, type);
        for (int64_t i = 0; i < l->value_dim; i += LANES) {
            const int64_t left = l->value_dim - i;
            const vec gate = silu(load_upto(at(gates, i, type), left, type));
            const vec value = load(from + i, FLOAT32) * scale * load_upto(norm + i, left, FLOAT32);
            store_upto(at(to, i, type), value * gate, left, type);
        }
    }
}

/* Rows of the projections are far apart: the processor is told in time which of them come next. */
static void fetch(const step *s, const work *w, int64_t first_row, int64_t count)
{
    const struct layer *l = s->layer;
    for (int64_t i = 0; i < 2 + 2 * l->ratio; i++) {
        run r = run_of(s, w, i < 2 + l->ratio ? i : i - l->ratio);
        int64_t stride = l->inputs_stride;
        if (i >= 2 + l->ratio) {
            stride = l->gates_stride;
            r.from = at(s->z, w->head * l->gates_step + (i - 2 - l->ratio) * l->value_dim, s->type);
        }
        for (int64_t t = 0; t < count; t++) {
            const char *from = at(r.from, (first_row + t) * stride, s->type);
            for (int64_t j = 0; j < r.count * size_of(s->type); j += 64)
                __builtin_prefetch(from + j, 0, 2);
        }
    }
}

static void run_tile(const step *s, work *w, int64_t first_row, int64_t count)
{
    const struct layer *l = s->layer;
    if (s->type == FLOAT32)
        convolve(s, w, first_row, count, FLOAT32);
    else
        convolve(s, w, first_row, count, BFLOAT16);
    norm_keys(l, w, count);
    for (int64_t head = 0; head < l->ratio; head++) {
        open_gates(s, w, head, first_row, count);
        for (int64_t column = 0; column < w->value_width; column += COLUMNS)
            run_columns(w, l->key_dim, count,
                        w->states + l->key_dim * (head * w->value_width + column),
                        w->mixed + 2 * w->key_width + head * w->value_width + column,
                        w->outputs + column);
        if (s->type == FLOAT32)
            write_outputs(s, w, head, first_row, count, FLOAT32);
        else
            write_outputs(s, w, head, first_row, count, BFLOAT16);
    }
}

static void open_work(const step *s, work *w)
{
    const struct layer *l = s->layer;
    w->key_width = up_to(l->key_dim, LANES);
    w->value_width = up_to(l->value_dim, COLUMNS);
    w->width = 2 * w->key_width + l->ratio * w->value_width;
    const int64_t sizes[] = {(l->conv_size - 1) * w->width, TILE_TOKENS * w->width,
                             TILE_TOKENS * w->value_width,
                             l->ratio * l->key_dim * w->value_width, w->value_width};
    float **const parts[] = {&w->inputs, &w->mixed, &w->outputs, &w->states, &w->row};
    enum { NUM_PARTS = sizeof sizes / sizeof sizes[0] };
    int64_t size = 0;
    for (int i = 0; i < NUM_PARTS; i++)
        size += up_to(sizes[i], 16);
    float *next = scratch((size_t)size * sizeof *next);
    if (next == NULL)
        abort(); /* a helper cannot say so */
    for (int i = 0; i < NUM_PARTS; i++) {
        *parts[i] = next;
        next += up_to(sizes[i], 16);
    }
    /* what fills up vectors is 0 */
    memset(w->inputs, 0, (size_t)sizes[0] * sizeof *w->inputs);
    memset(w->mixed, 0, (size_t)sizes[1] * sizeof *w->mixed);
    memset(w->row, 0, (size_t)sizes[4] * sizeof *w->row);
}

static void run_item(void *context, int64_t item)
{
    const step *s = context;
    const struct layer *l = s->layer;
    const int64_t number = item / l->num_key_heads;
    const int64_t *sequence = s->sequences + 3 * number;
    work w = {.head = item % l->num_key_heads};
    if (s->records != NULL) {
        const int64_t *blocks = s->records + number * 2 * s->record_blocks;
        w.read = blocks[0] != 0 ? blocks : NULL;
        w.written = blocks[s->record_blocks] != 0 ? blocks + s->record_blocks : NULL;
    }
    open_work(s, &w);
    copy_tail(s, &w, 1);
    copy_states(s, &w, 1);
    for (int64_t first = 0; first < sequence[1]; first += TILE_TOKENS) {
        const int64_t left = sequence[1] - first;
        const int64_t row = sequence[0] + first, next = left - TILE_TOKENS;
        fetch(s, &w, row + TILE_TOKENS, next < TILE_TOKENS ? next : TILE_TOKENS);
        run_tile(s, &w, row, left < TILE_TOKENS ? left : TILE_TOKENS);
    }
    copy_tail(s, &w, 0);
    copy_states(s, &w, 0);
}

/* delta(out, pool, sequences, records, layer, q, k, v, z, b, a, type, num_tokens, num_sequences,
 *       record_blocks, block_bytes, num_threads, eps)
 *
 * out [num_tokens, num_value_heads, value_dim] = what a layer makes of projected queries, keys, values,
 * output gates, betas and steps, each at its first head's. A sequence's states and the inputs of its
 * newest tokens are read from the first of its two records in the pool, and written to the second: of
 * each, [record_blocks] block ids; the first is 0 where there is none. records may be 0: there are none.
 * See struct layer. */
KERNEL(delta, "pppppppppppiiiiiif")
{
    step s;
    int64_t type, num_tokens, num_sequences, num_threads;
    read_words(words, delta_format, &s.out, &s.pool, &s.sequences, &s.records, &s.layer, &s.q, &s.k,
               &s.v, &s.z, &s.b, &s.a, &type, &num_tokens, &num_sequences, &s.record_blocks,
               &s.block_bytes, &num_threads, &s.eps);
    (void)num_tokens;
    s.type = (int)type;
    parallel_for(num_threads, num_sequences * s.layer->num_key_heads, run_item, &s);
    return 0;
}
