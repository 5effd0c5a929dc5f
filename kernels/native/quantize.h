// From a weight, or from integers and scales that are there already, to what quantized.h reads.
//
// `kernels.linear.reference.quantize` is the definition. A scale is a bf16 number; each integer is that multiple of the
// scale which is nearest to the weight. 16 columns are computed at once, each in its own lane.
#pragma once

#include <cmath>

#include "quantized.h"

namespace {

constexpr int kCandidates = 4, kMaxFactor = 15;  // factors of a group that are tried, with either sign
constexpr double kCandidateWork = 2.0;           // operations for a weight and one of them

INLINE Vec select_positive(const Vec& condition, const Vec& a, const Vec& b) {
    VEC_MAP((Part)(((PartBits)a.p[i] & (PartBits)(condition.p[i] > 0.0f)) |
                   ((PartBits)b.p[i] & ~(PartBits)(condition.p[i] > 0.0f))));
}

// The weight of largest magnitude in each column of w [count][16], with its sign; the first of several.
INLINE Vec largest_weight(const float* w, long count) {
    Vec largest = zero();
    for (long k = 0; k < count; k++) {
        const Vec value = load(w + k * kLanes);
        largest = select_positive(absolute(value) - absolute(largest), value, largest);
    }
    return largest;
}

// NaN for each column that holds NaN or infinity, else zero.
INLINE Vec not_finite(const float* w, long count) {
    Vec sum = zero();
    for (long k = 0; k < count; k++) sum = fma(load(w + k * kLanes), zero(), sum);
    return sum;
}

template <int kBits>
struct Quantizer;

template <>
struct Quantizer<8> {
    static constexpr int kLow = -kMaxInteger8, kHigh = kMaxInteger8;
    static constexpr double kWork = kCandidateWork;
    // The magnitude that a group's scale is made for: no smaller than its output's peak.
    static INLINE Vec size(const Vec& largest, const Vec& peak) { return max(absolute(largest), peak); }
    static INLINE Vec scale(const float*, long, const Vec& largest, const Vec& peak) {
        return size(largest, peak) / splat((float)kMaxInteger8);
    }
};

// A group's scale is the output's unit times a whole number, of either sign: the one that loses least, of those by which its largest weight
// becomes about 8. So all of an output's weights are its unit times integers of eight bits.
template <>
struct Quantizer<4> {
    static constexpr int kLow = kMinInteger4, kHigh = kMaxInteger4;
    static constexpr double kWork = 2 * kCandidates * kCandidateWork;

    static INLINE Vec size(const Vec& largest, const Vec&) { return absolute(largest); }
    static INLINE Vec scale(const float* w, long count, const Vec& largest, const Vec& unit) {
        const Vec steps = splat(1.0f) / unit, usual = round_integer(absolute(largest) / unit / splat((float)-kLow));
        Vec least = splat(__FLT_MAX__), best = zero();
        for (int candidate = 0; candidate < 2 * kCandidates; candidate++) {
            const Vec positive = clamp(usual + splat((float)(1 - candidate / 2)), 1, kMaxFactor);
            const Vec factor = select_positive(candidate % 2 ? largest : zero() - largest, positive, zero() - positive);
            const Vec inverse = splat(1.0f) / factor;
            Vec lost = zero();
            for (long k = 0; k < count; k++) {
                const Vec value = load(w + k * kLanes) * steps;
                const Vec away = value - clamp(round_integer(value * inverse), kLow, kHigh) * factor;
                lost = fma(away, away, lost);
            }
            best = select_positive(least - lost, factor, best);
            least = select_positive(least - lost, lost, least);
        }
        return best * unit;
    }
};

// The unit of outputs whose largest magnitudes these are: four bits, so that its products with factors are bf16 numbers.
INLINE Vec unit_of(const Vec& largest) {
    const Vec unit = largest / splat((float)(kMaxFactor * -kMinInteger4));
    VEC_MAP((Part)(((PartBits)unit.p[i] + 0x80000u) & 0xfff00000u));
}

// What is added up of 16 outputs: the squares of what rounding takes away from their weights, and those of the weights.
struct Squares {
    Vec lost = zero(), weights = zero();

    // To [2][n], the outputs from `first` on.
    void store_to(float* squares, long first, long n) const {
        store_some(squares + first, lost, n - first);
        store_some(squares + n + first, weights, n - first);
    }
};

// One group of one panel: w [count][16] to its scales, or factors, and to integers in the chunks that lie chunk_stride apart.
// shared: what is the same for all groups of an output: at four bits its unit; at eight its peak, or zero.
template <class Format>
void quantize_group(const float* w, long count, const Vec& shared, uint8_t* scales, uint8_t* chunks, long chunk_stride, Squares& squares) {
    using Rule = Quantizer<Format::kBits>;
    constexpr bool kHasFactors = kOwnBytes<Format> > 0;
    const Vec largest = largest_weight(w, count), usable = Rule::size(largest, shared) - splat(kSmallestNumber);
    const Vec scale = round_bf16(select_positive(usable, Rule::scale(w, count, largest, shared), zero()));
    const Vec divisor = select_positive(usable, scale, splat(1.0f));
    float factors[kLanes];
    if constexpr (kHasFactors) {
        store(factors, scale / select_positive(shared, shared, splat(1.0f)));
        for (int column = 0; column < kLanes; column++) {
            Format::put_factor(scales, column, (int)std::fabs(factors[column]) & kMaxFactor, factors[column] < 0.0f);
        }
    } else {
        store((Bf16*)scales, scale + not_finite(w, count));
    }
    for (long k = 0; k < count; k++) {
        float integers[kLanes];
        const Vec weight = load(w + k * kLanes), value = select_positive(usable, weight, zero());
        const Vec integer = clamp(round_integer(value / divisor), Rule::kLow, Rule::kHigh), lost = weight - integer * scale;
        store(integers, integer);
        squares.lost = fma(lost, lost, squares.lost);
        squares.weights = fma(weight, weight, squares.weights);
        uint8_t* chunk = chunks + k / Format::kPack * chunk_stride;
        for (int column = 0; column < kLanes; column++) {
            if constexpr (kHasFactors) {
                Format::put(chunk, column, k % Format::kPack, (int)integers[column], factors[column] < 0.0f);
            } else {
                Format::put(chunk, column, k % Format::kPack, (int)integers[column]);
            }
        }
    }
}

// Rows [first, first + 16) of weight [n, k] as [k][16]; zeros for rows that are not there.
template <class T>
void transpose_panel(const T* weight, long n, long k, long row_stride, long first, float* columns) {
    constexpr long kAtOnce = 256;  // columns
    float line[kAtOnce];
    for (long start = 0; start < k; start += kAtOnce) {
        const long count = smaller(kAtOnce, k - start);
        for (long i = 0; i < kLanes; i++) {
            const bool exists = first + i < n;
            if (exists) to_operand(weight + (first + i) * row_stride + start, count, line, count);
            for (long j = 0; j < count; j++) columns[(start + j) * kLanes + i] = exists ? line[j] : 0.0f;
        }
    }
}

// weight [n, k], rows row_stride elements apart -> args.layer.packed; squares [2][n], of what is lost and of the weights, or null.
// peaks [n]: the outputs' largest magnitudes, where columns that lie elsewhere count as well; null: they do not.
template <class T, class Format>
void quantize(const QuantizedArguments& args, const T* weight, long row_stride, const float* peaks, float* squares, long threads) {
    const Records<Format> records(args);
    const double work = Quantizer<Format::kBits>::kWork * args.layer.n * args.layer.k;
    parallel_for(records.panels, work, threads, [&](long panel) {
        static thread_local Scratch scratch;
        float* columns = scratch.get<float>(records.k * kLanes);
        uint8_t* scales = (uint8_t*)args.layer.packed + records.scales_at(panel);
        uint8_t* chunks = (uint8_t*)args.layer.packed + records.chunks_at(panel);
        const long step = records.step_bytes(panel);
        transpose_panel(weight, args.layer.n, records.k, row_stride, panel * kLanes, columns);
        const Vec peak = peaks == nullptr ? zero() : load_some(peaks + panel * kLanes, args.layer.n - panel * kLanes);
        const Vec shared = Format::kBits == 4 ? unit_of(max(absolute(largest_weight(columns, records.k)), peak)) : peak;
        if (records.kOwn > 0) {
            store((Bf16*)((uint8_t*)args.layer.packed + records.own_scales_at(panel)), shared + not_finite(columns, records.k));
        }
        Squares sums;
        for (long group = 0; group < records.groups; group++) {
            for (long i = 0; i < records.steps(group); i++) memset(chunks + i * step, 0, kChunkBytes);
            quantize_group<Format>(columns + group * records.group * kLanes, records.count(group), shared, scales, chunks, step, sums);
            scales += records.record_bytes(panel);
            chunks += records.record_bytes(panel);
        }
        if (squares != nullptr) sums.store_to(squares, panel * kLanes, args.layer.n);
    });
}

template <class T>
void quantize(const QuantizedArguments& args, const T* weight, long row_stride, const float* peaks, float* squares, long threads) {
    if (args.bits == 8 && (args.row_bits == 8 || has_twins<T>(args))) {
        quantize<T, RoundedPanel>(args, weight, row_stride, peaks, squares, threads);
    } else if (args.bits == 8) {
        quantize<T, typename IntegerFormats<T>::Bits8>(args, weight, row_stride, peaks, squares, threads);
#if defined(NOVA_FACTORS)
    } else if (has_twins<T>(args)) {
        quantize<T, FactorPanel>(args, weight, row_stride, peaks, squares, threads);
#endif
    } else {
        quantize<T, typename IntegerFormats<T>::Bits4>(args, weight, row_stride, peaks, squares, threads);
    }
}

// integers [n, k] and scales [n, groups], both contiguous, scales in bf16 or fp16 -> args.layer.packed.
template <class Format>
void pack_format(const QuantizedArguments& args, const int8_t* integers, const uint16_t* scales, long threads) {
    const Records<Format> records(args);
    const long n = args.layer.n, k = args.layer.k;
    parallel_for(records.panels, (double)n * k, threads, [&](long panel) {
        uint8_t* packed_scales = (uint8_t*)args.layer.packed + records.scales_at(panel);
        uint8_t* chunks = (uint8_t*)args.layer.packed + records.chunks_at(panel);
        const long step = records.step_bytes(panel), columns = smaller(kLanes, n - panel * kLanes);
        for (long group = 0; group < records.groups; group++) {
            for (long i = 0; i < records.steps(group); i++) memset(chunks + i * step, 0, kChunkBytes);
            memset(packed_scales, 0, kScaleBytes);
            for (long column = 0; column < columns; column++) {
                const long row = panel * kLanes + column;
                const int8_t* from = integers + row * k + group * records.group;
                memcpy(packed_scales + column * sizeof *scales, scales + row * records.groups + group, sizeof *scales);
                for (long i = 0; i < records.count(group); i++) {
                    Format::put(chunks + i / Format::kPack * step, column, i % Format::kPack, from[i]);
                }
            }
            packed_scales += records.record_bytes(panel);
            chunks += records.record_bytes(panel);
        }
    });
}

// For activations of type T.
template <class T>
void pack_integers(const QuantizedArguments& args, const int8_t* integers, const uint16_t* scales, long threads) {
    if (args.bits == 8 && args.full_range) {
        pack_format<typename IntegerFormats<T>::FullBits8>(args, integers, scales, threads);
    } else if (args.bits == 8) {
        pack_format<typename IntegerFormats<T>::Bits8>(args, integers, scales, threads);
    } else {
        pack_format<typename IntegerFormats<T>::Bits4>(args, integers, scales, threads);
    }
}

}  // namespace
