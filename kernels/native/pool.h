// Threads that share the work of a kernel with its caller.
//
// OpenMP's teams end every loop with a barrier, which waits for a thread even if it has done nothing; where a core is taken
// by another process (a gateway, say) each of the hundreds of loops of a step then waits for a time slice. Here a loop ends
// when its last piece is done: a helper that does not run delays nobody, and one that does takes what is left. Between two
// loops of a step helpers look out for the next one, and between two steps they sleep.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>

#include "vec.h"

namespace {

thread_local long this_thread = 0;  // among those that share a loop: 0 its caller, then the helpers

class Pool {
  public:
    using Call = void (*)(const void* body, long index);

    static Pool& get() {
        static Pool* pool = new Pool;  // never destroyed: helpers may outlive the end of main
        return *pool;
    }

    // call(body, i) once for every 0 <= i < count, on the caller's thread and up to threads - 1 others.
    void run(long count, long threads, Call call, const void* body) {
        if (is_busy_.exchange(true, std::memory_order_acquire)) {  // another thread's kernel has them, or an outer loop
            for (long i = 0; i < count; i++) call(body, i);
            return;
        }
        start_helpers(threads - 1);
        call_.store(call, std::memory_order_relaxed);
        body_.store(body, std::memory_order_relaxed);
        count_.store(count, std::memory_order_relaxed);
        team_.store(threads - 1, std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        const uint32_t epoch = (uint32_t)(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store((uint64_t)epoch << 32 | (uint32_t)count, std::memory_order_release);
        epoch_.store(epoch, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(sleep_); }  // who has looked at the number is waiting by now
            wake_.notify_all();
        }
        while (take_one(kCaller)) {}
        for (long spins = 0; num_done_.load(std::memory_order_acquire) < count; spins++) linger(spins);
        is_busy_.store(false, std::memory_order_release);
    }

  private:
    static constexpr long kSpins = 400;    // some microseconds
    static constexpr long kYields = 250;   // some hundred microseconds, if nobody else wants the core
    static constexpr long kMostHelpers = 255;
    static constexpr long kCaller = -1;    // in place of a helper's number

    Pool() {
        pthread_atfork(nullptr, nullptr, [] { get().forget_helpers(); });
    }

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    // Waits for a moment. Who waits for longer lets others have the core: it may be a helper with a piece that wants it, and
    // another process that has it now need not take it in the midst of a piece.
    static void linger(long spins) {
        spins < kSpins ? pause() : (void)sched_yield();
    }

    // The helpers of the parent process are not here.
    void forget_helpers() {
        num_helpers_ = 0;
        num_asleep_.store(0);
        ticket_.store(0);  // another thread of the parent may have been in a loop, which is not to be gone on with here
        is_busy_.store(false);
        new (&sleep_) std::mutex;
        new (&wake_) std::condition_variable;
    }

    // Signals are for the threads that were there before.
    void start_helpers(long wanted) {
        if (num_helpers_ >= smaller(wanted, kMostHelpers)) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (num_helpers_ < smaller(wanted, kMostHelpers) && start_helper()) num_helpers_++;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    bool start_helper() {
        const auto main = [](void* id) -> void* {
            get().help((long)id);
            return nullptr;
        };
        pthread_t thread;
        if (pthread_create(&thread, nullptr, main, (void*)num_helpers_) != 0) return false;  // the caller does it all
        pthread_detach(thread);
        return true;
    }

    // The life of a helper: one loop after the other.
    void help(long id) {
        this_thread = id + 1;
        uint32_t seen = 0;
        for (;;) {
            wait_for_next(seen);
            seen = epoch_.load(std::memory_order_acquire);
            while (take_one(id)) {}
        }
    }

    void wait_for_next(uint32_t seen) {
        for (long spins = 0; spins < kSpins + kYields; spins++) {
            if (epoch_.load(std::memory_order_acquire) != seen) return;
            linger(spins);
        }
        std::unique_lock<std::mutex> lock(sleep_);
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
        num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }

    // Does one piece of the loop that is on; false if none is left, or the loop is for fewer helpers: one that comes late from a loop before
    // is none of them. What is read of the loop is its own if the exchange succeeds: a loop cannot end, nor another begin, while one of its
    // pieces is still to be taken.
    bool take_one(long helper) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            const long left = (long)(uint32_t)ticket;
            if (left == 0 || helper >= team_.load(std::memory_order_relaxed)) return false;
            const Call call = call_.load(std::memory_order_relaxed);
            const void* body = body_.load(std::memory_order_relaxed);
            const long index = count_.load(std::memory_order_relaxed) - left;
            if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
                call(body, index);
                num_done_.fetch_add(1, std::memory_order_release);
                return true;
            }
        }
    }

    std::atomic<bool> is_busy_{false};
    long num_helpers_ = 0;
    std::mutex sleep_;
    std::condition_variable wake_;
    alignas(64) std::atomic<uint64_t> ticket_{0};  // the loop's number, and how many of its pieces are to be taken
    alignas(64) std::atomic<uint32_t> epoch_{0};   // the loop's number: what helpers wait for
    std::atomic<int> num_asleep_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> body_{nullptr};
    std::atomic<long> count_{0}, team_{0};
    alignas(64) std::atomic<long> num_done_{0};
};

}  // namespace
