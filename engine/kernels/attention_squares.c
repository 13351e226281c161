/* A prompt's attention by a unit of matrix tiles: 32 rows of queries by 32 keys at a time.
 *
 * An item's rows meet KEYS keys at a time, which are laid out in pairs once for all of them. 32 rows
 * are scored, weighed and multiplied with values before the next 32 are, so that scores and weights stay
 * in the first cache. Scores are powers of 2, and a total is kept lane by lane: there are more weights
 * than a unit needs time for their products, so little may be done with each. A row's sums depend on
 * its keys alone, and those begin at multiples of KEYS: not on other rows, threads or sequences.
 */
#include "attention_tile.h"
#include "tile_unit.h"

enum { KEYS = 2 * TILE_KEYS };

static const float NONE = -3e38f; /* the score of a key that a row does not see */
static const float LOG2_E = 1.44269504f;

/* An item's memory. */
typedef struct {
    uint16_t *q;                         /* [rows, padded_dim], as they are */
    float *out, *largest, *totals;       /* [rows, padded_dim]; [rows]; [rows, LANES] */
    uint32_t *key_pairs, *value_pairs;   /* [padded_dim / 2, KEYS]; [KEYS / 2, padded_dim] */
    uint16_t *narrow;                    /* [TILE_KEYS, padded_dim] of keys or values */
    float *scores;                       /* [SQUARE, KEYS] */
    uint16_t *weights;                   /* the same */
    float *key_scales, *value_scales;    /* [KEYS], of codes */
    int64_t first;                       /* the position of the current keys */
    float unit;                          /* a score times this is an exponent of 2 */
} squares;

static void open_squares(squares *s, const attention *a, const tile *t)
{
    const int64_t rows = t->num_padded_rows, dim = t->padded_dim;
    const int64_t sizes[] = {rows * dim / 2, rows * dim, rows, rows * LANES, dim / 2 * KEYS,
                             KEYS / 2 * dim, TILE_KEYS * dim / 2, SQUARE * KEYS, SQUARE * KEYS / 2,
                             KEYS, KEYS};
    float **const parts[] = {(float **)&s->q, &s->out, &s->largest, &s->totals,
                             (float **)&s->key_pairs, (float **)&s->value_pairs,
                             (float **)&s->narrow, &s->scores, (float **)&s->weights,
                             &s->key_scales, &s->value_scales};
    enum { NUM_PARTS = sizeof sizes / sizeof sizes[0] };
    int64_t size = 0;
    for (int i = 0; i < NUM_PARTS; i++)
        size += ceil_div(sizes[i], 16) * 16;
    float *next = scratch((size_t)size * sizeof(float));
    if (next == NULL)
        abort(); /* a few hundred KiB: there is no machine left to serve on */
    for (int i = 0; i < NUM_PARTS; i++) {
        *parts[i] = next;
        next += ceil_div(sizes[i], 16) * 16;
    }
    memset(s->q, 0, (size_t)(s->largest - (float *)s->q) * sizeof(float));
    memset(s->totals, 0, (size_t)(rows * LANES) * sizeof(float));
    for (int64_t row = 0; row < rows; row++)
        s->largest[row] = NONE;
    for (int64_t row = 0; row < t->num_rows; row++)
        memcpy(s->q + row * dim, at(a->q, element_of(a, t, 0, row, a->q_stride), BFLOAT16),
               (size_t)a->head_dim * 2);
    s->unit = a->scale * LOG2_E;
}

/* 2 to the power of each lane, to 3e-6: weights are rounded to eight bits; a NaN stays one. */
INLINE vec two_to(vec x)
{
    x = larger(all(-126.0f), x);
    const vec shifted = x + 12582912.0f; /* the nearest integer is in the low bits */
    const vec n = shifted - 12582912.0f;
    const vec r = x - n;
    vec sum = all(0.0096003955f);
    sum = sum * r + 0.0559168938f;
    sum = sum * r + 0.2402371846f;
    sum = sum * r + 0.6931219948f;
    sum = sum * r + 1.0f;
#if LANES == 16
    return (vec)_mm512_scalef_ps((__m512)sum, (__m512)n);
#else
    return sum * (vec)(((vec_int)shifted << 23) + (127 << 23));
#endif
}

/* Rows of the pool as bfloat16 [TILE_KEYS, padded_dim], zeros behind their values and behind them all. */
INLINE void narrow_rows(const attention *a, const tile *t, const char *const *from, int64_t count,
                        int64_t byte_offset, uint16_t *to, int type)
{
    for (int64_t k = 0; k < count; k++, to += t->padded_dim) {
        const char *row = from[k] + byte_offset;
        int64_t i = 0;
        for (; i + LANES <= a->head_dim; i += LANES)
            if (type == BFLOAT16)
                memcpy(to + i, at(row, i, type), sizeof(vec_half));
            else
                store(to + i, load(at(row, i, type), type), BFLOAT16);
        if (i < a->head_dim)
            store_part(to + i, load_part(at(row, i, type), a->head_dim - i, type), a->head_dim - i,
                       BFLOAT16);
        if (a->head_dim < t->padded_dim)
            memset(to + a->head_dim, 0, (size_t)(t->padded_dim - a->head_dim) * sizeof *to);
    }
    if (count < TILE_KEYS)
        memset(to, 0, (size_t)((TILE_KEYS - count) * t->padded_dim) * sizeof *to);
}

/* TILE_KEYS keys to columns of pairs of what is next to each other in a key. */
INLINE void pack_key_pairs(const tile *t, const uint16_t *rows, uint32_t *to)
{
    const int64_t dim = t->padded_dim;
#if LANES >= 8
    for (int64_t k = 0; k < TILE_KEYS; k += 8) {
        const char *eight_rows[8];
        for (int i = 0; i < 8; i++)
            eight_rows[i] = (const char *)(rows + (k + i) * dim);
        for (int64_t pair = 0; pair < dim / 2; pair += 8)
            turn((float *)to + pair * KEYS + k, KEYS, eight_rows, pair * 4, FLOAT32);
    }
#else
    for (int64_t k = 0; k < TILE_KEYS; k++)
        for (int64_t pair = 0; pair < dim / 2; pair++)
            memcpy(to + pair * KEYS + k, rows + k * dim + 2 * pair, sizeof *to);
#endif
}

/* TILE_KEYS values to pairs of what is at one place in a key's and the next's. */
INLINE void pack_value_pairs(const tile *t, const uint16_t *rows, uint32_t *to)
{
    const int64_t dim = t->padded_dim;
    for (int64_t k = 0; k < TILE_KEYS; k += 2, rows += 2 * dim, to += dim)
        for (int64_t i = 0; i < dim; i += LANES) {
            const vec_bits first = (vec_bits)load(rows + i, BFLOAT16);
            const vec_bits second = (vec_bits)load(rows + dim + i, BFLOAT16);
            store(to + i, (vec)(first >> 16 | second), FLOAT32);
        }
}

/* Lays out the keys and values of positions [first, first + KEYS), zeros for those that are not read. */
INLINE void lay_out(const attention *a, const tile *t, squares *s, int type)
{
    const int64_t byte_offset = t->first_head * a->head_dim * size_of(type);
    for (int64_t k = 0; k < KEYS && s->first + k < t->end_key; k += TILE_KEYS) {
        key_rows rows;
        open_rows(a, t, &rows, s->first + k, type);
        if (s->first + k < t->first_key) /* behind the window: its block may be another's */
            rows.count = 0;
        if (type == INT8) {
            find_scales(a, t, &rows, t->first_head);
            memcpy(s->key_scales + k, rows.key_scales, sizeof rows.key_scales);
            memcpy(s->value_scales + k, rows.value_scales, sizeof rows.value_scales);
        }
        narrow_rows(a, t, rows.keys, rows.count, byte_offset, s->narrow, type);
        pack_key_pairs(t, s->narrow, s->key_pairs + k);
        narrow_rows(a, t, rows.values, rows.count, byte_offset, s->narrow, type);
        pack_value_pairs(t, s->narrow, s->value_pairs + k / 2 * t->padded_dim);
    }
}

/* sums [32, 32 columns] (+)= left [32, depth] by right [depth / 2, 32] pairs; strides in bytes. */
INLINE void multiply_square(float *sums, int64_t sums_bytes, const uint16_t *left, int64_t left_bytes,
                            const uint32_t *right, int64_t right_bytes, int64_t depth, int is_fresh)
{
    char *low = (char *)sums, *high = low + UNIT_ROWS * sums_bytes;
    if (is_fresh) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    } else {
        tile_load(0, low, sums_bytes);
        tile_load(1, low + UNIT_BYTES, sums_bytes);
        tile_load(2, high, sums_bytes);
        tile_load(3, high + UNIT_BYTES, sums_bytes);
    }
    for (int64_t k = 0; k < depth; k += 2 * UNIT_ROWS) {
        const char *x = (const char *)(left + k), *w = (const char *)right + k / 2 * right_bytes;
        tile_load(4, x, left_bytes);
        tile_load(6, w, right_bytes);
        tile_load(7, w + UNIT_BYTES, right_bytes);
        tile_load(5, x + UNIT_ROWS * left_bytes, left_bytes);
        tile_multiply(0, 4, 6);
        tile_multiply(1, 4, 7);
        tile_multiply(2, 5, 6);
        tile_multiply(3, 5, 7);
    }
    tile_store(low, sums_bytes, 0);
    tile_store(low + UNIT_BYTES, sums_bytes, 1);
    tile_store(high, sums_bytes, 2);
    tile_store(high + UNIT_BYTES, sums_bytes, 3);
}

/* A row's scores as exponents of 2, NONE outside [low, high). */
INLINE void finish_scores(const attention *a, const squares *s, float *scores, int64_t num_columns,
                          int64_t low, int64_t high, int type)
{
    vec lane_numbers;
    for (int lane = 0; lane < LANES; lane++)
        lane_numbers[lane] = (float)lane;
    for (int64_t k = 0; k < num_columns; k += LANES) {
        vec score = load(scores + k, FLOAT32);
        if (type == INT8)
            score *= load(s->key_scales + k, FLOAT32);
        score = a->softcap > 0 ? LOG2_E * bent(score * a->scale, a->softcap) : score * s->unit;
        const vec number = lane_numbers + (float)k;
        score = choose((number >= (float)low) & (number < (float)high), score, all(NONE));
        store(scores + k, score, FLOAT32);
    }
}

INLINE float largest_in(const float *scores, int64_t num_columns)
{
    vec top = all(NONE);
    for (int64_t k = 0; k < num_columns; k += LANES)
        top = larger(load(scores + k, FLOAT32), top);
    return largest_of(top);
}

/* Turns a row's scores, which times `unit` are exponents of 2, into weights. */
INLINE void weigh_tiled_row(const squares *s, const tile *t, int64_t row, int64_t num_columns, float unit,
                      int is_whole, float shrink, int type)
{
    const float *scores = s->scores + row % SQUARE * KEYS, most = s->largest[row];
    uint16_t *weights = s->weights + row % SQUARE * KEYS;
    float *out = s->out + row * t->padded_dim;
    if (shrink != 1)
        for (int64_t i = 0; i < t->padded_dim; i += LANES)
            store(out + i, load(out + i, FLOAT32) * shrink, FLOAT32);
    vec total = load(s->totals + row * LANES, FLOAT32) * shrink;
    for (int64_t k = 0; k < num_columns; k += LANES) {
        const vec score = load(scores + k, FLOAT32);
        vec weight = two_to(score * unit - most);
        if (!is_whole)
            weight = choose(score == NONE, all(0), weight);
        total += weight;
        if (type == INT8)
            weight *= load(s->value_scales + k, FLOAT32);
        store(weights + k, weight, BFLOAT16);
    }
    store(s->totals + row * LANES, total, FLOAT32);
}

/* Weights of SQUARE rows from `first` on; a column is seen by one of them at least. */
INLINE void weigh_rows(const attention *a, const tile *t, squares *s, int64_t first,
                       int64_t num_columns, int type)
{
    const int64_t group = a->num_heads / a->num_kv_heads;
    const int64_t num_rows = smaller_of(SQUARE, t->num_rows - first);
    float tops[SQUARE], shrinks[SQUARE];
    int is_whole[SQUARE];
    for (int64_t i = 0; i < SQUARE; i++) {
        tops[i] = NONE;
        if (i >= num_rows)
            continue;
        float *scores = s->scores + i * KEYS;
        const int64_t last = t->first_position + (first + i) / group - s->first;
        const int64_t low = a->window > 0 ? last - a->window + 1 : 0;
        is_whole[i] = low <= 0 && last + 1 >= num_columns && a->softcap <= 0 && type != INT8;
        if (!is_whole[i])
            finish_scores(a, s, scores, num_columns, low, last + 1, type);
        tops[i] = largest_in(scores, num_columns) * (is_whole[i] ? s->unit : 1);
    }
    for (int64_t i = 0; i < SQUARE; i += LANES) {
        const vec before = load(s->largest + first + i, FLOAT32);
        const vec most = larger(load(tops + i, FLOAT32), before);
        store(s->largest + first + i, most, FLOAT32);
        store(shrinks + i, two_to(before - most), FLOAT32);
    }
    for (int64_t i = 0; i < num_rows; i++)
        if (is_whole[i])
            weigh_tiled_row(s, t, first + i, num_columns, s->unit, 1, shrinks[i], BFLOAT16);
        else
            weigh_tiled_row(s, t, first + i, num_columns, 1, 0, shrinks[i], type);
    if (num_rows < SQUARE)
        memset(s->weights + num_rows * KEYS, 0,
               (size_t)((SQUARE - num_rows) * KEYS) * sizeof *s->weights);
}

/* All rows that see some of the current keys. */
INLINE void attend_keys(const attention *a, const tile *t, squares *s, int type)
{
    const int64_t dim = t->padded_dim, group = a->num_heads / a->num_kv_heads;
    enum { SCORE_BYTES = KEYS * sizeof(float), WEIGHT_BYTES = KEYS * sizeof(uint16_t) };
    for (int64_t first = 0; first < t->num_rows; first += SQUARE) {
        const int64_t last_row = smaller_of(first + SQUARE, t->num_rows) - 1;
        const int64_t end = t->first_position + last_row / group + 1 - s->first;
        const int64_t num_columns = smaller_of(KEYS, ceil_div(end, SQUARE) * SQUARE);
        const int64_t low = t->first_position + first / group - a->window + 1 - s->first;
        if (end <= 0 || (a->window > 0 && low >= num_columns))
            continue;
        for (int64_t k = 0; k < num_columns; k += SQUARE)
            multiply_square(s->scores + k, SCORE_BYTES, s->q + first * dim, dim * 2,
                            s->key_pairs + k, SCORE_BYTES, dim, 1);
        weigh_rows(a, t, s, first, num_columns, type);
        for (int64_t i = 0; i < dim; i += SQUARE)
            multiply_square(s->out + first * dim + i, dim * 4, s->weights, WEIGHT_BYTES,
                            s->value_pairs + i, dim * 4, num_columns, 0);
    }
}

/* Rows over their totals; a sink is one more score, of a key without a value. */
static void write_rows(const attention *a, const tile *t, const squares *s)
{
    const int64_t group = a->num_heads / a->num_kv_heads;
    for (int64_t row = 0; row < t->num_rows; row++) {
        float total = sum_of(load(s->totals + row * LANES, FLOAT32)), kept = 1;
        if (a->sinks != NULL) {
            const float sink = a->sinks[t->first_head * group + row % group] * LOG2_E;
            const float most = sink > s->largest[row] ? sink : s->largest[row];
            kept = exp2f(s->largest[row] - most);
            total = total * kept + exp2f(sink - most);
        }
        const float *from = s->out + row * t->padded_dim, share = kept / total;
        void *to = at(a->out, element_of(a, t, 0, row, a->num_heads * a->head_dim), BFLOAT16);
        for (int64_t i = 0; i < a->head_dim; i += LANES)
            store_upto(at(to, i, BFLOAT16), load(from + i, FLOAT32) * share, a->head_dim - i,
                       BFLOAT16);
    }
}

INLINE void attend_rows(const attention *a, const tile *t, int type)
{
    squares s;
    open_squares(&s, a, t);
    begin_tiles();
    for (s.first = t->first_key / KEYS * KEYS; s.first < t->end_key; s.first += KEYS) {
        lay_out(a, t, &s, type);
        attend_keys(a, t, &s, type);
    }
    end_tiles();
    write_rows(a, t, &s);
}

void attend_by_squares(const attention *a, const tile *t, int kv_type)
{
    if (kv_type == INT8)
        attend_rows(a, t, INT8);
    else
        attend_rows(a, t, BFLOAT16);
}
