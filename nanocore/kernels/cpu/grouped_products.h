// Products with weights whose k are in groups: of integers, or of numbers from a codebook.

#pragma once

#include "integers.h"
#include "linear_weight.h"

namespace nanocore {

// As `FloatProducts`, of weights with groups of k, by what Groups says of them and of rows; see `multiply_groups`.
template <typename T, typename Groups>
struct GroupedProducts {
    static constexpr int kPanelRows = kMaxRows;
    const LinearWeight& weight;
    Groups groups;

    int64_t num_groups() const { return weight.format.num_groups(weight.in_features); }
    int64_t panel_bytes() const { return num_groups() * Groups::template bytes<kMaxRows>(weight.format.group); }

    void pack(const T* x, int64_t stride, int rows, char* to) const {
        with_rows(rows, [&](auto R) {
            if (rows < R) std::memset(to, 0, num_groups() * Groups::template bytes<R>(weight.format.group));
            for (int r = 0; r < rows; ++r)
                Groups::template pack<R>(Inputs<T>{x + r * stride, weight.permutation}, weight.format,
                                         weight.in_features, r, to);
        });
    }

    void multiply(const char* packed, int rows, const void* tile, const Prefetch& ahead, float* products) const {
        with_rows(rows, [&](auto R) {
            multiply_groups<R>(groups, packed, static_cast<const char*>(tile), weight.format, num_groups(),
                               ahead, products);
        });
    }
};

}  // namespace nanocore
