/* Many inputs times quantised weights: the part of a prompt that is bound by arithmetic.
 *
 * Codes of as many rows as two vectors have lanes are turned into floats, once for all inputs: a panel.
 * A group of panels stays in the second cache while all inputs pass by it, a few at a time: their sums,
 * two vectors of a panel and one value of an input fill the registers. Each sum is made in the order in
 * which quantised.c makes it for few inputs, so that it has the same bits.
 */
#include "forms.h"

#if LANES == 16
enum { MAX_INPUTS = 14 };
#else
enum { MAX_INPUTS = 6 };
#endif

enum {
    PANEL_ROWS = 2 * LANES,
    MAX_DEPTH = 768, /* values of a row in a panel: a few inputs as long stay in the first cache */
    PANEL_VALUES = MAX_DEPTH * PANEL_ROWS,
    PANEL_SCALES = MAX_DEPTH / MIN_GROUP * 2 * PANEL_ROWS,
    GROUP = (192 << 10) / (PANEL_VALUES * (int)sizeof(float)), /* panels in the second cache */
};

struct panel {
    const float *values; /* codes [depth, PANEL_ROWS] */
    const float *scales; /* and minimums, [groups, 2, PANEL_ROWS] */
    int64_t depth;
    int64_t num_rows;  /* to write; the others repeat the last */
    const float *bias; /* to add at the end, or NULL */
    int64_t column;    /* of the first row in out */
    int group, has_minimum;
    int is_first; /* part of the rows: sums begin with 0, else with what is there */
};

/* Inputs, from the panel's first value on, and the sums of their groups. */
struct inputs {
    const float *x, *sums;
    int64_t x_stride, sums_stride;
};

/* LANES columns of one input. */
INLINE vec read_sums(const float *out, int64_t count)
{
    return count >= LANES ? load(out, FLOAT32) : count > 0 ? load_part(out, count, FLOAT32) : all(0);
}

INLINE void write_sums(float *out, vec sums, const float *bias, int64_t count)
{
    if (bias != NULL)
        sums += read_sums(bias, count);
    if (count >= LANES)
        store(out, sums, FLOAT32);
    else if (count > 0)
        store_part(out, sums, count, FLOAT32);
}

/* A group of the panel, `count` values from number k on, by some inputs. */
INLINE void add_group(vec (*totals)[2], const struct panel *panel, const struct inputs *in, int64_t k,
                      int64_t count, int num_inputs)
{
    vec sums[MAX_INPUTS][2];
#pragma GCC unroll 14
    for (int i = 0; i < num_inputs; i++)
        sums[i][0] = sums[i][1] = all(0);
    const float *values = panel->values + k * PANEL_ROWS, *x = in->x + k;
    for (int64_t j = 0; j < count; j++, values += PANEL_ROWS) {
        const vec low = load(values, FLOAT32), high = load(values + LANES, FLOAT32);
#pragma GCC unroll 14
        for (int i = 0; i < num_inputs; i++) {
            const vec value = all(x[i * in->x_stride + j]);
            sums[i][0] = plus_product(sums[i][0], value, low);
            sums[i][1] = plus_product(sums[i][1], value, high);
        }
    }
    const int64_t number = k / panel->group;
    const float *scales = panel->scales + number * 2 * PANEL_ROWS;
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
        const vec scale = load(scales + v * LANES, FLOAT32);
        const vec minimum = load(scales + PANEL_ROWS + v * LANES, FLOAT32);
#pragma GCC unroll 14
        for (int i = 0; i < num_inputs; i++) {
            totals[i][v] = plus_product(totals[i][v], sums[i][v], scale);
            if (panel->has_minimum)
                totals[i][v] = plus_product(totals[i][v], minimum,
                                            all(in->sums[i * in->sums_stride + number]));
        }
    }
}

INLINE void multiply_inputs(const struct panel *panel, const struct inputs *in, float *out,
                            int64_t out_stride, int num_inputs)
{
    vec totals[MAX_INPUTS][2];
    for (int i = 0; i < num_inputs; i++)
        for (int v = 0; v < 2; v++)
            totals[i][v] = panel->is_first ? all(0)
                                           : read_sums(out + i * out_stride + v * LANES,
                                                       panel->num_rows - v * LANES);
    for (int64_t k = 0; k < panel->depth; k += panel->group) {
        const int64_t left = panel->depth - k;
        add_group(totals, panel, in, k, left < panel->group ? left : panel->group, num_inputs);
    }
    for (int i = 0; i < num_inputs; i++)
        for (int v = 0; v < 2; v++)
            write_sums(out + i * out_stride + v * LANES, totals[i][v],
                       panel->bias == NULL ? NULL : panel->bias + v * LANES,
                       panel->num_rows - v * LANES);
}

#define CASE(count)                                                                                \
    case count:                                                                                    \
        multiply_inputs(panel, in, out, out_stride, count);                                        \
        return;

static void multiply_some(const struct panel *panel, const struct inputs *in, float *out,
                          int64_t out_stride, int64_t num_inputs)
{
    switch (num_inputs) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if LANES == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
}

/* Values [first, end) of the rows of panel number `index` of a product, unpacked to `values` and
 * `scales`. */
static struct panel unpacked(const struct product *p, int64_t index, int64_t first, int64_t end,
                             float *values, float *scales)
{
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
    for (int v = 0; v < 2; v++)
        unpack_rows(values + v * LANES, scales + v * LANES, PANEL_ROWS, part, p->depth,
                    row + v * LANES, first, end);
    return (struct panel){
        .values = values,
        .scales = scales,
        .depth = end - first,
        .num_rows = num_left < PANEL_ROWS ? num_left : PANEL_ROWS,
        .bias = end < p->depth || p->bias == NULL ? NULL : p->bias + column + row,
        .column = column + row,
        .group = group_of(p->type),
        .has_minimum = has_minimum(p->type),
        .is_first = first == 0,
    };
}

/* All inputs by panels [from, to), at most GROUP of them. */
static void multiply_group(const struct product *p, int64_t from, int64_t to)
{
    static _Thread_local float values[GROUP * PANEL_VALUES] __attribute__((aligned(64)));
    static _Thread_local float scales[GROUP * PANEL_SCALES] __attribute__((aligned(64)));
    struct panel panels[GROUP];
    const int64_t num_groups = groups_of(p->type, p->depth);
    const int64_t num_cuts = (p->depth + MAX_DEPTH - 1) / MAX_DEPTH;
    const int64_t num_shares = (p->num_inputs + MAX_INPUTS - 1) / MAX_INPUTS;
    for (int64_t cut = 0; cut < num_cuts; cut++) {
        const int64_t num_units = (p->depth + MAX_GROUP - 1) / MAX_GROUP; /* divides MAX_DEPTH */
        const int64_t first = num_units * cut / num_cuts * MAX_GROUP;
        const int64_t next_cut = num_units * (cut + 1) / num_cuts * MAX_GROUP;
        const int64_t end = next_cut < p->depth ? next_cut : p->depth;
        for (int64_t i = from; i < to; i++)
            panels[i - from] = unpacked(p, i, first, end, values + (i - from) * PANEL_VALUES,
                                        scales + (i - from) * PANEL_SCALES);
        for (int64_t share = 0; share < num_shares; share++) {
            const int64_t input = p->num_inputs * share / num_shares;
            const int64_t next = p->num_inputs * (share + 1) / num_shares;
            const struct inputs in = {
                .x = p->x + input * p->x_stride + first,
                .x_stride = p->x_stride,
                .sums = p->x_sums + input * num_groups + first / group_of(p->type),
                .sums_stride = num_groups,
            };
            float *out = p->out + input * p->out_stride;
            for (int64_t i = 0; i < to - from; i++)
                multiply_some(&panels[i], &in, out + panels[i].column, p->out_stride, next - input);
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
