/* The small operations between the large ones: norms, activations, rotation with the KV write. */
#include "simd.h"

/* out = x / rms(x) * weight for rows of `dim`, rounded to the type of x once, after the product, or
 * where `rounds_twice`, before it too. */
INLINE void norm_row(
    void *out, const void *x, const void *weight, int64_t dim, float eps, int rounds_twice, int type,
    int weight_type)
{
    const int64_t whole = dim / LANES * LANES, rest = dim - whole;
    vec squares = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        const vec value = load(at(x, i, type), type);
        squares += value * value;
    }
    if (rest) {
        const vec value = load_part(at(x, whole, type), rest, type);
        squares += value * value;
    }
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)dim + eps);
    const int middle_type = rounds_twice ? type : FLOAT32;
    for (int64_t i = 0; i < whole; i += LANES) {
        const vec normed = rounded(load(at(x, i, type), type) * scale, middle_type);
        store(at(out, i, type), normed * load(at(weight, i, weight_type), weight_type), type);
    }
    if (rest) {
        const vec normed = rounded(load_part(at(x, whole, type), rest, type) * scale, middle_type);
        const vec factors = load_part(at(weight, whole, weight_type), rest, weight_type);
        store_part(at(out, whole, type), normed * factors, rest, type);
    }
}

/* rms_norm(out, x, weight, type, weight_type, num_tokens, num_rows, dim, out_stride, x_stride, eps)
 *
 * x is num_tokens times num_rows rows of dim, tokens x_stride apart, rows adjacent, weight one row
 * for each of num_rows. out may be x. */
KERNEL(rms_norm)
{
    void *out, *x, *weight;
    int64_t type, weight_type, num_tokens, num_rows, dim, out_stride, x_stride;
    float eps;
    (void)module;
    if (read_arguments(arguments, count, "pppiiiiiiif", &out, &x, &weight, &type, &weight_type,
                       &num_tokens, &num_rows, &dim, &out_stride, &x_stride, &eps))
        return NULL;
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t row = 0; row < num_rows; row++) {
            void *to = at(out, token * out_stride + row * dim, (int)type);
            const void *from = at(x, token * x_stride + row * dim, (int)type);
            const void *factors = at(weight, row * dim, (int)weight_type);
            if (type == FLOAT32)
                norm_row(to, from, factors, dim, eps, 0, FLOAT32, FLOAT32);
            else if (weight_type == FLOAT32)
                norm_row(to, from, factors, dim, eps, 0, BFLOAT16, FLOAT32);
            else
                norm_row(to, from, factors, dim, eps, 1, BFLOAT16, BFLOAT16);
        }
    Py_RETURN_NONE;
}
