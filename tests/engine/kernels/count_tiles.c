/* Prints what products and attention of a prompt's layer ask of a unit of tiles, and how often threads
 * wait for each other: loads, stores, products, waits of each kind.
 *
 * count_tiles NUM_TOKENS NUM_HEADS NUM_KV_HEADS HEAD_DIM HIDDEN INTERMEDIATE
 */
#include "kernels.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

int64_t num_loads, num_stores, num_products;
static int64_t num_waits;

void read_words(const word *words, const char *format, ...)
{
    va_list to;
    va_start(to, format);
    for (; *format; format++, words++)
        if (*format == 'p')
            *va_arg(to, void **) = words->address;
        else if (*format == 'i')
            *va_arg(to, int64_t *) = words->integer;
        else
            *va_arg(to, float *) = (float)words->real;
    va_end(to);
}

void parallel_for(int64_t num_threads, int64_t num_items, parallel_body body, void *context)
{
    num_waits += num_threads > 1 && num_items > 1;
    for (int64_t item = 0; item < num_items; item++)
        body(context, item);
}

void parallel_shares(int64_t num_threads, int64_t num_items, parallel_body body, void *context)
{
    parallel_for(num_threads, num_items, body, context);
}

void announce(int64_t thread, const char *address, int64_t num_bytes)
{
    (void)thread, (void)address, (void)num_bytes;
}

void announce_nothing(void) {}

void *grown(struct memory *memory, size_t num_bytes)
{
    free(memory->address);
    return memory->address = aligned_alloc(64, (num_bytes + 63) / 64 * 64);
}

void *scratch(size_t num_bytes)
{
    static struct memory memory;
    return grown(&memory, num_bytes);
}

static void report(const char *name)
{
    printf("%s %ld %ld %ld %ld\n", name, (long)num_loads, (long)num_stores, (long)num_products,
           (long)num_waits);
    num_loads = num_stores = num_products = num_waits = 0;
}

static void multiply(int64_t num_tokens, int64_t depth, int64_t num_parts, const int64_t *rows,
                     int64_t activation)
{
    int64_t parts[3][3], num_rows = 0;
    for (int64_t i = 0; i < num_parts; i++) {
        parts[i][0] = (int64_t)calloc((size_t)(rows[i] + 15) / 16 * 16, (size_t)depth * 2);
        parts[i][1] = rows[i];
        num_rows += rows[i];
    }
    const word words[] = {{.address = malloc((size_t)(num_tokens * num_rows * 2))},
                          {.address = calloc((size_t)num_tokens, (size_t)depth * 2)},
                          {.integer = num_tokens}, {.integer = 0}, {.integer = depth},
                          {.address = parts}, {.integer = num_parts}, {.address = NULL},
                          {.integer = WIDENED}, {.integer = activation}, {.integer = 2}};
    linear_pairs(words);
}

static void attend_prompt(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t dim)
{
    const int64_t sequence[3] = {0, num_tokens, num_tokens}, table[1] = {0};
    const int64_t width = num_heads * dim, plane = num_tokens * num_kv_heads * dim * 2;
    const word words[] = {{.address = malloc((size_t)(num_tokens * width * 2))},
                          {.address = calloc((size_t)num_tokens, (size_t)width * 2)},
                          {.address = calloc(2, (size_t)plane)}, {.address = (void *)sequence},
                          {.address = (void *)table}, {.address = NULL}, {.integer = BFLOAT16},
                          {.integer = 1}, {.integer = 1}, {.integer = width}, {.integer = num_heads},
                          {.integer = num_kv_heads}, {.integer = dim}, {.integer = num_tokens},
                          {.integer = 1}, {.integer = 0}, {.integer = 0}, {.integer = BFLOAT16},
                          {.integer = plane}, {.integer = TILES}, {.integer = 2}, {.real = 0.125},
                          {.real = 0}};
    attend(words);
}

int main(int count, char **values)
{
    if (count != 7)
        return 2;
    int64_t n[6];
    for (int i = 0; i < 6; i++)
        n[i] = atol(values[i + 1]);
    const int64_t kv = n[2] * n[3], qkv[3] = {n[1] * n[3], kv, kv}, gate_up[2] = {n[5], n[5]};
    multiply(n[0], n[4], 3, qkv, NOT_GATED);
    report("qkv");
    attend_prompt(n[0], n[1], n[2], n[3]);
    report("attention");
    multiply(n[0], qkv[0], 1, &n[4], NOT_GATED);
    report("output");
    multiply(n[0], n[4], 2, gate_up, SILU);
    report("gate_up");
    multiply(n[0], n[5], 1, &n[4], NOT_GATED);
    report("down");
    return 0;
}
