/* Attention over paged keys and values, read where they lie, with a running softmax.
 *
 * A tile of queries, all that share a KV head, meets its visible keys TILE_KEYS at a time: scores,
 * weights, weighted sum. Few queries (decode) take dot products with the rows of the pool as they
 * are. Many (a prompt's chunk) are worth a transposed copy of the keys, and register-blocked
 * products over it. Positions outside a query's window or beyond its own weigh exactly 0; positions
 * beyond the sequence are never read.
 */
#include "simd.h"

enum {
    TILE_KEYS = 64,
    TILE_ROWS = 128,                    /* queries times heads in a tile, about */
    MICRO_ROWS = LANES == 16 ? 12 : 6,  /* rows whose sums fit in registers, two vectors each */
    DIRECT_ROWS = 12,                   /* up to so many, transposing keys does not pay */
};

typedef struct {
    const void *q, *kv;
    void *out;
    const int64_t *sequences; /* for each: first query's row, query_len, seq_len */
    const int64_t *block_tables;
    int64_t num_sequences, table_stride, num_threads, q_stride;
    int64_t num_heads, num_kv_heads, head_dim, block_size, num_layers, layer, window;
    float scale, softcap;
    int64_t heads_per_item; /* KV heads that one item serves where there is one query */
} attention;

/* One item: some queries of a sequence, some KV heads. */
typedef struct {
    const int64_t *table;
    int64_t first_row, first_position, num_queries;
    int64_t first_head, num_heads;
    int64_t num_rows; /* of scores: queries times heads that share a KV head */
    int64_t num_padded_rows, padded_dim;
    int is_direct;
} tile;

/* Rows of the pool under the current keys, at the first KV head. */
typedef struct {
    const char *keys[TILE_KEYS], *values[TILE_KEYS];
    int64_t first_position, count;
} key_rows;

/* A tile's memory: heads times rows of q, out, largest, total; the rest serves one head at a time. */
typedef struct {
    float *q, *out, *largest, *total, *weights, *packed_keys, *packed_values;
} workspace;

INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t queries_per_tile(const attention *a)
{
    return larger_of(1, TILE_ROWS / (a->num_heads / a->num_kv_heads));
}

static int64_t items_of(const attention *a, int64_t num_queries)
{
    if (num_queries == 1)
        return ceil_div(a->num_kv_heads, a->heads_per_item);
    return ceil_div(num_queries, queries_per_tile(a)) * a->num_kv_heads;
}

static tile tile_of(const attention *a, int64_t item)
{
    int64_t s = 0;
    for (int64_t passed; item >= (passed = items_of(a, a->sequences[3 * s + 1])); s++)
        item -= passed;
    const int64_t *sequence = a->sequences + 3 * s;
    tile t = {.table = a->block_tables + s * a->table_stride};
    int64_t first_query = 0;
    if (sequence[1] == 1) {
        t.num_queries = 1;
        t.first_head = item * a->heads_per_item;
        t.num_heads = smaller_of(a->heads_per_item, a->num_kv_heads - t.first_head);
    } else {
        /* the longest tiles first: what is left at the end is short */
        const int64_t num_tiles = ceil_div(sequence[1], queries_per_tile(a));
        first_query = (num_tiles - 1 - item / a->num_kv_heads) * queries_per_tile(a);
        t.num_queries = smaller_of(queries_per_tile(a), sequence[1] - first_query);
        t.first_head = item % a->num_kv_heads;
        t.num_heads = 1;
    }
    t.first_row = sequence[0] + first_query;
    t.first_position = sequence[2] - sequence[1] + first_query;
    t.num_rows = t.num_queries * (a->num_heads / a->num_kv_heads);
    t.is_direct = t.num_rows <= DIRECT_ROWS && a->head_dim % LANES == 0;
    t.num_padded_rows = t.is_direct ? t.num_rows : ceil_div(t.num_rows, MICRO_ROWS) * MICRO_ROWS;
    t.padded_dim = ceil_div(a->head_dim, 2 * LANES) * 2 * LANES;
    return t;
}

static int open_workspace(workspace *w, const tile *t)
{
    const int64_t rows = t->num_heads * t->num_padded_rows;
    const int64_t sizes[] = {rows * t->padded_dim,
                             rows * t->padded_dim,
                             rows,
                             rows,
                             t->num_padded_rows * TILE_KEYS,
                             t->padded_dim * TILE_KEYS,
                             t->padded_dim * TILE_KEYS};
    float **const parts[] = {&w->q,       &w->out,         &w->largest,      &w->total,
                             &w->weights, &w->packed_keys, &w->packed_values};
    int64_t size = 0;
    for (int i = 0; i < 7; i++)
        size += ceil_div(sizes[i], 16) * 16;
    float *next = scratch((size_t)size * sizeof(float));
    if (next == NULL)
        return -1;
    for (int i = 0; i < 7; i++) {
        *parts[i] = next;
        next += ceil_div(sizes[i], 16) * 16;
    }
    memset(w->q, 0, (size_t)(2 * ceil_div(sizes[0], 16) * 16) * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        w->largest[row] = -INFINITY;
        w->total[row] = 0;
    }
    return 0;
}

/* Rows of q and of the output, as one number. */
INLINE int64_t element_of(const attention *a, const tile *t, int64_t head, int64_t row, int64_t stride)
{
    const int64_t group = a->num_heads / a->num_kv_heads;
    return (t->first_row + row / group) * stride +
           ((t->first_head + head) * group + row % group) * a->head_dim;
}

INLINE void read_queries(const attention *a, const tile *t, const workspace *w, int type)
{
    for (int64_t head = 0; head < t->num_heads; head++)
        for (int64_t row = 0; row < t->num_rows; row++) {
            const void *from = at(a->q, element_of(a, t, head, row, a->q_stride), type);
            float *to = w->q + (head * t->num_padded_rows + row) * t->padded_dim;
            int64_t i = 0;
            for (; i + LANES <= a->head_dim; i += LANES)
                store(to + i, load(at(from, i, type), type) * a->scale, FLOAT32);
            if (i < a->head_dim)
                store(to + i, load_part(at(from, i, type), a->head_dim - i, type) * a->scale,
                      FLOAT32);
        }
}

INLINE void write_output(const attention *a, const tile *t, const workspace *w, int type)
{
    for (int64_t head = 0; head < t->num_heads; head++)
        for (int64_t row = 0; row < t->num_rows; row++) {
            const int64_t state = head * t->num_padded_rows + row;
            const float share = 1.0f / w->total[state];
            const float *from = w->out + state * t->padded_dim;
            const int64_t stride = a->num_heads * a->head_dim;
            void *to = at(a->out, element_of(a, t, head, row, stride), type);
            int64_t i = 0;
            for (; i + LANES <= a->head_dim; i += LANES)
                store(at(to, i, type), load(from + i, FLOAT32) * share, type);
            if (i < a->head_dim)
                store_part(at(to, i, type), load(from + i, FLOAT32) * share, a->head_dim - i, type);
        }
}

/* Where the keys and values of positions [first, first + count) lie. */
INLINE void find_rows(const attention *a, const tile *t, key_rows *rows, int type)
{
    const int64_t row_bytes = a->num_kv_heads * a->head_dim * size_of(type);
    const int64_t half_bytes = a->block_size * row_bytes;
    int64_t offset = rows->first_position % a->block_size;
    const int64_t *block = t->table + rows->first_position / a->block_size;
    for (int64_t k = 0; k < rows->count; block++, offset = 0) {
        const char *plane = (const char *)a->kv + (*block * a->num_layers + a->layer) * 2 * half_bytes;
        for (; offset < a->block_size && k < rows->count; offset++, k++) {
            rows->keys[k] = plane + offset * row_bytes;
            rows->values[k] = rows->keys[k] + half_bytes;
        }
    }
    for (int64_t k = rows->count; k < TILE_KEYS; k++) /* may be computed with, is not used */
        rows->keys[k] = rows->keys[rows->count - 1];
}

/* The sums of four vectors' lanes, next to each other. */
INLINE void store_sums(float *to, vec a, vec b, vec c, vec d)
{
#if LANES >= 8
#if LANES == 16
#define HALVED(v) \
    _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1))
#else
#define HALVED(v) ((__m256)v)
#endif
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(HALVED(a), HALVED(b)),
                                        _mm256_hadd_ps(HALVED(c), HALVED(d)));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    to[0] = sum_of(a), to[1] = sum_of(b), to[2] = sum_of(c), to[3] = sum_of(d);
#endif
}

/* Scores of num_rows queries (a constant) with the keys as they lie. */
INLINE void score_directly(const tile *t, const key_rows *keys, int64_t byte_offset, const float *q,
                           float *scores, int num_rows, int64_t dim, int type)
{
    for (int64_t k = 0; k < keys->count; k += 4) {
        vec sums[3][4] = {0};
        for (int64_t i = 0; i < dim; i += LANES) {
            vec key[4];
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                key[n] = load(at(keys->keys[k + n] + byte_offset, i, type), type);
#pragma GCC unroll 3
            for (int row = 0; row < num_rows; row++) {
                const vec query = load(q + row * t->padded_dim + i, FLOAT32);
#pragma GCC unroll 4
                for (int n = 0; n < 4; n++)
                    sums[row][n] += query * key[n];
            }
        }
#pragma GCC unroll 3
        for (int row = 0; row < num_rows; row++)
            store_sums(scores + row * TILE_KEYS + k, sums[row][0], sums[row][1], sums[row][2],
                       sums[row][3]);
    }
}

/* out += weights * values for num_rows rows (a constant), num_vectors (a constant) from element i. */
INLINE void add_values_directly(const tile *t, const key_rows *keys, int64_t byte_offset,
                                const float *weights, float *out, int num_rows, int num_vectors,
                                int64_t i, int type)
{
    vec sums[3][4];
#pragma GCC unroll 3
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int n = 0; n < num_vectors; n++)
            sums[row][n] = load(out + row * t->padded_dim + i + n * LANES, FLOAT32);
    for (int64_t k = 0; k < keys->count; k++) {
        vec value[4];
#pragma GCC unroll 4
        for (int n = 0; n < num_vectors; n++)
            value[n] = load(at(keys->values[k] + byte_offset, i + n * LANES, type), type);
#pragma GCC unroll 3
        for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
            for (int n = 0; n < num_vectors; n++)
                sums[row][n] += weights[row * TILE_KEYS + k] * value[n];
    }
#pragma GCC unroll 3
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int n = 0; n < num_vectors; n++)
            store(out + row * t->padded_dim + i + n * LANES, sums[row][n], FLOAT32);
}

INLINE void add_rows_directly(const tile *t, const key_rows *keys, int64_t byte_offset,
                              const float *weights, float *out, int num_rows, int64_t dim, int type)
{
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        add_values_directly(t, keys, byte_offset, weights, out, num_rows, 4, i, type);
    for (; i < dim; i += LANES)
        add_values_directly(t, keys, byte_offset, weights, out, num_rows, 1, i, type);
}

/* Keys as columns: packed[dim][TILE_KEYS]; values as rows of padded_dim floats. */
INLINE void pack(const attention *a, const tile *t, const key_rows *keys, int64_t byte_offset,
                 const workspace *w, int type)
{
    for (int64_t k = 0; k < TILE_KEYS; k++) {
        const char *key = keys->keys[k] + byte_offset;
        float lanes[LANES];
        for (int64_t i = 0; i < a->head_dim; i += LANES) {
            const int64_t count = smaller_of(LANES, a->head_dim - i);
            store(lanes, count == LANES ? load(at(key, i, type), type)
                                        : load_part(at(key, i, type), count, type), FLOAT32);
            for (int64_t lane = 0; lane < count; lane++)
                w->packed_keys[(i + lane) * TILE_KEYS + k] = lanes[lane];
        }
    }
    for (int64_t k = 0; k < keys->count; k++) {
        const char *value = keys->values[k] + byte_offset;
        float *to = w->packed_values + k * t->padded_dim;
        for (int64_t i = 0; i < t->padded_dim; i += LANES) {
            const int64_t count = larger_of(0, smaller_of(LANES, a->head_dim - i));
            store(to + i, count == LANES ? load(at(value, i, type), type)
                                         : load_part(at(value, i, type), count, type), FLOAT32);
        }
    }
}

/* sums[MICRO_ROWS][2 vectors] += left[row][n] * right[n] for n below count: the product of rows of
 * numbers and rows of vectors. */
INLINE void multiply(float *sums, int64_t sums_stride, const float *left, int64_t left_stride,
                     const float *right, int64_t right_stride, int64_t count, int is_fresh)
{
    vec sum[MICRO_ROWS][2];
#pragma GCC unroll 12
    for (int row = 0; row < MICRO_ROWS; row++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++)
            sum[row][n] = is_fresh ? all(0) : load(sums + row * sums_stride + n * LANES, FLOAT32);
    for (int64_t n = 0; n < count; n++) {
        const vec low = load(right + n * right_stride, FLOAT32);
        const vec high = load(right + n * right_stride + LANES, FLOAT32);
#pragma GCC unroll 12
        for (int row = 0; row < MICRO_ROWS; row++) {
            sum[row][0] += left[row * left_stride + n] * low;
            sum[row][1] += left[row * left_stride + n] * high;
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < MICRO_ROWS; row++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++)
            store(sums + row * sums_stride + n * LANES, sum[row][n], FLOAT32);
}

INLINE vec bent(vec score, float cap)
{
    return cap - 2 * cap / (exponential(score * (2 / cap)) + 1);
}

/* Turns a row's scores into weights, exactly 0 outside [low, high), and rescales what the row has
 * gathered, if a larger score than before is among them. */
INLINE void weigh_row(float *scores, int64_t low, int64_t high, float softcap, float *largest,
                      float *total, float *out, int64_t padded_dim)
{
    if (low >= high) {
        memset(scores, 0, TILE_KEYS * sizeof(float));
        return;
    }
    const int is_whole = low == 0 && high == TILE_KEYS;
    vec lane_numbers, top = all(-INFINITY), sum = {0};
    for (int lane = 0; lane < LANES; lane++)
        lane_numbers[lane] = (float)lane;
    for (int64_t k = 0; k < TILE_KEYS; k += LANES) {
        vec score = load(scores + k, FLOAT32);
        if (softcap > 0)
            score = bent(score, softcap);
        if (!is_whole) {
            const vec number = lane_numbers + (float)k;
            score = choose((number >= (float)low) & (number < (float)high), score, all(-INFINITY));
        }
        store(scores + k, score, FLOAT32);
        top = larger(score, top);
    }
    const float new_largest = largest_of(larger(top, all(*largest)));
    if (new_largest > *largest) {
        const float shrink = expf(*largest - new_largest);
        *largest = new_largest;
        *total *= shrink;
        for (int64_t i = 0; i < padded_dim; i += LANES)
            store(out + i, load(out + i, FLOAT32) * shrink, FLOAT32);
    }
    for (int64_t k = 0; k < TILE_KEYS; k += LANES) {
        const vec score = load(scores + k, FLOAT32);
        vec weight = exponential(score - *largest);
        if (!is_whole)
            weight = choose(score == -INFINITY, all(0), weight);
        sum += weight;
        store(scores + k, weight, FLOAT32);
    }
    *total += sum_of(sum);
}

/* Rows in groups of three, and what is left, each size with code of its own. */
#define IN_THREES(num_rows, call)                      \
    for (int64_t row = 0; row < (num_rows); row += 3)  \
        switch ((num_rows) - row) {                    \
        case 1: { enum { ROWS = 1 }; call; } break;    \
        case 2: { enum { ROWS = 2 }; call; } break;    \
        default: { enum { ROWS = 3 }; call; }          \
        }

INLINE void attend_head(const attention *a, const tile *t, const key_rows *keys, int64_t head,
                        const workspace *w, int type)
{
    const int64_t first = head * t->num_padded_rows, dim = t->padded_dim;
    const int64_t byte_offset = (t->first_head + head) * a->head_dim * size_of(type);
    const int64_t group = a->num_heads / a->num_kv_heads;
    const float *q = w->q + first * dim;
    float *out = w->out + first * dim;
    if (t->is_direct) {
        IN_THREES(t->num_rows, score_directly(t, keys, byte_offset, q + row * dim,
                                              w->weights + row * TILE_KEYS, ROWS, a->head_dim, type))
    } else {
        pack(a, t, keys, byte_offset, w, type);
        for (int64_t k = 0; k < TILE_KEYS; k += 2 * LANES)
            for (int64_t row = 0; row < t->num_rows; row += MICRO_ROWS)
                multiply(w->weights + row * TILE_KEYS + k, TILE_KEYS, q + row * dim, dim,
                         w->packed_keys + k, TILE_KEYS, a->head_dim, 1);
    }
    for (int64_t row = 0; row < t->num_rows; row++) {
        const int64_t last = t->first_position + row / group - keys->first_position;
        const int64_t low = a->window > 0 ? larger_of(0, last - a->window + 1) : 0;
        const int64_t high = smaller_of(keys->count, last + 1);
        weigh_row(w->weights + row * TILE_KEYS, low, high, a->softcap, w->largest + first + row,
                  w->total + first + row, out + row * dim, dim);
    }
    if (t->is_direct) {
        IN_THREES(t->num_rows,
                  add_rows_directly(t, keys, byte_offset, w->weights + row * TILE_KEYS,
                                    out + row * dim, ROWS, a->head_dim, type))
    } else {
        for (int64_t i = 0; i < dim; i += 2 * LANES)
            for (int64_t row = 0; row < t->num_rows; row += MICRO_ROWS)
                multiply(out + row * dim + i, dim, w->weights + row * TILE_KEYS, TILE_KEYS,
                         w->packed_values + i, dim, keys->count, 0);
    }
}

INLINE void attend_item(const attention *a, int64_t item, int type)
{
    const tile t = tile_of(a, item);
    workspace w;
    if (open_workspace(&w, &t) != 0)
        abort(); /* a few hundred KiB: there is no machine left to serve on */
    read_queries(a, &t, &w, type);
    const int64_t end = t.first_position + t.num_queries;
    key_rows keys;
    keys.first_position = a->window > 0 ? larger_of(0, t.first_position - a->window + 1) : 0;
    for (; keys.first_position < end; keys.first_position += TILE_KEYS) {
        keys.count = smaller_of(TILE_KEYS, end - keys.first_position);
        find_rows(a, &t, &keys, type);
        for (int64_t head = 0; head < t.num_heads; head++)
            attend_head(a, &t, &keys, head, &w, type);
    }
    write_output(a, &t, &w, type);
}

static void attend_float32(void *context, int64_t item) { attend_item(context, item, FLOAT32); }
static void attend_bfloat16(void *context, int64_t item) { attend_item(context, item, BFLOAT16); }

/* attend(out, q, kv, sequences, block_tables, type, num_sequences, table_stride, q_stride, num_heads,
 *        num_kv_heads, head_dim, block_size, num_layers, layer, window, num_threads, scale, softcap)
 *
 * out is [num_tokens, num_heads, head_dim], q the same with tokens q_stride apart, kv the pool.
 * sequences and block_tables are int64: [num_sequences, 3] of first query's row, query_len and
 * seq_len, and [num_sequences, table_stride] of block ids. window or softcap 0: there is none. */
KERNEL(attend)
{
    attention a;
    int64_t type;
    (void)module;
    if (read_arguments(arguments, count, "pppppiiiiiiiiiiiiff", &a.out, &a.q, &a.kv, &a.sequences,
                       &a.block_tables, &type, &a.num_sequences, &a.table_stride, &a.q_stride,
                       &a.num_heads, &a.num_kv_heads, &a.head_dim, &a.block_size, &a.num_layers,
                       &a.layer, &a.window, &a.num_threads, &a.scale, &a.softcap))
        return NULL;
    /* all heads of a position lie together: read them together, unless threads would go without */
    const int is_shared = a.num_sequences < 2 * a.num_threads && a.num_threads > 1;
    a.heads_per_item = is_shared ? 1 : a.num_kv_heads;
    int64_t num_items = 0;
    for (int64_t s = 0; s < a.num_sequences; s++)
        num_items += items_of(&a, a.sequences[3 * s + 1]);
    Py_BEGIN_ALLOW_THREADS;
    parallel_for(a.num_threads, num_items, type == FLOAT32 ? attend_float32 : attend_bfloat16, &a);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
