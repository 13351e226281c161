/* Inputs in bfloat16 times weights packed in pairs, by dots of pairs, by widening both, or by tiles.
 *
 * Few inputs are bound by reading: four panels are read side by side, a quarter of the share apart, for
 * the hardware fetches four long streams ahead twice as fast as one. Many inputs are bound by
 * arithmetic: sums of two panels fill the registers, and a group of panels stays in the second cache
 * while all inputs pass by. Nothing is packed on the way, and sums, which are float32, go to the
 * output from where they are. Which of dots and widening is faster is the processor's: product_choice.py.
 * A call may have both kinds of inputs, some few and those of tiles: weights are read once for both.
 */
#include "pairs.h"

#if LANES == 16
enum { FEW_INPUTS = 6, MANY_INPUTS = 13 };
#else
enum { FEW_INPUTS = 1, MANY_INPUTS = 3 };
#endif

enum {
    STREAMS = 4,
    STREAMED_INPUTS = 4 * FEW_INPUTS, /* up to so many, panels are read side by side */
    AHEAD_BYTES = 1536, /* of panels side by side, fetched while others are multiplied */
    GROUP_BYTES = 512 << 10,          /* of panels, that stay in the second cache */
    ROWS_PER_ITEM = 16, /* of inputs, that are widened */
};

/* Some panels by some inputs. */
struct block {
    const char *panels[STREAMS];
    const char *x;
    const float *wide;
    int64_t x_stride, num_pairs; /* between inputs; of a row */
    int is_first;                /* of the blocks that read these panels */
};

/* Read anew each time: every register is taken, and a sum must not leave its own for a constant. */
static const uint32_t odd_values[16] __attribute__((aligned(64))) = {[0 ... 15] = 0xffff0000u};

INLINE vec_bits pairs_at(const char *from)
{
    vec_bits pairs;
    memcpy(&pairs, from, sizeof pairs);
    return pairs;
}

/* The first or the second values of pairs of weights. */
INLINE vec widened_pairs(const char *from, int is_second)
{
    const vec_bits pairs = pairs_at(from);
    return (vec)(is_second ? pairs & *(const volatile vec_bits *)odd_values : pairs << 16);
}

/* sums + a pair of weights times a pair of an input, lane by lane. */
INLINE vec plus_pairs(vec sum, vec_bits w, uint32_t pair)
{
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    const uint32_t bits[2] = {pair << 16, pair & 0xffff0000u};
    float x[2];
    memcpy(x, bits, sizeof x);
    return sum + (vec)(w & 0xffff0000u) * x[1] + (vec)(w << 16) * x[0];
#endif
}

typedef vec panel_sums[STREAMS][PANEL_VECS];

/* What streams have a little further on; panels of a stream follow each other. */
INLINE void fetch(const struct block *b, int64_t k, int num_panels)
{
    if (num_panels == STREAMS && b->is_first)
#pragma GCC unroll 4
        for (int n = 0; n < STREAMS; n++)
            __builtin_prefetch(b->panels[n] + k * PANEL_ROWS * PAIR_BYTES + AHEAD_BYTES);
}

INLINE void add_dots(const struct block *b, panel_sums *sum, int num_panels, int num_inputs)
{
    for (int64_t k = 0; k < b->num_pairs; k++) {
        panel_sums w;
        fetch(b, k, num_panels);
#pragma GCC unroll 4
        for (int n = 0; n < num_panels; n++)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECS; v++)
                w[n][v] = (vec)pairs_at(b->panels[n] + (k * PANEL_ROWS + v * LANES) * PAIR_BYTES);
#pragma GCC unroll 14
        for (int i = 0; i < num_inputs; i++) {
            uint32_t pair;
            memcpy(&pair, b->x + (i * b->x_stride + 2 * k) * 2, sizeof pair);
#pragma GCC unroll 4
            for (int n = 0; n < num_panels; n++)
#pragma GCC unroll 4
                for (int v = 0; v < PANEL_VECS; v++)
                    sum[i][n][v] = plus_pairs(sum[i][n][v], (vec_bits)w[n][v], pair);
        }
    }
}

INLINE void add_widened(const struct block *b, panel_sums *sum, int num_panels, int num_inputs)
{
    for (int64_t k = 0; k < b->num_pairs; k++) {
        fetch(b, k, num_panels);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            panel_sums w;
#pragma GCC unroll 4
            for (int n = 0; n < num_panels; n++)
#pragma GCC unroll 4
                for (int v = 0; v < PANEL_VECS; v++)
                    w[n][v] = widened_pairs(
                        b->panels[n] + (k * PANEL_ROWS + v * LANES) * PAIR_BYTES, half);
#pragma GCC unroll 14
            for (int i = 0; i < num_inputs; i++) {
                const vec value = all(b->wide[i * b->x_stride + 2 * k + half]);
#pragma GCC unroll 4
                for (int n = 0; n < num_panels; n++)
#pragma GCC unroll 4
                    for (int v = 0; v < PANEL_VECS; v++)
                        sum[i][n][v] = plus_product(sum[i][n][v], value, w[n][v]);
            }
        }
    }
}

INLINE void multiply_block(const struct block *b, panel_sums *sums, int num_panels, int num_inputs)
{
    panel_sums sum[MANY_INPUTS];
#pragma GCC unroll 14
    for (int i = 0; i < num_inputs; i++)
#pragma GCC unroll 4
        for (int n = 0; n < num_panels; n++)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECS; v++)
                sum[i][n][v] = all(0);
    if (b->wide == NULL)
        add_dots(b, sum, num_panels, num_inputs);
    else
        add_widened(b, sum, num_panels, num_inputs);
#pragma GCC unroll 14
    for (int i = 0; i < num_inputs; i++)
#pragma GCC unroll 4
        for (int n = 0; n < num_panels; n++)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECS; v++)
                sums[i][n][v] = sum[i][n][v];
}

#define CASE(num_panels, count)                                                                    \
    case count:                                                                                    \
        multiply_block(b, sums, num_panels, count);                                                \
        return;

static void multiply_four(const struct block *b, panel_sums *sums, int64_t inputs)
{
    switch (inputs) {
        CASE(STREAMS, 1)
#if LANES == 16
        CASE(STREAMS, 2) CASE(STREAMS, 3) CASE(STREAMS, 4) CASE(STREAMS, 5) CASE(STREAMS, 6)
#endif
    }
}

static void multiply_two(const struct block *b, panel_sums *sums, int64_t inputs)
{
    switch (inputs) {
        CASE(2, 1) CASE(2, 2) CASE(2, 3)
#if LANES == 16
        CASE(2, 4) CASE(2, 5) CASE(2, 6) CASE(2, 7) CASE(2, 8) CASE(2, 9) CASE(2, 10) CASE(2, 11)
        CASE(2, 12) CASE(2, 13)
#endif
    }
}

/* Inputs [first, end) by panels numbers[0..num_panels); two or STREAMS, of which a number may be
 * repeated, for it is written twice then. */
static void multiply_some(const struct pairs_product *p, const struct panels *panels,
                          const int64_t *numbers, int num_panels, int64_t first, int64_t end)
{
    panel_sums sums[MANY_INPUTS];
    struct block b = {.x = p->x + first * p->x_stride * 2,
                      .wide = p->wide == NULL ? NULL : p->wide + first * p->x_stride,
                      .x_stride = p->x_stride,
                      .num_pairs = p->depth / 2,
                      .is_first = first == 0};
    for (int n = 0; n < num_panels; n++)
        b.panels[n] = panels->base + numbers[n] * panels->bytes;
    (num_panels == STREAMS ? multiply_four : multiply_two)(&b, sums, end - first);
    for (int64_t i = 0; i < end - first; i++)
        for (int n = 0; n < num_panels; n++)
            for (int v = 0; v < PANEL_VECS; v++) {
                const int64_t row = numbers[n] * PANEL_ROWS + v * LANES;
                write_panel_sums(p, first + i, panels->column + row, sums[i][n][v],
                                 panels->num_rows - row);
            }
}

static void multiply_streams(const void *product, const struct panels *panels)
{
    const struct pairs_product *p = product;
    const int64_t count = panels->end - panels->first;
    const int64_t quarter = (count + STREAMS - 1) / STREAMS;
    /* equal shares: 3 + 3 + 2 inputs, not 3 + 3 + 1 + 1 */
    const int64_t num_shares = (p->num_inputs + FEW_INPUTS - 1) / FEW_INPUTS;
    for (int64_t i = 0; i < quarter; i++) {
        int64_t numbers[STREAMS];
        for (int n = 0; n < STREAMS; n++) {
            const int64_t number = i + n * quarter;
            numbers[n] = panels->first + (number < count ? number : i);
        }
        for (int64_t share = 0; share < num_shares; share++)
            multiply_some(p, panels, numbers, STREAMS, p->num_inputs * share / num_shares,
                          p->num_inputs * (share + 1) / num_shares);
    }
}

static void multiply_groups(const void *product, const struct panels *panels)
{
    const struct pairs_product *p = product;
    int64_t group = GROUP_BYTES / panels->bytes / 2 * 2;
    group = group < 2 ? 2 : group;
    const int64_t num_shares = (p->num_inputs + MANY_INPUTS - 1) / MANY_INPUTS;
    for (int64_t from = panels->first; from < panels->end; from += group) {
        const int64_t to = from + group < panels->end ? from + group : panels->end;
        for (int64_t share = 0; share < num_shares; share++)
            for (int64_t i = from; i < to; i += 2) {
                const int64_t numbers[2] = {i, i + 1 < to ? i + 1 : i};
                multiply_some(p, panels, numbers, 2, p->num_inputs * share / num_shares,
                              p->num_inputs * (share + 1) / num_shares);
            }
    }
}

static int has_many(int64_t num_inputs, int64_t num_few)
{
    return num_inputs > STREAMED_INPUTS || num_few < num_inputs;
}

static void multiply_pairs(void *context, int64_t item)
{
    const struct pairs_product *p = context;
    for_pairs(p, item, p->num_inputs <= STREAMED_INPUTS ? multiply_streams : multiply_groups);
}

/* Inputs for tiles, then the few: an item's weights are in a cache by then. */
static void multiply_both(void *context, int64_t item)
{
    struct pairs_product *both = context;
    multiply_tiles(&both[1], item);
    if (both[0].num_inputs > 0)
        multiply_pairs(&both[0], item);
}

/* ROWS_PER_ITEM inputs as float32. */
static void widen_inputs(void *context, int64_t item)
{
    const struct pairs_product *p = context;
    const int64_t end = (item + 1) * ROWS_PER_ITEM;
    for (int64_t i = item * ROWS_PER_ITEM; i < end && i < p->num_inputs; i++)
        for (int64_t k = 0; k < p->depth; k += LANES)
            store((float *)p->wide + i * p->depth + k,
                  load(p->x + (i * p->x_stride + k) * 2, BFLOAT16), FLOAT32);
}

/* Copies inputs as the kernels read them, the first num_wide as float32, too; -1: out of memory. */
static int prepare_inputs(struct pairs_product *p, int64_t num_inputs, int64_t depth, int64_t num_wide,
                          int64_t num_threads)
{
    const int64_t num_copied = p->depth == depth ? 0 : num_inputs * p->depth;
    const int64_t wide_bytes = num_wide * p->depth * 4;
    char *memory = scratch((size_t)(num_copied * 2 + wide_bytes));
    if (memory == NULL)
        return num_copied + wide_bytes == 0 ? 0 : -1;
    if (num_copied) { /* rows of whole tiles, with zeros behind their values */
        char *rows = memory + wide_bytes;
        memset(rows, 0, (size_t)num_copied * 2);
        for (int64_t i = 0; i < num_inputs; i++)
            memcpy(rows + i * p->depth * 2, p->x + i * depth * 2, (size_t)depth * 2);
        p->x = rows;
        p->x_stride = p->depth;
    }
    if (num_wide) {
        p->wide = (float *)memory;
        parallel_for(num_threads, (num_wide + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, widen_inputs, p);
    }
    return 0;
}

/* What takes tiles of a product whose first half of rows are gates, as a product of these. */
static void make_gated(struct pairs_product *p, struct part *gates, int64_t activation)
{
    *gates = p->parts[0];
    gates->num_rows = p->out_stride / 2;
    p->gated_bytes = p->num_parts == 2 ? p->parts[1].address - gates->address
                                       : gates->num_rows / PANEL_ROWS * bytes_of_panel(p->depth);
    p->parts = gates;
    p->num_parts = 1;
    p->out_stride = gates->num_rows;
    p->activation = activation;
}

/* Gates among what the few inputs have made, times what they gate. */
static void apply_gates(void *out, const struct pairs_product *few, int64_t activation,
                        int64_t num_threads)
{
    const int64_t width = few->out_stride / 2;
    const word words[] = {{.address = out},
                          {.address = few->out},
                          {.address = few->out + width * 2},
                          {.integer = BFLOAT16},
                          {.integer = few->num_inputs},
                          {.integer = width},
                          {.integer = few->out_stride},
                          {.integer = few->out_stride},
                          {.integer = activation},
                          {.integer = num_threads}};
    gated(words);
}

/* linear_pairs(out, x, num_inputs, num_few, depth, parts, num_parts, bias, variant, activation,
 *              num_threads)
 *
 * out [num_inputs, rows of all parts] and x [num_inputs, depth] are bfloat16 and contiguous; parts are
 * int64 [num_parts, 3]: address of a packed matrix, its rows, and its scheme; bias is float32 for
 * all rows, or address 0. The first num_few inputs are multiplied in the variant, WIDENED, whose
 * products are exact, or DOTS; all others by TILES. Dots and tiles add products two by two and may take
 * denormals for 0. An input's results have the same bits whatever is beside it.
 *
 * With an activation out is half as wide, and what gated() would make of it, bit for bit: the first half
 * of the rows are gates. They are a part of their own, or whole panels. */
KERNEL(linear_pairs, "ppiiipipiii")
{
    static _Thread_local struct memory memory;
    void *out, *x, *parts, *bias;
    int64_t num_inputs, num_few, depth, num_parts, variant, activation, num_threads;
    read_words(words, linear_pairs_format, &out, &x, &num_inputs, &num_few, &depth, &parts, &num_parts,
               &bias, &variant, &activation, &num_threads);
    const int is_many = has_many(num_inputs, num_few), is_gated = activation != NOT_GATED;
    struct pairs_product p = {
        .parts = parts,
        .x = x,
        .out = out,
        .bias = bias,
        .num_parts = num_parts,
        .num_inputs = num_few,
        .depth = padded(depth, TILE_DEPTH),
        .x_stride = depth,
        .num_items = num_items_for(num_threads, is_many),
        .activation = NOT_GATED,
    };
    for (int64_t i = 0; i < num_parts; i++)
        p.out_stride += p.parts[i].num_rows;
    if (prepare_inputs(&p, num_inputs, depth, variant == WIDENED ? num_few : 0, num_threads) < 0)
        return -1;
    struct pairs_product both[2] = {p, p};
    struct part gates;
    if (is_gated) {
        make_gated(&both[1], &gates, activation);
        both[0].out = grown(&memory, (size_t)(num_few * p.out_stride * 2));
        if (both[0].out == NULL && num_few > 0)
            return -1;
    }
    both[1].num_inputs = num_inputs - num_few;
    both[1].x += num_few * p.x_stride * 2;
    both[1].out += num_few * both[1].out_stride * 2;
    const int has_tiles = num_few < num_inputs;
    for_items(num_threads, p.num_items, is_many, has_tiles ? multiply_both : multiply_pairs, both);
    if (is_gated && num_few > 0)
        apply_gates(out, &both[0], activation, num_threads);
    return 0;
}

void announce_linear_pairs(const word *words)
{
    void *out, *x, *parts, *bias;
    int64_t num_inputs, num_few, depth, num_parts, variant, activation, num_threads;
    read_words(words, linear_pairs_format, &out, &x, &num_inputs, &num_few, &depth, &parts, &num_parts,
               &bias, &variant, &activation, &num_threads);
    if (has_many(num_inputs, num_few))
        announce_nothing();
    else
        announce_shares(parts, num_parts, PANEL_ROWS, bytes_of_panel(padded(depth, TILE_DEPTH)),
                        num_threads);
}

/* pack_pairs(packed, matrix, num_rows, depth, first, end)
 *
 * Panels [first, end) of the bfloat16 matrix [num_rows, depth] to where they belong in packed, which
 * is [panels, padded depth / 2, PANEL_ROWS, 2]. */
KERNEL(pack_pairs, "ppiiii")
{
    char *packed, *matrix;
    int64_t num_rows, depth, first, end;
    read_words(words, pack_pairs_format, &packed, &matrix, &num_rows, &depth, &first, &end);
    const int64_t num_pairs = padded(depth, TILE_DEPTH) / 2;
    for (int64_t panel = first; panel < end; panel++)
        for (int64_t row = 0; row < PANEL_ROWS; row++) {
            char *to = packed + (panel * num_pairs * PANEL_ROWS + row) * PAIR_BYTES;
            const int64_t number = panel * PANEL_ROWS + row;
            const int64_t there = number < num_rows ? depth : 0;
            const char *from = matrix + number * depth * 2;
            for (int64_t k = 0; k < num_pairs; k++, to += PANEL_ROWS * PAIR_BYTES) {
                const int64_t left = there - 2 * k;
                uint16_t pair[2] = {0, 0};
                memcpy(pair, left > 0 ? from + k * PAIR_BYTES : (const char *)pair,
                       left >= 2 ? 4 : left == 1 ? 2 : 0);
                memcpy(to, pair, sizeof pair);
            }
        }
    return 0;
}
