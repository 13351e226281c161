/* Inputs in bfloat16 times weights packed in pairs, by matrix tiles: 32 inputs by 32 rows at a time.
 */
#include "pairs.h"
#include "tile_unit.h"

enum { INPUTS = 2 * UNIT_ROWS, GROUP_BYTES = 1 << 20 };

/* INPUTS inputs, of which num_inputs are written, by panels i and i + 1; the second may be the first. */
static void multiply_square(const struct pairs_product *p, const struct panels *panels, int64_t i,
                            int64_t second, const char *x, int64_t x_bytes, int64_t input,
                            int64_t num_inputs)
{
    const char *low = panels->base + i * panels->bytes;
    const char *high = panels->base + second * panels->bytes;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < p->depth; k += TILE_DEPTH) {
        tile_load(4, x + k * 2, x_bytes);
        tile_load(5, x + k * 2 + UNIT_ROWS * x_bytes, x_bytes);
        tile_load(6, low + k * PANEL_ROWS * 2, UNIT_BYTES);
        tile_load(7, high + k * PANEL_ROWS * 2, UNIT_BYTES);
        tile_multiply(0, 4, 6);
        tile_multiply(1, 4, 7);
        tile_multiply(2, 5, 6);
        tile_multiply(3, 5, 7);
    }
    float sums[INPUTS][2 * PANEL_ROWS] __attribute__((aligned(64)));
    enum { STRIDE = sizeof sums[0] };
    tile_store((char *)&sums[0][0], STRIDE, 0);
    tile_store((char *)&sums[0][PANEL_ROWS], STRIDE, 1);
    tile_store((char *)&sums[UNIT_ROWS][0], STRIDE, 2);
    tile_store((char *)&sums[UNIT_ROWS][PANEL_ROWS], STRIDE, 3);
    for (int64_t n = 0; n < num_inputs; n++)
        for (int v = 0; v < 2 * PANEL_VECS; v++) {
            const int64_t panel = v < PANEL_VECS ? i : second;
            const int64_t row = panel * PANEL_ROWS + v % PANEL_VECS * LANES;
            write_panel_sums(p, input + n, panels->column + row,
                             load(&sums[n][v * LANES], FLOAT32), panels->num_rows - row);
        }
}

static void multiply_tiled(const void *product, const struct panels *panels)
{
    const struct pairs_product *p = product;
    int64_t group = GROUP_BYTES / panels->bytes / 2 * 2;
    group = group < 2 ? 2 : group;
    const int64_t row_bytes = p->depth * 2;
    char *rest = NULL; /* the last inputs, and zeros up to a whole tile: nothing behind x is read */
    const int64_t num_rest = p->num_inputs % INPUTS;
    for (int64_t from = panels->first; from < panels->end; from += group) {
        const int64_t to = from + group < panels->end ? from + group : panels->end;
        for (int64_t input = 0; input < p->num_inputs; input += INPUTS) {
            const int is_rest = p->num_inputs - input < INPUTS;
            const char *x = p->x + input * p->x_stride * 2;
            if (is_rest && rest == NULL) {
                rest = calloc(INPUTS, (size_t)row_bytes);
                if (rest == NULL)
                    abort(); /* less than a prompt's row for each of 32 tokens */
                for (int64_t n = 0; n < num_rest; n++)
                    memcpy(rest + n * row_bytes, x + n * p->x_stride * 2, (size_t)row_bytes);
            }
            for (int64_t i = from; i < to; i += 2)
                multiply_square(p, panels, i, i + 1 < to ? i + 1 : i, is_rest ? rest : x,
                                is_rest ? row_bytes : p->x_stride * 2, input,
                                is_rest ? num_rest : INPUTS);
        }
    }
    free(rest);
}

void multiply_tiles(void *context, int64_t item)
{
    begin_tiles();
    for_pairs(context, item, multiply_tiled);
    end_tiles();
}
