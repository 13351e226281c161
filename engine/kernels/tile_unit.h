/* A unit for products of matrix tiles: eight registers of 16 rows of 64 bytes.
 *
 * One interface for Intel's AMX and for plain C, which computes what the instructions do, so that
 * packing and arithmetic are tested on machines without the unit. A thread tells the unit the shape of
 * the registers before it uses them, and lets go of them after, for eight of them cost a context switch
 * 8 KiB. tile_multiply() adds to 16 by 16 float32 sums the products of 16 rows of 16 pairs of bfloat16
 * and 16 pairs of rows of 16 columns; numbers of registers are constants.
 */
#ifndef PENSTOCK_TILE_UNIT_H
#define PENSTOCK_TILE_UNIT_H

#include "simd.h"

enum { UNIT_ROWS = 16, UNIT_BYTES = 64 };

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
INLINE void begin_tiles(void)
{
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t num_rows[16];
    } shape = {.palette = 1,
               .row_bytes = {[0 ... 7] = UNIT_BYTES},
               .num_rows = {[0 ... 7] = UNIT_ROWS}};
    _tile_loadconfig(&shape);
}
#define end_tiles() _tile_release()
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride) _tile_loadd(tile, from, stride)
#define tile_store(to, stride, tile) _tile_stored(tile, to, stride)
#define tile_multiply(sums, x, w) _tile_dpbf16ps(sums, x, w)
#else
static _Thread_local char registers[8][UNIT_ROWS][UNIT_BYTES];
#define begin_tiles() memset(registers, 0, sizeof registers)
#define end_tiles() ((void)0)
#define tile_zero(tile) memset(registers[tile], 0, sizeof registers[tile])
INLINE void tile_load(int tile, const char *from, int64_t stride)
{
    for (int row = 0; row < UNIT_ROWS; row++)
        memcpy(registers[tile][row], from + row * stride, UNIT_BYTES);
}
INLINE void tile_store(char *to, int64_t stride, int tile)
{
    for (int row = 0; row < UNIT_ROWS; row++)
        memcpy(to + row * stride, registers[tile][row], UNIT_BYTES);
}
INLINE float value_of(const char *bfloat16)
{
    uint16_t half;
    memcpy(&half, bfloat16, sizeof half);
    const uint32_t bits = (half & 0x7f80) == 0 ? 0 : (uint32_t)half << 16; /* denormals are 0 */
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static __attribute__((unused)) void tile_multiply(int sums, int x, int w)
{
    for (int input = 0; input < UNIT_ROWS; input++)
        for (int pair = 0; pair < UNIT_BYTES / 4; pair++)
            for (int row = 0; row < UNIT_ROWS; row++) {
                const char *a = registers[x][input] + pair * 4;
                const char *b = registers[w][pair] + row * 4;
                float sum;
                memcpy(&sum, registers[sums][input] + row * sizeof sum, sizeof sum);
                sum += value_of(a + 2) * value_of(b + 2) + value_of(a) * value_of(b);
                memcpy(registers[sums][input] + row * sizeof sum, &sum, sizeof sum);
            }
}
#endif

#endif
