/* Inputs times weights as the checkpoint stores them: out = x W^T + bias, sums in float32.
 *
 * Weights stay bfloat16, float16 or float32 in memory, row by row, and are widened in registers: a
 * step with few tokens takes as long as reading them, so half the bytes is half the time, and a
 * widened value is exact. A tile is 4 weight rows by a few inputs, as many as the registers hold.
 * The same tile serves prompts: then a block of weights stays in the second cache while all inputs
 * pass by it, which comes within a few percent of multiplying packed panels and packs nothing.
 */
#include "simd.h"

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
    MAX_DEPTH = 2048,  /* values of a row that a tile takes: its inputs stay in the first cache */
    FEW_BYTES = 48 << 10,   /* of inputs, that may be read again for each tile */
    BLOCK_BYTES = 192 << 10,  /* of weights, that stay in the second cache */
    AHEAD_BYTES = 9216, /* how far ahead weights are fetched: the hardware stops at each page */
    ITEMS_PER_THREAD = 4,
    LONG_PRODUCTS = 1 << 22, /* from here on other Python threads may run meanwhile */
};

typedef float quad __attribute__((vector_size(16)));
typedef int32_t quad_index __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (quad_index){i, j, k, l})
#endif

/* sum + a * b. Written out where every register is taken: the compiler would move sums about. */
INLINE vec plus_product(vec sum, vec a, vec b)
{
#if LANES == 8
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

/* A matrix that shares the inputs with others: [num_rows, depth]. */
struct part {
    int64_t address;
    int64_t num_rows;
};

struct product {
    const struct part *parts;
    const float *x; /* [num_inputs, x_stride], arranged */
    float *out;     /* [num_inputs, out_stride] */
    const float *bias;
    int64_t num_parts, num_inputs, depth, x_stride, out_stride, num_items, num_tiles;
    int type; /* of the weights */
};

/* What a tile reads and writes. */
struct tile {
    const char *rows[ROWS];
    int64_t num_rows; /* to write; the others repeat the last */
    int is_first;     /* of the tiles that read these weights: it fetches the next ones */
    const float *x;
    int64_t x_stride, depth; /* depth in whole STEPs */
    float *out;
    int64_t out_stride;
    const float *bias; /* begin with it, or NULL: add to what is there */
};

/* float16 to float32. */
INLINE vec widened_half(const void *from)
{
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#elif LANES == 8
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(from));
#else
    vec_half halves;
    memcpy(&halves, from, sizeof halves);
    const vec_bits bits = __builtin_convertvector(halves, vec_bits);
    const vec scaled = (vec)((bits & 0x7fff) << 13) * 0x1p112f;
    const vec_bits infinite = (vec_bits)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vec)((vec_bits)scaled | infinite | (bits & 0x8000) << 16);
#endif
}

/* Read anew each time: every register is taken, and a sum must not leave its own for a constant. */
static const uint32_t odd_values[16] __attribute__((aligned(64))) = {[0 ... 15] = 0xffff0000u};

/* One half of STEP weights. A vector of bfloat16 pairs is widened in place: even values, then odd. */
INLINE vec widened(const char *from, int type, int half)
{
    if (type == FLOAT16)
        return widened_half(from + half * 2 * LANES);
    if (type == FLOAT32)
        return load(from + half * 4 * LANES, FLOAT32);
    vec_bits pairs;
    memcpy(&pairs, from, sizeof pairs);
    return (vec)(half ? pairs & *(const volatile vec_bits *)odd_values : pairs << 16);
}

/* The sums of the lanes of four vectors. */
INLINE quad lane_sums(const vec *four)
{
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

INLINE void multiply_tile(const struct tile *tile, int type, int num_inputs)
{
    const int64_t item_bytes = size_of(type);
    const int is_first = tile->is_first;
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
        if (is_first)
#pragma GCC unroll 4
            for (int j = 0; j < ROWS; j++)
                __builtin_prefetch(rows[j] + k * item_bytes + AHEAD_BYTES, 0, 3);
        multiply_step(sums, rows, k * item_bytes, x, k, type, num_inputs);
    }
    const size_t num_bytes = (size_t)tile->num_rows * sizeof(float);
#pragma GCC unroll 6
    for (int i = 0; i < num_inputs; i++) {
        float *out = tile->out + i * tile->out_stride;
        quad before = {0};
        memcpy(&before, tile->bias == NULL ? out : tile->bias, num_bytes);
        const quad after = before + lane_sums(sums[i]);
        memcpy(out, &after, num_bytes);
    }
}

#define FOR_EACH_TYPE(num_inputs)                                                                  \
    case num_inputs:                                                                               \
        if (type == BFLOAT16)                                                                      \
            multiply_tile(tile, BFLOAT16, num_inputs);                                             \
        else if (type == FLOAT16)                                                                  \
            multiply_tile(tile, FLOAT16, num_inputs);                                              \
        else                                                                                       \
            multiply_tile(tile, FLOAT32, num_inputs);                                              \
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
    tile.bias = NULL;
    tile.is_first = 0;
    multiply(&tile, type, num_inputs);
}

/* All inputs by rows [first, end) of one part, whose first row is column 0 of out. */
static void multiply_rows(const struct product *p, const struct part *part, int64_t column,
                          int64_t first, int64_t end)
{
    static const float no_bias[ROWS];
    const char *weights = (const char *)(uintptr_t)part->address;
    const int64_t row_bytes = p->depth * size_of(p->type);
    /* equal shares: 3 + 3 + 2 inputs, not 3 + 3 + 1 + 1 */
    const int64_t num_shares = (p->num_inputs + MAX_INPUTS - 1) / MAX_INPUTS;
    for (int64_t k = 0; k < p->depth; k += MAX_DEPTH) {
        const int64_t depth = p->depth - k < MAX_DEPTH ? p->depth - k : MAX_DEPTH;
        for (int64_t share = 0; share < num_shares; share++) {
            const int64_t input = p->num_inputs * share / num_shares;
            const int64_t next_input = p->num_inputs * (share + 1) / num_shares;
            for (int64_t row = first; row < end; row += ROWS) {
                struct tile tile = {
                    .num_rows = end - row < ROWS ? end - row : ROWS,
                    .is_first = share == 0,
                    .x = p->x + input * p->x_stride + k,
                    .x_stride = p->x_stride,
                    .depth = depth / STEP * STEP,
                    .out = p->out + input * p->out_stride + column + row,
                    .out_stride = p->out_stride,
                };
                if (k == 0)
                    tile.bias = p->bias == NULL ? no_bias : p->bias + column + row;
                for (int j = 0; j < ROWS; j++) {
                    const int64_t row_read = row + (j < tile.num_rows ? j : tile.num_rows - 1);
                    tile.rows[j] = weights + row_read * row_bytes + k * size_of(p->type);
                }
                multiply(&tile, p->type, next_input - input);
                if (tile.depth < depth)
                    multiply_rest(tile, depth, p->type, next_input - input);
            }
        }
    }
}

/* One of num_items equal shares of all parts' rows, in blocks that the caches hold. */
static void multiply_item(void *context, int64_t item)
{
    const struct product *p = context;
    const int64_t first_tile = p->num_tiles * item / p->num_items;
    const int64_t end_tile = p->num_tiles * (item + 1) / p->num_items;
    const int64_t depth = p->depth < MAX_DEPTH ? p->depth : MAX_DEPTH;
    int64_t block = ROWS;
    if (p->num_inputs * depth * (int64_t)sizeof(float) > FEW_BYTES)
        block = ROWS * (BLOCK_BYTES / (ROWS * depth * size_of(p->type)) + 1);
    int64_t column = 0, tile = 0;
    for (int64_t i = 0; i < p->num_parts; i++) {
        const struct part *part = &p->parts[i];
        const int64_t next_tile = tile + (part->num_rows + ROWS - 1) / ROWS;
        const int64_t from = first_tile > tile ? first_tile : tile;
        const int64_t to = end_tile < next_tile ? end_tile : next_tile;
        const int64_t past = (to - tile) * ROWS;
        const int64_t last = past < part->num_rows ? past : part->num_rows;
        for (int64_t row = (from - tile) * ROWS; row < last; row += block)
            multiply_rows(p, part, column, row, row + block < last ? row + block : last);
        column += part->num_rows;
        tile = next_tile;
    }
}

/* Inputs as float32 in the order in which weights of a type are widened, padded with zeros. */
static void arrange(float *to, const char *x, int64_t depth, int type, int weight_type)
{
    for (int64_t k = 0; k < depth; k += STEP) {
        const int64_t count = depth - k < STEP ? depth - k : STEP;
        const int64_t first = count < LANES ? count : LANES;
        const char *from = x + k * size_of(type);
        float values[STEP];
        const vec low = count < LANES ? load_part(from, first, type) : load(from, type);
        store(values, low, FLOAT32);
        from += first * size_of(type);
        const vec high = count < STEP ? load_part(from, count - first, type) : load(from, type);
        store(values + LANES, high, FLOAT32);
        for (int i = 0; i < STEP; i++)
            to[k + i] = values[weight_type == BFLOAT16 ? i % LANES * 2 + i / LANES : i];
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

/* linear(out, x, type, num_inputs, depth, parts, num_parts, weight_type, bias, num_threads)
 *
 * out is [num_inputs, rows of all parts], x is [num_inputs, depth], both contiguous and of type
 * FLOAT32 or BFLOAT16; parts are pairs of int64: address and rows of a contiguous matrix; bias is
 * float32 for all rows, or address 0. */
KERNEL(linear)
{
    void *out, *x, *parts, *bias;
    int64_t type, num_inputs, depth, num_parts, weight_type, num_threads;
    (void)module;
    if (read_arguments(arguments, count, "ppiiipiipi", &out, &x, &type, &num_inputs, &depth, &parts,
                       &num_parts, &weight_type, &bias, &num_threads) < 0)
        return NULL;
    struct product p = {
        .parts = parts,
        .bias = bias,
        .num_parts = num_parts,
        .num_inputs = num_inputs,
        .depth = depth,
        .x_stride = (depth + STEP - 1) / STEP * STEP,
        .num_items = num_threads > 1 ? num_threads * ITEMS_PER_THREAD : 1,
        .type = (int)weight_type,
    };
    for (int64_t i = 0; i < num_parts; i++) {
        p.num_tiles += (p.parts[i].num_rows + ROWS - 1) / ROWS;
        p.out_stride += p.parts[i].num_rows;
    }
    const int64_t num_x = num_inputs * p.x_stride, num_out = num_inputs * p.out_stride;
    const int64_t num_floats = num_x + (type == FLOAT32 ? 0 : num_out);
    float *memory = scratch((size_t)num_floats * sizeof(float));
    if (memory == NULL)
        return PyErr_NoMemory();
    p.x = memory;
    p.out = type == FLOAT32 ? out : memory + num_x;
    const int is_long = num_out * depth >= LONG_PRODUCTS;
    PyThreadState *state = is_long ? PyEval_SaveThread() : NULL;
    for (int64_t i = 0; i < num_inputs; i++)
        arrange(memory + i * p.x_stride, at(x, i * depth, (int)type), depth, (int)type, p.type);
    parallel_for(num_threads, p.num_items, multiply_item, &p);
    if (type != FLOAT32)
        round_rows(out, p.out, num_out, (int)type);
    if (is_long)
        PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}
