/* What the files of the extension share: arguments, threads, and the table of functions.
 *
 * Every kernel takes addresses of tensors, sizes and strides; strides count elements. The caller
 * vouches for addresses, shapes and dtypes; nothing here knows torch, or raises but for a wrong
 * number or type of arguments.
 */
#ifndef PENSTOCK_KERNELS_H
#define PENSTOCK_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Types of elements, as in cpu.py; INT8 are codes, whose scales lie elsewhere. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 16 };

/* Ways to multiply, as in cpu.py. */
enum { WIDENED = 0, DOTS = 1, TILES = 2 };

/* Activations of gates, as engine/checkpoint/model_config.py numbers them; NOT_GATED, as in cpu.py: none. */
enum { NOT_GATED = -1, SILU, GELU, CLAMPED_SWIGLU, SIGMOID };

/* An argument of a kernel. */
typedef union {
    void *address;
    int64_t integer;
    double real;
} word;

/* A kernel and its arguments, one letter each: 'p' an address, 'i' an integer, 'f' a real number.
 * It returns 0, or -1 if there is no memory; it knows nothing of Python, and allocates no object. */
#define KERNEL(name, arguments)           \
    const char name##_format[] = arguments; \
    int name(const word *words)

/* Reads words by a format into void **, int64_t * and float *. */
void read_words(const word *words, const char *format, ...);

/* Runs body(context, item) for each item in [0, num_items), on the calling thread and
 * num_threads - 1 helpers, in any order; returns when all are done. One thread: a plain loop. */
typedef void (*parallel_body)(void *context, int64_t item);
void parallel_for(int64_t num_threads, int64_t num_items, parallel_body body, void *context);

/* The same, where each thread begins with an equal share of its own of the items, which follow each
 * other: thread t of n with item num_items * t / n. */
void parallel_shares(int64_t num_threads, int64_t num_items, parallel_body body, void *context);

/* Helper number `thread`, from 1, will read num_bytes from there on, sooner or later in a call to come:
 * it may fetch them while it waits. */
void announce(int64_t thread, const char *address, int64_t num_bytes);
void announce_nothing(void);

/* A thread's scratch memory: at least num_bytes, aligned to 64, uninitialised, the same again on the
 * thread's next call; NULL if there is no memory. */
void *scratch(size_t num_bytes);

/* Memory of one thread's that grows: at least num_bytes of it, aligned to 64, uninitialised, the same
 * again on the next call; NULL if there is none. */
struct memory {
    void *address;
    size_t capacity;
};
void *grown(struct memory *memory, size_t num_bytes);

#define DECLARED(name)               \
    extern const char name##_format[]; \
    int name(const word *words);
DECLARED(attend)
DECLARED(delta)
DECLARED(draw)
DECLARED(gated)
DECLARED(grow)
DECLARED(place)
DECLARED(rate)
DECLARED(reduce)
DECLARED(rms_norm)
DECLARED(split_gates)
DECLARED(linear)
DECLARED(linear_pairs)
DECLARED(mixture)
DECLARED(pack_pairs)

/* Announces what the helpers of such a call will read first of its weights. */
void announce_linear(const word *words);
void announce_linear_pairs(const word *words);

#endif
