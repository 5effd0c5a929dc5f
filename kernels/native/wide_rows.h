// Linear layers over integers of four bits with rows of 16-bit integers (WidePanel), where there are such.
//
// A number far above the rest of its group leaves the rest few bits. Where the rest of a row, of all groups together, would lose 2^-10 of its
// norm or more, which would show if what is above had small weights, the row gets a second row of integers: what was rounded away, in steps
// of 2^-15 of the first row's. The products of both are added. The row alone decides that, so its bits are the same in every batch.
#pragma once

#include "quantized.h"
#include "rounding.h"

namespace {

// Whether the layer was computed here.
template <class T>
INLINE bool wide_quantized(const QuantizedArguments&, const T*, long, void*, long, long) { return false; }

#if defined(NOVA_WIDE_ROWS)

constexpr float kRestBelow = 1024.0f;    // in steps; the largest number of a group has 2^14 or more
constexpr double kMostLost = 0x1p-20;    // of the rest, both squared and added up
constexpr float kFinerStep = 0x1p-15f;   // of the second row

INLINE Vec rounded_away(const Vec& steps) { return steps - round_integer(steps); }

struct Loss {  // squared and added up; in fp64, which holds the square of every number
    double lost = 0.0, rest = 0.0;
};

// Of a group of a row, whose integers have this step. 0 and NaN: nothing.
INLINE Loss loss_of(const Bf16* x, long count, float step) {
    if (!(step > 0.0f)) return {};
    const Vec inverse = splat(1.0f / step), bound = splat(kRestBelow);
    Vec lost = zero(), rest = zero();
    for (long k = 0; k < count; k += kLanes) {
        const Vec steps = load_some(x + k, count - k) * inverse, away = rounded_away(steps);
        const Vec below{_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(absolute(steps).p[0], bound.p[0], _CMP_LT_OQ), steps.p[0])};
        lost = fma(away, away, lost);
        rest = fma(below, below, rest);
    }
    const double square = (double)step * step;
    return {square * sum_lanes(lost), square * sum_lanes(rest)};
}

// The rows of a layer, and behind them the second ones.
struct WideRows {
    const QuantizedArguments& args;
    const Bf16* x;
    long x_stride, m, threads;
    RoundedRows<WidePanel> first;

    // second[row]: which row its second one is, or 0. Returns how many there are.
    long count_second(long* second) const {
        parallel_ranges(m, 4, kElementWork * m * args.layer.k, threads, [&](long begin, long end) {
            for (long row = begin; row < end; row++) {
                second[row] = wants_second(row);
            }
        });
        long count = 0;
        for (long row = 0; row < m; row++) {
            if (second[row]) second[row] = m + count++;
        }
        return count;
    }

    // All of them; they lie in `scratch`.
    RoundedRows<WidePanel> all(const long* second, long count, Scratch& scratch) const {
        const long total = m + count, numbers = total * first.groups;
        float* memory = scratch.get<float>(2 * numbers + total * first.width);
        const RoundedRows<WidePanel> rows{(int16_t*)(memory + 2 * numbers), memory, (int32_t*)(memory + numbers), first.width, first.groups};
        memcpy(rows.integers, first.integers, m * first.width * sizeof(int16_t));
        memcpy(rows.scales, first.scales, m * first.groups * sizeof(float));
        memset(rows.excesses, 0, numbers * sizeof(int32_t));
        for (long row = 0; row < m; row++) {
            for (long i = 0; i < first.groups && second[row]; i++) round_again(rows, row, second[row], i);
        }
        return rows;
    }

  private:
    const Bf16* group_at(long row, long i) const { return x + row * x_stride + i * args.group; }
    long count(long i) const { return smaller(args.group, args.layer.k - i * args.group); }
    bool wants_second(long row) const {
        Loss all;
        for (long i = 0; i < first.groups; i++) {
            const Loss loss = loss_of(group_at(row, i), count(i), first.scale(row, i));
            all.lost += loss.lost;
            all.rest += loss.rest;
        }
        return all.lost > kMostLost * all.rest;
    }

    // What was rounded away of a group goes to a row of its own.
    void round_again(const RoundedRows<WidePanel>& rows, long row, long to, long i) const {
        const float scale = first.scale(row, i), step = scale > 0.0f ? scale : 0.0f;  // nothing of NaN
        const Vec inverse = splat(step > 0.0f ? 1.0f / step : 0.0f), finer = splat(1.0f / kFinerStep);
        for (long k = 0; k < count(i); k += kLanes) {
            const Vec steps = load_some(group_at(row, i) + k, count(i) - k) * inverse;
            const Vec integers = step > 0.0f ? round_integer(rounded_away(steps) * finer) : zero();
            WidePanel::store_integers(rows.integers + to * rows.width + i * args.group + k, integers);
        }
        rows.scales[to * rows.groups + i] = step * kFinerStep;
    }
};

// Of no more than kTileRows rows.
void wide_tile(const QuantizedArguments& args, const Bf16* x, long x_stride, void* y, long m, long threads) {
    static thread_local Scratch first_memory, index_memory, all_memory, sums_memory;
    const auto first = round_rows<WidePanel>(x, x_stride, m, args.layer.k, args.group, first_memory, threads);
    const WideRows rows{args, x, x_stride, m, threads, first};
    long* second = index_memory.get<long>(m);
    const long count = rows.count_second(second);
    if (count == 0) return vector_rounded<Bf16>(args, first, y, m, threads);
    const long n = args.layer.n;
    QuantizedArguments sums_args = args;
    sums_args.layer.bias = nullptr;
    sums_args.layer.out_dtype = kFloat32;
    float* sums = sums_memory.get<float>((m + count) * n + kLanes);  // the last panel may be read behind its end
    vector_rounded<Bf16>(sums_args, rows.all(second, count, all_memory), sums, m + count, threads);
    const Output<Bf16> output{args.layer, y, 0};
    parallel_ranges(m, 1, kElementWork * m * n, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            for (long panel = 0; panel < ceil_div(n, kLanes); panel++) {
                alignas(64) float values[kLanes];
                Vec sum = load(sums + row * n + panel * kLanes);
                if (second[row]) sum = sum + load(sums + second[row] * n + panel * kLanes);
                store(values, sum);
                output.write_sums(row, &panel, values, 1, 1);
            }
        }
    });
}

INLINE bool wide_quantized(const QuantizedArguments& args, const Bf16* x, long x_stride, void* y, long m, long threads) {
    if (args.row_bits != 16 || args.bits != 4) return false;
    const long number_bytes = args.layer.out_dtype == args.layer.dtype ? sizeof(Bf16) : sizeof(float);
    for (long first = 0; first < m; first += kTileRows) {  // a whole prompt's sums would take much memory for good
        void* to = (char*)y + first * args.layer.n * number_bytes;
        wide_tile(args, x + first * x_stride, x_stride, to, smaller(kTileRows, m - first), threads);
    }
    return true;
}

#endif

}  // namespace
