/* The arithmetic of one tile of attention: scores, weights, weighted sums, and what they work on. */
#ifndef PENSTOCK_ATTENTION_TILE_H
#define PENSTOCK_ATTENTION_TILE_H

#include "simd.h"

enum {
    TILE_KEYS = 64,
    PART_KEYS = 512,                    /* whose sums are merged with those before them */
    FEW_QUERIES = 16,                   /* of a sequence, that no unit of tiles takes */
    SQUARE = 32,                        /* rows, keys and values at a time of a unit of tiles */
    MAX_SQUARE_ROWS = 256,              /* as TILE_ROWS, by a unit: keys are laid out once for them */
    TILE_ROWS = 128,                    /* queries times heads in a tile, about */
    MICRO_ROWS = LANES == 16 ? 12 : 6,  /* rows whose sums fit in registers, two vectors each */
    SCORE_ROWS = LANES == 16 ? 4 : 3,   /* the same of scores, several sums of which are open */
    DIRECT_ROWS = 12,                   /* up to so many, transposing keys does not pay */
};

typedef struct {
    const void *q, *kv;
    void *out;
    const int64_t *sequences; /* for each: first query's row, query_len, seq_len */
    const int64_t *block_tables;
    int64_t num_sequences, table_stride, num_threads, q_stride;
    int64_t num_heads, num_kv_heads, head_dim, block_size, num_layers, layer, window;
    int64_t plane_bytes; /* of a layer's keys in a block, and of its values */
    int64_t variant;         /* prompts in bfloat16 by WIDENED products or by TILES, as in kernels.h */
    float scale, softcap;
    const float *sinks; /* of each head, a score beside those of its keys; NULL: none has one */
    /* Of sequences with one query each part of the keys is an item, or for each share of the heads
     * one; the sums of parts lie in partial until they are joined. */
    int64_t num_shares;
    float *partial; /* [parts of all, num_heads, head_dim + largest, total] */
} attention;

/* One item: some queries of a sequence, some KV heads. */
typedef struct {
    const int64_t *table;
    int64_t first_row, first_position, num_queries;
    int64_t first_key, end_key; /* of the positions that are read */
    float *partial;             /* of its part; NULL: the output is complete, and written */
    int64_t first_head, num_heads;
    int64_t num_rows; /* of scores: queries times heads that share a KV head */
    int64_t num_padded_rows, padded_dim;
    int is_direct, is_tiled;
    int is_joined; /* of several parts, or with sinks, which are joined here */
} tile;

/* Rows of the pool under the current keys, at the first KV head. */
typedef struct {
    const char *keys[TILE_KEYS], *values[TILE_KEYS];
    int64_t first_position, count;
    /* Of codes: the current head's, each what its row is to be multiplied by. */
    float key_scales[TILE_KEYS], value_scales[TILE_KEYS];
} key_rows;

/* A tile's memory: heads times rows of q, out, largest, total; the rest serves one head at a time. */
typedef struct {
    float *q, *out, *largest, *total, *weights, *packed_keys, *packed_values;
    float *joined; /* [rows, padded_dim + largest, total] of the parts so far */
} workspace;

INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Rows of q and of the output, as one number. */
INLINE int64_t element_of(const attention *a, const tile *t, int64_t head, int64_t row, int64_t stride)
{
    const int64_t group = a->num_heads / a->num_kv_heads;
    return (t->first_row + row / group) * stride +
           ((t->first_head + head) * group + row % group) * a->head_dim;
}

/* The keys of a layer in a block; the values lie plane_bytes behind them. */
INLINE const char *plane_of(const attention *a, int64_t block)
{
    return (const char *)a->kv + (block * a->num_layers + a->layer) * 2 * a->plane_bytes;
}

/* Where the keys and values of positions [first, first + count) lie. */
INLINE void find_rows(const attention *a, const tile *t, key_rows *rows, int type)
{
    const int64_t row_bytes = a->num_kv_heads * a->head_dim * size_of(type);
    int64_t offset = rows->first_position % a->block_size;
    const int64_t *block = t->table + rows->first_position / a->block_size;
    for (int64_t k = 0; k < rows->count; block++, offset = 0) {
        const char *plane = plane_of(a, *block);
        for (; offset < a->block_size && k < rows->count; offset++, k++) {
            rows->keys[k] = plane + offset * row_bytes;
            rows->values[k] = rows->keys[k] + a->plane_bytes;
        }
    }
    for (int64_t k = rows->count; k < TILE_KEYS; k++) { /* may be computed with, is not used */
        rows->keys[k] = rows->keys[rows->count - 1];
        rows->values[k] = rows->values[rows->count - 1];
    }
}

/* The rows of a tile of keys from a position on; none beyond the end. */
INLINE void open_rows(const attention *a, const tile *t, key_rows *rows, int64_t first, int type)
{
    rows->first_position = first;
    rows->count = larger_of(0, smaller_of(TILE_KEYS, t->end_key - first));
    if (rows->count > 0)
        find_rows(a, t, rows, type);
}

/* The scales of one head's codes at those positions: behind the codes of a plane, float32
 * [num_kv_heads, block_size]. */
INLINE void find_scales(const attention *a, const tile *t, key_rows *rows, int64_t head)
{
    int64_t offset = rows->first_position % a->block_size;
    const int64_t *block = t->table + rows->first_position / a->block_size;
    for (int64_t k = 0; k < rows->count; block++, offset = 0) {
        const int64_t count = smaller_of(a->block_size - offset, rows->count - k);
        const int64_t first = a->block_size * a->num_kv_heads * a->head_dim +
                              (head * a->block_size + offset) * (int64_t)sizeof(float);
        const char *scales = plane_of(a, *block) + first;
        memcpy(rows->key_scales + k, scales, (size_t)count * sizeof(float));
        memcpy(rows->value_scales + k, scales + a->plane_bytes, (size_t)count * sizeof(float));
        k += count;
    }
    for (int64_t k = rows->count; k < TILE_KEYS; k++) /* may be computed with, is not used */
        rows->key_scales[k] = rows->value_scales[k] = 0;
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

/* Asks for memory that is soon read: a row of the next tile beside the arithmetic with one of this,
 * which otherwise would wait until all of its rows have come, and no reading would be under way then. */
INLINE void fetch(const char *from, int64_t num_bytes)
{
    for (int64_t byte = 0; byte < num_bytes; byte += 64)
        __builtin_prefetch(from + byte);
}

/* Scores of num_rows queries (a constant) with the keys as they lie. */
INLINE void score_directly(const tile *t, const key_rows *keys, int64_t byte_offset, const float *q,
                           float *scores, int num_rows, int64_t dim, int type, const key_rows *next)
{
    for (int64_t k = 0; k < keys->count; k += 4) {
        vec sums[3][4] = {0};
        if (next != NULL)
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                fetch(next->keys[k + n] + byte_offset, dim * size_of(type));
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
                                int64_t i, int type, const key_rows *next)
{
    vec sums[3][4];
#pragma GCC unroll 3
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int n = 0; n < num_vectors; n++)
            sums[row][n] = load(out + row * t->padded_dim + i + n * LANES, FLOAT32);
    for (int64_t k = 0; k < keys->count; k++) {
        vec weight[3];
        if (next != NULL)
            fetch(next->values[k] + byte_offset + i * size_of(type), num_vectors * LANES * size_of(type));
#pragma GCC unroll 3
        for (int row = 0; row < num_rows; row++)
            weight[row] = all(weights[row * TILE_KEYS + k]);
#pragma GCC unroll 4
        for (int n = 0; n < num_vectors; n++) {
            const vec value = load(at(keys->values[k] + byte_offset, i + n * LANES, type), type);
#pragma GCC unroll 3
            for (int row = 0; row < num_rows; row++)
                sums[row][n] = plus_product(sums[row][n], weight[row], value);
        }
    }
#pragma GCC unroll 3
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int n = 0; n < num_vectors; n++)
            store(out + row * t->padded_dim + i + n * LANES, sums[row][n], FLOAT32);
}

INLINE void add_rows_directly(const tile *t, const key_rows *keys, int64_t byte_offset,
                              const float *weights, float *out, int num_rows, int64_t dim, int type,
                              const key_rows *next)
{
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        add_values_directly(t, keys, byte_offset, weights, out, num_rows, 4, i, type, next);
    for (; i < dim; i += LANES)
        add_values_directly(t, keys, byte_offset, weights, out, num_rows, 1, i, type, next);
}

/* Keys as columns: packed[dim][TILE_KEYS]; values as rows of padded_dim floats. */
INLINE void pack(const attention *a, const tile *t, const key_rows *keys, int64_t byte_offset,
                 const workspace *w, int type)
{
    int64_t first = 0;
#if LANES >= 8
    for (; first + 8 <= a->head_dim; first += 8)
        for (int64_t k = 0; k < TILE_KEYS; k += 8)
            turn(w->packed_keys + first * TILE_KEYS + k, TILE_KEYS, keys->keys + k,
                 byte_offset + first * size_of(type), type);
#endif
    for (int64_t k = 0; k < TILE_KEYS && first < a->head_dim; k++) {
        const char *key = keys->keys[k] + byte_offset;
        float lanes[LANES];
        for (int64_t i = first; i < a->head_dim; i += LANES) {
            const int64_t count = smaller_of(LANES, a->head_dim - i);
            store(lanes, load_part(at(key, i, type), count, type), FLOAT32);
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

/* What score_directly() adds up in lane number `lane`, for SCORE_ROWS rows and two vectors of keys. */
INLINE void score_lane(vec (*sum)[2], const float *q, int64_t stride, const float *keys, int64_t dim,
                       int lane)
{
#pragma GCC unroll 4
    for (int row = 0; row < SCORE_ROWS; row++)
        sum[row][0] = sum[row][1] = all(0);
    for (int64_t i = lane; i < dim; i += LANES) {
        const vec low = load(keys + i * TILE_KEYS, FLOAT32);
        const vec high = load(keys + i * TILE_KEYS + LANES, FLOAT32);
#pragma GCC unroll 4
        for (int row = 0; row < SCORE_ROWS; row++) {
            sum[row][0] += q[row * stride + i] * low;
            sum[row][1] += q[row * stride + i] * high;
        }
    }
}

INLINE void add_scores(vec (*sum)[2], vec (*more)[2])
{
#pragma GCC unroll 4
    for (int row = 0; row < SCORE_ROWS; row++) {
        sum[row][0] += more[row][0];
        sum[row][1] += more[row][1];
    }
}

/* Two lanes whose sums store_sums() adds first: 8 apart where there are 16. */
INLINE void score_halves(vec (*sum)[2], const float *q, int64_t stride, const float *keys,
                         int64_t dim, int lane)
{
    score_lane(sum, q, stride, keys, dim, lane);
#if LANES == 16
    vec more[SCORE_ROWS][2];
    score_lane(more, q, stride, keys, dim, lane + 8);
    add_scores(sum, more);
#endif
}

/* Scores of SCORE_ROWS rows with two vectors of keys as columns, in the order of score_directly(). */
INLINE void score_packed(float *scores, const float *q, int64_t stride, const float *keys, int64_t dim)
{
    vec sum[SCORE_ROWS][2], four[SCORE_ROWS][2], pair[SCORE_ROWS][2], one[SCORE_ROWS][2];
#pragma GCC unroll 2
    for (int lane = 0; lane < (LANES < 8 ? LANES : 8); lane += 4) {
        score_halves(four, q, stride, keys, dim, lane);
        score_halves(one, q, stride, keys, dim, lane + 1);
        add_scores(four, one);
        score_halves(pair, q, stride, keys, dim, lane + 2);
        score_halves(one, q, stride, keys, dim, lane + 3);
        add_scores(pair, one);
        add_scores(four, pair);
        if (lane == 0)
            memcpy(sum, four, sizeof sum);
        else
            add_scores(sum, four);
    }
    for (int row = 0; row < SCORE_ROWS; row++)
        for (int n = 0; n < 2; n++)
            store(scores + row * TILE_KEYS + n * LANES, sum[row][n], FLOAT32);
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

/* Each of a tile's columns times the scale of its key or value. */
INLINE void scale_columns(float *row, const float *scales)
{
    for (int64_t k = 0; k < TILE_KEYS; k += LANES)
        store(row + k, load(row + k, FLOAT32) * load(scales + k, FLOAT32), FLOAT32);
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

/* One item of a prompt's queries of bfloat16, by a unit of tiles. */
void attend_by_squares(const attention *a, const tile *t, int kv_type);

#endif
