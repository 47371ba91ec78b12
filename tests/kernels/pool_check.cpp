// Many loops of many sizes over one pool: every item runs exactly once, and is done when the loop
// returns. The counts are plain integers, so ThreadSanitizer sees an item that two threads ran, and
// a loop that returned too early. There are more threads than cores: some are always late. What a
// late thread might do with the next loop takes very many loops to see; their number is an argument.

#include "pool.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

using nanocore::Pool;

// Loops of up to `most` items; returns the number of items that did not run exactly once.
static int run_loops(Pool& pool, int num_loops, int most, std::mt19937& random) {
    int num_wrong = 0;
    for (int loop = 0; loop < num_loops; ++loop) {
        const int count = static_cast<int>(random() % (most + 1));
        // Memory of its own: a late thread that still ran the last loop would write to freed memory.
        auto times = std::make_unique<std::vector<int>>(count);
        std::vector<int>& runs = *times;
        pool.loop(count, [&](int64_t item, int thread) {
            if (thread < 0 || thread >= pool.num_threads()) runs[item] += 100;
            for (volatile int work = 0; work < item % 7 * 20;) work = work + 1;
            runs[item] += 1;
        });
        for (int run : runs) num_wrong += run != 1;
    }
    return num_wrong;
}

int main(int, char** arguments) {
    const int num_short_loops = std::atoi(arguments[1]);
    std::mt19937 random(0);
    int num_wrong = 0;
    for (int num_threads : {1, 2, 3, 6}) {
        std::vector<int> cores;
        for (int i = 0; i < num_threads; ++i) cores.push_back(i % 2);
        Pool pool(cores);
        num_wrong += run_loops(pool, num_short_loops, 4, random);  // some threads are a loop late, or more
        num_wrong += run_loops(pool, 500, 40, random);
        num_wrong += run_loops(pool, 5, 5000, random);
        // Threads that fell asleep are woken, or not needed.
        for (int pause = 0; pause < 3; ++pause) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            num_wrong += run_loops(pool, 20, 40, random);
        }
    }
    for (int i = 0; i < 50; ++i) Pool pool({0, 1, 0});  // ends before its threads have begun
    std::printf("%d wrong\n", num_wrong);
    return num_wrong != 0;
}
