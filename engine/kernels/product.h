/* What products with weights share, however many inputs there are: their arguments, and widening. */
#ifndef PENSTOCK_PRODUCT_H
#define PENSTOCK_PRODUCT_H

#include "simd.h"

/* A matrix that shares the inputs with others: [num_rows, depth]. */
struct part {
    int64_t address;
    int64_t num_rows;
    int64_t scheme; /* of its values: FLOAT32, BFLOAT16, FLOAT16, or a form of quantised.h */
};

struct unit;

struct product {
    const struct part *parts;
    const float *x; /* [num_inputs, x_stride] */
    float *out;     /* [num_inputs, out_stride] */
    const float *bias;
    const struct unit *units; /* the inputs, where they are multiplied by dots; see quantised.h */
    const float *x_sums; /* of groups of each input, where the weights want them */
    int64_t num_parts, num_inputs, depth, x_stride, out_stride, num_items;
    int type; /* of the weights, which is one for all parts */
};

/* The product as a body of parallel_for, for many inputs, as they are. */
void multiply_panels(void *context, int64_t item);

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

#endif
