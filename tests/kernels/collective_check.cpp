// Ranks that reduce through memory that they share, each a thread with a pool of its own: every sum
// is right, and ThreadSanitizer sees who reads or writes a buffer too early. There are more threads
// than cores, so that some are always late.

#include "collective.h"

#include <cstdio>
#include <cstdlib>
#include <random>

using namespace nanocore;

static float part_of(int64_t rank, int call, int64_t i) {
    return static_cast<float>((rank + 1) * (call % 50) + i % 17);
}

// Sums of rows of two values, in pieces of at most 24 KiB; returns how many values are wrong.
static int run_rank(const RankGroup& group, int num_threads, int num_calls, std::mt19937 random) {
    std::vector<int> cores;
    for (int i = 0; i < num_threads; ++i) cores.push_back(i % 2);
    Workspace workspace(cores);
    int num_wrong = 0;
    for (int call = 0; call < num_calls; ++call) {
        const int64_t rows = random() % (call % 100 ? 40 : 30000);  // the same on every rank
        std::vector<float> x(2 * rows);
        for (int64_t i = 0; i < 2 * rows; ++i) x[i] = part_of(group.rank, call, i);
        AllReduceCall<float>{group, x.data(), 2, nullptr, rows}.run(workspace);
        for (int64_t i = 0; i < 2 * rows; ++i) {
            float expected = 0.0f;
            for (int64_t rank = 0; rank < group.size; ++rank) expected += part_of(rank, call, i);
            num_wrong += x[i] != expected;
        }
    }
    return num_wrong;
}

int main(int, char** arguments) {
    const int num_calls = std::atoi(arguments[1]);
    int num_wrong = 0;
    for (int64_t size : {2, 3}) {
        const int64_t buffer_bytes = 24 << 10;
        std::vector<uint64_t> counters(size * RankGroup::kCounterStride), entered(size);
        std::vector<char> buffers(2 * size * buffer_bytes);
        std::vector<int> wrong(size);
        std::vector<std::thread> ranks;
        for (int64_t rank = 0; rank < size; ++rank)
            ranks.emplace_back([&, rank] {
                const RankGroup group{counters.data(), buffers.data(), buffer_bytes,
                                      rank,            size,           &entered[rank]};
                wrong[rank] = run_rank(group, 1 + rank % 2, num_calls, std::mt19937(7));
            });
        for (std::thread& rank : ranks) rank.join();
        for (int of_rank : wrong) num_wrong += of_rank;
    }
    std::printf("%d wrong\n", num_wrong);
    return num_wrong != 0;
}
