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
    int64_t row_bits;  // activations become integers of 8 bits; or bf16 ones of 16, by what twin_rows.h says; 0: they don't.
                       // If they do, a group is a multiple of 16 columns (of 8 at four bits), or all of them
};

namespace {

// Whether rows become two of bytes each: twin_rows.h. Integers of four bits then have factors, and outputs one scale.
template <class T>
INLINE bool has_twins(const QuantizedArguments& args) { return std::is_same_v<T, Bf16> && args.row_bits == 16; }

constexpr long kRecordPanels = 2;       // as many as pass over many rows at a time: they read one stream from end to end
constexpr long kSplitRows = kWidth == 16 ? kBlockRows : 0;  // below that, four panels pass over any number of rows at a time

// Where things lie: blocks of kRecordPanels panels (the last one may have fewer), in each one record per group. A record holds
// the scales (or factors) of its panels, then for each step one chunk per panel.
template <class Format>
struct Records {
    static constexpr long kPack = Format::kPack, kOwn = kOwnBytes<Format>;
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

    // Of a panel: its own scales; those and its first chunk in the record of the first group.
    long own_scales_at(long panel) const {
        const long panel_bytes = kOwn + groups * kScaleBytes + ceil_div(k, kPack) * kChunkBytes;
        return panel / kRecordPanels * kRecordPanels * panel_bytes + panel % kRecordPanels * kScaleBytes;
    }
    long scales_at(long panel) const { return own_scales_at(panel) + width(panel) * kOwn; }
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

#if defined(__AVX512BF16__)
// Whether many rows widen integers once, to bf16 numbers in a cache, in place of once for each block of rows. It costs the first block
// as much as it saves one of the others.
template <class Format, class = void>
constexpr bool kWidensOnce = false;
template <class Format>
constexpr bool kWidensOnce<Format, std::enable_if_t<Format::kIsWidened>> = true;
constexpr long kWidenedRows = 3 * kBlockRows + 1;  // from so many on

// A group after the other of a record, whose N panels are left behind at `to`, each step's side by side.
template <class Format, int N>
struct Widening {
    static constexpr int kPairs = Format::kPairs;
    const uint8_t* at;
    long step_bytes, record_bytes;
    Bf16* to;

    template <int M, class Rows, class Wanted>
    INLINE void add(Vec (&acc)[M][N], const Rows& rows, long steps, Wanted& wanted) {
        const uint8_t* from = at;
        for (long k = 0; k < steps; k++, from += step_bytes, to += kPairs * N * 2 * kLanes) {
            __m512bh columns[N][kPairs];
            wanted.ask(k * kPairs);
            UNROLL for (int n = 0; n < N; n++) Format::widen(from + n * kChunkBytes, columns[n]);
            UNROLL for (int pair = 0; pair < kPairs; pair++) {
                Pairs wide[N];
                UNROLL for (int n = 0; n < N; n++) {
                    wide[n][0] = (PartBits)columns[n][pair];
                    _mm512_storeu_si512(to + (pair * N + n) * 2 * kLanes, (__m512i)columns[n][pair]);
                }
                Bf16DotPanel::multiply(acc, rows, k * Format::kPack + 2 * pair, wide);
            }
        }
        wanted.go_on(steps * kPairs);
        at += record_bytes;
    }
};

// The same as they were left behind.
template <class Format, int N>
struct Widened {
    const Bf16* at;

    template <int M, class Rows, class Wanted>
    INLINE void add(Vec (&acc)[M][N], const Rows& rows, long steps, Wanted& wanted) {
        const long pairs = steps * Format::kPairs;
        const Bf16* from[N];
        UNROLL for (int n = 0; n < N; n++) from[n] = at + n * 2 * kLanes;
        accumulate<Bf16DotPanel>(acc, rows, from, N * 2 * kLanes, pairs, wanted);
        wanted.go_on(pairs);
        at += pairs * N * 2 * kLanes;
    }
};
#endif

// Out: Output, or something else that has its `write_all`.
template <class Out, class Format, class RowsRule>
struct QuantizedTile {
    static constexpr bool kAsksForNext = kWidth == 16 && kManyRows<typename Format::X> == 1;
    // So many go block after block. One or two beyond a block take longer as half a block, where integers are widened for it.
    static constexpr long kLeastMany = kBlockRows + (sizeof(typename Format::X) == 1 ? 1 : 3);
    static constexpr bool kIsOneStream = !kAsksByItself && sizeof(typename Format::X) == 1;  // is read by few rows, where hints bring it
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
            wanted.go_on(records.steps(group));
            add_group(acc, row, group, scales, totals);
            UNROLL for (int n = 0; n < N; n++) {
                w[n] += record;
                scales[n] += record;
            }
            from = from.from(records.group);
        }
        output.template write_all<N>(row, panels, totals, M);
    }

    // totals [M][N][16] += a group's sums, scaled.
    template <int M, int N>
    INLINE void add_group(const typename RowsRule::Sum (&acc)[M][N], long row, long group, const uint8_t* const (&scales)[N], float* totals) const {
        UNROLL for (int n = 0; n < N; n++) {
            const Vec scale = half_scales ? load((const Fp16*)scales[n]) : load((const Bf16*)scales[n]);
            UNROLL for (int m = 0; m < M; m++) {
                float* total = totals + (m * N + n) * kLanes;
                store(total, fma(scale, rule.sum_of(acc[m][n], row + m, group), load(total)));
            }
        }
        asm volatile("" ::"r"(totals) : "memory");  // they stay there: the registers are for the loop over a group's steps
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
        const bool is_whole = records.width(panel) == kRecordPanels, are_two = operands.rows <= 2 * kBlockRows;
#if defined(__AVX512BF16__)
        if constexpr (kWidensOnce<Format>) {
            if (operands.rows >= kWidenedRows) return is_whole ? widen_once<kRecordPanels>(panel, next) : widen_once<1>(panel, next);
        }
#endif
        if (are_two) return is_whole ? run_blocks<kRecordPanels, 512>(panel, next) : run_blocks<1, 512>(panel, next);
        is_whole ? run_blocks<kRecordPanels, 0>(panel, next) : run_blocks<1, 0>(panel, next);
    }

  private:
    // What blocks ask for of the record of panel `next`, in so many asks of all blocks together; -1: of none.
    template <long kAgain>
    INLINE Ahead<1, 2, kAgain> ahead_of(long panel, long next, long asks) const {
        const long bytes = next < 0 || asks == 0 ? 0 : ceil_div(records.groups * records.record_bytes(next), asks);
        return {{(const char*)packed + records.scales_at(next < 0 ? panel : next)}, bytes};
    }

    // call.block<M>(row) for one block of rows after the other. The last one begins early enough to be whole, or half a block, as in linear.h.
    template <class Call>
    INLINE void for_each_block(long row, Call& call) const {
        for (const long rows = operands.rows; row < rows; row += kBlockRows) {
            if (rows - row <= kBlockRows / 2) {
                call.template block<kBlockRows / 2>(rows - kBlockRows / 2);
            } else {
                call.template block<kBlockRows>(smaller(row, rows - kBlockRows));
            }
        }
    }

    template <int N, long kAgain>
    struct Blocks {
        const QuantizedTile& tile;
        long panel, steps;
        Ahead<1, 2, kAgain> ahead;

        template <int M>
        INLINE void block(long row) {
            tile.multiply<M, N>(row, panel, ahead);
            ahead.go_on(steps);
        }
    };

    template <int N, long kAgain>
    INLINE void run_blocks(long panel, long next) const {
        const long steps = ceil_div(records.k, Format::kPack), blocks = ceil_div(operands.rows, kBlockRows);
        Blocks<N, kAgain> all{*this, panel, steps, ahead_of<kAgain>(panel, next, blocks * steps)};
        for_each_block(0, all);
    }

#if defined(__AVX512BF16__)
    // The same as `multiply`, over a record. integers: Widening or Widened.
    template <int M, int N, class Integers>
    INLINE void multiply_widened(long row, long panel, Ahead<1, 2> wanted, Integers integers) const {
        auto from = operands.template block<M>(row);
        const uint8_t* scales[N];
        long panels[N];
        alignas(64) float totals[M * N * kLanes] = {};
        UNROLL for (int n = 0; n < N; n++) {
            panels[n] = panel + n;
            scales[n] = packed + records.scales_at(panels[n]);
        }
        for (long group = 0; group < records.groups; group++) {
            Vec acc[M][N];
            UNROLL for (int m = 0; m < M; m++) {
                UNROLL for (int n = 0; n < N; n++) acc[m][n] = zero();
            }
            integers.add(acc, from, records.steps(group), wanted);
            add_group(acc, row, group, scales, totals);
            UNROLL for (int n = 0; n < N; n++) scales[n] += records.record_bytes(panel);
            from = from.from(records.group);
        }
        output.template write_all<N>(row, panels, totals, M);
    }

    template <int N>
    struct WidenedBlocks {
        const QuantizedTile& tile;
        long panel, steps;  // of pairs
        Ahead<1, 2> ahead;
        const Bf16* wide;

        template <int M>
        INLINE void block(long row) {
            tile.multiply_widened<M, N>(row, panel, ahead, Widened<Format, N>{wide});
            ahead.go_on(steps);
        }
    };

    template <int N>
    NOINLINE void widen_once(long panel, long next) const {
        static thread_local Scratch scratch;
        const long steps = ceil_div(records.k, Format::kPack) * Format::kPairs, blocks = ceil_div(operands.rows, kBlockRows);
        Bf16* wide = scratch.get<Bf16>(steps * N * 2 * kLanes);
        WidenedBlocks<N> others{*this, panel, steps, ahead_of<0>(panel, next, blocks * steps), wide};
        const uint8_t* at = packed + records.chunks_at(panel);
        const Widening<Format, N> first{at, records.step_bytes(panel), records.record_bytes(panel), wide};
        multiply_widened<kBlockRows, N>(0, panel, others.ahead, first);
        others.ahead.go_on(steps);
        for_each_block(kBlockRows, others);
    }
#endif
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
        if (Tile::kIsOneStream && tile.operands.rows < kSplitRows) return run_stream<kRecordPanels>(tile, panels, work, threads);
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
