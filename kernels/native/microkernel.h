// The one inner loop of linear layers and attention: rows of activations times packed columns.
//
// A packed panel holds 16 columns side by side for each step along the summed dimension; bf16 panels hold two steps in a
// pair, as the AVX512-BF16 instruction wants them. Every output has one accumulator and takes its products in order, whatever
// the number of rows or columns in the block, so the block's shape never shows in the bits.
//
// A panel format names its stored element T, the element X of the rows that it multiplies, kPack (elements of the summed dimension
// in one step) and the step itself, for elements [k, k + kPack) of the rows and what lies `at` elements into the panels.
#pragma once

#include "operands.h"

namespace {

template <class Element>
struct PlainPanel {  // fp32 or fp16: [step][16]
    using T = Element;
    using X = float;
    static constexpr int kPack = 1;

    template <int M, int N, class Operand>
    static INLINE void step(Vec (&acc)[M][N], const Operand& x, long k, const T* const (&w)[N], long at) {
        Vec column[N];
        UNROLL for (int n = 0; n < N; n++) column[n] = load(w[n] + at);
        UNROLL for (int m = 0; m < M; m++) {
            const Vec row = splat(*x.at(m, k));
            UNROLL for (int n = 0; n < N; n++) acc[m][n] = fma(row, column[n], acc[m][n]);
        }
    }

    // kPack is 1: there are no halves.
    static INLINE void half_step(Vec&, const float*, const T*, long, bool) {}
};

using Pairs = PartBits[kParts];

INLINE void load_pairs(Pairs& pairs, const Bf16* w) {
    UNROLL for (int i = 0; i < kParts; i++) pairs[i] = *(const PartBitsLoad*)(w + 2 * i * kWidth);
}

INLINE Vec even_of(const Pairs& pairs) { VEC_MAP((Part)(pairs[i] << 16)); }
INLINE Vec odd_of(const Pairs& pairs) { VEC_MAP((Part)(pairs[i] & 0xffff0000)); }

struct Bf16Panel {  // bf16 widened to fp32: [step][16][2]
    using T = Bf16;
    using X = float;
    static constexpr int kPack = 2;

    template <int M, int N, class Operand>
    static INLINE void step(Vec (&acc)[M][N], const Operand& x, long k, const T* const (&w)[N], long at) {
        Pairs pairs[N];
        UNROLL for (int n = 0; n < N; n++) load_pairs(pairs[n], w[n] + at);
        multiply(acc, x, k, pairs);
    }

    // The same of pairs that have been loaded.
    template <int M, int N, class Operand>
    static INLINE void multiply(Vec (&acc)[M][N], const Operand& x, long k, const Pairs (&pairs)[N]) {
        Vec even[N], odd[N];
        UNROLL for (int n = 0; n < N; n++) {
            even[n] = even_of(pairs[n]);
            odd[n] = odd_of(pairs[n]);
        }
        UNROLL for (int m = 0; m < M; m++) {
            const Vec first = splat(*x.at(m, k)), second = splat(*x.at(m, k + 1));
            UNROLL for (int n = 0; n < N; n++) acc[m][n] = fma(first, even[n], acc[m][n]);
            UNROLL for (int n = 0; n < N; n++) acc[m][n] = fma(second, odd[n], acc[m][n]);
        }
    }

    // Takes one element of the pair and never reads the other into the result.
    static INLINE void half_step(Vec& acc, const float* x, const T* w, long at, bool second) {
        Pairs pairs;
        load_pairs(pairs, w + at);
        acc = second ? fma(splat(x[1]), odd_of(pairs), acc) : fma(splat(x[0]), even_of(pairs), acc);
    }
};

#if defined(__AVX512BF16__)
struct Bf16DotPanel {  // the same layout, multiplied in pairs by the AVX512-BF16 instruction
    using T = Bf16;
    using X = Bf16;
    static constexpr int kPack = 2;

    static INLINE __m512bh splat_pair(const Bf16* x) {
        int32_t pair;
        memcpy(&pair, x, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }

    template <int M, int N, class Operand>
    static INLINE void step(Vec (&acc)[M][N], const Operand& x, long k, const T* const (&w)[N], long at) {
        Pairs pairs[N];
        UNROLL for (int n = 0; n < N; n++) load_pairs(pairs[n], w[n] + at);
        multiply(acc, x, k, pairs);
    }

    // The same of pairs that have been loaded.
    template <int M, int N, class Operand>
    static INLINE void multiply(Vec (&acc)[M][N], const Operand& x, long k, const Pairs (&pairs)[N]) {
        UNROLL for (int m = 0; m < M; m++) {
            const __m512bh row = splat_pair(x.at(m, k));
            UNROLL for (int n = 0; n < N; n++) acc[m][n].p[0] = _mm512_dpbf16_ps(acc[m][n].p[0], row, (__m512bh)pairs[n][0]);
        }
    }

    static INLINE void half_step(Vec& acc, const Bf16* x, const T* w, long at, bool second) {
        const __m512i keep = _mm512_set1_epi32(second ? (int)0xffff0000 : 0x0000ffff);
        const __m512i pairs = _mm512_and_si512(_mm512_loadu_si512(w + at), keep);
        const __m512i row = _mm512_and_si512((__m512i)splat_pair(x), keep);
        acc.p[0] = _mm512_dpbf16_ps(acc.p[0], (__m512bh)row, (__m512bh)pairs);
    }
};
using Bf16Format = Bf16DotPanel;
#else
using Bf16Format = Bf16Panel;
#endif

// How many bytes ahead of their use panels are asked for: for the first cache, and for the second; 0: not at all.
struct Prefetch {
    long near, far;

    INLINE void go_on(long) {}
};
constexpr Prefetch kNoPrefetch = {0, 0};  // that is left to the processor
constexpr Prefetch kBothCaches = {2048, 16384};
// One stream from end to end, from memory. Beside `many` rows and more the first cache alone has not the room to ask for as much as is on
// its way from memory. Beside fewer two panels side by side, which keep two sums of each row going, are met as fast as the processor asks
// by itself; one panel, whose products it waits for, a little later than with hints. A processor with AVX-512 and without bf16 products is
// Intel's for the most part, as one with tiles is, and asks for so little by itself that bf16 panels beside one to four rows come 1.5 to 1.8
// times as fast with them there, and panels of bytes 1.1 to 1.3 times as fast here.
#if defined(__AVX512F__) && (!defined(__AVX512BF16__) || defined(__AMX_BF16__))
constexpr bool kAsksByItself = false;
#else
constexpr bool kAsksByItself = true;
#endif
constexpr Prefetch streamed(int rows, int many, bool in_pairs) {
    return rows >= many || !kAsksByItself ? kBothCaches : in_pairs ? kNoPrefetch : Prefetch{4096, 0};
}

// acc[m][n] += sum over `steps` of x[m] * w[n], in order. x: Rows or SideRows; a panel's steps lie w_stride elements apart.
template <class Format, class Sum, int M, int N, class Operand>
INLINE void accumulate(Sum (&acc)[M][N], const Operand& x, const typename Format::T* const (&w)[N], long w_stride, long steps,
                       const Prefetch prefetch = kNoPrefetch) {
    const long step_bytes = w_stride * (long)sizeof(typename Format::T);
    for (long k = 0; k < steps; k++) {
        UNROLL for (int n = 0; n < N; n++) {
            const char* at = (const char*)w[n] + k * step_bytes;
            if (prefetch.near > 0) __builtin_prefetch(at + prefetch.near, 0, 3);
            if (prefetch.far > 0) __builtin_prefetch(at + prefetch.far, 0, 2);
        }
        Format::step(acc, x, k * Format::kPack, w, k * w_stride);
    }
}

// Other memory that is wanted next, in the first cache or the second: in the k-th step, what lies k * stride bytes behind these places.
// kAgain: what lies so many bytes before that is asked for again. A processor forgets what it is asked for while too much is on its way.
template <int P, int kCache = 1, long kAgain = 0>
struct Ahead {
    const char* at[P];
    long stride;

    INLINE void ask(long k) const {
        UNROLL for (int p = 0; p < P; p++) __builtin_prefetch(at[p] + k * stride, 0, 4 - kCache);
        UNROLL for (int p = 0; p < P && kAgain > 0; p++) __builtin_prefetch(at[p] + k * stride - kAgain, 0, 4 - kCache);
    }
    // After so many steps.
    INLINE void go_on(long steps) {
        UNROLL for (int p = 0; p < P; p++) at[p] += steps * stride;
    }
};

// The same, and that memory is asked for.
template <class Format, class Sum, int M, int N, class Operand, int P, int kCache, long kAgain>
INLINE void accumulate(Sum (&acc)[M][N], const Operand& x, const typename Format::T* const (&w)[N], long w_stride, long steps,
                       const Ahead<P, kCache, kAgain>& ahead) {
    for (long k = 0; k < steps; k++) {
        ahead.ask(k);
        Format::step(acc, x, k * Format::kPack, w, k * w_stride);
    }
}

template <class T>
struct FormatOf {
    using type = PlainPanel<T>;
};
template <>
struct FormatOf<Bf16> {
    using type = Bf16Format;
};

}  // namespace
