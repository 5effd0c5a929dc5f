// Rows of activations, as the inner loop of microkernel.h reads them.
//
// A word is what one broadcast takes: one float, two bf16 numbers, or four integers. SideRows are sixteen rows whose words lie side
// by side, so that a step of the loop takes one cache line; rows that do not fill sixteen stay one below the other.
#pragma once

#include <type_traits>

#include "parallel.h"

namespace {

constexpr long kSideRows = kWidth == 16 ? 16 : 0;  // smaller register files hold no sums of so many rows
constexpr long kTileRows = 256;  // rows for which the weights pass by once; they shall stay in the cache

template <class X>
constexpr long kWord = 4 / sizeof(X);

// So many read a panel from the cache for the most part: blocks of fewer rows are as fast then. Of bytes and of bf16 numbers, which are
// multiplied fastest, they are as fast anyhow.
template <class X>
constexpr long kManyRows = sizeof(X) == 1 || std::is_same_v<X, Bf16> ? 1 : 64;

template <class X>
struct Rows {  // `stride` elements apart
    const X* x;
    long stride;

    INLINE const X* at(long row, long k) const { return x + row * stride + k; }
    INLINE Rows from(long k) const { return {x + k, stride}; }
};

template <class X>
struct SideRows {  // [k / kWord][16][kWord]
    const X* x;

    INLINE const X* at(long row, long k) const { return x + k * kSideRows + row * kWord<X>; }  // k: where a word begins
    INLINE SideRows from(long k) const { return {x + k * kSideRows}; }
};

// Some rows of a layer's input: the first num_side of them side by side, sixteen after sixteen, the rest one below the other.
template <class X>
struct Operands {
    long first, rows;  // in the input
    const X* side;     // [num_side / 16], of 16 * depth elements
    long num_side, depth;
    Rows<X> below;

    template <int M>
    INLINE auto block(long row) const {
        if constexpr (M == kSideRows) {
            return SideRows<X>{side + row * depth};
        } else {
            return Rows<X>{below.at(row - num_side, 0), below.stride};
        }
    }
};

// A row as X, zero-padded to `padded` elements: widened to fp32, or as it is.
template <class T, class X>
INLINE void to_operand(const T* x, long count, X* operand, long padded) {
    if constexpr (std::is_same_v<X, float>) {
        long k = 0;
        for (; k + kLanes <= count; k += kLanes) store(operand + k, load(x + k));
        for (; k < padded; k++) operand[k] = k < count ? load_one(x + k) : 0.0f;
    } else {
        static_assert(std::is_same_v<T, X>);
        memcpy(operand, x, count * sizeof(X));
        memset(operand + count, 0, (padded - count) * sizeof(X));
    }
}

#if defined(__AVX512F__)
// Lane j of row i goes to lane i of row j.
INLINE void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16], fours[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        UNROLL for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    }
    UNROLL for (int c = 0; c < 4; c++) {  // fours[4 * i + c] has column 4 * l + c of rows 4 * i to 4 * i + 3 in its quarter l
        const __m512i even0 = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x88);
        const __m512i even1 = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x88);
        const __m512i odd0 = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xdd);
        const __m512i odd1 = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xdd);
        rows[c] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        rows[4 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        rows[8 + c] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
        rows[12 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
    }
}

// Sixteen words of a row as X from its element k on, zeros behind its end.
template <class X, class T>
INLINE __m512i load_words(const T* x, long k, long count) {
    constexpr long words = kLanes * kWord<X>;
    if constexpr (std::is_same_v<X, float>) {
        return (__m512i)(count - k >= words ? load(x + k) : load_some(x + k, count - k)).p[0];
    } else {
        static_assert(std::is_same_v<T, X>);
        if (count - k >= words) return _mm512_loadu_si512(x + k);
        X some[words] = {};
        memcpy(some, x + k, (count - k) * sizeof(X));
        return _mm512_loadu_si512(some);
    }
}

// Sixteen rows, x_stride apart, of `count` elements -> SideRows of `depth` elements.
template <class T, class X>
void put_side_by_side(const T* x, long x_stride, long count, X* to, long depth) {
    for (long k = 0; k < depth; k += kLanes * kWord<X>) {
        __m512i words[16];
        UNROLL for (int row = 0; row < 16; row++) words[row] = load_words<X>(x + row * x_stride, k, count);
        transpose(words);
        UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + k * kSideRows + i * kLanes * kWord<X>, words[i]);
    }
}
#else
template <class T, class X>
void put_side_by_side(const T*, long, long, X*, long) {}
#endif

template <class T, class X>
constexpr bool kUsableInPlace = std::is_same_v<T, X>;

// Calls body(operands) for one tile of the rows of x [m, k], which lie x_stride apart, after the other. Rows are zero-padded to a
// multiple of `pack` elements. From kMany rows on none lie side by side.
template <class X, long kMany = kManyRows<X>, class T, class Body>
void for_each_tile(const T* x, long x_stride, long m, long k, long pack, long threads, const Body& body) {
    static thread_local Scratch scratch;
    const long depth = round_up(k, kLanes * kWord<X>), padded = round_up(k, pack);
    for (long first = 0; first < m; first += kTileRows) {
        const long rows = smaller(kTileRows, m - first);
        const long num_side = kSideRows > 0 && rows < kMany ? rows / kLanes * kLanes : 0;
        const T* from = x + first * x_stride;
        X* side = scratch.get<X>(num_side * depth + (rows - num_side) * padded);
        parallel_ranges(num_side / kLanes, 1, kElementWork * num_side * k, threads, [&](long begin, long end) {
            for (long i = begin * kLanes; i < end * kLanes; i += kLanes) {
                put_side_by_side(from + i * x_stride, x_stride, k, side + i * depth, depth);
            }
        });
        from += num_side * x_stride;
        if (kUsableInPlace<T, X> && k % pack == 0) {
            body(Operands<X>{first, rows, side, num_side, depth, {(const X*)from, x_stride}});
            continue;
        }
        X* below = side + num_side * depth;
        parallel_ranges(rows - num_side, 8, kElementWork * (rows - num_side) * k, threads, [&](long begin, long end) {
            for (long r = begin; r < end; r++) to_operand(from + r * x_stride, k, below + r * padded, padded);
        });
        body(Operands<X>{first, rows, side, num_side, depth, {below, padded}});
    }
}

}  // namespace
