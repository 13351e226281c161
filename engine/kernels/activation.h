/* Activations of gates, and their products with what they gate. */
#ifndef PENSTOCK_ACTIVATION_H
#define PENSTOCK_ACTIVATION_H

#include "simd.h"

static const float SWIGLU_LIMIT = 7, SWIGLU_ALPHA = 1.702f; /* as in engine/worker/model/layers.py */

/* SiLU; GELU in its tanh form, which is gate * sigmoid(2 u) for the u that tanh is taken of; SiLU with a
 * steeper sigmoid, of a gate that has an upper limit; or the sigmoid itself. */
INLINE vec activated(vec gate, int activation)
{
    if (activation == CLAMPED_SWIGLU)
        gate = choose(gate > SWIGLU_LIMIT, all(SWIGLU_LIMIT), gate);
    vec exponent = -gate;
    if (activation == GELU)
        exponent *= 1.5957691216f * (1.0f + 0.044715f * gate * gate);
    if (activation == CLAMPED_SWIGLU)
        exponent *= SWIGLU_ALPHA;
    return (activation == SIGMOID ? all(1) : gate) / (1.0f + exponential(exponent));
}

/* The activation of a gate times `up`, or times one more than that, where both are clamped. */
INLINE vec gated_by(vec gate, vec up, int activation, int type)
{
    if (activation == CLAMPED_SWIGLU) {
        up = choose(up > SWIGLU_LIMIT, all(SWIGLU_LIMIT), up);
        up = rounded(choose(up < -SWIGLU_LIMIT, all(-SWIGLU_LIMIT), up) + 1.0f, type);
    }
    return rounded(activated(gate, activation), type) * up;
}

#endif
