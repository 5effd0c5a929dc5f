// Linear layers over integers on tiles (tiles.h), where there are some. Sums of a group stay apart from the totals, as in quantized.h.
//
// Weights of eight or four bits become bf16 tiles a little before they are multiplied, between the products of the tiles before them: tiles
// that have just been written take long to read. What comes from memory is small, and every row passes over it while it lies in the first
// cache. Where rows are integers too, a chunk is a step of a tile as it lies.
#pragma once

#include "quantized.h"
#include "tiled_streams.h"
#include "twin_rows.h"

namespace {

// Whether the layer was computed here.
template <class T>
INLINE bool tiled_quantized(const QuantizedArguments&, const T*, long, void*, long, long) { return false; }

#if defined(NOVA_TILES)

constexpr long kIntegerRows = kTileSide;  // fewer take less time without tiles, and the bits are the same

// What a group's sums of a row of the layer come to.
struct PlainSums {
    INLINE Vec value(const void* sums, long, long) const { return load((const float*)sums); }
};

// A group's sums that are complete, of the `left` rows from `row` on, and where their totals are.
template <int P>
struct GroupSums {
    const char* sums;
    float* totals;
    long row, left, group;
    Vec scales[P];

    template <class Sums>
    INLINE void add(const Sums& rule, long rows) {
        const long count = smaller(rows, left);
        if (count <= 0) return;
        const GroupSums it = *this;  // which what is stored cannot change
        for (long m = 0; m < count; m++) {
            UNROLL for (int p = 0; p < P; p++) {
                float* total = it.totals + (m * P + p) * kLanes;
                store(total, fma(it.scales[p], rule.value(it.sums + (m * P + p) * kRowBytes, it.row + m, it.group), load(total)));
            }
        }
        sums += count * P * kRowBytes;
        totals += count * P * kLanes;
        row += count;
        left -= count;
    }
};

// What is done beside a block's products: the stream goes on, and some rows of the block before are added with each run.
template <class Aside, class Sums, int P>
struct AddBehind {
    Aside aside;
    GroupSums<P>& finished;
    const Sums& rule;
    long rows;  // a run

    template <int kParts>
    INLINE void ask(int part, const char* const (&panels)[P], long run) { aside.template ask<kParts>(part, panels, run); }
    INLINE void end_run() {
        aside.end_run();
        finished.add(rule, rows);
    }
};

template <class Panels, class Sums, class Out = TileOutput>
struct TiledQuantized {
    const QuantizedArguments& args;
    const Panels& panels;
    TileRows rows;
    long num_rows;
    Out output;
    Sums rule;

    // All rows over panels [begin, end).
    void run(long begin, long end) const {
        static thread_local Scratch scratch;
        const long size = round_up(num_rows, kPairRows) * 2 * kRowBytes, pairs_end = begin + (end - begin) / 2 * 2;
        char* memory = scratch.get<char>(3 * size + Panels::kMemory);
        TileRegisters registers;
        sweep_all<2>(begin, pairs_end, memory, size, registers);
        sweep_all<1>(pairs_end, end, memory, size, registers);
        output.finish();
    }

  private:
    template <int P>
    INLINE void sweep_all(long begin, long end, char* memory, long size, TileRegisters& registers) const {
        if (begin == end) return;
        auto stream = panels.template stream<P>(args, begin, end, num_rows, memory + 3 * size);
        for (long panel = begin; panel < end; panel += P) sweep<P>(panel, stream, memory, size, registers);
    }

    // A block's sums are scaled while the next one is multiplied, or behind it: what a tile has just stored takes long to read.
    template <int P, class Stream>
    void sweep(long panel, Stream& stream, char* memory, long size, TileRegisters& registers) const {
        float* totals = (float*)memory;
        memset(totals, 0, num_rows * P * kRowBytes);
        GroupSums<P> finished{};
        for (long group = 0, k = 0; k < args.layer.k; group++) {
            const long begin = k, end = smaller(args.layer.k, begin + args.group);
            for (long count; k < end; k += count) {
                count = smaller(kBlockDepth, end - k);
                const Piece piece{group, k - begin, count, k + count == end};
                sweep_rows<P>(panel, k, piece, stream, memory, size, registers, finished);
            }
        }
        finished.add(rule, kPairRows);
        for (long row = 0; row < num_rows; row += kPairRows) {
            output.template write_now<P>(row, panel, totals + row * P * kLanes, smaller(kPairRows, num_rows - row));
        }
    }

    // All rows over a piece, whose first column is k. Sums of a whole group are added soon: two blocks' are all that is kept of them.
    template <int P, class Stream>
    INLINE void sweep_rows(long panel, long k, const Piece& piece, Stream& stream, char* memory, long size, TileRegisters& registers,
                           GroupSums<P>& finished) const {
        const long blocks = ceil_div(num_rows, kPairRows), runs = piece.count / Panels::kDepth;
        const bool is_whole = piece.start == 0 && piece.is_last;
        const auto tiles = stream.take(panel, piece);
        for (long block = 0; block < blocks; block++) {
            const long row = block * kPairRows, count = smaller(kPairRows, num_rows - row);
            const long place = is_whole ? (piece.group * blocks + block) % 2 * kPairRows : piece.group % 2 * blocks * kPairRows + row;
            char* sums = memory + size + place * P * kRowBytes;
            const auto multiply = [&](const auto& aside) {
                multiply_rows<typename Panels::Product>(registers, rows.from(row, k / Panels::kDepth), count, tiles, runs, piece.start == 0, sums, aside);
            };
            if (blocks == 1) {
                multiply(stream.beside());
            } else if constexpr (Stream::kIsWidened) {
                multiply(AddBehind<typename Stream::Spread, Sums, P>{stream.spread(blocks), finished, rule, ceil_div(kPairRows, runs)});
            } else {
                block == 0 ? multiply(stream.beside()) : multiply(AskNothing{});
            }
            finished.add(rule, kPairRows);
            finished = {sums, (float*)memory + row * P * kLanes, row, piece.is_last ? count : 0, piece.group, {}};
            if (piece.is_last) get_scales(panel, finished);
        }
    }

    template <int P>
    INLINE void get_scales(long panel, GroupSums<P>& it) const {
        for (int p = 0; p < P; p++) {
            const uint8_t* scales = panels.packed + panels.records.scales_at(panel + p) + it.group * panels.records.record_bytes(panel);
            it.scales[p] = args.half_scales ? load((const Fp16*)scales) : load((const Bf16*)scales);
        }
    }
};

// Shares the panels among the threads.
template <class Tile>
void run_panels(const Tile& tile, const LinearArguments& layer, long threads) {
    const long panels = ceil_div(layer.n, kLanes);
    parallel_ranges(ceil_div(panels, 2), kGroupPanels / 2, (double)tile.num_rows * layer.n * layer.k, threads, [&](long begin, long end) {
        tile.run(2 * begin, smaller(panels, 2 * end));
    });
}

// Whether groups are whole runs of tiles so deep.
INLINE bool has_runs(const QuantizedArguments& args, long depth) {
    return args.layer.k > 0 && args.layer.k % depth == 0 && (args.group % depth == 0 || args.group >= args.layer.k);
}

// Rows of so many bytes that stay in the second cache.
INLINE long rows_to_pass(long bytes) {
    return clamp(kPassNumbers * (long)sizeof(Bf16) / bytes / kPairRows * kPairRows, 2 * kPairRows, kPassRows);
}

template <class Columns>
void multiply_widened(const QuantizedArguments& args, const Bf16* x, long x_stride, void* y, long m, long threads) {
    static thread_local Scratch scratch;
    const LinearArguments& layer = args.layer;
    const Records<IntegerDotPanel<Columns>> records(args);
    const WidenedPanels<Columns> panels{records, (const uint8_t*)layer.packed};
    const long bytes = layer.k * sizeof(Bf16);
    for_each_pass(m, rows_to_pass(bytes), [&](long first, long count) {
        const TileRows rows = rows_as_tiles(x + first * x_stride, x_stride * sizeof(Bf16), count, bytes, layer.n, scratch, threads);
        const TileOutput output{layer, {layer, y, first}, may_pass_by(layer, y)};
        run_panels(TiledQuantized<WidenedPanels<Columns>, PlainSums>{args, panels, rows, count, output, {}}, layer, threads);
    });
}

INLINE bool tiled_quantized(const QuantizedArguments& args, const Bf16* x, long x_stride, void* y, long m, long threads) {
    if (!has_runs(args, kRunDepth)) return false;
    if (args.bits == 4) {
        multiply_widened<Integer4Pairs>(args, x, x_stride, y, m, threads);
    } else if (args.full_range) {
        multiply_widened<Integer8Pairs<true>>(args, x, x_stride, y, m, threads);
    } else {
        multiply_widened<Integer8Pairs<false>>(args, x, x_stride, y, m, threads);
    }
    return true;
}

// Rows that are integers; output_at(first) is what those from `first` on go to. The bits are those of quantized.h, for whole numbers have
// but one sum.
template <class OutputAt>
bool tiled_rounded(const QuantizedArguments& args, const RoundedRows<RoundedPanel>& integers, long m, long threads, const OutputAt& output_at) {
    if (m < kIntegerRows || !has_runs(args, IntegerPanels::kDepth)) return false;
    static thread_local Scratch scratch;
    const LinearArguments& layer = args.layer;
    const Records<RoundedPanel> records(args);
    const IntegerPanels panels{records, (const uint8_t*)layer.packed};
    for_each_pass(m, rows_to_pass(layer.k), [&](long first, long count) {
        const TileRows rows = rows_as_tiles(integers.integers + first * integers.width, integers.width, count, layer.k, layer.n, scratch, threads);
        const auto output = output_at(first);
        using Out = std::remove_const_t<decltype(output)>;
        if (records.groups == 1) return TiledWhole<Out, BytePanels>{args, BytePanels(args, count), rows, count, output, {integers, first}}.run(threads);
        run_panels(TiledQuantized<IntegerPanels, RoundedSums, Out>{args, panels, rows, count, output, {integers, first}}, layer, threads);
    });
    return true;
}

#endif

// As `quantized_linear`, of m rows that are integers already.
template <class T>
void rounded_linear(const QuantizedArguments& args, const RoundedRows<RoundedPanel>& rows, void* y, long m, long threads) {
#if defined(NOVA_TILES)
    const auto output_at = [&](long first) { return TileOutput{args.layer, {args.layer, y, first}, may_pass_by(args.layer, y)}; };
    if (std::is_same_v<T, Bf16> && tiled_rounded(args, rows, m, threads, output_at)) return;
#endif
    vector_rounded<T>(args, rows, y, m, threads);
}

// y [m, n] = x [m, k] times the packed weight, plus bias; x rows lie x_stride elements apart.
template <class T>
void quantized_linear(const QuantizedArguments& args, const T* x, long x_stride, void* y, long m, long threads) {
    if (args.row_bits == 8) {
        static thread_local Scratch scratch;
        const auto rows = round_rows<RoundedPanel>(x, x_stride, m, args.layer.k, args.group, scratch, threads);
        rounded_linear<T>(args, rows, y, m, threads);
    } else if (!twin_quantized(args, x, x_stride, y, m, threads) && !tiled_quantized(args, x, x_stride, y, m, threads)) {
        vector_quantized(args, x, x_stride, y, m, threads);
    }
}

// The same of one pair of panels, whole columns of a layer without a bias: y [m, 32].
template <class T>
void quantized_pair(const QuantizedArguments& args, long pair, const T* x, long x_stride, void* y, long m) {
    static_assert(kRecordPanels == 2);
    if (args.bits == 4 && has_twins<T>(args)) abort();  // a panel's own scales are not counted here
    const long pack = kChunkBytes * 8 / (kLanes * args.bits);
    const long panel_bytes = ceil_div(args.layer.k, args.group) * kScaleBytes + ceil_div(args.layer.k, pack) * kChunkBytes;
    QuantizedArguments one = args;
    one.layer.n = 2 * kLanes;
    one.layer.packed = (const uint8_t*)args.layer.packed + pair * 2 * panel_bytes;
    quantized_linear(one, x, x_stride, y, m, 1);
}

}  // namespace
