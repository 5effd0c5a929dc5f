// A vector of 16 floats on every instruction set, in the vector extensions that GCC and Clang share.
//
// The file is compiled once per instruction set, with that set's -m flags, into one library. Everything therefore lives in an
// unnamed namespace and calls no template of the standard library: a function with external linkage would be merged by the
// linker, and the portable path might then run AVX-512 code.
//
// Products and sums are fused only where the source says `fma`; the build passes -ffp-contract=off, so that a row's bits do
// not depend on how the compiler happened to unroll the loop it was computed in.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in one register
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;
constexpr long kLanes = 16;
constexpr float kInfinity = __builtin_inff();

typedef float Part __attribute__((vector_size(4 * kWidth)));
typedef int32_t PartInt __attribute__((vector_size(4 * kWidth)));
typedef uint32_t PartBits __attribute__((vector_size(4 * kWidth)));
typedef uint16_t PartHalf __attribute__((vector_size(2 * kWidth)));
typedef Part PartLoad __attribute__((aligned(4), may_alias));
typedef PartBits PartBitsLoad __attribute__((aligned(2), may_alias));
typedef PartHalf PartHalfLoad __attribute__((aligned(2), may_alias));

struct Vec {
    Part p[kParts];
};

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long round_up(long a, long b) { return ceil_div(a, b) * b; }
INLINE long clamp(long x, long low, long high) { return smaller(larger(x, low), high); }

// ---- one register ----

INLINE Part part_set(float x) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(x);
#elif defined(__AVX2__)
    return _mm256_set1_ps(x);
#else
    return Part{x, x, x, x};
#endif
}

INLINE Part part_fma(Part a, Part b, Part c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;  // two roundings: baseline x86 has no fused product
#endif
}

// fp16 -> fp32, exact.
INLINE Part part_widen(PartHalf h) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
    return _mm256_cvtph_ps((__m128i)h);
#else
    const PartBits bits = __builtin_convertvector(h, PartBits);
    const PartBits magnitude = (bits & 0x7fff) << 13;
    Part value = (Part)magnitude * part_set(0x1p112f);  // corrects the exponent's bias, of subnormals too
    const PartBits infinite = (PartBits)(magnitude >= (uint32_t)0x0f800000) & 0x7f800000;
    return (Part)((PartBits)value | infinite | ((bits & 0x8000) << 16));
#endif
}

// fp32 -> fp16, to nearest, ties to even.
INLINE PartHalf part_narrow(Part x) {
#if defined(__AVX512F__)
    return (PartHalf)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (PartHalf)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#else
    const PartBits bits = (PartBits)x, magnitude = bits & 0x7fffffff;
    const PartBits normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const PartBits subnormal = (PartBits)((Part)magnitude + part_set(0.5f)) - 0x3f000000;  // the adder rounds at 2^-24
    const PartBits small = (PartBits)(magnitude < (uint32_t)0x38800000);
    const PartBits overflow = (PartBits)(magnitude >= (uint32_t)0x477ff000);
    const PartBits nan = (PartBits)(magnitude > (uint32_t)0x7f800000);
    PartBits half = (small & subnormal) | (~small & normal);
    half = (overflow & ((nan & 0x7e00) | (~nan & 0x7c00))) | (~overflow & half);
    return __builtin_convertvector(half | ((bits >> 16) & 0x8000), PartHalf);
#endif
}

// The bits of x rounded to bf16, to nearest, ties to even, in the upper half of each lane.
INLINE PartBits part_round_bf16(Part x) {
    const PartBits bits = (PartBits)x;
    const PartBits rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const PartBits nan = (PartBits)((bits & 0x7fffffff) > (uint32_t)0x7f800000);
    return ((nan & 0x7fc00000) | (~nan & rounded)) & 0xffff0000;
}

// bf16 -> fp32. GCC knows no single instruction for the conversion of a whole register, nor for the one back.
INLINE Part part_widen_bf16(PartHalf h) {
#if defined(__AVX512F__)
    return (Part)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
    return (Part)(__builtin_convertvector(h, PartBits) << 16);
#endif
}

#if defined(__AVX512BF16__)
constexpr int kUnusual = 0x01 | 0x20 | 0x80;  // classes of numbers: quiet NaN, subnormal, signaling NaN
#endif
// x rounded to bf16, as part_round_bf16 does it. The instruction takes subnormal numbers for zero, and keeps what NaN holds.
INLINE PartHalf part_to_bf16(Part x) {
#if defined(__AVX512BF16__)
    if (__builtin_expect(_mm512_fpclass_ps_mask(x, kUnusual) == 0, true)) {
        return (PartHalf)_mm512_cvtneps_pbh(x);
    }
#endif
#if defined(__AVX512F__)
    return (PartHalf)_mm512_cvtepi32_epi16((__m512i)(part_round_bf16(x) >> 16));
#else
    return __builtin_convertvector(part_round_bf16(x) >> 16, PartHalf);
#endif
}

// The second operand where either is NaN.
INLINE Part part_max(Part a, Part b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return (Part)(((PartInt)a & (a > b)) | ((PartInt)b & ~(a > b)));
#endif
}
INLINE Part part_min(Part a, Part b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return (Part)(((PartInt)a & (a < b)) | ((PartInt)b & ~(a < b)));
#endif
}

// ---- sixteen lanes ----

#define VEC_MAP(expression)              \
    Vec r;                               \
    UNROLL for (int i = 0; i < kParts; i++) r.p[i] = (expression); \
    return r

INLINE Vec splat(float x) { VEC_MAP(part_set(x)); }
INLINE Vec zero() { VEC_MAP(Part{}); }
INLINE Vec operator+(const Vec& a, const Vec& b) { VEC_MAP(a.p[i] + b.p[i]); }
INLINE Vec operator-(const Vec& a, const Vec& b) { VEC_MAP(a.p[i] - b.p[i]); }
INLINE Vec operator*(const Vec& a, const Vec& b) { VEC_MAP(a.p[i] * b.p[i]); }
INLINE Vec operator/(const Vec& a, const Vec& b) { VEC_MAP(a.p[i] / b.p[i]); }
INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) { VEC_MAP(part_fma(a.p[i], b.p[i], c.p[i])); }
INLINE Vec max(const Vec& a, const Vec& b) { VEC_MAP(part_max(a.p[i], b.p[i])); }
INLINE Vec min(const Vec& a, const Vec& b) { VEC_MAP(part_min(a.p[i], b.p[i])); }
INLINE Vec round_bf16(const Vec& a) {
#if defined(__AVX512BF16__)
    VEC_MAP(part_widen_bf16(part_to_bf16(a.p[i])));
#else
    VEC_MAP((Part)part_round_bf16(a.p[i]));
#endif
}
INLINE Vec absolute(const Vec& a) { VEC_MAP((Part)((PartBits)a.p[i] & 0x7fffffff)); }

// To the nearest integer, ties to even, for |a| < 2^22.
INLINE Vec round_integer(const Vec& a) {
    const Vec magic = splat(12582912.0f);
    return (a + magic) - magic;
}

// NaN becomes `low`.
INLINE Vec clamp(const Vec& a, int low, int high) { return min(max(a, splat((float)low)), splat((float)high)); }

INLINE Vec load(const float* x) { VEC_MAP(*(const PartLoad*)(x + i * kWidth)); }
INLINE Vec load(const Bf16* x) {
    VEC_MAP(part_widen_bf16(*(const PartHalfLoad*)(x + i * kWidth)));
}
INLINE Vec load(const Fp16* x) { VEC_MAP(part_widen(*(const PartHalfLoad*)(x + i * kWidth))); }

INLINE void store(float* x, const Vec& a) {
    UNROLL for (int i = 0; i < kParts; i++) *(PartLoad*)(x + i * kWidth) = a.p[i];
}
INLINE void store(Bf16* x, const Vec& a) {
    UNROLL for (int i = 0; i < kParts; i++) {
        *(PartHalfLoad*)(x + i * kWidth) = part_to_bf16(a.p[i]);
    }
}
INLINE void store(Fp16* x, const Vec& a) {
    UNROLL for (int i = 0; i < kParts; i++) *(PartHalfLoad*)(x + i * kWidth) = part_narrow(a.p[i]);
}

// The first `count` lanes; the others are zero.
template <class T>
INLINE Vec load_some(const T* x, long count) {
    if (count >= kLanes) return load(x);
    T all[kLanes] = {};
    memcpy(all, x, count * sizeof(T));
    return load(all);
}

template <class T>
INLINE void store_some(T* x, const Vec& a, long count) {
    if (count >= kLanes) return store(x, a);
    T all[kLanes];
    store(all, a);
    memcpy(x, all, count * sizeof(T));
}

// One number of any element type. bf16 and fp16 convert as their vectors do.
template <class T>
INLINE float load_one(const T* x) {
    return load_some(x, 1).p[0][0];
}
INLINE float load_one(const float* x) { return *x; }

// Lanes begin <= lane < end of a; the others are `fill`.
INLINE Vec keep_lanes(const Vec& a, long begin, long end, float fill) {
    if (begin <= 0 && end >= kLanes) return a;
    PartInt lanes;
    for (int i = 0; i < kWidth; i++) lanes[i] = i;
    const PartBits others = (PartBits)part_set(fill);
    VEC_MAP((Part)((PartInt)((lanes + i * kWidth >= (int)begin) & (lanes + i * kWidth < (int)end)) ? (PartBits)a.p[i] : others));
}

// Whether a < b in some lane.
INLINE bool any_less(const Vec& a, const Vec& b) {
    PartInt any{};
    UNROLL for (int i = 0; i < kParts; i++) any |= a.p[i] < b.p[i];
    uint64_t words[kWidth / 2], all = 0;
    memcpy(words, &any, sizeof any);
    UNROLL for (int i = 0; i < kWidth / 2; i++) all |= words[i];
    return all != 0;
}

// Sums and maxima over lanes in one fixed tree: lane i with lane i + 8, then i + 4, ...
#if defined(__AVX2__)
template <class Join>
INLINE float fold_lanes(const Vec& a, const Join& join) {
#if defined(__AVX512F__)
    const __m512 all = a.p[0];
    const __m256 eight = (__m256)join(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
    const __m256 eight = (__m256)join((__m256)a.p[0], (__m256)a.p[1]);
#endif
    const __m128 four = join(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = join(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(join(two, _mm_movehdup_ps(two)));
}
struct AddParts {
    INLINE __m256 operator()(__m256 a, __m256 b) const { return _mm256_add_ps(a, b); }
    INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_add_ps(a, b); }
};
struct MaxParts {
    INLINE __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
    INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};
INLINE float sum_lanes(const Vec& a) { return fold_lanes(a, AddParts()); }
INLINE float max_lanes(const Vec& a) { return fold_lanes(a, MaxParts()); }
#else
INLINE float sum_lanes(const Vec& a) {
    float x[kLanes];
    store(x, a);
    UNROLL for (int half = 8; half > 0; half /= 2) {
        UNROLL for (int i = 0; i < half; i++) x[i] += x[i + half];
    }
    return x[0];
}
INLINE float max_lanes(const Vec& a) {
    float x[kLanes];
    store(x, a);
    UNROLL for (int half = 8; half > 0; half /= 2) {
        UNROLL for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    }
    return x[0];
}
#endif

// value * 2^n for whole n where the result is a normal number.
INLINE Vec scale_by_power(const Vec& value, const Vec& n) {
#if defined(__AVX512F__)
    VEC_MAP(_mm512_scalef_ps(value.p[i], n.p[i]));
#else
    VEC_MAP((Part)((PartBits)value.p[i] + ((PartBits)__builtin_convertvector(n.p[i], PartInt) << 23)));
#endif
}

// e^x within 2 units in the last place for -86 <= x <= 88; below, e^-86. NaN stays NaN.
INLINE Vec exp_below_88(const Vec& x) {
    const Vec y = max(splat(-86.0f), x);
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec n = fma(y, splat(1.44269504f), magic) - magic;
    const Vec f = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), y));  // y - n ln 2, ln 2 in two parts
    Vec e = fma(splat(1.39467558e-3f), f, splat(8.36934336e-3f));  // fitted to (e^f - 1 - f) / f^2 on |f| <= ln(2) / 2
    e = fma(e, f, splat(4.16662581e-2f));
    e = fma(e, f, splat(1.66665137e-1f));
    e = fma(e, f, splat(0.5f));
    return scale_by_power(fma(e * f, f, f) + splat(1.0f), n);
}

// e^x within 2 units in the last place for -86 <= x <= 88; beyond, that of the nearest bound. NaN stays NaN.
INLINE Vec exp(const Vec& x) { return exp_below_88(min(splat(88.0f), x)); }

// tanh x within about 1e-7 absolute.
INLINE Vec tanh(const Vec& x) { return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)); }

// x as it is after a trip through the element type.
INLINE Vec rounded(const Vec& x, const float*) { return x; }
INLINE Vec rounded(const Vec& x, const Bf16*) { return round_bf16(x); }
INLINE Vec rounded(const Vec& x, const Fp16*) { VEC_MAP(part_widen(part_narrow(x.p[i]))); }

#if defined(__AVX512BF16__)
// Whether part_to_bf16 takes one instruction for each.
template <int N>
INLINE bool are_usual(const Vec (&a)[N]) {
    __mmask16 unusual = 0;
    UNROLL for (int i = 0; i < N; i++) unusual |= _mm512_fpclass_ps_mask(a[i].p[0], kUnusual);
    return __builtin_expect(unusual == 0, true);
}
#endif

// Each of them, as `rounded` and `store` have it.
template <class T, int N>
INLINE void round_all(Vec (&a)[N], const T* type) {
    UNROLL for (int i = 0; i < N; i++) a[i] = rounded(a[i], type);
}
template <class T, int N>
INLINE void store_all(T* x, const Vec (&a)[N]) {
    UNROLL for (int i = 0; i < N; i++) store(x + i * kLanes, a[i]);
}
#if defined(__AVX512BF16__)
template <int N>
INLINE void round_all(Vec (&a)[N], const Bf16*) {
    if (are_usual(a)) {
        UNROLL for (int i = 0; i < N; i++) a[i].p[0] = part_widen_bf16((PartHalf)_mm512_cvtneps_pbh(a[i].p[0]));
    } else {
        UNROLL for (int i = 0; i < N; i++) a[i].p[0] = (Part)part_round_bf16(a[i].p[0]);
    }
}
template <int N>
INLINE void store_all(Bf16* x, const Vec (&a)[N]) {
    if (are_usual(a)) {
        UNROLL for (int i = 0; i < N; i++) *(PartHalfLoad*)(x + i * kLanes) = (PartHalf)_mm512_cvtneps_pbh(a[i].p[0]);
    } else {
        UNROLL for (int i = 0; i < N; i++) store(x + i * kLanes, a[i]);
    }
}
#endif

}  // namespace
