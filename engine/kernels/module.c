/* The extension module: its table of functions, their arguments, and what the processor can run. */
#include "kernels.h"

#include <stdarg.h>

int read_arguments(PyObject *const *arguments, Py_ssize_t count, const char *format, ...)
{
    const Py_ssize_t expected = (Py_ssize_t)strlen(format);
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
        return -1;
    }
    va_list targets;
    va_start(targets, format);
    for (Py_ssize_t i = 0; i < count; i++) {
        void *target = va_arg(targets, void *);
        if (format[i] == 'f')
            *(float *)target = (float)PyFloat_AsDouble(arguments[i]);
        else if (format[i] == 'p')
            *(void **)target = PyLong_AsVoidPtr(arguments[i]);
        else
            *(int64_t *)target = PyLong_AsLongLong(arguments[i]);
    }
    va_end(targets);
    return PyErr_Occurred() ? -1 : 0;
}

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
    if (has_avx512)
        return Py_BuildValue("(sss)", "avx512", "avx2", "portable");
    if (has_avx2)
        return Py_BuildValue("(ss)", "avx2", "portable");
#endif
    return Py_BuildValue("(s)", "portable");
}

#define ROW(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    {"supported", supported, METH_NOARGS, NULL},
    ROW(attend),
    ROW(gated),
    ROW(place),
    ROW(rms_norm),
    ROW(linear),
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
