/* Many inputs times weights: the part of a prompt that is bound by arithmetic.
 *
 * As many weight rows as two vectors have lanes are widened and turned into a panel. A group of
 * panels stays in the second cache while all inputs pass by it, a few at a time: their sums, two
 * vectors of a panel and one value of an input fill the registers. Inputs are read where they are;
 * only weights are packed, a few hundredths of the work at a few hundred inputs.
 */
#include "quantised.h"

#if LANES == 16
enum { MAX_INPUTS = 14 };
#else
enum { MAX_INPUTS = 6 };
#endif

enum {
    PANEL_ROWS = 2 * LANES,
    MAX_DEPTH = 768, /* values of a row in a panel: a few inputs as long stay in the first cache */
    PANEL_VALUES = MAX_DEPTH * PANEL_ROWS,
    GROUP = (192 << 10) / (PANEL_VALUES * (int)sizeof(float)), /* panels in the second cache */
};

struct panel {
    const float *values; /* [depth, PANEL_ROWS] */
    int64_t depth;
    int64_t num_rows;   /* to write; the others repeat the last */
    const float *bias;  /* begin with it, or NULL: add to what is there */
    int64_t column;     /* of the first row in out */
};

/* Values [first, depth) of one row into its column of the panel. */
static void fill_column(float *column, const char *row, int64_t first, int64_t depth, int type)
{
    for (int64_t k = first; k < depth; k += LANES) {
        const int64_t count = depth - k < LANES ? depth - k : LANES;
        char padded[LANES * sizeof(float)] = {0};
        memcpy(padded, row + k * size_of(type), (size_t)(count * size_of(type)));
        const vec values = type == FLOAT16 ? widened_half(padded) : load(padded, type);
        for (int64_t lane = 0; lane < count; lane++)
            column[(k + lane) * PANEL_ROWS] = values[lane];
    }
}

INLINE void fill_panel(float *panel, const char *const *rows, int64_t depth, int type)
{
    int64_t k = 0;
#if LANES >= 8
    for (; k + 8 <= depth; k += 8)
        for (int row = 0; row < PANEL_ROWS; row += 8)
            turn(panel + k * PANEL_ROWS + row, PANEL_ROWS, rows + row, k * size_of(type), type);
#endif
    for (int row = 0; row < PANEL_ROWS; row++)
        fill_column(panel + row, rows[row], k, depth, type);
}

/* Sums of LANES columns of one input to where they belong. */
INLINE void write_sums(float *out, vec sums, const float *bias, int64_t count)
{
    if (count <= 0)
        return;
    if (count >= LANES) {
        store(out, sums + load(bias == NULL ? out : bias, FLOAT32), FLOAT32);
        return;
    }
    store_part(out, sums + load_part(bias == NULL ? out : bias, count, FLOAT32), count, FLOAT32);
}

INLINE void multiply_inputs(const struct panel *panel, const float *x, int64_t x_stride, float *out,
                            int64_t out_stride, int num_inputs)
{
    vec sums[MAX_INPUTS][2];
#pragma GCC unroll 14
    for (int i = 0; i < num_inputs; i++)
        sums[i][0] = sums[i][1] = all(0);
    const float *values = panel->values;
    for (int64_t k = 0; k < panel->depth; k++, values += PANEL_ROWS) {
        const vec low = load(values, FLOAT32), high = load(values + LANES, FLOAT32);
#pragma GCC unroll 14
        for (int i = 0; i < num_inputs; i++) {
            const vec value = all(x[i * x_stride + k]);
            sums[i][0] = plus_product(sums[i][0], value, low);
            sums[i][1] = plus_product(sums[i][1], value, high);
        }
    }
    const float *bias = panel->bias, *high_bias = bias == NULL ? NULL : bias + LANES;
#pragma GCC unroll 14
    for (int i = 0; i < num_inputs; i++) {
        float *row = out + i * out_stride;
        write_sums(row, sums[i][0], bias, panel->num_rows);
        write_sums(row + LANES, sums[i][1], high_bias, panel->num_rows - LANES);
    }
}

#define CASE(count)                                                                                \
    case count:                                                                                    \
        multiply_inputs(panel, x, x_stride, out, out_stride, count);                               \
        return;

static void multiply_some(const struct panel *panel, const float *x, int64_t x_stride, float *out,
                          int64_t out_stride, int64_t num_inputs)
{
    switch (num_inputs) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if LANES == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
}

/* Values [first, end) of the rows of panel number `index` of a product, into `values`. */
static struct panel packed(const struct product *p, int64_t index, int64_t first, int64_t end,
                           float *values)
{
    static const float no_bias[PANEL_ROWS];
    const struct part *part = p->parts;
    int64_t column = 0, num_before = 0, num_panels;
    for (;; part++) {
        num_panels = (part->num_rows + PANEL_ROWS - 1) / PANEL_ROWS;
        if (index < num_before + num_panels)
            break;
        num_before += num_panels;
        column += part->num_rows;
    }
    const int64_t row = (index - num_before) * PANEL_ROWS, num_left = part->num_rows - row;
    const int64_t num_rows = num_left < PANEL_ROWS ? num_left : PANEL_ROWS;
    if (is_quantised(p->type)) {
        for (int v = 0; v < 2; v++)
            unpack_rows(values + v * LANES, PANEL_ROWS, part, p->depth, row + v * LANES, first, end);
        column += row;
        const float *bias = first > 0 ? NULL : p->bias == NULL ? no_bias : p->bias + column;
        return (struct panel){values, end - first, num_rows, bias, column};
    }
    const char *rows[PANEL_ROWS];
    for (int64_t i = 0; i < PANEL_ROWS; i++) {
        const int64_t from = (row + (i < num_rows ? i : num_rows - 1)) * p->depth + first;
        rows[i] = (const char *)(uintptr_t)part->address + from * size_of(p->type);
    }
    if (p->type == BFLOAT16)
        fill_panel(values, rows, end - first, BFLOAT16);
    else if (p->type == FLOAT16)
        fill_panel(values, rows, end - first, FLOAT16);
    else
        fill_panel(values, rows, end - first, FLOAT32);
    column += row;
    const float *bias = first > 0 ? NULL : p->bias == NULL ? no_bias : p->bias + column;
    return (struct panel){values, end - first, num_rows, bias, column};
}

/* All inputs by panels [from, to), at most GROUP of them. */
static void multiply_group(const struct product *p, int64_t from, int64_t to)
{
    static _Thread_local float values[GROUP * PANEL_VALUES] __attribute__((aligned(64)));
    struct panel panels[GROUP];
    const int64_t num_cuts = (p->depth + MAX_DEPTH - 1) / MAX_DEPTH;
    const int64_t num_shares = (p->num_inputs + MAX_INPUTS - 1) / MAX_INPUTS;
    for (int64_t cut = 0; cut < num_cuts; cut++) {
        const int64_t unit = is_quantised(p->type) ? MAX_GROUP : 1; /* which divides MAX_DEPTH */
        const int64_t num_units = (p->depth + unit - 1) / unit;
        const int64_t first = num_units * cut / num_cuts * unit;
        const int64_t next_cut = num_units * (cut + 1) / num_cuts * unit;
        const int64_t end = next_cut < p->depth ? next_cut : p->depth;
        for (int64_t i = from; i < to; i++)
            panels[i - from] = packed(p, i, first, end, values + (i - from) * PANEL_VALUES);
        for (int64_t share = 0; share < num_shares; share++) {
            const int64_t input = p->num_inputs * share / num_shares;
            const int64_t next = p->num_inputs * (share + 1) / num_shares;
            const float *x = p->x + input * p->x_stride + first;
            float *out = p->out + input * p->out_stride;
            for (int64_t i = 0; i < to - from; i++)
                multiply_some(&panels[i], x, p->x_stride, out + panels[i].column, p->out_stride,
                              next - input);
        }
    }
}

void multiply_panels(void *context, int64_t item)
{
    const struct product *p = context;
    int64_t num_panels = 0;
    for (int64_t i = 0; i < p->num_parts; i++)
        num_panels += (p->parts[i].num_rows + PANEL_ROWS - 1) / PANEL_ROWS;
    const int64_t end = num_panels * (item + 1) / p->num_items;
    for (int64_t from = num_panels * item / p->num_items; from < end; from += GROUP)
        multiply_group(p, from, from + GROUP < end ? from + GROUP : end);
}
