// Weights as small integers: how they lie in memory, and how they enter the inner loop of microkernel.h.
//
// A chunk is 64 bytes: 16 columns side by side, kPack integers of each. A chunk is one step of `accumulate`, whose products
// are added one after the other (with AVX512-BF16, pair after pair), exactly as if the integers were stored as bf16 or fp32:
// both hold every integer of 8 bits.
//
// A format has, beside what every panel format has, kBits and `put`, which writes one integer into a chunk full of zeros; one of 8
// bits also over another integer, and without touching those beside it, which other threads may be writing.
//
// Activations may be rounded to integers too (rounding.h): then a group's sum is a whole number, exact in any order. Of eight bits and no
// more than 1,024 columns it is below 2^24, exact in 32-bit integers and in fp32 alike, so all instruction sets agree.
#pragma once

#include "microkernel.h"

namespace {

constexpr long kChunkBytes = 64;
constexpr long kScaleBytes = kLanes * sizeof(Bf16);  // of one panel in one group, also in fp16
constexpr int kMinInteger4 = -8, kMaxInteger4 = 7;
constexpr int kMaxInteger8 = 127;  // and the least is its negative, but in the formats for the full range
constexpr int kMinInteger8 = -128;

// ---- fp32 operands ----

template <int bits>
struct IntegerColumns {  // [16] words of 32 bits, integer k of a column in the bits from bits * k on, two's complement
    static constexpr int kBits = bits, kPack = 32 / bits;

    static INLINE void put(uint8_t* chunk, int column, int k, int value) {
        if (bits == 8) {
            chunk[4 * column + k] = (uint8_t)value;
            return;
        }
        uint32_t word;
        memcpy(&word, chunk + 4 * column, 4);
        word |= ((uint32_t)value & ((1u << bits) - 1)) << (bits * k);
        memcpy(chunk + 4 * column, &word, 4);
    }

    static INLINE Vec widen(const uint8_t* chunk, int k) {
#if defined(__AVX512F__)
        if (bits == 4) {  // one look-up, which heeds the four lowest bits alone, in place of a shift and a conversion
            const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
            const __m512i words = _mm512_loadu_si512(chunk);
            VEC_MAP(_mm512_permutexvar_ps(k == 0 ? words : _mm512_srli_epi32(words, bits * k), table));
        }
#endif
        VEC_MAP(__builtin_convertvector(
            (PartInt)(*(const PartBitsLoad*)(chunk + 4 * i * kWidth) << (32 - bits - bits * k)) >> (32 - bits), Part));
    }
};

template <class Columns>
struct IntegerPanel : Columns {
    using T = uint8_t;
    using X = float;

    template <int M, int N, class Operand>
    static INLINE void step(Vec (&acc)[M][N], const Operand& x, long k, const T* const (&w)[N], long at) {
        UNROLL for (int i = 0; i < Columns::kPack; i++) {
            Vec column[N];
            UNROLL for (int n = 0; n < N; n++) column[n] = Columns::widen(w[n] + at, i);
            UNROLL for (int m = 0; m < M; m++) {
                const Vec row = splat(*x.at(m, k + i));
                UNROLL for (int n = 0; n < N; n++) acc[m][n] = fma(row, column[n], acc[m][n]);
            }
        }
    }
};

// ---- bf16 operands ----

#if defined(__AVX512BF16__)

// The two bytes of |integer| in bf16, by the integer's seven low bits.
struct Bf16Bytes {
    uint8_t low[128] = {}, high[128] = {};

    constexpr Bf16Bytes() {
        for (int value = 1; value < 128; value++) {
            int exponent = 6;
            while (value >> exponent == 0) exponent--;
            const int bits = (127 + exponent) << 7 | (value << (7 - exponent) & 0x7f);
            low[value] = (uint8_t)bits;
            high[value] = (uint8_t)(bits >> 8);
        }
    }
};
alignas(64) constexpr Bf16Bytes kBf16Bytes;

// Sign and magnitude; in each 128 bits first the first pairs of four columns, then their second ones. In the full range what would
// be the negative zero is -128, which costs two instructions.
template <bool kFullRange>
struct Integer8Pairs {
    static constexpr int kBits = 8, kPack = 4;

    static INLINE void put(uint8_t* chunk, int column, int k, int value) {
        const int at = column / 4 * 16 + k / 2 * 8 + column % 4 * 2 + k % 2;
        chunk[at] = (uint8_t)(__builtin_abs(value) | (value >> 31 & 0x80));
    }

    // Two look-ups, which do not heed the sign, give the bytes of 64 numbers; the sign goes on top, and interleaving joins them. Where there are
    // tiles a look-up among 128 bytes takes 1.6 times as long as one among 64, and of 64 and more the bytes are 2 |integer| and 0x42.
    static INLINE void widen(const uint8_t* chunk, __m512bh (&pairs)[2]) {
        const __m512i *low_table = (const __m512i*)kBf16Bytes.low, *high_table = (const __m512i*)kBf16Bytes.high;
        const __m512i bytes = _mm512_loadu_si512(chunk), sign = _mm512_set1_epi8((char)0x80);
#if defined(__AMX_BF16__)
        const __mmask64 are_below_64 = _mm512_testn_epi8_mask(bytes, _mm512_set1_epi8(0x40));
        const __m512i low = _mm512_mask_permutexvar_epi8(_mm512_add_epi8(bytes, bytes), are_below_64, bytes, low_table[0]);
        const __m512i magnitude = _mm512_mask_permutexvar_epi8(_mm512_set1_epi8(0x42), are_below_64, bytes, high_table[0]);
#else
        const __m512i low = _mm512_permutex2var_epi8(low_table[0], bytes, low_table[1]);
        const __m512i magnitude = _mm512_permutex2var_epi8(high_table[0], bytes, high_table[1]);
#endif
        __m512i high = _mm512_ternarylogic_epi32(magnitude, bytes, sign, 0xf8);  // magnitude | (bytes & sign)
        if (kFullRange) high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(bytes, sign), _mm512_set1_epi8((char)0xc3));
        pairs[0] = (__m512bh)_mm512_unpacklo_epi8(low, high);
        pairs[1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
    }
};

// Of both values of bit 4, which is a bit of the next integer.
struct Bf16Words {
    uint16_t bits[32] = {};

    constexpr Bf16Words() {
        for (int i = 0; i < 32; i++) {
            const int magnitude = i % 16 < 8 ? i % 16 : 16 - i % 16;
            const uint8_t low = kBf16Bytes.low[magnitude], high = kBf16Bytes.high[magnitude];
            bits[i] = (uint16_t)(high << 8 | low | (i % 16 < 8 ? 0 : 0x8000));
        }
    }
};
alignas(64) constexpr Bf16Words kBf16Words;

struct Integer4Pairs {  // two's complement; [16] words of 32 bits, the four even integers of a column in the lower half
    static constexpr int kBits = 4, kPack = 8;

    static INLINE void put(uint8_t* chunk, int column, int k, int value) {
        chunk[column * 4 + k % 2 * 2 + k / 4] |= (uint8_t)((value & 15) << (k / 2 % 2 * 4));
    }

    // A look-up of 16-bit words heeds five bits of its index, so that shifts alone bring one integer after the other there.
    static INLINE void widen(const uint8_t* chunk, __m512bh (&pairs)[4]) {
        const __m512i words = _mm512_loadu_si512(chunk), table = _mm512_load_si512(kBf16Words.bits);
        UNROLL for (int i = 0; i < 4; i++) {
            pairs[i] = (__m512bh)_mm512_permutexvar_epi16(i == 0 ? words : _mm512_srli_epi16(words, 4 * i), table);
        }
    }
};

template <class Columns>
struct IntegerDotPanel : Columns {
    static constexpr bool kIsWidened = true;  // to bf16 numbers, before anything else
    using T = uint8_t;
    using X = Bf16;
    static constexpr int kPairs = Columns::kPack / 2;

    template <int M, int N, class Operand>
    static INLINE void step(Vec (&acc)[M][N], const Operand& x, long k, const T* const (&w)[N], long at) {
        __m512bh column[N][kPairs];
        UNROLL for (int n = 0; n < N; n++) Columns::widen(w[n] + at, column[n]);
        UNROLL for (int pair = 0; pair < kPairs; pair++) {
            UNROLL for (int m = 0; m < M; m++) {
                const __m512bh row = Bf16DotPanel::splat_pair(x.at(m, k + 2 * pair));
                UNROLL for (int n = 0; n < N; n++) {
                    acc[m][n].p[0] = _mm512_dpbf16_ps(acc[m][n].p[0], row, column[n][pair]);
                }
            }
        }
    }
};
#endif

// ---- integer operands ----

struct RowScale {
    float step, inverse;  // of a group's integers
};

// So that the largest number becomes 127.
INLINE RowScale eight_bits(float largest) { return {largest / kMaxInteger8, kMaxInteger8 / largest}; }

#if defined(__AVX512VNNI__)
struct RoundedPanel {  // [16] words; each byte is an integer plus 128, since one side of the instruction has no sign
    using T = uint8_t;
    using X = int8_t;
    static constexpr int kBits = 8, kPack = 4, kMost = kMaxInteger8, kExcess = 128;

    static INLINE RowScale scale_of(float largest) { return eight_bits(largest); }
    static INLINE void store_integers(int8_t* to, const Vec& integers) {
        _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(integers.p[0])));
    }
    static INLINE void put(uint8_t* chunk, int column, int k, int value) { chunk[4 * column + k] = (uint8_t)(value + kExcess); }

    struct Sum {
        __m512i p;
    };

    template <int M, int N, class Operand>
    static INLINE void step(Sum (&acc)[M][N], const Operand& x, long k, const T* const (&w)[N], long at) {
        __m512i column[N];
        UNROLL for (int n = 0; n < N; n++) column[n] = _mm512_loadu_si512(w[n] + at);
        UNROLL for (int m = 0; m < M; m++) {
            int32_t word;
            memcpy(&word, x.at(m, k), 4);
            const __m512i row = _mm512_set1_epi32(word);
            UNROLL for (int n = 0; n < N; n++) {  // for the intrinsic GCC copies each sum twice
                asm("vpdpbusd %2, %1, %0" : "+v"(acc[m][n].p) : "v"(column[n]), "v"(row));
            }
        }
    }

    static INLINE Sum nothing() { return {_mm512_setzero_si512()}; }
    // excess: kExcess times the sum of the row's integers.
    static INLINE Vec sum_of(const Sum& acc, int32_t excess) { return {_mm512_cvtepi32_ps(_mm512_sub_epi32(acc.p, _mm512_set1_epi32(excess)))}; }
};
#else
struct RoundedPanel : IntegerPanel<IntegerColumns<8>> {  // fp32 holds every sum of no more than 1,024 columns
    using Sum = Vec;
    static constexpr int kMost = kMaxInteger8, kExcess = 0;
    static INLINE RowScale scale_of(float largest) { return eight_bits(largest); }
    static INLINE void store_integers(float* to, const Vec& integers) { store(to, integers); }
    static INLINE Vec nothing() { return zero(); }
    static INLINE Vec sum_of(const Vec& acc, int32_t) { return acc; }
};
#endif

// Integers of four bits times a factor of their group, a whole number up to 15, are integers of eight bits, and an output has one scale for all of
// them: so rows of bytes (twin_rows.h) meet RoundedPanel's bytes in the end. Only a weight that was quantised here has such factors.
#if defined(__AVX512VNNI__)
#define NOVA_FACTORS
struct FactorPanel {  // [16] words; byte i has integer i of a column in its lower half and integer i + 4 in its upper one
    using T = uint8_t;
    static constexpr int kBits = 4, kPack = 8, kSteps = kPack / RoundedPanel::kPack;
    static constexpr bool kHasFactors = true;

    // A negative factor is a positive one of the negative integers. Plus 7 or 8 those of either kind are 0 to 15.
    static INLINE void put(uint8_t* chunk, int column, int k, int value, bool is_negative) {
        chunk[4 * column + k % 4] |= (uint8_t)(((is_negative ? 7 - value : 8 + value) & 15) << (k / 4 * 4));
    }
    // Of a column in a group: its factor, and what makes RoundedPanel's byte of the product.
    static INLINE void put_factor(uint8_t* factors, int column, int factor, bool is_negative) {
        factors[2 * column] = (uint8_t)factor;
        factors[2 * column + 1] = (uint8_t)(RoundedPanel::kExcess - (is_negative ? 7 : 8) * factor);
    }

    // In 16 bits, for integers in the lower halves of bytes and in the upper ones.
    struct Group {
        __m512i factors[kSteps];
    };
    static INLINE __m512i words_at(const uint8_t* factors) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)factors)); }
    static INLINE Group group_of(const __m512i& words) {
        const __m512i bytes = _mm512_set4_epi32((int)0x800c800c, (int)0x80088008, (int)0x80048004, (int)0x80008000);
        const __m512i factors = _mm512_shuffle_epi8(words, bytes);
        return {factors, _mm512_slli_epi16(factors, 12)};
    }

    // Products of factors and integers that are 0 to 15, in the places of two of RoundedPanel's chunks. None reaches the byte beside it: of what
    // is 16 times too large for its place 16 bits are left, which are those above.
    static INLINE void multiply(const uint8_t* chunk, const Group& group, __m512i (&bytes)[kSteps]) {
        const __m512i words = _mm512_loadu_si512(chunk);
        bytes[0] = _mm512_mullo_epi16(_mm512_and_si512(words, _mm512_set1_epi16(0x0f0f)), group.factors[0]);
        bytes[1] = _mm512_mulhi_epu16(_mm512_and_si512(words, _mm512_set1_epi16((short)0xf0f0)), group.factors[1]);
    }

    // What makes RoundedPanel's bytes of them.
    static INLINE __m512i offsets_of(const __m512i& words) {
        return _mm512_shuffle_epi8(words, _mm512_set4_epi32(0x0d0d0d0d, 0x09090909, 0x05050505, 0x01010101));
    }
    // What makes them products of integers that have signs, in 32 bits.
    static INLINE __m512i centers_of(const __m512i& words) {
        return _mm512_sub_epi32(_mm512_srli_epi32(words, 8), _mm512_set1_epi32(RoundedPanel::kExcess));
    }
};
#endif

template <class Format, class = void>
constexpr long kOwnBytes = 0;  // of a panel, beside those of its groups: what has factors has its scales there
template <class Format>
constexpr long kOwnBytes<Format, std::enable_if_t<Format::kHasFactors>> = kScaleBytes;

// The formats for activations of type T.
template <class T>
struct IntegerFormats {
    using Bits8 = IntegerPanel<IntegerColumns<8>>;
    using FullBits8 = Bits8;
    using Bits4 = IntegerPanel<IntegerColumns<4>>;
};
#if defined(__AVX512BF16__)
template <>
struct IntegerFormats<Bf16> {
    using Bits8 = IntegerDotPanel<Integer8Pairs<false>>;
    using FullBits8 = IntegerDotPanel<Integer8Pairs<true>>;
    using Bits4 = IntegerDotPanel<Integer4Pairs>;
};
#endif

}  // namespace
