/* Inputs times weights as the checkpoint stores them: out = x W^T + bias, sums in float32.
 *
 * Weights stay bfloat16, float16 or float32 in memory, row by row, and are widened in registers: a
 * step with few tokens takes as long as reading them, so half the bytes is half the time, and a
 * widened value is exact. A tile is 4 weight rows by a few inputs, as many as the registers hold.
 * Its rows are a quarter of the weights apart: one tile after the other, that makes four long streams,
 * which the hardware fetches ahead twice as fast as four rows that lie side by side. Many inputs are
 * bound by arithmetic instead: a block of rows is widened once, and stays in the second cache while all
 * inputs pass by. Either way a sum is made in one order, whatever the number of inputs.
 */
#include "forms.h"
#include "quantised.h"

#if LANES == 16
enum { MAX_INPUTS = 6 };
#elif LANES == 8
enum { MAX_INPUTS = 3 };
#else
enum { MAX_INPUTS = 2 };
#endif

enum {
    ROWS = 4,          /* weight rows of a tile */
    STEP = 2 * LANES,  /* values of a row that one turn of the loop takes */
    MAX_DEPTH = 1024,  /* values of a row that a tile takes: its inputs stay in the first cache */
    AHEAD_BYTES = 1536, /* fetched while others are multiplied; rows of a stream follow each other */
    FEW_BYTES = 96 << 10,    /* of inputs, that may be read again for each tile */
    BLOCK_BYTES = 256 << 10, /* of packed weights, that stay in the second cache */
    PACKED = -1, /* weights that pack_tile() has widened, in place of their type */
    MANY_INPUTS = 30, /* from here on widening rows once costs less than it gains */
    MANY_UNPACKED = 16, /* the same of quantised weights, which are unpacked either way */
};

typedef float quad __attribute__((vector_size(16)));
typedef int32_t quad_index __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (quad_index){i, j, k, l})
#endif

/* What a tile reads and writes. */
struct tile {
    const char *rows[ROWS];
    int64_t num_rows; /* to write; the others repeat the first */
    const float *x;
    int64_t x_stride, depth; /* depth in whole STEPs */
    float *out;
    int64_t out_stride, row_stride; /* between inputs, and between the rows of the tile */
    const float *bias; /* begin with it, or NULL: with 0 */
    int is_added;      /* to what is there, instead */
    int is_alone;      /* no other tile reads these rows */
    const char *ahead[2]; /* if one does: rows to fetch meanwhile, which are the next tile's */
};

/* Weights of one part that follow each other. */
struct rows {
    const char *weights; /* the first row */
    int64_t num_rows;
    int64_t quarter; /* rows that the rows of a tile lie apart */
    int64_t column;  /* of the first row in out */
};

/* A share of the inputs, and of the values of a row. */
struct share {
    int64_t input, num_inputs;
    int64_t first, depth;
    int64_t number; /* of the share of the inputs: the first two fetch the next tile's rows */
    int is_alone;   /* there is no other */
};

/* Read anew each time: every register is taken, and a sum must not leave its own for a constant. */
static const uint32_t odd_values[16] __attribute__((aligned(64))) = {[0 ... 15] = 0xffff0000u};

/* One half of STEP weights. A vector of bfloat16 pairs is widened in place: even values, then odd. */
INLINE vec widened(const char *from, int type, int half)
{
    if (type == PACKED)
        return load(from + half * 4 * LANES, FLOAT32);
    if (type == FLOAT16)
        return widened_half(from + half * 2 * LANES);
    if (type == FLOAT32)
        return load(from + half * 4 * LANES, FLOAT32);
    vec_bits pairs;
    memcpy(&pairs, from, sizeof pairs);
    return (vec)(half ? pairs & *(const volatile vec_bits *)odd_values : pairs << 16);
}

/* Fetch as much as a turn of the loop takes. */
INLINE void fetch(const char *from, int type)
{
#pragma GCC unroll 2
    for (int64_t line = 0; line < STEP * size_of(type); line += 64)
        __builtin_prefetch(from + line);
}

/* The sums of the lanes of four vectors. */
INLINE quad lane_sums(const vec *four)
{
#if LANES == 16
    const __m512 a = (__m512)four[0], b = (__m512)four[1], c = (__m512)four[2], d = (__m512)four[3];
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return (quad)_mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums));
#else
    quad folded[4];
    for (int i = 0; i < 4; i++) {
        quad parts[LANES / 4];
        memcpy(parts, &four[i], sizeof parts);
        folded[i] = parts[0];
        for (int j = 1; j < LANES / 4; j++)
            folded[i] += parts[j];
    }
    const quad *f = folded;
    const quad ab = SHUFFLE(f[0], f[1], 0, 4, 1, 5) + SHUFFLE(f[0], f[1], 2, 6, 3, 7);
    const quad cd = SHUFFLE(f[2], f[3], 0, 4, 1, 5) + SHUFFLE(f[2], f[3], 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
#endif
}

/* sums[input][row] += STEP values of each input times those of each row. */
INLINE void multiply_step(vec (*sums)[ROWS], const char *const *rows, int64_t offset_bytes,
                          const float *const *x, int64_t k, int type, int num_inputs)
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        vec inputs[MAX_INPUTS];
#pragma GCC unroll 6
        for (int i = 0; i < num_inputs; i++)
            inputs[i] = load(x[i] + k + half * LANES, FLOAT32);
#pragma GCC unroll 4
        for (int j = 0; j < ROWS; j++) {
            const vec weights = widened(rows[j] + offset_bytes, type, half);
#pragma GCC unroll 6
            for (int i = 0; i < num_inputs; i++)
                sums[i][j] = plus_product(sums[i][j], weights, inputs[i]);
        }
    }
}

INLINE void multiply_tile(const struct tile *tile, int type, int num_inputs, int is_alone)
{
    const int64_t item_bytes = type == PACKED ? ROWS * (int64_t)sizeof(float) : size_of(type);
    const char *rows[ROWS] = {tile->rows[0], tile->rows[1], tile->rows[2], tile->rows[3]};
    const float *x[MAX_INPUTS];
    vec sums[MAX_INPUTS][ROWS];
#pragma GCC unroll 6
    for (int i = 0; i < num_inputs; i++)
        x[i] = tile->x + i * tile->x_stride;
#pragma GCC unroll 6
    for (int i = 0; i < num_inputs; i++)
#pragma GCC unroll 4
        for (int j = 0; j < ROWS; j++)
            sums[i][j] = all(0);
    for (int64_t k = 0; k < tile->depth; k += STEP) {
        if (type == PACKED)
            ;
        else if (is_alone)
#pragma GCC unroll 4
            for (int j = 0; j < ROWS; j++)
                fetch(rows[j] + AHEAD_BYTES + k * item_bytes, type);
        else
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++)
                fetch(tile->ahead[j] + k * item_bytes, type);
        multiply_step(sums, rows, k * item_bytes, x, k, type, num_inputs);
    }
#pragma GCC unroll 6
    for (int i = 0; i < num_inputs; i++) {
        float *out = tile->out + i * tile->out_stride;
        const float *before = tile->is_added ? out : tile->bias;
        const quad row_sums = lane_sums(sums[i]);
        if (type == PACKED && tile->num_rows == ROWS) {
            quad whole = {0};
            if (before != NULL)
                memcpy(&whole, before, sizeof whole);
            whole += row_sums;
            memcpy(out, &whole, sizeof whole);
            continue;
        }
        for (int64_t j = 0, at = 0; j < tile->num_rows; j++, at += tile->row_stride)
            out[at] = row_sums[j] + (before == NULL ? 0 : before[at]);
    }
}

#define MULTIPLY(type, num_inputs)                                                                 \
    (tile->is_alone ? multiply_tile(tile, type, num_inputs, 1)                                     \
                    : multiply_tile(tile, type, num_inputs, 0))
#define FOR_EACH_TYPE(num_inputs)                                                                  \
    case num_inputs:                                                                               \
        if (type == PACKED)                                                                        \
            multiply_tile(tile, PACKED, num_inputs, 0);                                            \
        else if (type == BFLOAT16)                                                                 \
            MULTIPLY(BFLOAT16, num_inputs);                                                        \
        else if (type == FLOAT16)                                                                  \
            MULTIPLY(FLOAT16, num_inputs);                                                         \
        else                                                                                       \
            MULTIPLY(FLOAT32, num_inputs);                                                         \
        return;

static void multiply(const struct tile *tile, int type, int64_t num_inputs)
{
    switch (num_inputs) {
        FOR_EACH_TYPE(1)
        FOR_EACH_TYPE(2)
#if LANES >= 8
        FOR_EACH_TYPE(3)
#endif
#if LANES >= 16
        FOR_EACH_TYPE(4)
        FOR_EACH_TYPE(5)
        FOR_EACH_TYPE(6)
#endif
    }
}

/* What the rows have beyond their whole STEPs; the inputs are padded with zeros, the rows are not. */
static void multiply_rest(struct tile tile, int64_t depth, int type, int64_t num_inputs)
{
    char rest[ROWS][STEP * sizeof(float)] = {{0}};
    const size_t num_bytes = (size_t)((depth - tile.depth) * size_of(type));
    for (int j = 0; j < ROWS; j++)
        tile.rows[j] = memcpy(rest[j], tile.rows[j] + tile.depth * size_of(type), num_bytes);
    tile.x += tile.depth;
    tile.depth = STEP;
    tile.is_added = 1;
    multiply(&tile, type, num_inputs);
}

/* A share by row number `row` of each quarter. */
static void multiply_quarters(const struct product *p, const struct rows *rows, int64_t row,
                              const struct share *share)
{
    const int64_t column = rows->column + row, row_bytes = p->depth * size_of(p->type);
    struct tile tile = {
        .x = p->x + share->input * p->x_stride + share->first,
        .x_stride = p->x_stride,
        .depth = share->depth / STEP * STEP,
        .out = p->out + share->input * p->out_stride + column,
        .out_stride = p->out_stride,
        .row_stride = rows->quarter,
        .bias = p->bias == NULL ? NULL : p->bias + column,
        .is_added = share->first > 0,
        .is_alone = share->is_alone,
    };
    const char *weights = rows->weights + share->first * size_of(p->type);
    for (int j = 0; j < ROWS; j++) {
        const int64_t row_read = row + j * rows->quarter, is_there = row_read < rows->num_rows;
        tile.num_rows += is_there;
        tile.rows[j] = weights + (is_there ? row_read : row) * row_bytes;
    }
    for (int j = 0; j < 2; j++) {
        const int64_t quarter = share->number < 2 ? share->number * 2 + j : 0;
        tile.ahead[j] = weights + (row + 1 + quarter * rows->quarter) * row_bytes;
    }
    multiply(&tile, p->type, share->num_inputs);
    if (tile.depth < share->depth)
        multiply_rest(tile, share->depth, p->type, share->num_inputs);
}

/* Widens rows of a tile that begin at `rows` to [depth / STEP][ROWS][STEP], zeros behind the last. */
INLINE void pack_rows(float *to, const char *const *rows, int64_t depth, int type)
{
    for (int64_t k = 0; k < depth; k += STEP)
        for (int j = 0; j < ROWS; j++)
            for (int half = 0; half < 2; half++, to += LANES) {
                const char *from = rows[j] + k * size_of(type);
                char rest[STEP * sizeof(float)] = {0};
                if (depth - k < STEP)
                    from = memcpy(rest, from, (size_t)((depth - k) * size_of(type)));
                store(to, widened(from, type, half), FLOAT32);
            }
}

static void pack_tile(float *to, const struct product *p, const struct rows *rows, int64_t first,
                      int64_t k, int64_t depth)
{
    const char *from[ROWS];
    for (int64_t j = 0; j < ROWS; j++) {
        const int64_t row = first + j < rows->num_rows ? first + j : rows->num_rows - 1;
        from[j] = rows->weights + (row * p->depth + k) * size_of(p->type);
    }
    if (p->type == BFLOAT16)
        pack_rows(to, from, depth, BFLOAT16);
    else if (p->type == FLOAT16)
        pack_rows(to, from, depth, FLOAT16);
    else
        pack_rows(to, from, depth, FLOAT32);
}

static void multiply_packed(const struct product *p, const struct rows *rows, int64_t first,
                            const float *packed, const struct share *share)
{
    struct tile tile = {
        .x = p->x + share->input * p->x_stride + share->first,
        .x_stride = p->x_stride,
        .depth = share->depth / STEP * STEP,
        .num_rows = rows->num_rows - first < ROWS ? rows->num_rows - first : ROWS,
        .out = p->out + share->input * p->out_stride + rows->column + first,
        .out_stride = p->out_stride,
        .row_stride = 1,
        .bias = p->bias == NULL ? NULL : p->bias + rows->column + first,
        .is_added = share->first > 0,
    };
    for (int j = 0; j < ROWS; j++)
        tile.rows[j] = (const char *)(packed + j * STEP);
    multiply(&tile, PACKED, share->num_inputs);
    if (tile.depth == share->depth)
        return;
    for (int j = 0; j < ROWS; j++)
        tile.rows[j] += tile.depth * ROWS * (int64_t)sizeof(float);
    tile.x += tile.depth;
    tile.depth = STEP;
    tile.is_added = 1;
    multiply(&tile, PACKED, share->num_inputs);
}

/* Many inputs by some rows: these are widened once, and stay in the second cache. Each sum is made
 * in the order in which it is for few inputs, so that it has the same bits. */
static void multiply_many(const struct product *p, const struct rows *rows)
{
    static _Thread_local float packed[BLOCK_BYTES / sizeof(float) + ROWS * (MAX_DEPTH + STEP)]
        __attribute__((aligned(64)));
    const int64_t num_shares = (p->num_inputs + MAX_INPUTS - 1) / MAX_INPUTS;
    for (int64_t k = 0; k < p->depth; k += MAX_DEPTH) {
        struct share share = {.first = k};
        share.depth = p->depth - k < MAX_DEPTH ? p->depth - k : MAX_DEPTH;
        const int64_t tile_floats = (share.depth + STEP - 1) / STEP * STEP * ROWS;
        for (int64_t row = 0; row < rows->num_rows; row += ROWS)
            pack_tile(packed + row / ROWS * tile_floats, p, rows, row, k, share.depth);
        for (int64_t i = 0; i < num_shares; i++) {
            share.input = p->num_inputs * i / num_shares;
            share.num_inputs = p->num_inputs * (i + 1) / num_shares - share.input;
            for (int64_t row = 0; row < rows->num_rows; row += ROWS)
                multiply_packed(p, rows, row, packed + row / ROWS * tile_floats, &share);
        }
    }
}

static int has_few_inputs(const struct product *p)
{
    return p->num_inputs * p->depth * (int64_t)sizeof(float) <= FEW_BYTES;
}

/* All inputs by some rows: a tile of them after the other, if the inputs stay in the caches
 * meanwhile; else, of the rows, which do, all that a share of the inputs needs. */
static void multiply_rows(const struct product *p, const struct rows *rows)
{
    const int is_few = has_few_inputs(p);
    /* equal shares: 3 + 3 + 2 inputs, not 3 + 3 + 1 + 1 */
    const int64_t num_shares = (p->num_inputs + MAX_INPUTS - 1) / MAX_INPUTS;
    const int64_t num_passes = is_few ? rows->quarter : 1, num_tiles = is_few ? 1 : rows->quarter;
    for (int64_t pass = 0; pass < num_passes; pass++)
        for (int64_t k = 0; k < p->depth; k += MAX_DEPTH)
            for (int64_t i = 0; i < num_shares; i++) {
                struct share share = {.first = k, .number = i, .is_alone = num_shares == 1};
                share.input = p->num_inputs * i / num_shares;
                share.num_inputs = p->num_inputs * (i + 1) / num_shares - share.input;
                share.depth = p->depth - k < MAX_DEPTH ? p->depth - k : MAX_DEPTH;
                for (int64_t tile = 0; tile < num_tiles; tile++)
                    multiply_quarters(p, rows, pass + tile, &share);
            }
}

/* One of num_items equal shares of all parts' rows, in blocks that the caches hold. */
static void multiply_item(void *context, int64_t item)
{
    const struct product *p = context;
    int64_t num_rows = 0, column = 0;
    for (int64_t i = 0; i < p->num_parts; i++)
        num_rows += p->parts[i].num_rows;
    const int64_t first = num_rows * item / p->num_items;
    const int64_t end = num_rows * (item + 1) / p->num_items;
    const int64_t row_bytes = p->depth * size_of(p->type);
    const int64_t depth = p->depth < MAX_DEPTH ? (p->depth + STEP - 1) / STEP * STEP : MAX_DEPTH;
    const int64_t in_cache = BLOCK_BYTES / (depth * (int64_t)sizeof(float)) / ROWS * ROWS;
    const int has_many = p->num_inputs >= MANY_INPUTS;
    const int64_t block = !has_many && has_few_inputs(p) ? num_rows : in_cache;
    for (int64_t i = 0; i < p->num_parts; i++) {
        const struct part *part = &p->parts[i];
        const int64_t next = column + part->num_rows, last = end < next ? end : next;
        for (int64_t row = first > column ? first : column; row < last; row += block) {
            const int64_t num_left = last - row;
            struct rows rows = {.num_rows = num_left < block ? num_left : block, .column = row};
            rows.weights = (const char *)(uintptr_t)part->address + (row - column) * row_bytes;
            rows.quarter = (rows.num_rows + ROWS - 1) / ROWS;
            (has_many ? multiply_many : multiply_rows)(p, &rows);
        }
        column = next;
    }
}

/* One input as float32, padded with zeros: as it is, or in the order in which bfloat16 weights are
 * widened in place, even values before odd ones in each STEP. */
static void arrange(float *to, const char *x, int64_t depth, int type, int is_split)
{
    for (int64_t k = 0; k < depth; k += STEP) {
        const int64_t count = depth - k < STEP ? depth - k : STEP;
        const int64_t first = count < LANES ? count : LANES;
        const char *from = x + k * size_of(type);
        const vec low = count < LANES ? load_part(from, first, type) : load(from, type);
        from += first * size_of(type);
        const vec high = count < STEP ? load_part(from, count - first, type) : load(from, type);
        if (!is_split) {
            store(to + k, low, FLOAT32);
            store(to + k + LANES, high, FLOAT32);
            continue;
        }
        float values[STEP];
        store(values, low, FLOAT32);
        store(values + LANES, high, FLOAT32);
        for (int i = 0; i < STEP; i++)
            to[k + i] = values[i % LANES * 2 + i / LANES];
    }
}

static void round_rows(char *to, const float *from, int64_t count, int type)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(to + i * size_of(type), load(from + i, FLOAT32), type);
    if (i < count)
        store_part(to + i * size_of(type), load_part(from + i, count - i, FLOAT32), count - i, type);
}

/* A product with parts of one scheme, which fill num_columns of the output from `column` on. */
static struct product of_one_scheme(const struct product *whole, int64_t *next_part, int64_t column,
                                    int64_t *num_columns)
{
    struct product p = *whole;
    p.parts += *next_part;
    p.out += column;
    p.bias = p.bias == NULL ? NULL : p.bias + column;
    p.type = (int)p.parts[0].scheme;
    p.num_parts = *num_columns = 0;
    while (*next_part < whole->num_parts && whole->parts[*next_part].scheme == p.type) {
        *num_columns += whole->parts[(*next_part)++].num_rows;
        p.num_parts++;
    }
    return p;
}

/* What the inputs and outputs are for the caller; rows of them are items for the threads. */
struct conversion {
    char *out;
    const char *x;
    float *arranged, *sums;
    struct unit *units; /* or this */
    const struct product *product;
    int64_t type, num_columns;
    int is_split;
};

enum { ROWS_PER_ITEM = 16, FEW_ROWS = 8 };

#define FOR_ROWS(item, num_rows)                                                                \
    for (int64_t row = (item) * ROWS_PER_ITEM,                                                  \
                 end = row + ROWS_PER_ITEM < (num_rows) ? row + ROWS_PER_ITEM : (num_rows);     \
         row < end; row++)

static void arrange_item(void *context, int64_t item)
{
    const struct conversion *c = context;
    const struct product *p = c->product;
    FOR_ROWS(item, p->num_inputs)
    {
        float *to = c->arranged + row * p->x_stride;
        arrange(to, at(c->x, row * p->depth, (int)c->type), p->depth, (int)c->type, c->is_split);
        if (rounds_inputs(p->type))
            round_input(to, p->depth);
    }
}

static void sum_item(void *context, int64_t item)
{
    const struct conversion *c = context;
    FOR_ROWS(item, c->product->num_inputs)
        sum_input(c->sums, c->product, row);
}

static void fill_item(void *context, int64_t item)
{
    const struct conversion *c = context;
    const struct product *p = c->product;
    FOR_ROWS(item, p->num_inputs)
        fill_units(c->units, p, at(c->x, row * p->depth, (int)c->type), (int)c->type, row);
}

static void round_item(void *context, int64_t item)
{
    const struct conversion *c = context;
    const struct product *p = c->product;
    FOR_ROWS(item, p->num_inputs)
        round_rows(at(c->out, row * c->num_columns, (int)c->type), p->out + row * c->num_columns,
                   c->num_columns, (int)c->type);
}

static void convert(const struct conversion *c, int64_t num_threads, parallel_body body)
{
    const int64_t num_rows = c->product->num_inputs;
    parallel_for(num_rows < FEW_ROWS ? 1 : num_threads, /* less than waking a thread takes */
                 (num_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, body, (void *)(uintptr_t)c);
}

/* Room for an input as float32, or as units. */
static int64_t floats_of_input(const struct product *p, int64_t type, int is_rounded)
{
    const int64_t unit_floats = (int64_t)(sizeof(struct unit) / sizeof(float));
    const int has_units = type == BFLOAT16 || is_rounded;
    const int64_t in_units = has_units ? (p->depth / MIN_GROUP + 1) * unit_floats : 0;
    return in_units > p->x_stride ? in_units : p->x_stride;
}

static int has_many_inputs(const struct part *parts, int64_t num_inputs)
{
    return num_inputs >= (is_quantised((int)parts->scheme) ? MANY_UNPACKED : MANY_INPUTS);
}

/* linear(out, x, type, num_inputs, depth, parts, num_parts, bias, num_threads)
 *
 * out is [num_inputs, rows of all parts], x is [num_inputs, depth], both contiguous and of type
 * FLOAT32 or BFLOAT16; parts are int64 [num_parts, 3]: address and rows of a contiguous matrix, and
 * the scheme of its values; bias is float32 for all rows, or address 0. */
KERNEL(linear, "ppiiipipi")
{
    void *out, *x, *parts, *bias;
    int64_t type, num_inputs, depth, num_parts, num_threads;
    read_words(words, linear_format, &out, &x, &type, &num_inputs, &depth, &parts,
                       &num_parts, &bias, &num_threads);
    const struct part *first_part = parts;
    const int has_many = has_many_inputs(first_part, num_inputs);
    int is_rounded = 0, is_in_order = depth % STEP == 0, has_sums = 0;
    for (int64_t i = 0; i < num_parts; i++) {
        is_rounded |= rounds_inputs((int)first_part[i].scheme);
        is_in_order &= first_part[i].scheme != BFLOAT16;
        has_sums |= is_quantised(first_part[i].scheme) && wants_sums((int)first_part[i].scheme);
    }
    const int is_read_in_place = has_many && type == FLOAT32 && !is_rounded && is_in_order;
    struct product whole = {
        .parts = parts,
        .bias = bias,
        .num_parts = num_parts,
        .num_inputs = num_inputs,
        .depth = depth,
        .x = x,
        .x_stride = is_read_in_place ? depth : (depth + STEP - 1) / STEP * STEP,
        .num_items = num_items_for(num_threads, has_many),
    };
    for (int64_t i = 0; i < num_parts; i++)
        whole.out_stride += whole.parts[i].num_rows;
    const int64_t num_x = is_read_in_place ? 0 : num_inputs * floats_of_input(&whole, type, is_rounded);
    const int64_t num_out = num_inputs * whole.out_stride;
    const int64_t num_sums = has_sums ? num_inputs * (depth / MIN_GROUP + 1) : 0;
    const int64_t num_floats = num_x + (type == FLOAT32 ? 0 : num_out) + num_sums;
    float *memory = scratch((size_t)num_floats * sizeof(float));
    if (memory == NULL && num_floats > 0)
        return -1;
    if (!is_read_in_place)
        whole.x = memory;
    whole.out = type == FLOAT32 ? out : memory + num_x;
    struct conversion c = {
        .out = out,
        .x = x,
        .arranged = memory,
        .product = &whole,
        .type = type,
        .num_columns = whole.out_stride,
    };
    for (int64_t part = 0, column = 0, num_columns; part < num_parts; column += num_columns) {
        struct product p = of_one_scheme(&whole, &part, column, &num_columns);
        c.product = &p;
        if (has_dots(p.type, type)) {
            p.units = c.units = (struct unit *)memory;
            convert(&c, num_threads, fill_item);
            for_items(num_threads, p.num_items, has_many, multiply_dots, &p);
            continue;
        }
        c.is_split = p.type == BFLOAT16;
        if (!is_read_in_place)
            convert(&c, num_threads, arrange_item);
        if (is_quantised(p.type) && wants_sums(p.type)) {
            p.x_sums = c.sums = memory + num_floats - num_sums;
            convert(&c, num_threads, sum_item);
        }
        const parallel_body body = !is_quantised(p.type) ? multiply_item
                                   : has_many            ? multiply_panels
                                                         : multiply_quantised;
        for_items(num_threads, p.num_items, has_many, body, &p);
    }
    c.product = &whole;
    if (type != FLOAT32)
        convert(&c, num_threads, round_item);
    return 0;
}

void announce_linear(const word *words)
{
    void *out, *x, *bias;
    const struct part *parts;
    int64_t type, num_inputs, depth, num_parts, num_threads, count = 1;
    read_words(words, linear_format, &out, &x, &type, &num_inputs, &depth, &parts, &num_parts, &bias,
               &num_threads);
    const int scheme = (int)parts->scheme, is_packed = is_quantised(scheme);
    if (has_many_inputs(parts, num_inputs)) {
        announce_nothing();
        return;
    }
    while (count < num_parts && parts[count].scheme == scheme)
        count++;
    announce_shares(parts, count, is_packed ? CODE_ROWS : 1,
                    is_packed ? panel_bytes(scheme, depth) : depth * size_of(scheme), num_threads);
}
