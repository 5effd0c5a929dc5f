// From a weight, or from integers and scales that are there already, to what quantized.h reads.
//
// `kernels.linear.reference.quantize` is the definition. A scale is rounded to bf16; each integer is that multiple of the
// scale which is nearest to the weight. 16 columns are computed at once, each in its own lane.
#pragma once

#include "quantized.h"

namespace {

constexpr int kCandidates = 16;
constexpr double kCandidateWork = 2.0;  // operations for a weight and a candidate

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
    static INLINE Vec scale(const float*, long, const Vec& largest) {
        return absolute(largest) / splat((float)kMaxInteger8);
    }
};

// The largest weight becomes about -8, which is why a scale may be negative. Of several steps around that, some of which clip,
// the one whose integers, times the scale that suits them best, leave the smallest squared error.
template <>
struct Quantizer<4> {
    static constexpr int kLow = kMinInteger4, kHigh = kMaxInteger4;
    static INLINE Vec scale(const float* w, long count, const Vec& largest) {
        Vec best_gain = splat(-1.0f), best_scale = zero();
        for (int candidate = 0; candidate < kCandidates; candidate++) {
            const Vec inverse = splat(-7.0f - 0.25f * candidate) / largest;
            Vec products = zero(), squares = zero();
            for (long k = 0; k < count; k++) {
                const Vec value = load(w + k * kLanes);
                const Vec integer = clamp(round_integer(value * inverse), kLow, kHigh);
                products = fma(value, integer, products);
                squares = fma(integer, integer, squares);
            }
            const Vec gain = products * products / squares;  // by so much this takes away from the squared error
            best_scale = select_positive(gain - best_gain, products / squares, best_scale);
            best_gain = select_positive(gain - best_gain, gain, best_gain);
        }
        return best_scale;
    }
};

// What is added up of 16 outputs: the squares of what rounding takes away from their weights, and those of the weights.
struct Squares {
    Vec lost = zero(), weights = zero();

    // To [2][n], the outputs from `first` on.
    void store_to(float* squares, long first, long n) const {
        store_some(squares + first, lost, n - first);
        store_some(squares + n + first, weights, n - first);
    }
};

// One group of one panel: w [count][16] to its scales, and to integers in the chunks that lie chunk_stride apart.
template <class Format>
void quantize_group(const float* w, long count, Bf16* scales, uint8_t* chunks, long chunk_stride, Squares& squares) {
    using Rule = Quantizer<Format::kBits>;
    const Vec largest = largest_weight(w, count), usable = absolute(largest) - splat(kSmallestNumber);
    const Vec scale = round_bf16(select_positive(usable, Rule::scale(w, count, largest), zero()));
    store(scales, scale + not_finite(w, count));
    const Vec divisor = select_positive(usable, scale, splat(1.0f));
    for (long k = 0; k < count; k++) {
        float integers[kLanes];
        const Vec weight = load(w + k * kLanes), value = select_positive(usable, weight, zero());
        const Vec integer = clamp(round_integer(value / divisor), Rule::kLow, Rule::kHigh), lost = weight - integer * scale;
        store(integers, integer);
        squares.lost = fma(lost, lost, squares.lost);
        squares.weights = fma(weight, weight, squares.weights);
        uint8_t* chunk = chunks + k / Format::kPack * chunk_stride;
        for (int column = 0; column < kLanes; column++) Format::put(chunk, column, k % Format::kPack, (int)integers[column]);
    }
}

// Rows [first, first + 16) of weight [n, k] in columns [start, start + count), as [count][16]; zeros for rows that are not there.
template <class T>
void transpose_group(const T* weight, long n, long row_stride, long first, long start, long count, float* columns) {
    static thread_local Scratch scratch;
    float* line = scratch.get<float>(count);
    for (long i = 0; i < kLanes; i++) {
        const bool exists = first + i < n;
        if (exists) to_operand(weight + (first + i) * row_stride + start, count, line, count);
        for (long k = 0; k < count; k++) columns[k * kLanes + i] = exists ? line[k] : 0.0f;
    }
}

// weight [n, k], rows row_stride elements apart -> args.layer.packed; squares [2][n], of what is lost and of the weights, or null.
template <class T, class Format>
void quantize(const QuantizedArguments& args, const T* weight, long row_stride, float* squares, long threads) {
    const Records<Format> records(args);
    const double work = kCandidateWork * (Format::kBits == 4 ? kCandidates : 1) * args.layer.n * args.layer.k;
    parallel_for(records.panels, work, threads, [&](long panel) {
        static thread_local Scratch scratch;
        float* columns = scratch.get<float>(records.group * kLanes);
        uint8_t* scales = (uint8_t*)args.layer.packed + records.scales_at(panel);
        uint8_t* chunks = (uint8_t*)args.layer.packed + records.chunks_at(panel);
        const long step = records.step_bytes(panel);
        Squares sums;
        for (long group = 0; group < records.groups; group++) {
            const long count = records.count(group);
            for (long i = 0; i < records.steps(group); i++) memset(chunks + i * step, 0, kChunkBytes);
            transpose_group(weight, args.layer.n, row_stride, panel * kLanes, group * records.group, count, columns);
            quantize_group<Format>(columns, count, (Bf16*)scales, chunks, step, sums);
            scales += records.record_bytes(panel);
            chunks += records.record_bytes(panel);
        }
        if (squares != nullptr) sums.store_to(squares, panel * kLanes, args.layer.n);
    });
}

template <class T>
void quantize(const QuantizedArguments& args, const T* weight, long row_stride, float* squares, long threads) {
    if (args.row_bits == 8 || has_twins<T>(args)) {
        quantize<T, RoundedPanel>(args, weight, row_stride, squares, threads);
    } else if (args.bits == 8) {
        quantize<T, typename IntegerFormats<T>::Bits8>(args, weight, row_stride, squares, threads);
    } else {
        quantize<T, typename IntegerFormats<T>::Bits4>(args, weight, row_stride, squares, threads);
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
