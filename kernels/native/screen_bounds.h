// Between which two numbers a logit lies, by what eight bits say of it; see screen.h.
#pragma once

#include "tiled_quantized.h"

// Mirrored by `kernels.linear.screened.ScreenArguments`.
struct ScreenArguments {
    QuantizedArguments exact;  // the layer, to kRounded, without a bias; n is a multiple of 64. bits is 0: its weights are no integers
    QuantizedArguments rough;  // its weights in eight bits (its own ones, or others), for rows in eight bits, to float32
    const float *reach, *size; // [n]: a logit and its rough one are no further apart than the first times a row's norm and the second times
                               // the norm of what rounding took away from it
    double largest;            // above the norm of every output's weights
    int64_t most_pairs;        // of panels; if more are wanted, all logits might as well be computed
};

namespace {

constexpr long kPairColumns = 2 * kLanes;
// Of a row's norm, that its integers may lose: twice of what they do where all numbers are of one kind. One that has a few far above the
// rest of their groups gets a second row of integers, for what the first ones lack; and so do few rows, which take no longer with it.
constexpr double kMostOfNorm = 0x1p-6;

// The norm of a row; NaN if one of its numbers is not finite.
template <class T>
double norm_of(const T* x, long count) {
    Vec squares = zero();
    for (long k = 0; k < count; k += kLanes) {
        const Vec value = load_some(x + k, count - k);
        squares = fma(value, value, squares);
    }
    return std::sqrt((double)sum_lanes(squares));
}

// Rows in eight bits, and behind them second ones of some.
template <class T>
struct RoughRows {
    using Integers = RoundedRows<RoundedPanel>;
    const ScreenArguments& args;
    const T* x;
    long x_stride, m;
    float* lost;     // [m]: above the norm of what is in no integer
    int32_t* second; // [m]: which row has what the first integers lack, or 0
    long k = args.rough.layer.k, group = args.rough.group;

    // Returns how many there are, of both kinds.
    long round(Scratch& integer_memory, Integers& integers) const {
        static thread_local Scratch rest_memory;
        float* rest = rest_memory.get<float>(round_up(k, kLanes));
        integers = rows_in<RoundedPanel>(integer_memory, 2 * m, k, group);
        long count = m;
        for (long row = 0; row < m; row++) {
            const T* from = x + row * x_stride;
            integers.round_row(from, k, group, row);
            double norm = norm_of_rest(integers, row, from, rest);
            second[row] = 4 * m <= kBlockRows || norm > kMostOfNorm * norm_of(from, k) ? count++ : 0;
            if (second[row]) {
                integers.round_row(rest, k, group, second[row]);
                norm = norm_of_rest(integers, second[row], rest, rest);
            }
            if (has_twins<T>(args.exact)) norm += twins_lose(from, k);
            lost[row] = (float)(norm * 1.001);
        }
        return count;
    }

    // The products of second rows are added to those of the first; rough [count, n].
    void join(float* rough, long n, long threads) const {
        parallel_for(m, kElementWork * m * n, threads, [&](long row) {
            float *to = rough + row * n, *more = rough + second[row] * n;
            for (long id = 0; id < n && second[row]; id += kLanes) store(to + id, load(to + id) + load(more + id));
        });
    }

  private:
    // rest: what from's integers, in that row, lack.
    template <class From>
    double norm_of_rest(const Integers& integers, long row, const From* from, float* rest) const {
        for (long at = 0; at < k; at += kLanes) {
            alignas(64) float values[kLanes];
            for (long i = 0; i < kLanes; i++) values[i] = (float)integers.integers[row * integers.width + at + i];
            const Vec step = splat(integers.scale(row, at / group));
            store(rest + at, load_some(from + at, k - at) - step * load(values));
        }
        return norm_of(rest, k);
    }
};

// The bounds of a row's logits.
template <class T>
struct Bounds {
    const float *rough, *reach, *size;
    Vec norm, lost;

    INLINE Vec highest(long id) const { return rounded(load(rough + id) + distance(id), (const T*)nullptr); }
    INLINE Vec lowest(long id) const { return rounded(load(rough + id) - distance(id), (const T*)nullptr); }

  private:
    INLINE Vec distance(long id) const { return fma(norm, load(reach + id), lost * load(size + id)); }
};

// What the bounds of each row's logits come to: all that a greedy row has to know.
struct TopBounds {
    const ScreenArguments& args;
    const float* norms;  // [2][rows]: theirs, and of what their rounding took away
    float* highest;      // [rows][pairs]: above all logits of a pair
    Vec* lowest;         // [threads][rows]: of what a thread has met, lane by lane, below the largest
    long num_rows, first_row = 0;

    // As Output, from which it takes the place: rough logits of rows [row, row + count) over the panels of pairs.
    template <int N>
    INLINE void write_all(long row, const long (&panels)[N], const float* rough, long count) const {
        if (N % 2 != 0) abort();  // the layer has whole pairs
        for (int n = 0; n < N; n += 2) {
            alignas(64) float values[kBlockRows * kPairColumns];
            for (long m = 0; N > 2 && m < count; m++) memcpy(values + m * kPairColumns, rough + (m * N + n) * kLanes, kPairColumns * sizeof(float));
            note(first_row + row, panels[n] / 2, N > 2 ? values : rough, count);
        }
    }

    // The same of a pair's sums [count][2][16], as TileOutput has it.
    template <int P>
    INLINE void write_now(long row, long panel, const float* sums, long count) const {
        if (P != 2) abort();
        note(first_row + row, panel / 2, sums, count);
    }
    INLINE void finish() const {}

    // rough: [count][32].
    NOINLINE void note(long row, long pair, const float* rough, long count) const {
        const long id = pair * kPairColumns, num_pairs = args.rough.layer.n / kPairColumns;
        const Vec reach[2] = {load(args.reach + id), load(args.reach + id + kLanes)}, size[2] = {load(args.size + id), load(args.size + id + kLanes)};
        Vec* tops = lowest + this_thread * num_rows;
        for (const long end = row + count; row < end; row++, rough += kPairColumns) {
            const Vec norm = splat(norms[row]), lost = splat(norms[num_rows + row]), values[2] = {load(rough), load(rough + kLanes)};
            const Vec distance[2] = {fma(norm, reach[0], lost * size[0]), fma(norm, reach[1], lost * size[1])};
            highest[row * num_pairs + pair] = max_lanes(max(values[0] + distance[0], values[1] + distance[1]));
            tops[row] = max(max(values[0] - distance[0], values[1] - distance[1]), tops[row]);
        }
    }
};

// The bounds of few rows from the products of all of them and of their second rows, which are one block.
struct JoinedTops {
    const TopBounds& tops;

    template <int N>
    INLINE void write_all(long, const long (&panels)[N], float* rough, long count) const {
        const long rows = tops.num_rows;
        if (count != 2 * rows) abort();
        for (long i = 0; i < rows * N * kLanes; i += kLanes) store(rough + i, load(rough + i) + load(rough + rows * N * kLanes + i));
        tops.write_all<N>(0, panels, rough, rows);
    }
};

// The bounds of many rows from their products as these are made, which are written nowhere. False where there is no kernel for that.
INLINE bool tops_of_products(const QuantizedArguments& rough, const RoundedRows<RoundedPanel>& rows, long num_integers, const TopBounds& tops,
                              long threads) {
#if defined(__AVX512VNNI__)
    const auto output_at = [&](long first) {
        TopBounds output = tops;
        output.first_row = first;
        return output;
    };
    if (num_integers == 2 * tops.num_rows && num_integers <= kBlockRows / 2) {
        const auto joined = [&](long) { return JoinedTops{tops}; };
        for_rounded_tiles(rough, rows, num_integers, threads, joined, [&](const auto& tile) { run_tile(tile, rough.layer, threads); });
        return true;
    }
    if (num_integers > tops.num_rows) return false;
#if defined(NOVA_TILES)
    if (tiled_rounded(rough, rows, tops.num_rows, threads, output_at)) return true;
#endif
    if (tops.num_rows <= kBlockRows || tops.num_rows > kTileRows) return false;  // one tile of as many as `run_many` wants
    for_rounded_tiles(rough, rows, tops.num_rows, threads, output_at, [&](const auto& tile) { run_many(tile, rough.layer, threads); });
    return true;
#else
    return false;
#endif
}

}  // namespace
