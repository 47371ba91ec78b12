// Threads that share the items of a loop, and wait briefly spinning between loops.
//
// A step is hundreds of short loops one after the other. Waking a thread takes longer than many of
// them, so threads look for work for some microseconds before they sleep; and nobody waits for a
// thread that has not woken: items are claimed one by one, and the caller claims like the others.

#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace nanocore {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Keeps the calling thread on one core while it lives. Where that is not allowed, it does nothing.
class OnCore {
   public:
    explicit OnCore(int core) {
#if defined(__linux__)
        is_moved_ = core >= 0 && sched_getaffinity(0, sizeof before_, &before_) == 0 && pin(core);
#endif
    }
    OnCore(const OnCore&) = delete;
    OnCore& operator=(const OnCore&) = delete;

#if defined(__linux__)
    ~OnCore() {
        if (is_moved_) sched_setaffinity(0, sizeof before_, &before_);
    }

    // For good; whether it could be done. Below 0 it is not asked for.
    static bool pin(int core) {
        if (core < 0) return false;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(core, &set);
        return sched_setaffinity(0, sizeof set, &set) == 0;
    }

   private:
    bool is_moved_ = false;
    cpu_set_t before_;
#else
    ~OnCore() {}
    static bool pin(int) { return false; }
#endif
};

class Pool {
   public:
    // One thread for each core but the first, which is the caller's; each is pinned, unless its core
    // is below 0.
    explicit Pool(const std::vector<int>& cores)
        : callers_core_(cores[0]), num_threads_(static_cast<int>(cores.size())) {
        for (int i = 1; i < num_threads_; ++i)
            threads_.emplace_back([this, i, core = cores[i]] { work(i, core); });
    }

    ~Pool() {
        stopping_.store(true);
        publish(nullptr, nullptr, 0);
        for (std::thread& thread : threads_) thread.join();
    }

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }

    // For the caller, around many loops: on another thread's core both would take turns, which the
    // system notices late, as the caller sleeps between steps.
    OnCore stay() const { return OnCore(callers_core_); }

    // body(item, thread) for every item below `count`, in any order; returns when all are done.
    template <typename Body>
    void loop(int64_t count, const Body& body) {
        if (count <= 1 || num_threads_ == 1) {
            for (int64_t item = 0; item < count; ++item) body(item, 0);
            return;
        }
        done_.store(0, std::memory_order_relaxed);
        uint64_t ticket = publish(
            [](const void* context, int64_t item, int thread) {
                (*static_cast<const Body*>(context))(item, thread);
            },
            &body, static_cast<uint32_t>(count));
        take_items(ticket, 0);
        for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) {
            // Another process may have taken the core of the thread that is waited for.
            if (spins > 20000) sched_yield();
            else relax();
        }
    }

   private:
    typedef void (*Run)(const void* context, int64_t item, int thread);

    // A ticket is a loop's number and the next item of it: whoever raises it has claimed the item,
    // and knows that the loop had not ended.
    static constexpr int kItemBits = 32;

    uint64_t publish(Run run, const void* context, uint32_t count) {
        // A late thread may still hold the last loop's ticket. It must not claim an item with it
        // once it can read this loop's count: so no item of the last loop is left.
        ticket_.fetch_or(0xffffffffu, std::memory_order_acq_rel);
        std::atomic_thread_fence(std::memory_order_release);  // pairs with that of take_items
        run_.store(run, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        count_.store(count, std::memory_order_relaxed);
        uint32_t number = number_.load(std::memory_order_relaxed) + 1;
        uint64_t ticket = static_cast<uint64_t>(number) << kItemBits;
        ticket_.store(ticket, std::memory_order_release);
        number_.store(number, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) > 0) number_.notify_all();
        return ticket;
    }

    void take_items(uint64_t ticket, int thread) {
        const uint64_t number = ticket >> kItemBits;
        const Run run = run_.load(std::memory_order_relaxed);
        const void* context = context_.load(std::memory_order_relaxed);
        const uint32_t count = count_.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_acquire);
        ticket = ticket_.load(std::memory_order_relaxed);
        while (ticket >> kItemBits == number && static_cast<uint32_t>(ticket) < count) {
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                run(context, static_cast<uint32_t>(ticket), thread);
                done_.fetch_add(1, std::memory_order_acq_rel);
                ticket = ticket_.load(std::memory_order_acquire);
            }
        }
    }

    void work(int thread, int core) {
        OnCore::pin(core);  // failing leaves it where it is, which is allowed
        uint32_t seen = 0;
        while (true) {
            uint32_t number = number_.load(std::memory_order_acquire);
            for (int spins = 0; number == seen && spins < kSpins; ++spins) {
                relax();
                number = number_.load(std::memory_order_acquire);
            }
            if (number == seen) {
                num_asleep_.fetch_add(1, std::memory_order_seq_cst);
                number_.wait(seen, std::memory_order_seq_cst);
                num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
                continue;
            }
            if (stopping_.load(std::memory_order_relaxed)) return;
            seen = number;
            take_items(ticket_.load(std::memory_order_acquire), thread);
        }
    }

    static constexpr int kSpins = 2000;  // of 20 to 50 ns

    const int callers_core_;
    const int num_threads_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> number_{0};
    std::atomic<int> num_asleep_{0};
    std::atomic<Run> run_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<uint32_t> count_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    std::vector<std::thread> threads_;  // the last member: they use all others
};

}  // namespace nanocore
