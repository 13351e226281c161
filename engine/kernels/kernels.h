/* What the files of the extension share: arguments, threads, and the table of functions.
 *
 * Every function takes positional ints and floats: addresses of tensors, sizes and strides. Strides
 * count elements. The caller vouches for addresses, shapes and dtypes; nothing here allocates Python
 * objects, knows torch, or raises but for a wrong number or type of arguments.
 */
#ifndef PENSTOCK_KERNELS_H
#define PENSTOCK_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Types of elements, as in cpu.py. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Reads positional arguments by a format of one letter each: 'p' an address (void **), 'i' an int
 * (int64_t *), 'f' a float (float *). Returns 0, or -1 with a Python error set. */
int read_arguments(PyObject *const *arguments, Py_ssize_t count, const char *format, ...);

/* Runs body(context, item) for each item in [0, num_items), on the calling thread and
 * num_threads - 1 helpers, in any order; returns when all are done. One thread: a plain loop. */
typedef void (*parallel_body)(void *context, int64_t item);
void parallel_for(int64_t num_threads, int64_t num_items, parallel_body body, void *context);

/* A thread's scratch memory: at least num_bytes, aligned to 64, uninitialised, the same again on the
 * thread's next call; NULL if there is no memory. */
void *scratch(size_t num_bytes);

#define KERNEL(name) PyObject *name(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
KERNEL(attend);
KERNEL(gated);
KERNEL(place);
KERNEL(rms_norm);
KERNEL(linear);

#endif
