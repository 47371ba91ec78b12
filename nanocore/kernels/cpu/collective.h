// Sums over the ranks of one host, through memory that they share.
//
// Layout and protocol are those of shared_memory.py, which says why one wait for each exchange is
// enough: ranks that replay a step and ranks that call kernels one by one understand each other, and
// have the same bits. Nobody here looks whether the others live: the engine does, and ends a rank in
// the middle of its wait.

#pragma once

#include <chrono>
#include <thread>

#include "rows.h"

namespace nanocore {

struct RankGroup {
    uint64_t* counters;  // of exchanges that each rank has entered, kCounterStride apart
    char* buffers;       // [2][size][buffer_bytes]
    int64_t buffer_bytes;
    int64_t rank;
    int64_t size;
    uint64_t* entered;  // by this rank; its own memory

    static constexpr int64_t kCounterStride = 8;

    template <typename T>
    T* buffer(uint64_t exchange, int64_t of_rank) const {
        const int64_t half = static_cast<int64_t>(exchange % 2) * size;
        return reinterpret_cast<T*>(buffers + (half + of_rank) * buffer_bytes);
    }

    // What this rank has written to its buffer is seen by whoever sees the counter.
    void publish(uint64_t exchange) const {
        *entered = exchange;
        __atomic_store_n(counters + rank * kCounterStride, exchange, __ATOMIC_RELEASE);
    }

    // Polls, soon lets others run between polls, then sleeps: as SharedRegion.wait, for its reasons.
    void wait(int64_t for_rank, uint64_t exchange) const {
        const uint64_t* counter = counters + for_rank * kCounterStride;
        const auto is_there = [&] { return __atomic_load_n(counter, __ATOMIC_ACQUIRE) >= exchange; };
        for (int polls = 0; polls < kPolls; ++polls) {
            if (is_there()) return;
            relax();
        }
        using std::chrono::nanoseconds;
        const auto start = std::chrono::steady_clock::now();
        while (!is_there()) {
            const nanoseconds waited = std::chrono::steady_clock::now() - start;
            if (waited < kYielding) std::this_thread::yield();
            else std::this_thread::sleep_for(std::min<nanoseconds>(waited / 8, kMostSleep));
        }
    }

   private:
    static constexpr int kPolls = 100;  // of 20 to 50 ns
    static constexpr std::chrono::milliseconds kYielding{1}, kMostSleep{1};
};

// x becomes the sum over ranks, added in float32 in order of rank and rounded once; then the bias
// is added, and rounded again.
template <typename T>
struct AllReduceCall {
    RankGroup group;
    T* x;
    int64_t size;
    const T* bias;  // or null
    int64_t rows;

    void run(Workspace& workspace) const {
        const int64_t count = rows * size;
        const int64_t most = group.buffer_bytes / static_cast<int64_t>(sizeof(T));
        int64_t start = 0;
        do {  // without values there is an exchange, too
            exchange(workspace.pool, x + start, std::min(most, count - start));
            start += most;
        } while (start < count);
        if (!bias) return;
        loop_rows(workspace.pool, rows, size, [&](int64_t row) {
            add_values(x + row * size, bias, size, x + row * size);
        });
    }

   private:
    void exchange(Pool& pool, T* part, int64_t count) const {
        const uint64_t number = *group.entered + 1;
        T* own = group.template buffer<T>(number, group.rank);
        loop_parts(pool, count, [&](int64_t from, int64_t length) {
            std::memcpy(own + from, part + from, length * sizeof(T));
        });
        group.publish(number);
        for (int64_t rank = 0; rank < group.size; ++rank) group.wait(rank, number);
        loop_parts(pool, count, [&](int64_t from, int64_t length) {
            sum(number, from, length, part + from);
        });
    }

    template <typename Body>
    static void loop_parts(Pool& pool, int64_t count, const Body& body) {
        pool.loop((count + kItemValues - 1) / kItemValues, [&](int64_t item, int) {
            const int64_t from = item * kItemValues;
            body(from, std::min(kItemValues, count - from));
        });
    }

    void sum(uint64_t number, int64_t from, int64_t length, T* out) const {
        const T* first = group.template buffer<T>(number, 0) + from;
        int64_t i = 0;
        for (; i + kLanes <= length; i += kLanes) {
            F total = load(first + i);
            for (int64_t rank = 1; rank < group.size; ++rank)
                total += load(group.template buffer<T>(number, rank) + from + i);
            store_nearest(total, out + i);
        }
        for (; i < length; ++i) {
            float total = to_float(first[i]);
            for (int64_t rank = 1; rank < group.size; ++rank)
                total += to_float(group.template buffer<T>(number, rank)[from + i]);
            from_float(total, out + i);
        }
    }
};

}  // namespace nanocore
