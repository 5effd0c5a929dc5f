// Rows of integers times columns that have one scale each, on tiles (tiles.h): the sum of a whole depth is a whole number, and what is done to
// it is done once, behind the products of the rows after it.
#pragma once

#include "whole_streams.h"

#if defined(NOVA_TILES)

namespace {

// What a group's sums of a row of the layer come to.
struct RoundedSums {
    const RoundedRows<RoundedPanel>& rows;
    long first;  // row of the layer

    INLINE Vec value(const void* sums, long row, long group) const {
        const RoundedPanel::Sum sum{_mm512_loadu_si512(sums)};
        return RoundedPanel::sum_of(sum, rows.excess(first + row, group)) * splat(rows.scale(first + row, group));
    }
};

// Sums of a block of rows that are complete, [left][P][16] of them: a few rows at a time become results.
template <class Out, int P>
struct WholeResults {
    const RoundedSums& rule;
    const Out& output;
    const char* sums = nullptr;
    long row = 0, left = 0, panel = 0;
    Vec scales[P];

    INLINE void write(long rows) {
        const long count = smaller(rows, left);
        if (count <= 0) return;
        alignas(64) float values[kPairRows * P * kLanes];
        for (long m = 0; m < count; m++) {
            UNROLL for (int p = 0; p < P; p++) {
                const long at = m * P + p;
                store(values + at * kLanes, fma(scales[p], rule.value(sums + at * kRowBytes, row + m, 0), zero()));
            }
        }
        output.template write_now<P>(row, panel, values, count);
        sums += count * P * kRowBytes;
        row += count;
        left -= count;
    }
};

// What is done beside a block's products: results of the block before are written, and what comes next is asked for, or widened.
template <class Results, class Ask>
struct WriteWhole {
    Results& results;
    Ask ahead;
    long rows;  // a run

    template <int kParts, int P>
    INLINE void ask(int part, const char* const (&panels)[P], long run) { ahead.template ask<kParts>(part, panels, run); }
    INLINE void end_run() {
        ahead.end_run();
        results.write(rows);
    }
};

// Panels: BytePanels or FactorPanels.
template <class Out, class Panels>
struct TiledWhole {
    static constexpr long kDepth = kRunSteps * RoundedPanel::kPack;  // columns of a run
    const QuantizedArguments& args;
    Panels panels;
    TileRows rows;
    long num_rows;
    Out output;
    RoundedSums rule;

    void run(long threads) const {
        const long count = ceil_div(args.layer.n, kLanes), pairs = count / 2;
        parallel_shares(ceil_div(count, 2), (double)num_rows * args.layer.n * args.layer.k, threads, [&](Shares& shares) {
            static thread_local Scratch scratch;
            const long sums = 2 * num_blocks() * kBlockBytes;
            char* memory = scratch.get<char>(sums + Panels::kMemory);
            Block block{memory, 0, {}};
            WholeResults<Out, 2> results{rule, output};
            typename Panels::template Stream<2> stream(panels, num_blocks(), memory + sums);
            for (long i; (i = shares.take()) >= 0;) {
                const long after = shares.after(i);
                if (i < pairs) {
                    sweep<2>(2 * i, after >= 0 && after < pairs ? 2 * after : -1, stream, block, results);
                } else {  // a panel alone
                    results.write(kPairRows);
                    WholeResults<Out, 1> last{rule, output};
                    typename Panels::template Stream<1> alone(panels, num_blocks(), memory + sums);
                    sweep<1>(2 * i, -1, alone, block, last);
                    last.write(kPairRows);
                }
            }
            results.write(kPairRows);
            output.finish();
        });
    }

  private:
    static constexpr long kBlockBytes = kPairRows * 2 * kRowBytes;  // of a block's sums

    // What a thread has for one block of rows after the other.
    struct Block {
        char* sums;  // of two blocks in turns where they are complete at once, else of all blocks, two by two
        long turn;
        TileRegisters registers;
    };

    INLINE long num_blocks() const { return ceil_div(num_rows, kPairRows); }

    // All rows over P panels. next: the panel that comes after them, or -1.
    template <int P, class Stream>
    INLINE void sweep(long panel, long next, Stream& stream, Block& it, WholeResults<Out, P>& results) const {
        const long k = args.layer.k, blocks = num_blocks(), columns = panels.columns;
        for (long begin = 0; begin < k; begin += columns) {
            const long runs = smaller(columns, k - begin) / kDepth;
            const auto tiles = stream.take(panel, begin, next);
            for (long block = 0; block < blocks; block++) {
                const long place = k <= columns ? it.turn++ % 2 : it.turn % 2 * blocks + block;
                char* sums = it.sums + place * kBlockBytes;
                multiply(tiles, block, begin, runs, it.registers, sums, stream, results);
                if (begin + columns >= k) begin_results<P>(panel, block, sums, results);
            }
        }
        if (k > columns) it.turn++;
    }

    // sums (+)= a block of rows times columns [begin, begin + runs * kDepth) of P panels.
    template <int P, class Tiles, class Stream>
    INLINE void multiply(const Tiles& tiles, long block, long begin, long runs, TileRegisters& registers, char* sums, Stream& stream,
                         WholeResults<Out, P>& results) const {
        const long row = block * kPairRows, count = smaller(kPairRows, num_rows - row), each = round_up(ceil_div(results.left, runs), 2);
        stream.with_aside(runs, [&](const auto& ahead) {
            using Ask = std::decay_t<decltype(ahead)>;
            multiply_rows<IntegerProduct>(registers, rows.from(row, begin / kDepth), count, tiles, runs, begin == 0, sums,
                                          WriteWhole<WholeResults<Out, P>, Ask>{results, ahead, each});
        });
    }

    template <int P>
    INLINE void begin_results(long panel, long block, const char* sums, WholeResults<Out, P>& results) const {
        results.write(kPairRows);
        results.sums = sums;
        results.row = block * kPairRows;
        results.left = smaller(kPairRows, num_rows - results.row);
        results.panel = panel;
        for (int p = 0; p < P && block == 0; p++) {
            const uint8_t* scales = panels.scales(panel + p);
            results.scales[p] = args.half_scales ? load((const Fp16*)scales) : load((const Bf16*)scales);
        }
    }
};

}  // namespace

#endif
