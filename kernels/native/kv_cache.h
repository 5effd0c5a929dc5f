// How keys and values lie in the paged cache, and what attention has to know of that: as the model has them, or as integers.
//
// A panel holds 16 tokens of one head, in steps of the inner loop (microkernel.h). Keys: [padded_dim / kPack][16][kPack], so that
// tokens are the columns of the product with a query. Values: [16 / kPack][padded_dim][kPack], so that head dimensions are the
// columns of the product with the probabilities.
//
// A kind of cache names the type T of what goes in and comes out, the format of its panels, kHeader, how many of the format's
// elements lie before a panel's first step, and kIsFinite, whether slots that nobody has written to hold numbers (else NaN, maybe).
// `put` writes one number into a step. `scaled` multiplies one number for each of the 16 tokens by the scale of the token's elements.
#pragma once

#include "integers.h"

namespace {

constexpr long kMaxDim = 256;  // of a head

template <class Element>
struct PlainCache {
    using T = Element;
    using Format = typename FormatOf<T>::type;
    static constexpr long kHeader = 0;
    static constexpr bool kIsFinite = false;

    static INLINE void put(T* step, long column, long k, const T& x) { step[column * Format::kPack + k] = x; }
    static INLINE Vec scaled(const Vec& x, const T*) { return x; }
};

// Integers of 8 bits, with a scale for each token, which may be NaN. The panel's 16 scales lie before its steps.
template <class Element>
struct IntegerCache {
    using T = Element;
    using Format = typename IntegerFormats<T>::Bits8;
    static constexpr long kHeader = kLanes * sizeof(float);
    static constexpr bool kIsFinite = true;

    static INLINE void put(uint8_t* step, long column, long k, int x) { Format::put(step, column, k, x); }
    static INLINE Vec scaled(const Vec& x, const uint8_t* steps) { return x * load((const float*)(steps - kHeader)); }
};

// Elements of a panel.
template <class Cache>
INLINE long panel_size(long padded_dim) {
    return Cache::kHeader + kLanes * padded_dim;
}

}  // namespace
