/* What products with weights share, however many inputs there are: their arguments, and widening. */
#ifndef PENSTOCK_PRODUCT_H
#define PENSTOCK_PRODUCT_H

#include "simd.h"

enum { CODE_ROWS = 16 }; /* rows of a matrix that is packed in panels lie in one of them */

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

/* Consecutive panels of one part, [first, end), and where the rows of panel 0 lie in the output. */
struct panels {
    const char *base;
    int64_t first, end, num_rows, column, bytes; /* of a panel */
    int scheme;
};

INLINE int64_t panels_of(int64_t num_rows) { return (num_rows + CODE_ROWS - 1) / CODE_ROWS; }

INLINE int64_t units_of_rows(int64_t num_rows, int64_t together)
{
    return (panels_of(num_rows) + together - 1) / together;
}

/* Calls multiply() for the panels of item number `item` of num_items, part after part; all items have
 * an equal share of them, in units of `together`. `bytes` are a panel's, one number for all parts. */
typedef void (*multiply_panels_of)(const void *product, const struct panels *panels);
INLINE void for_panels(const void *product, const struct part *parts, int64_t num_parts,
                       int64_t together, int64_t bytes, int64_t item, int64_t num_items,
                       multiply_panels_of multiply)
{
    int64_t num_units = 0, before = 0, column = 0;
    for (int64_t i = 0; i < num_parts; i++)
        num_units += units_of_rows(parts[i].num_rows, together);
    const int64_t first = num_units * item / num_items;
    const int64_t end = num_units * (item + 1) / num_items;
    for (int64_t i = 0; i < num_parts; i++) {
        const int64_t count = units_of_rows(parts[i].num_rows, together);
        const int64_t num_panels = panels_of(parts[i].num_rows);
        const struct panels panels = {
            .base = (const char *)(uintptr_t)parts[i].address,
            .first = first > before ? (first - before) * together : 0,
            .end = end < before + count ? (end - before) * together : num_panels,
            .num_rows = parts[i].num_rows,
            .column = column,
            .bytes = bytes,
            .scheme = (int)parts[i].scheme,
        };
        if (panels.first < panels.end)
            multiply(product, &panels);
        before += count;
        column += parts[i].num_rows;
    }
}

/* Announces each helper's share of the weights, units of some rows and `bytes` each. */
INLINE void announce_shares(const struct part *parts, int64_t num_parts, int64_t unit_rows,
                            int64_t bytes, int64_t num_threads)
{
    int64_t num_units = 0;
    for (int64_t i = 0; i < num_parts; i++)
        num_units += (parts[i].num_rows + unit_rows - 1) / unit_rows;
    for (int64_t thread = 1; thread < num_threads && thread < num_units; thread++) {
        const struct part *part = parts;
        int64_t first = num_units * thread / num_threads, count;
        while (first >= (count = (part->num_rows + unit_rows - 1) / unit_rows)) {
            first -= count;
            part++;
        }
        announce(thread, (const char *)(uintptr_t)part->address + first * bytes,
                 (count - first) * bytes);
    }
}

/* Into how many items a product is cut. Few inputs are bound by reading: each item begins anew to fetch
 * ahead, so they are long, and each thread has a share of them of its own. */
INLINE int64_t num_items_for(int64_t num_threads, int has_many)
{
    enum { ITEMS_PER_THREAD = 4, LONG_ITEMS_PER_THREAD = 2 };
    return num_threads == 1 ? 1
                            : num_threads * (has_many ? ITEMS_PER_THREAD : LONG_ITEMS_PER_THREAD);
}

INLINE void for_items(int64_t num_threads, int64_t num_items, int has_many, parallel_body body,
                      void *product)
{
    (has_many ? parallel_for : parallel_shares)(num_threads, num_items, body, product);
}

/* The product with quantised weights as a body of parallel_for, for many inputs, whose sums are there. */
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
