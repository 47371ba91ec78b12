// Gates of MLPs: an activation of one half of the features times the other half.

#pragma once

#include "vectors.h"

namespace nanocore {

enum class Gate : int { kNone = 0, kSilu = 1, kGelu = 2 };

NANOCORE_INLINE F activate(Gate gate, F x) {
    if (gate == Gate::kSilu) {
        const F most = broadcast(88.0f);
        return x / (exponential(-x > most ? most : -x) + 1.0f);
    }
    // 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    F inner = 0.7978845608f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (tanh_of(inner) + 1.0f);
}

// act(first) * second, of values that are stored as T.
template <typename T>
NANOCORE_INLINE F gated(Gate gate, F first, F second, const T* stored_as) {
    return rounded(activate(gate, first), stored_as) * second;
}

}  // namespace nanocore
