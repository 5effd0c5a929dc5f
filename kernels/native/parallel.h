// Work sharing over threads, and scratch memory.
#pragma once

#include <stdlib.h>

#include "pool.h"
#include "vec.h"

namespace {

constexpr long kLineBytes = 64;      // of a cache
constexpr double kSerialWork = 2e5;  // multiply-adds below which starting threads costs more than it saves
constexpr double kElementWork = 32;  // multiply-adds in the time that a number takes which is read, changed and written

// Calls body(i) once for every 0 <= i < count, in any order, on up to `threads` threads. `work` estimates the multiply-adds of
// all calls together. Which thread runs a call must not matter to its result.
template <class Body>
INLINE void parallel_for(long count, double work, long threads, const Body& body) {
    if (threads <= 1 || count <= 1 || work < kSerialWork) {
        for (long i = 0; i < count; i++) body(i);
        return;
    }
    const auto call = [](const void* it, long i) { (*(const Body*)it)(i); };
    Pool::get().run(count, smaller(threads, count), call, &body);
}

// The same over [0, count), handed out as runs [begin, end) of some times `grain` indices.
template <class Body>
INLINE void parallel_ranges(long count, long grain, double work, long threads, const Body& body) {
    if (threads <= 1 || count <= grain || work < kSerialWork) {
        if (count > 0) body(0, count);
        return;
    }
    const long size = round_up(ceil_div(count, threads * 4), grain);
    parallel_for(ceil_div(count, size), work, threads, [&](long i) { body(i * size, smaller(count, (i + 1) * size)); });
}

// Indices [0, count) that threads take one by one: each from a part of its own, in order, and when that is used up from the others'. So a
// thread mostly knows what it will get next, and one that does not run holds up nobody.
class Shares {
  public:
    Shares(long count, long threads) : count_(count), parts_(clamp(smaller(threads, count), 1, kMostParts)) {
        for (long part = 0; part < parts_; part++) next_[part].at.store(begin_of(part), std::memory_order_relaxed);
    }

    // The next one for this thread; -1 if none is left.
    long take() {
        for (long i = 0; i < parts_; i++) {
            const long part = (own_part() + i) % parts_, end = begin_of(part + 1);
            if (next_[part].at.load(std::memory_order_relaxed) >= end) continue;
            const long index = next_[part].at.fetch_add(1, std::memory_order_relaxed);
            if (index < end) return index;
        }
        return -1;
    }

    // What this thread gets after `index`, if no other one takes it; -1 where its part ends.
    long after(long index) const { return index + 1 < begin_of(own_part() + 1) && index + 1 > begin_of(own_part()) ? index + 1 : -1; }
    // What it gets first.
    long first() const { return begin_of(own_part()); }

  private:
    static constexpr long kMostParts = 64;
    struct alignas(64) Next {
        std::atomic<long> at;
    };

    long own_part() const { return this_thread % parts_; }
    long begin_of(long part) const { return count_ * part / parts_; }

    long count_, parts_;
    Next next_[kMostParts];
};

// body(shares) once on each of up to `threads` threads, which share [0, count) that way.
template <class Body>
INLINE void parallel_shares(long count, double work, long threads, const Body& body) {
    const long used = work < kSerialWork ? 1 : smaller(threads, count);
    Shares shares(count, used);
    parallel_for(used, work, used, [&](long) { body(shares); });
}

// Memory that a thread keeps between calls, so that a step does not pay for page faults. It only grows.
struct Scratch {
    void* data = nullptr;
    size_t size = 0;

    ~Scratch() { free(data); }

    template <class T>
    T* get(long count) {
        const size_t wanted = round_up(count * sizeof(T) + 64, 64);
        if (wanted > size) {
            free(data);
            data = aligned_alloc(64, wanted);
            if (data == nullptr) abort();  // what an allocation failure does to the rest of the process too
            size = wanted;
        }
        return (T*)data;
    }
};

}  // namespace
