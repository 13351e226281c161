/* Weights packed in pairs: one layout of bfloat16 for dots of pairs, and for matrix tiles.
 *
 * A panel is PANEL_ROWS rows of a matrix: of all of them the first two values, then of all of them the
 * next two, and so on. A vector of pairs times one broadcast pair of an input adds two products to each
 * of 16 sums; 16 steps of a panel, 1 KiB, are one operand of a matrix unit. Rows that are missing in
 * the last panel, and values to a whole number of tiles, are 0.
 */
#ifndef PENSTOCK_PAIRS_H
#define PENSTOCK_PAIRS_H

#include "product.h"

enum {
    PANEL_ROWS = CODE_ROWS,
    TILE_DEPTH = 32, /* values of a row in a tile: a packed row is a multiple of them */
    PANEL_VECS = PANEL_ROWS / LANES,
    PAIR_BYTES = 4,
};

struct pairs_product {
    const struct part *parts; /* of matrices that are packed */
    const char *x;     /* bfloat16 [num_inputs, x_stride] */
    const float *wide; /* the same as float32, where that is what is multiplied */
    char *out;     /* bfloat16 [num_inputs, out_stride] */
    const float *bias;
    int64_t num_parts, num_inputs, depth, x_stride, out_stride, num_items;
    int64_t activation;  /* of rows by tiles, each of which gates another; or NOT_GATED */
    int64_t gated_bytes; /* from a panel of gates to that of the rows they gate */
};

INLINE int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

INLINE int64_t bytes_of_panel(int64_t depth) { return depth / 2 * PANEL_ROWS * PAIR_BYTES; }

/* Calls multiply() for the panels of item number `item`. */
INLINE void for_pairs(const struct pairs_product *p, int64_t item, multiply_panels_of multiply)
{
    for_panels(p, p->parts, p->num_parts, 1, bytes_of_panel(p->depth), item, p->num_items,
               multiply);
}

/* Sums of one input and LANES rows of a panel to the output. */
INLINE void write_panel_sums(const struct pairs_product *p, int64_t input, int64_t column, vec sums,
                             int64_t count)
{
    char *to = p->out + (input * p->out_stride + column) * 2;
    const float *bias = p->bias == NULL ? NULL : p->bias + column;
    if (count >= LANES) {
        store(to, bias == NULL ? sums : sums + load(bias, FLOAT32), BFLOAT16);
    } else if (count > 0) {
        sums = bias == NULL ? sums : sums + load_part(bias, count, FLOAT32);
        store_part(to, sums, count, BFLOAT16);
    }
}

/* Bodies of parallel_for. */
void multiply_tiles(void *context, int64_t item);

#endif
