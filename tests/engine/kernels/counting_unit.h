/* Stands for engine/kernels/tile_unit.h: a unit that counts what it is told, and computes nothing. */
#ifndef PENSTOCK_TILE_UNIT_H
#define PENSTOCK_TILE_UNIT_H

#include "simd.h"

enum { UNIT_ROWS = 16, UNIT_BYTES = 64 };

extern int64_t num_loads, num_stores, num_products;
#define begin_tiles() ((void)0)
#define end_tiles() ((void)0)
#define tile_zero(tile) ((void)0)
#define tile_load(tile, from, stride) ((void)(from), num_loads++)
#define tile_store(to, stride, tile) ((void)(to), num_stores++)
#define tile_multiply(sums, x, w) ((void)num_products++)

#endif
