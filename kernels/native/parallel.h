// Work sharing over threads, and scratch memory.
#pragma once

#include <stdlib.h>

#include "pool.h"
#include "vec.h"

namespace {

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
