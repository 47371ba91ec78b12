// What a run of kernels shares: threads, and memory that is kept from one to the next.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "pool.h"
#include "routing.h"

namespace nanocore {

// Memory that grows to what was needed once, on a cache line.
class Scratch {
   public:
    ~Scratch() { std::free(data_); }
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    float* of(int64_t num_bytes) {
        if (num_bytes > size_) {
            std::free(data_);
            size_ = (num_bytes + 4095) / 4096 * 4096;
            data_ = static_cast<float*>(std::aligned_alloc(64, size_));
            if (!data_) std::abort();  // as the system does when memory is not there
        }
        return data_;
    }

   private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};

// What a run of kernels shares. `panel` and `token_counts` are one for each thread; the counts are
// zero between kernels.
struct Workspace {
    explicit Workspace(const std::vector<int>& cores)
        : pool(cores), panel(cores.size()), token_counts(cores.size()) {}
    Pool pool;
    Scratch rows;
    std::vector<Scratch> panel;
    std::vector<std::vector<int32_t>> token_counts;
    std::vector<int64_t> first_item;
    RoutedRows routed;
    Scratch expert_rows[2], inner, inner_rows;
};

}  // namespace nanocore
