/* Inputs in bfloat16 times weights packed in pairs, by matrix tiles: 32 inputs by 32 rows at a time.
 *
 * A square of sums is written while the next is multiplied, a few rows between two steps: after it, the
 * unit would wait a third of a short row's time. There is even time to apply an activation: a square of a
 * gated product is 16 rows of gates and the 16 that they gate. Weights are fetched into the first cache a
 * few steps ahead, which is free beside the unit. A group of panels stays in the second cache meanwhile; of
 * long rows a cut of them, else inputs would come from further away for every few panels. Sums are kept
 * between cuts as they are, so that their bits do not depend on these.
 */
#include "activation.h"
#include "pairs.h"
#include "tile_unit.h"

enum {
    INPUTS = 2 * UNIT_ROWS,
    COLUMNS = 2 * PANEL_ROWS,
    GROUP_BYTES = 1 << 20,
    STEP_BYTES = UNIT_ROWS * UNIT_BYTES, /* of a panel, in a step */
    STEPS_AHEAD = 4,
    MAX_STEPS = 64, /* of a cut */
};

/* Sums that wait to be written. */
struct square {
    float sums[INPUTS][COLUMNS] __attribute__((aligned(64)));
    char *to;             /* the first */
    const float *bias[2]; /* of the columns of each panel, or NULL */
    int64_t num_inputs, num_columns, stride_bytes, num_written; /* stride: from input to input */
};

/* One that is multiplied, and the one before. */
struct squares {
    struct square both[2];
    int64_t count; /* of those so far */
};

/* A cut of the rows of a group of panels. */
struct cut {
    int64_t from, to; /* the panels; of a gated product those of the gates */
    int64_t first_step, num_steps;
    float *kept; /* of each square of inputs and panels the sums so far; NULL: there is one cut */
    int is_last;
};

/* The operands of a square: inputs row_bytes apart, two panels, and the two that come next. */
struct operands {
    const char *x, *panels[2], *next[2];
    int64_t row_bytes, num_steps;
    const float *sums; /* to begin with; NULL: 0 */
};

enum { SUMS_BYTES = COLUMNS * sizeof(float) };

/* LANES sums from column i of a panel on, `left` of which are wanted. */
INLINE vec biased(const struct square *s, int panel, int64_t i, int64_t left)
{
    const vec sums = load(&s->sums[s->num_written][panel * PANEL_ROWS + i], FLOAT32);
    return s->bias[panel] == NULL ? sums : sums + load_upto(s->bias[panel] + i, left, FLOAT32);
}

/* Writes an input's sums, or what gates make of them, rounded as if both had been written. */
INLINE void write_input(const struct square *s, int activation)
{
    char *to = s->to + s->num_written * s->stride_bytes;
#pragma GCC unroll 8
    for (int64_t i = 0; i < COLUMNS; i += LANES) {
        const int panel = i >= PANEL_ROWS;
        const int64_t left = s->num_columns - i;
        if (left <= 0 || (panel && activation != NOT_GATED))
            return;
        vec made = biased(s, panel, i % PANEL_ROWS, left);
        if (activation != NOT_GATED)
            made = gated_by(rounded(made, BFLOAT16), rounded(biased(s, 1, i, left), BFLOAT16),
                            activation, BFLOAT16);
        store_upto(to + i * 2, made, left, BFLOAT16);
    }
}

/* Writes up to `count` more inputs of a square. */
INLINE void write_some(struct square *s, int64_t count, int activation)
{
    for (; count > 0 && s->num_written < s->num_inputs; count--, s->num_written++)
        write_input(s, activation);
}

/* Asks for what panel `number` of a square has some steps further on, or the next one has. */
INLINE void fetch_ahead(const struct operands *o, int number, int64_t step)
{
    const int64_t ahead = step + STEPS_AHEAD;
    const char *from = ahead < o->num_steps
                           ? o->panels[number] + ahead * STEP_BYTES
                           : o->next[number] + (ahead - o->num_steps) * STEP_BYTES;
#pragma GCC unroll 16
    for (int64_t line = 0; line < STEP_BYTES; line += 64)
        __builtin_prefetch(from + line);
}

INLINE void begin_sums(const char *sums)
{
    if (sums == NULL) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    } else {
        tile_load(0, sums, SUMS_BYTES);
        tile_load(1, sums + UNIT_BYTES, SUMS_BYTES);
        tile_load(2, sums + UNIT_ROWS * SUMS_BYTES, SUMS_BYTES);
        tile_load(3, sums + UNIT_ROWS * SUMS_BYTES + UNIT_BYTES, SUMS_BYTES);
    }
}

/* Multiplies to `sums`, and writes what is left of the square before. */
INLINE void multiply_square(const struct operands *o, char *sums, struct square *before,
                            int activation)
{
    const int64_t rows_a_step = INPUTS / o->num_steps + 1;
    begin_sums((const char *)o->sums);
    for (int64_t step = 0; step < o->num_steps; step++) {
        const char *x = o->x + step * TILE_DEPTH * 2;
        tile_load(4, x, o->row_bytes);
        tile_load(6, o->panels[0] + step * STEP_BYTES, UNIT_BYTES);
        tile_load(7, o->panels[1] + step * STEP_BYTES, UNIT_BYTES);
        tile_load(5, x + UNIT_ROWS * o->row_bytes, o->row_bytes);
        tile_multiply(0, 4, 6);
        fetch_ahead(o, 0, step);
        tile_multiply(1, 4, 7);
        write_some(before, rows_a_step, activation);
        tile_multiply(2, 5, 6);
        fetch_ahead(o, 1, step);
        tile_multiply(3, 5, 7);
    }
    write_some(before, INPUTS, activation);
    tile_store(sums, SUMS_BYTES, 0);
    tile_store(sums + UNIT_BYTES, SUMS_BYTES, 1);
    tile_store(sums + UNIT_ROWS * SUMS_BYTES, SUMS_BYTES, 2);
    tile_store(sums + UNIT_ROWS * SUMS_BYTES + UNIT_BYTES, SUMS_BYTES, 3);
}

/* The last inputs, and zeros up to a whole tile: nothing behind x is read. */
static char *padded_rest(const struct pairs_product *p)
{
    const int64_t row_bytes = p->depth * 2, num_rest = p->num_inputs % INPUTS;
    char *rest = calloc(INPUTS, (size_t)row_bytes);
    if (rest == NULL)
        abort(); /* less than a prompt's row for each of 32 tokens */
    for (int64_t n = 0; n < num_rest; n++)
        memcpy(rest + n * row_bytes, p->x + (p->num_inputs - num_rest + n) * p->x_stride * 2,
               (size_t)row_bytes);
    return rest;
}

/* Panels of a part that a square takes. */
INLINE int64_t panels_a_square(const struct pairs_product *p)
{
    return p->activation == NOT_GATED ? 2 : 1;
}

/* Squares of some panels. */
INLINE int64_t squares_of(const struct pairs_product *p, int64_t num_panels)
{
    return (num_panels + panels_a_square(p) - 1) / panels_a_square(p);
}

/* The two panels of the square that begins with panel i; the second may be the first. */
INLINE void find_panels(const char **two, const struct pairs_product *p, const char *base,
                        int64_t panel_bytes, int64_t i, int64_t to)
{
    two[0] = base + i * panel_bytes;
    two[1] = p->activation != NOT_GATED ? two[0] + p->gated_bytes
             : i + 1 < to               ? two[0] + panel_bytes
                                        : two[0];
}

/* What waits to be written of the square that begins with panel i, by INPUTS inputs from `input` on. */
INLINE void place_square(struct square *s, const struct pairs_product *p, const struct panels *panels,
                         int64_t i, int64_t to, int64_t input)
{
    const int64_t column = panels->column + i * PANEL_ROWS, end = to * PANEL_ROWS;
    const int64_t second = p->activation == NOT_GATED ? PANEL_ROWS : panels->num_rows;
    s->to = p->out + (input * p->out_stride + column) * 2;
    s->bias[0] = p->bias == NULL ? NULL : p->bias + column;
    s->bias[1] = p->bias == NULL ? NULL : p->bias + column + second;
    s->num_inputs = p->num_inputs - input < INPUTS ? p->num_inputs - input : INPUTS;
    s->num_columns = (end < panels->num_rows ? end : panels->num_rows) - i * PANEL_ROWS;
    s->stride_bytes = p->out_stride * 2;
    s->num_written = 0;
}

/* INPUTS inputs from `input` on by a cut. */
INLINE void multiply_inputs(const struct pairs_product *p, const struct panels *panels,
                            const struct cut *cut, int64_t input, const char *rest,
                            struct squares *squares, int activation)
{
    const int is_rest = p->num_inputs - input < INPUTS;
    const char *x = is_rest ? rest : p->x + input * p->x_stride * 2;
    const char *base = panels->base + cut->first_step * STEP_BYTES;
    const int64_t from = cut->from, to = cut->to, apart = panels_a_square(p);
    struct operands o = {.x = x + cut->first_step * TILE_DEPTH * 2,
                         .row_bytes = is_rest ? p->depth * 2 : p->x_stride * 2,
                         .num_steps = cut->num_steps};
    for (int64_t i = from; i < to; i += apart) {
        find_panels(o.panels, p, base, panels->bytes, i, to);
        find_panels(o.next, p, base, panels->bytes, i + apart < to ? i + apart : from, to);
        const int64_t number = input / INPUTS * squares_of(p, to - from) + (i - from) / apart;
        float *kept = cut->kept == NULL ? NULL : cut->kept + number * INPUTS * COLUMNS;
        o.sums = cut->first_step == 0 ? NULL : kept;
        struct square *before = &squares->both[squares->count % 2];
        if (!cut->is_last) {
            multiply_square(&o, (char *)kept, before, activation);
            continue;
        }
        struct square *now = &squares->both[++squares->count % 2];
        multiply_square(&o, (char *)now->sums, before, activation);
        place_square(now, p, panels, i, to, input);
    }
}

/* All inputs by a cut. */
static void multiply_cut(const struct pairs_product *p, const struct panels *panels,
                         const struct cut *cut, const char *rest, struct squares *squares)
{
    for (int64_t input = 0; input < p->num_inputs; input += INPUTS)
        if (p->activation == NOT_GATED)
            multiply_inputs(p, panels, cut, input, rest, squares, NOT_GATED);
        else if (p->activation == SILU)
            multiply_inputs(p, panels, cut, input, rest, squares, SILU);
        else
            multiply_inputs(p, panels, cut, input, rest, squares, (int)p->activation);
}

/* Memory for the sums of all inputs by some panels. */
static float *kept_sums(const struct pairs_product *p, int64_t num_panels)
{
    static _Thread_local struct memory memory;
    const int64_t num_squares = (p->num_inputs + INPUTS - 1) / INPUTS * squares_of(p, num_panels);
    float *kept = grown(&memory, (size_t)(num_squares * INPUTS * SUMS_BYTES));
    if (kept == NULL)
        abort(); /* as much as a part of the output */
    return kept;
}

static void multiply_tiled(const void *product, const struct panels *panels)
{
    const struct pairs_product *p = product;
    struct squares squares;
    squares.both[0].num_inputs = squares.both[0].num_written = squares.count = 0;
    const int64_t num_steps = p->depth / TILE_DEPTH;
    const int64_t num_cuts = (num_steps + MAX_STEPS - 1) / MAX_STEPS;
    const int64_t num_squares = GROUP_BYTES / (2 * panels->bytes / num_cuts);
    const int64_t group = (num_squares < 1 ? 1 : num_squares) * panels_a_square(p);
    char *rest = p->num_inputs % INPUTS == 0 ? NULL : padded_rest(p);
    for (int64_t from = panels->first; from < panels->end; from += group)
        for (int64_t n = 0; n < num_cuts; n++) {
            struct cut cut = {.from = from, .first_step = num_steps * n / num_cuts};
            cut.to = from + group < panels->end ? from + group : panels->end;
            cut.num_steps = num_steps * (n + 1) / num_cuts - cut.first_step;
            cut.kept = num_cuts == 1 ? NULL : kept_sums(p, group);
            cut.is_last = n == num_cuts - 1;
            multiply_cut(p, panels, &cut, rest, &squares);
        }
    write_some(&squares.both[squares.count % 2], INPUTS, (int)p->activation);
    free(rest);
}

void multiply_tiles(void *context, int64_t item)
{
    const struct pairs_product *p = context;
    begin_tiles();
    for_panels(p, p->parts, p->num_parts, panels_a_square(p), bytes_of_panel(p->depth), item,
               p->num_items, multiply_tiled);
    end_tiles();
}
