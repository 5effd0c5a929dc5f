// Linear layers over weights quantised to small integers: y = bias + sum over groups of scale * (sum over a group's k of x * q).
//
// A group is a run of K with one scale for each output column. Its inner sum has one accumulator per output and takes its
// products in order, as in linear.h; the groups' sums are scaled and added in order too. That is so for every number of rows.
#pragma once

#include "integers.h"
#include "linear.h"
#include "rounding.h"

// Mirrored by `kernels.linear.quantized.QuantizedArguments`.
struct QuantizedArguments {
    LinearArguments layer;
    int64_t bits, group;  // 8 or 4; a multiple of 8
    int64_t full_range, half_scales;  // whether -128 is among integers of 8 bits; whether scales are fp16, else bf16
    int64_t row_bits;  // activations become integers of 8 bits; or bf16 ones of 16, where NOVA_WIDE_ROWS is; 0: they don't.
                       // If they do, a group is a multiple of 16 columns
};

namespace {

constexpr long kRecordPanels = 2;       // as many as pass over many rows at a time: they read one stream from end to end
constexpr long kSplitRows = kWidth == 16 ? kBlockRows : 0;  // below that, four panels pass over any number of rows at a time
constexpr long kScaleBytes = kLanes * sizeof(Bf16);  // of one panel in one group, also in fp16

// Where things lie: blocks of kRecordPanels panels (the last one may have fewer), in each one record per group. A record holds
// the scales of its panels, then for each step one chunk per panel.
template <class Format>
struct Records {
    static constexpr long kPack = Format::kPack;
    long panels, groups, k, group;

    explicit Records(const QuantizedArguments& args)
        : panels(ceil_div(args.layer.n, kLanes)),
          groups(ceil_div(args.layer.k, args.group)),
          k(args.layer.k),
          group(args.group) {}

    long count(long index) const { return smaller(group, k - index * group); }  // integers of a column in a group
    long steps(long index) const { return ceil_div(count(index), kPack); }

    // Of the block that a panel is in.
    long width(long panel) const { return smaller(kRecordPanels, panels - panel / kRecordPanels * kRecordPanels); }
    long step_bytes(long panel) const { return width(panel) * kChunkBytes; }
    long record_bytes(long panel) const { return width(panel) * kScaleBytes + group / kPack * step_bytes(panel); }

    // Of a panel: its scales and its first chunk in the record of the first group.
    long scales_at(long panel) const {
        const long panel_bytes = groups * kScaleBytes + ceil_div(k, kPack) * kChunkBytes;
        return panel / kRecordPanels * kRecordPanels * panel_bytes + panel % kRecordPanels * kScaleBytes;
    }
    long chunks_at(long panel) const {
        const long place = panel % kRecordPanels;
        return scales_at(panel) + width(panel) * kScaleBytes + place * (kChunkBytes - kScaleBytes);
    }
};

// What a group's sums of a row of the tile come to: as they are, or of rounded rows.
struct PlainRows {
    using Sum = Vec;
    static INLINE Vec nothing() { return zero(); }
    INLINE Vec sum_of(const Vec& acc, long, long) const { return acc; }
};
template <class Panel>
struct ScaledRows {
    using Sum = typename Panel::Sum;
    const RoundedRows<Panel>& rows;
    long first;  // row of the tile

    static INLINE Sum nothing() { return Panel::nothing(); }
    INLINE Vec sum_of(const Sum& acc, long row, long group) const {
        return Panel::sum_of(acc, rows.excess(first + row, group)) * splat(rows.scale(first + row, group));
    }
};

// Out: Output, or something else that has its `write_all`.
template <class Out, class Format, class RowsRule>
struct QuantizedTile {
    static constexpr bool kAsksForNext = kWidth == 16 && kManyRows<typename Format::X> == 1;
    // So many go block after block. One or two beyond a block take longer as half a block, where integers are widened for it.
    static constexpr long kLeastMany = kBlockRows + (sizeof(typename Format::X) == 1 ? 1 : 3);
    static constexpr int kStreamPanels = kGroupPanels;  // of which one stream could not keep the multipliers busy
    // Integers that are widened first, and above all into half registers, leave the processor less room to look ahead.
    template <int M>
    static constexpr Prefetch kWanted = streamed(M, kWidth < 16 ? 2 : sizeof(typename Format::X) == 1 ? 8 : 4, kRecordPanels == 2);
    const Records<Format>& records;
    const uint8_t* packed;
    const Operands<typename Format::X>& operands;
    Out output;
    bool half_scales;
    RowsRule rule;
    long far = kRecordPanels;  // of four panels, how far the last two are from the first two

    template <int M, int N>
    INLINE void block(long row, long panel) const {
        multiply<M, N>(row, panel, kWanted<M>);
    }

    // wanted: Prefetch or Ahead.
    template <int M, int N, class Wanted>
    INLINE void multiply(long row, long panel, Wanted wanted) const {
        const long step = records.step_bytes(panel), record = records.record_bytes(panel);
        auto from = operands.template block<M>(row);
        const uint8_t *w[N], *scales[N];
        long panels[N];
        alignas(64) float totals[M * N * kLanes] = {};
        UNROLL for (int n = 0; n < N; n++) {
            panels[n] = place(panel, n);
            w[n] = packed + records.chunks_at(panels[n]);
            scales[n] = packed + records.scales_at(panels[n]);
        }
        for (long group = 0; group < records.groups; group++) {
            typename RowsRule::Sum acc[M][N];
            UNROLL for (int m = 0; m < M; m++) {
                UNROLL for (int n = 0; n < N; n++) acc[m][n] = RowsRule::nothing();
            }
            accumulate<Format>(acc, from, w, step, records.steps(group), wanted);
            go_on(wanted, records.steps(group));
            UNROLL for (int n = 0; n < N; n++) {
                const Vec scale = half_scales ? load((const Fp16*)scales[n]) : load((const Bf16*)scales[n]);
                UNROLL for (int m = 0; m < M; m++) {
                    float* total = totals + (m * N + n) * kLanes;
                    store(total, fma(scale, rule.sum_of(acc[m][n], row + m, group), load(total)));
                }
                w[n] += record;
                scales[n] += record;
            }
            from = from.from(records.group);
            asm volatile("" ::"r"(totals) : "memory");  // totals stay there: the registers are for the loop over a group's steps
        }
        output.template write_all<N>(row, panels, totals, M);
    }

    INLINE long place(long panel, int n) const {
        return n < kRecordPanels ? panel + n : panel + far + n - kRecordPanels;
    }

    // All rows, over panels [begin, end), where a block begins.
    void run(long begin, long end) const {
        long panel = begin;
        if (kSplitRows > operands.rows) {
            // One half of the panels beside the other: two long streams, whose ends alone are fetched in vain.
            QuantizedTile split = *this;
            split.far = (end - begin) / kGroupPanels * kRecordPanels;
            for (; panel < begin + split.far; panel += kRecordPanels) sweep_rows(split, panel, panel + kGroupPanels);
            panel += split.far;
        }
        for (; panel < end; panel += kGroupPanels) sweep_rows(*this, panel, smaller(end, panel + kGroupPanels));
    }

    // More than a block of rows over the panels of a record, block after block, each of which asks for its part of the record of panel
    // `next`; -1: of none. Two blocks read faster than they are answered, and ask again.
    void run_record(long panel, long next) const {
        operands.rows <= 2 * kBlockRows ? run_blocks<512>(panel, next) : run_blocks<0>(panel, next);
    }

  private:
    // The last block begins early enough to be whole, or half a block, as in linear.h.
    template <long kAgain>
    INLINE void run_blocks(long panel, long next) const {
        constexpr int half = kBlockRows / 2;
        const long rows = operands.rows, blocks = ceil_div(rows, kBlockRows), steps = ceil_div(records.k, Format::kPack);
        const long bytes = next < 0 || steps == 0 ? 0 : ceil_div(records.groups * records.record_bytes(next), blocks * steps);  // for a step
        Ahead<1, 2, kAgain> ahead{{(const char*)packed + records.scales_at(next < 0 ? panel : next)}, bytes};
        for (long row = 0; row < rows; row += kBlockRows, ahead.at[0] += steps * bytes) {
            if (records.width(panel) < kRecordPanels) {
                multiply<kBlockRows, 1>(smaller(row, rows - kBlockRows), panel, ahead);
            } else if (rows - row <= half) {
                multiply<half, kRecordPanels>(rows - half, panel, ahead);
            } else {
                multiply<kBlockRows, kRecordPanels>(smaller(row, rows - kBlockRows), panel, ahead);
            }
        }
    }

    static void go_on(const Prefetch&, long) {}
    template <int P, int kCache, long kAgain>
    static INLINE void go_on(Ahead<P, kCache, kAgain>& ahead, long steps) {
        UNROLL for (int p = 0; p < P; p++) ahead.at[p] += steps * ahead.stride;
    }
};

// Shares the panels of one tile of many rows among the threads.
template <class Tile>
void run_many(const Tile& tile, const LinearArguments& layer, long threads) {
    const double work = (double)tile.operands.rows * layer.n * layer.k;
    parallel_shares(ceil_div(tile.records.panels, kRecordPanels), work, threads, [&](Shares& shares) {
        for (long i; (i = shares.take()) >= 0;) {
            const long after = shares.after(i);
            tile.run_record(i * kRecordPanels, after < 0 ? -1 : after * kRecordPanels);
        }
    });
}

// The same of any number of rows.
template <class Tile>
void run_tile(const Tile& tile, const LinearArguments& layer, long threads) {
    const long panels = tile.records.panels;
    const double work = (double)tile.operands.rows * layer.n * layer.k;
    if constexpr (Tile::kAsksForNext) {
        if (tile.operands.rows >= Tile::kLeastMany) return run_many(tile, layer, threads);
    }
    parallel_ranges(ceil_div(panels, kGroupPanels), 1, work, threads, [&](long begin, long end) {
        tile.run(begin * kGroupPanels, smaller(panels, end * kGroupPanels));
    });
}

template <class T, class Format>
void vector_quantized(const QuantizedArguments& args, const T* x, long x_stride, void* y, long m, long threads) {
    using X = typename Format::X;
    const LinearArguments& layer = args.layer;
    const Records<Format> records(args);
    for_each_tile<X>(x, x_stride, m, layer.k, Format::kPack, threads, [&](const Operands<X>& operands) {
        using Tile = QuantizedTile<Output<T>, Format, PlainRows>;
        const Output<T> output{layer, y, operands.first};
        run_tile(Tile{records, (const uint8_t*)layer.packed, operands, output, args.half_scales != 0, {}}, layer, threads);
    });
}

// As `quantized_linear` of tiled_quantized.h, for every instruction set and shape.
template <class T>
void vector_quantized(const QuantizedArguments& args, const T* x, long x_stride, void* y, long m, long threads) {
    if (args.bits == 8 && args.full_range) {
        vector_quantized<T, typename IntegerFormats<T>::FullBits8>(args, x, x_stride, y, m, threads);
    } else if (args.bits == 8) {
        vector_quantized<T, typename IntegerFormats<T>::Bits8>(args, x, x_stride, y, m, threads);
    } else {
        vector_quantized<T, typename IntegerFormats<T>::Bits4>(args, x, x_stride, y, m, threads);
    }
}

// Calls body(tile) for tiles of rows that are integers; output_at(first) is what the rows from `first` on go to.
template <class Panel, class OutputAt, class Body>
void for_rounded_tiles(const QuantizedArguments& args, const RoundedRows<Panel>& rows, long m, long threads, const OutputAt& output_at,
                       const Body& body) {
    using X = typename Panel::X;
    const LinearArguments& layer = args.layer;
    const Records<Panel> records(args);
    for_each_tile<X>(rows.integers, rows.width, m, rows.width, Panel::kPack, threads, [&](const Operands<X>& operands) {
        const auto output = output_at(operands.first);
        using Tile = QuantizedTile<std::remove_const_t<decltype(output)>, Panel, ScaledRows<Panel>>;
        const ScaledRows<Panel> rule{rows, operands.first};
        body(Tile{records, (const uint8_t*)layer.packed, operands, output, args.half_scales != 0, rule});
    });
}

// The same as `vector_quantized` of rows that are integers.
template <class T, class Panel>
void vector_rounded(const QuantizedArguments& args, const RoundedRows<Panel>& rows, void* y, long m, long threads) {
    const auto output_at = [&](long first) { return Output<T>{args.layer, y, first}; };
    for_rounded_tiles(args, rows, m, threads, output_at, [&](const auto& tile) { run_tile(tile, args.layer, threads); });
}

}  // namespace
