// Numbers to small integers, and rows of activations that are rounded so.
//
// `kernels.linear.reference.round_rows` is the definition, of eight bits. Each group of a row has a scale of its own, so that a large number spoils
// the precision of its own group alone.
#pragma once

#include "integers.h"

namespace {

constexpr float kSmallestNumber = 1e-18f;  // a group that holds nothing larger becomes zero: squares would underflow

template <class Panel>
struct RoundedRows {
    using X = typename Panel::X;
    X* integers;            // [m, width]
    float* scales;          // [m, groups]
    int32_t* excesses;      // [m, groups]: Panel::kExcess times the sum of a group's integers
    long width, groups;     // width: the columns, padded with zeros to a multiple of 16

    INLINE float scale(long row, long group) const { return scales[row * groups + group]; }
    INLINE int32_t excess(long row, long group) const { return excesses[row * groups + group]; }

    // Columns [start, start + count) of a row, one group; x lies at the first of them.
    template <class T>
    void round_group(const T* x, long count, long row, long group, long start) const {
        Vec top = zero(), not_finite = zero(), sum = zero();
        for (long k = 0; k < count; k += kLanes) {
            const Vec value = load_some(x + k, count - k);
            top = max(absolute(value), top);
            not_finite = fma(value, zero(), not_finite);
        }
        const float largest = max_lanes(top);
        const RowScale scale = largest > kSmallestNumber ? Panel::scale_of(largest) : RowScale{0.0f, 0.0f};
        const Vec inverse = splat(scale.inverse);
        for (long k = 0; k < count; k += kLanes) {
            const Vec value = round_integer(load_some(x + k, count - k) * inverse);
            const Vec integer = clamp(value, -Panel::kMost, Panel::kMost);
            Panel::store_integers(integers + row * width + start + k, integer);
            sum = sum + integer;
        }
        scales[row * groups + group] = scale.step + sum_lanes(not_finite);
        excesses[row * groups + group] = Panel::kExcess * (int32_t)sum_lanes(sum);
    }

    // x [k], in groups of so many.
    template <class T>
    void round_row(const T* x, long k, long group, long row) const {
        for (long i = 0; i < groups; i++) round_group(x + i * group, smaller(group, k - i * group), row, i, i * group);
    }
};

// Room for m rows of k columns in `scratch`; a group is a multiple of 16 columns.
template <class Panel>
RoundedRows<Panel> rows_in(Scratch& scratch, long m, long k, long group) {
    const long width = round_up(k, kLanes), groups = ceil_div(k, group);
    float* numbers = scratch.get<float>(2 * m * groups + m * width);
    return {(typename Panel::X*)(numbers + 2 * m * groups), numbers, (int32_t*)(numbers + m * groups), width, groups};
}

// x [m, k], rows x_stride elements apart. The result lies in `scratch`.
template <class Panel, class T>
RoundedRows<Panel> round_rows(const T* x, long x_stride, long m, long k, long group, Scratch& scratch, long threads) {
    const RoundedRows<Panel> rows = rows_in<Panel>(scratch, m, k, group);
    parallel_ranges(m, 4, kElementWork * m * k, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) rows.round_row(x + row * x_stride, k, group, row);
    });
    return rows;
}

}  // namespace
