// bf16 rows over integers of eight bits, or of four times factors, one scale for each output, as whole numbers: where processors multiply bytes.
//
// A row becomes integers of 16 bits, in steps of a power of two, 2^-14 of its largest number or less, so that a bf16 number enters as it is
// unless it is below 1/128 of that one. (A largest number for which both bytes have no room takes steps twice as long.) Each is 256 times an
// upper byte plus a lower one, both signed: two rows of bytes, whose products with the weights' bytes are exact, in any order and for any
// number of rows: below 2^31 for 65,536 columns. So nothing is widened, neither in registers nor in memory.
//
// A number far above the rest of its row leaves the rest few bits. Where the rest would lose 0.14 % of its norm or more, about what rounding
// an output to bf16 takes, which would show if what is above had small weights, the row is followed by what was rounded away, in steps of
// 2^-15 of the first ones, and the products of both are added. The row alone decides that, so its bits are the same in every batch.
#pragma once

#include <cmath>

#include "factors.h"
#include "rounding.h"
#include "tiled_whole.h"

namespace {

// Whether the layer was computed here.
template <class T>
INLINE bool twin_quantized(const QuantizedArguments&, const T*, long, void*, long, long) { return false; }
// Above the norm of what the integers of a row lack.
template <class T>
INLINE double twins_lose(const T*, long) { return 0.0; }

#if defined(__AVX512VNNI__)

constexpr long kTwinColumns = 1L << 16;  // whose products are below 2^31 together
constexpr long kTwinLine = 64;          // numbers whose bytes lie side by side
constexpr float kTwinRest = 1024.0f;    // in steps; the largest number has 2^14 or more, or a little less
constexpr float kTwinLost = 0x1p-19f;   // of the rest, both squared and added up
constexpr float kTwinFiner = 0x1p-15f;  // steps of what was rounded away
constexpr long kTwinRows = 256;         // at a time: what they become takes memory for good
constexpr long kTwinBytes = 3L << 18;   // of them, which shall stay in the second cache
constexpr long kTwinTileRows = 5;       // fewer take less time without tiles
constexpr long kFactorTileRows = 3;     // of four bits: registers have no room for what is widened beside more

// Where bytes lie: lines of 64 columns, so many bytes from one to the next; rows two by two, upper and lower.
struct TwinPlace {
    bool are_tiles;
    long row, line, tile;  // bytes; of 16 rows
    INLINE long at(long index) const { return index / kLanes * tile + index % kLanes * row; }
};

struct TwinRows {
    int8_t* bytes;
    TwinPlace place;
    RoundedRows<RoundedPanel> rounded;  // scales and excesses of the rows of bytes
    long k;

    // 64 numbers of a row as integers, sixteen after sixteen.
    struct Integers {
        __m512i words[4];
    };

    // Bytes of a line of row `index`; what they add up to goes to `sums`.
    INLINE void store_line(long index, long line, const Integers& it, __m512i (&sums)[2]) const {
        // Narrowing goes by quarters of registers: word i of quarter j is to be word j of quarter i.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), half = _mm512_set1_epi16(128);
        __m512i upper[2], lower[2];
        UNROLL for (int i = 0; i < 2; i++) {
            const __m512i both = _mm512_packs_epi32(it.words[2 * i], it.words[2 * i + 1]);
            upper[i] = _mm512_srai_epi16(_mm512_add_epi16(both, half), 8);
            lower[i] = _mm512_srai_epi16(_mm512_slli_epi16(both, 8), 8);
        }
        const __m512i uppers = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(upper[0], upper[1]));
        const __m512i lowers = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(lower[0], lower[1]));
        int8_t* to = bytes + place.at(2 * index) + line * place.line;
        _mm512_storeu_si512(to, uppers);
        _mm512_storeu_si512(to + place.row, lowers);
        sums[0] = _mm512_dpbusd_epi32(sums[0], _mm512_set1_epi8(1), uppers);
        sums[1] = _mm512_dpbusd_epi32(sums[1], _mm512_set1_epi8(1), lowers);
    }

    INLINE void set(long index, float step, const __m512i (&sums)[2]) const {
        rounded.scales[2 * index] = 256.0f * step;
        rounded.scales[2 * index + 1] = step;
        for (int i = 0; i < 2; i++) rounded.excesses[2 * index + i] = RoundedPanel::kExcess * _mm512_reduce_add_epi32(sums[i]);
    }

    // 64 numbers of a row from its number `at` on, zeros behind its end.
    INLINE void load_line(const Bf16* x, long at, Vec (&numbers)[4]) const {
        if (k - at >= kTwinLine) {
            UNROLL for (int i = 0; i < 4; i++) numbers[i] = load(x + at + i * kLanes);
        } else {
            for (int i = 0; i < 4; i++) numbers[i] = k - at > i * kLanes ? load_some(x + at + i * kLanes, k - at - i * kLanes) : zero();
        }
    }

    // The bits of the largest magnitude of a row as a float; of infinity or more if one of its numbers is not finite.
    INLINE uint32_t largest_bits(const Bf16* x) const {
        const __m512i magnitude = _mm512_set1_epi16(0x7fff);
        __m512i top[2] = {};
        for (long at = 0; at < k; at += kTwinLine) {
            for (int i = 0; i < 2; i++) {
                const long left = k - at - i * 2 * kLanes;
                const __m512i some = left >= 2 * kLanes ? _mm512_loadu_si512(x + k - left)
                                                        : _mm512_maskz_loadu_epi16(left > 0 ? (1u << left) - 1 : 0, x + k - left);
                top[i] = _mm512_max_epu16(_mm512_and_si512(some, magnitude), top[i]);
            }
        }
        const __m512i both = _mm512_max_epu16(top[0], top[1]);
        return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_slli_epi32(both, 16), _mm512_and_si512(both, _mm512_set1_epi32(0xffff0000))));
    }

    // Row `index`. Returns whether it has to be followed by another one.
    bool round(const Bf16* x, long index) const {
        const uint32_t bits = largest_bits(x);
        const RowScale scale = scale_for(bits);
        const Vec inverse = splat(scale.inverse);
        const __m512 below = _mm512_set1_ps(kTwinRest);
        Vec lost[4], rest[4];
        for (int i = 0; i < 4; i++) lost[i] = rest[i] = zero();
        __m512i sums[2] = {};
        for (long line = 0; line * kTwinLine < k; line++) {
            Integers integers;
            Vec steps[4];
            load_line(x, line * kTwinLine, steps);
            UNROLL for (int i = 0; i < 4; i++) {
                steps[i] = steps[i] * inverse;
                integers.words[i] = _mm512_cvtps_epi32(steps[i].p[0]);
                const Vec away = steps[i] - Vec{_mm512_cvtepi32_ps(integers.words[i])};
                const __mmask16 are_small = _mm512_cmp_ps_mask(absolute(steps[i]).p[0], below, _CMP_LT_OQ);
                lost[i] = fma(away, away, lost[i]);
                rest[i].p[0] = _mm512_mask3_fmadd_ps(steps[i].p[0], steps[i].p[0], rest[i].p[0], are_small);
            }
            store_line(index, line, integers, sums);
        }
        set(index, bits < 0x7f800000 ? scale.step : __builtin_nanf(""), sums);
        return sum_lanes((lost[0] + lost[1]) + (lost[2] + lost[3])) > kTwinLost * sum_lanes((rest[0] + rest[1]) + (rest[2] + rest[3]));
    }

    // Above the norm of what the integers of a row lack.
    double lost(const Bf16* x) const {
        const RowScale scale = scale_for(largest_bits(x));
        const Vec inverse = splat(scale.inverse);
        Vec lost = zero();
        for (long at = 0; at < k; at += kTwinLine) {
            Vec numbers[4];
            load_line(x, at, numbers);
            for (const Vec& some : numbers) {
                const Vec steps = some * inverse, away = steps - round_integer(steps);
                lost = fma(away, away, lost);
            }
        }
        return scale.step * std::sqrt((double)sum_lanes(lost)) + kSmallestNumber * std::sqrt((double)k);
    }

    // Row `to`: what was rounded away of row `index`.
    void round_rest(const Bf16* x, long index, long to) const {
        const float step = rounded.scales[2 * index + 1];
        const Vec inverse = splat(1.0f / step), finer = splat(1.0f / kTwinFiner);
        __m512i sums[2] = {};
        for (long line = 0; line * kTwinLine < k; line++) {
            Integers integers;
            Vec numbers[4];
            load_line(x, line * kTwinLine, numbers);
            for (int i = 0; i < 4; i++) {
                const Vec steps = numbers[i] * inverse;
                integers.words[i] = _mm512_cvtps_epi32(((steps - round_integer(steps)) * finer).p[0]);
            }
            store_line(to, line, integers, sums);
        }
        set(to, step * kTwinFiner, sums);
    }

  private:
    // bits: of the row's largest magnitude. 255 * 128 is the one that is too large for two signed bytes.
    static INLINE RowScale scale_for(uint32_t bits) {
        const bool is_full = (bits & 0x7f0000) == 0x7f0000;
        const uint32_t word = (bits & 0x7f800000) - ((is_full ? 13 : 14) << 23);
        float largest, step;
        memcpy(&largest, &bits, 4);
        memcpy(&step, &word, 4);
        return largest > kSmallestNumber ? RowScale{step, 1.0f / step} : RowScale{0.0f, 0.0f};
    }
};

INLINE double twins_lose(const Bf16* x, long k) {
    TwinRows rows{};
    rows.k = k;
    return rows.lost(x);
}

// Rows that are followed by others, and what is summed of both.
struct Followed {
    const long* follows;  // [m]: which row follows one, of those behind the m; 0: none
    float* sums;          // [2][count][width]: of the followed rows and of those that follow
    long m, count, width;

    // Where the sums of a row go; null: they are all of it.
    INLINE float* place(long row) const {
        if (row >= m) return sums + (count + row - m) * width;
        return count > 0 && follows[row] ? sums + (follows[row] - m) * width : nullptr;
    }
};

// Where the sums of two rows of bytes go: they are one row's.
template <class Out>
struct TwinOutput {
    Out output;
    const Followed& followed;

    template <int N>
    INLINE void write_all(long row, const long (&panels)[N], const float* sums, long count) const {
        alignas(64) float values[kLanes / 2 * N * kLanes];
        join<N>(sums, count, values);
        if (followed.count == 0) return output.template write_all<N>(row / 2, panels, values, count / 2);
        write_each<N>(row / 2, panels, values, count / 2, [&](long one, const float* its) { output.template write_all<N>(one, panels, its, 1); });
    }
    template <int P>
    INLINE void write_now(long row, long panel, const float* sums, long count) const {
        alignas(64) float values[kLanes * P * kLanes];
        join<P>(sums, count, values);
        if (followed.count == 0) return output.template write_now<P>(row / 2, panel, values, count / 2);
        long panels[P];
        UNROLL for (int p = 0; p < P; p++) panels[p] = panel + p;
        write_each<P>(row / 2, panels, values, count / 2, [&](long one, const float* its) { output.template write_now<P>(one, panel, its, 1); });
    }
    INLINE void finish() const { output.finish(); }

  private:
    template <int N>
    static INLINE void join(const float* sums, long count, float* to) {
        if (count % 2 != 0) abort();
        for (long m = 0; m < count; m += 2) {
            UNROLL for (int n = 0; n < N; n++) store(to + (m / 2 * N + n) * kLanes, load(sums + (m * N + n) * kLanes) + load(sums + ((m + 1) * N + n) * kLanes));
        }
    }

    // write(row, its values) of each row that is whole by itself; the sums of the others are kept.
    template <int N, class Write>
    NOINLINE void write_each(long row, const long (&panels)[N], const float* values, long count, const Write& write) const {
        for (long i = 0; i < count; i++, values += N * kLanes) {
            float* kept = followed.place(row + i);
            if (kept == nullptr) write(row + i, values);
            for (int n = 0; n < N && kept != nullptr; n++) store(kept + panels[n] * kLanes, load(values + n * kLanes));
        }
    }
};

// Whether m rows pass over the layer by tiles. They have the same bits.
INLINE bool twins_take_tiles(const QuantizedArguments& args, long m) {
#if defined(NOVA_TILES)
    constexpr long depth = kRunSteps * RoundedPanel::kPack;
    if (args.layer.k == 0 || args.layer.k % depth != 0) return false;
    return args.bits == 8 ? m >= kTwinTileRows : m >= kFactorTileRows && args.group % depth == 0;
#else
    return false;
#endif
}

// y [m, n] of rows that are bytes, but for those that are followed.
INLINE void multiply_twins(const QuantizedArguments& args, const TwinRows& rows, const Followed& followed, void* y, long threads) {
    const long count = 2 * (followed.m + followed.count);
    const auto* packed = (const uint8_t*)args.layer.packed;
#if defined(NOVA_TILES)
    if (rows.place.are_tiles) {
        const TileRows tiles{(const char*)rows.bytes, rows.place.row, rows.place.line, rows.place.tile};
        using Out = TwinOutput<TileOutput>;
        const Out output{{args.layer, {args.layer, y, 0}, may_pass_by(args.layer, y)}, followed};
        if (args.bits == 4) return TiledWhole<Out, FactorPanels>{args, FactorPanels(args, count), tiles, count, output, {rows.rounded, 0}}.run(threads);
        return TiledWhole<Out, BytePanels>{args, BytePanels(args, count), tiles, count, output, {rows.rounded, 0}}.run(threads);
    }
#endif
    using Out = TwinOutput<Output<Bf16>>;
    const Out output{{args.layer, y, 0}, followed};
    const Operands<int8_t> operands{0, count, nullptr, 0, rows.place.tile / kLanes, {rows.bytes, rows.place.row}};
    if (args.bits == 4) return multiply_factors(args, operands, output, rows.rounded, threads);
    const Records<RoundedPanel> records(args);
    using Tile = QuantizedTile<Out, RoundedPanel, ScaledRows<RoundedPanel>>;
    run_tile(Tile{records, packed, operands, output, args.half_scales != 0, {rows.rounded, 0}}, args.layer, threads);
}

// The rows of y that are followed.
INLINE void add_followed(const QuantizedArguments& args, const Followed& followed, void* y, long threads) {
    const Output<Bf16> output{args.layer, y, 0};
    parallel_ranges(followed.m, 1, kElementWork * followed.count * args.layer.n, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const float* sums = followed.place(row);
            if (sums == nullptr) continue;
            const float* more = followed.place(followed.follows[row]);
            for (long panel = 0; panel < ceil_div(args.layer.n, kLanes); panel++) {
                alignas(64) float values[kLanes];
                store(values, load(sums + panel * kLanes) + load(more + panel * kLanes));
                output.write_sums(row, &panel, values, 1, 1);
            }
        }
    });
}

// Of no more than kTwinRows rows.
INLINE void twin_rows(const QuantizedArguments& args, const Bf16* x, long x_stride, void* y, long m, long threads) {
    static thread_local Scratch number_memory, index_memory, byte_memory, sums_memory;
    const long k = args.layer.k, depth = round_up(k, kTwinLine), most = 4 * m;  // each row may be followed by another one, both of two
    const bool are_tiles = twins_take_tiles(args, m);
    const TwinPlace place{are_tiles, are_tiles ? kTwinLine : depth, are_tiles ? kLanes * kTwinLine : kTwinLine, kLanes * depth};
    float* scales = number_memory.get<float>(2 * most);
    long* follows = index_memory.get<long>(m);
    int8_t* bytes = byte_memory.get<int8_t>(round_up(most, 2 * kLanes) * depth);
    const TwinRows rows{bytes, place, {bytes, scales, (int32_t*)scales + most, depth, 1}, k};
    parallel_ranges(m, 4, kElementWork * m * k, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) follows[row] = rows.round(x + row * x_stride, row);
    });
    Followed followed{follows, nullptr, m, 0, round_up(args.layer.n, kLanes)};
    for (long row = 0; row < m; row++) {
        if (follows[row]) follows[row] = m + followed.count++;
    }
    if (followed.count == 0) return multiply_twins(args, rows, followed, y, threads);
    followed.sums = sums_memory.get<float>(2 * followed.count * followed.width);
    parallel_ranges(m, 1, kElementWork * followed.count * k, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            if (follows[row]) rows.round_rest(x + row * x_stride, row, follows[row]);
        }
    });
    multiply_twins(args, rows, followed, y, threads);
    add_followed(args, followed, y, threads);
}

INLINE bool twin_quantized(const QuantizedArguments& args, const Bf16* x, long x_stride, void* y, long m, long threads) {
    if (!has_twins<Bf16>(args)) return false;
    const bool is_apt = args.bits == 8 ? args.group >= args.layer.k : args.group <= kFactorGroup;
    if (args.layer.k > kTwinColumns || !is_apt) abort();  // as `quantizing` of kernels.linear.quantized sees to
    const long number_bytes = args.layer.out_dtype == args.layer.dtype ? sizeof(Bf16) : sizeof(float);
    const long most = clamp(kTwinBytes / (2 * larger(args.layer.k, 1)) / kLanes * kLanes, kLanes, kTwinRows);
    const long pass = round_up(ceil_div(m, larger(1, ceil_div(m, most))), kLanes);  // all of about the same size
    for (long first = 0; first < m; first += pass) {
        void* to = (char*)y + first * args.layer.n * number_bytes;
        twin_rows(args, x + first * x_stride, x_stride, to, smaller(pass, m - first), threads);
    }
    return true;
}

#endif

}  // namespace
