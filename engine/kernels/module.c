/* The extension module: its table of kernels, their arguments, what the processor can run, and the
 * graph. A step of few tokens is hundreds of calls of microseconds each, equal in every step
 * but for what they find in memory: written down once, they are made again without Python. */
#include "kernels.h"

#include <stdarg.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { MAX_WORDS = 24, RELEASES_ALWAYS = -1, MANY_TOKENS = 8 };

struct kernel {
    const char *name;
    const char *format;
    int (*run)(const word *words);
    int num_tokens_at; /* the word that says if it takes so long that other threads may run */
    void (*announce)(const word *words); /* what it reads, if that is much */
};

#define NAMED(name) #name, name##_format, name
static const struct kernel kernels[] = {
    {NAMED(attend), RELEASES_ALWAYS},
    {NAMED(gated), 3},
    {NAMED(place), 7},
    {NAMED(rms_norm), 6},
    {NAMED(linear), 3, announce_linear},
    {NAMED(linear_pairs), 2, announce_linear_pairs},
    {NAMED(pack_pairs), RELEASES_ALWAYS},
    {NAMED(mixture), 5},
    {NAMED(grow), 3},
    {NAMED(delta), 12},
    {NAMED(split_gates), 3},
    {NAMED(draw), RELEASES_ALWAYS},
    {NAMED(rate), RELEASES_ALWAYS},
    {NAMED(reduce), RELEASES_ALWAYS},
};

/* The calls since record(): the number of the kernel, then its words; one after the other. */
static struct {
    int is_on;
    word *words;
    size_t count, capacity;
} graph;

void read_words(const word *words, const char *format, ...)
{
    va_list targets;
    va_start(targets, format);
    for (; *format; format++, words++) {
        void *target = va_arg(targets, void *);
        if (*format == 'f')
            *(float *)target = (float)words->real;
        else if (*format == 'p')
            *(void **)target = words->address;
        else
            *(int64_t *)target = words->integer;
    }
    va_end(targets);
}

/* Arguments to words by a format. Returns their number, or -1 with a Python error set. */
static int to_words(PyObject *const *arguments, Py_ssize_t count, const char *format, word *words)
{
    const Py_ssize_t expected = (Py_ssize_t)strlen(format);
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (format[i] == 'f')
            words[i].real = PyFloat_AsDouble(arguments[i]);
        else if (format[i] == 'p')
            words[i].address = PyLong_AsVoidPtr(arguments[i]);
        else
            words[i].integer = PyLong_AsLongLong(arguments[i]);
    }
    return PyErr_Occurred() ? -1 : (int)count;
}

static int append(int64_t number, const word *words, int count)
{
    if (graph.count + 1 + (size_t)count > graph.capacity) {
        const size_t capacity = 2 * graph.capacity + MAX_WORDS + 1;
        word *grown = realloc(graph.words, capacity * sizeof(word));
        if (grown == NULL)
            return -1;
        graph.words = grown;
        graph.capacity = capacity;
    }
    graph.words[graph.count++].integer = number;
    memcpy(graph.words + graph.count, words, (size_t)count * sizeof(word));
    graph.count += (size_t)count;
    return 0;
}

static PyObject *call(int64_t number, PyObject *const *arguments, Py_ssize_t count)
{
    const struct kernel *kernel = &kernels[number];
    word words[MAX_WORDS];
    const int num_words = to_words(arguments, count, kernel->format, words);
    if (num_words < 0)
        return NULL;
    if (graph.is_on && append(number, words, num_words) < 0)
        return PyErr_NoMemory();
    const int is_long = kernel->num_tokens_at == RELEASES_ALWAYS ||
                        words[kernel->num_tokens_at].integer >= MANY_TOKENS;
    PyThreadState *state = is_long ? PyEval_SaveThread() : NULL;
    const int status = kernel->run(words);
    if (is_long)
        PyEval_RestoreThread(state);
    if (status < 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#define CALLED(name, number)                                                             \
    static PyObject *call_##name(PyObject *module, PyObject *const *arguments,           \
                                 Py_ssize_t count)                                       \
    {                                                                                    \
        (void)module;                                                                    \
        return call(number, arguments, count);                                           \
    }
CALLED(attend, 0)
CALLED(gated, 1)
CALLED(place, 2)
CALLED(rms_norm, 3)
CALLED(linear, 4)
CALLED(linear_pairs, 5)
CALLED(pack_pairs, 6)
CALLED(mixture, 7)
CALLED(grow, 8)
CALLED(delta, 9)
CALLED(split_gates, 10)
CALLED(draw, 11)
CALLED(rate, 12)
CALLED(reduce, 13)

/* record(): from now on every call is also written down. */
static PyObject *record(PyObject *module, PyObject *ignored)
{
    (void)module, (void)ignored;
    graph.is_on = 1;
    graph.count = 0;
    Py_RETURN_NONE;
}

/* recorded(): the calls since then, as bytes; nothing is written down any more. */
static PyObject *recorded(PyObject *module, PyObject *ignored)
{
    (void)module, (void)ignored;
    graph.is_on = 0;
    return PyBytes_FromStringAndSize((const char *)graph.words,
                                     (Py_ssize_t)(graph.count * sizeof(word)));
}

/* A call of a graph: its kernel, and its words to `words`. Returns where the next one begins. */
static const char *read_call(const char *from, const struct kernel **kernel, word *words)
{
    int64_t number;
    memcpy(&number, from, sizeof number);
    *kernel = &kernels[number];
    const size_t num_bytes = strlen((*kernel)->format) * sizeof(word);
    memcpy(words, from + sizeof number, num_bytes);
    return from + sizeof number + num_bytes;
}

/* Announces what the first call from there on reads that reads much. */
static void look_ahead(const char *next, const char *end)
{
    while (next < end) {
        const struct kernel *kernel;
        word words[MAX_WORDS];
        next = read_call(next, &kernel, words);
        if (kernel->announce != NULL) {
            kernel->announce(words);
            return;
        }
    }
    announce_nothing();
}

/* replay(calls): make them again. Their addresses must still be good. */
static PyObject *replay(PyObject *module, PyObject *calls)
{
    (void)module;
    if (!PyBytes_Check(calls))
        return PyErr_Format(PyExc_TypeError, "expected bytes");
    const char *next = PyBytes_AsString(calls), *end = next + PyBytes_Size(calls);
    int status = 0;
    Py_BEGIN_ALLOW_THREADS;
    while (next < end && status == 0) {
        const struct kernel *kernel;
        word words[MAX_WORDS];
        next = read_call(next, &kernel, words);
        if (kernel->announce != NULL)
            look_ahead(next, end);
        status = kernel->run(words);
    }
    Py_END_ALLOW_THREADS;
    if (status < 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#if defined(__x86_64__)
/* True if the processor has tiles for bfloat16, and the system lets this process use them, which it
 * has to be asked for: without, the first tile instruction is a fatal signal. */
static int grants_tiles(void)
{
    enum { BF16_AND_TILE = 1 << 22 | 1 << 24, ASK_FOR_FEATURE = 0x1023, TILE_DATA = 18 };
    unsigned int a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & BF16_AND_TILE) != BF16_AND_TILE)
        return 0;
    return syscall(SYS_arch_prctl, ASK_FOR_FEATURE, TILE_DATA) == 0;
}
#endif

/* Names of the levels that this processor and its kernel can run, best first. */
static PyObject *supported(PyObject *module, PyObject *ignored)
{
    (void)module, (void)ignored;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                           __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && __builtin_cpu_supports("avx512bf16") && grants_tiles())
        return Py_BuildValue("(sssss)", "amx", "avx512bf16", "avx512", "avx2", "portable");
    if (has_avx512 && __builtin_cpu_supports("avx512bf16"))
        return Py_BuildValue("(ssss)", "avx512bf16", "avx512", "avx2", "portable");
    if (has_avx512)
        return Py_BuildValue("(sss)", "avx512", "avx2", "portable");
    if (has_avx2)
        return Py_BuildValue("(ss)", "avx2", "portable");
#endif
    return Py_BuildValue("(s)", "portable");
}

#define ROW(name) {#name, (PyCFunction)(void (*)(void))call_##name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    {"supported", supported, METH_NOARGS, NULL},
    ROW(attend),
    ROW(gated),
    ROW(place),
    ROW(rms_norm),
    ROW(linear),
    ROW(linear_pairs),
    ROW(pack_pairs),
    ROW(mixture),
    ROW(grow),
    ROW(delta),
    ROW(split_gates),
    ROW(draw),
    ROW(rate),
    ROW(reduce),
    {"record", record, METH_NOARGS, NULL},
    {"recorded", recorded, METH_NOARGS, NULL},
    {"replay", replay, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

#define TEXT_OF(name) #name
#define NAME_OF(level) "engine.kernels._" TEXT_OF(level)
#define INIT_OF(level) PyInit__##level
#define INIT(level) INIT_OF(level)

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = NAME_OF(LEVEL), .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC INIT(LEVEL)(void)
{
    return PyModuleDef_Init(&definition);
}
