/* Matrices of codes and scales, packed for the kernels, as engine/checkpoint/quantisation.py has it.
 *
 * A panel is 16 rows. Along them lie groups of 16 or more values: first the codes of all 16 rows, then
 * their scales, then, where there are, their minimums: a value is scale * code + minimum. Codes of 4
 * bits are eight of a row in each 32-bit lane, the first lowest; of 5 or 6 bits what is above four lies
 * behind them (high_bits in forms.h); of 2 or 3 bits a lane has two of each of 16 values, and of a
 * third bit there are 16 more behind them, half a lane; codes of 8 bits lie value by value, 16 rows side by side. Where
 * scales are small integers, a head before every 256 values has what they are multiplied by, and where
 * they are six bits, themselves. INT8_ROW has one scale a row, before all codes,
 * and NVFP4 there what a row's scales are multiplied and divided by. Some forms have zeros
 * in place of minimums: a value is scale * (code - zero). The last group of a row may be cut short by
 * the matrix; its place is as large as the others'.
 */
#ifndef PENSTOCK_QUANTISED_H
#define PENSTOCK_QUANTISED_H

#include "product.h"

enum { BLOCK_VALUES = 256, MIN_GROUP = 16, MAX_GROUP = 128 };

/* Forms, as in cpu.py, behind the types and the scheme of packed pairs. */
enum {
    Q4_0 = 4, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, MXFP4,
    IQ4_NL, IQ4_XS, Q2_K, Q3_K, NVFP4, INT4_32, INT4_128, INT8_128, INT8_ROW, FP8_128
};

INLINE int is_quantised(int64_t type) { return type >= Q4_0; }

/* Codes [first, end) of LANES rows, which begin with number `row` of the matrix, as floats to columns of a
 * panel: to[k * stride]. Of each group the scales go to a row of `scales`, the minimums to the next. first
 * is at a group's beginning. */
void unpack_rows(float *to, float *scales, int64_t stride, const struct part *part, int64_t depth,
                 int64_t row, int64_t first, int64_t end);

/* The sum of each group of an input to its row of [num_inputs, groups of a row]. */
void sum_input(float *sums, const struct product *p, int64_t input);

/* True of a form that has minimums, which are multiplied by those sums. */
int wants_sums(int form);

/* True of a form whose products are those of inputs that are one scale times integers of one byte. */
INLINE int rounds_inputs(int form) { return form == INT8_ROW; }

/* An input, float32 [depth], rounded to such. */
void round_input(float *x, int64_t depth);

/* The product as a body of parallel_for, for few inputs, whose sums are there. */
void multiply_quantised(void *context, int64_t item);

enum { UNIT = 32 };

/* Up to UNIT values of an input as integers of two bytes, times one scale; where the form says so, of
 * one byte, the higher one, times a scale of the whole input. */
struct unit {
    int32_t high[UNIT / 4], low[UNIT / 4]; /* four bytes each, in the order in which codes are unpacked */
    float scale, sum;                      /* sum: of the values */
    int32_t excess; /* what dots begin with, for bytes are larger than codes by a constant */
    int32_t unused;
};

/* True if this processor multiplies a form with inputs of a type by dots of bytes. */
int has_dots(int form, int64_t type);

/* Of one input at x, all units; they are [units, inputs], of MIN_GROUP values at least. */
void fill_units(struct unit *units, const struct product *p, const char *x, int type, int64_t input);

/* The product as a body of parallel_for, whose units are there. */
void multiply_dots(void *context, int64_t item);

#endif
