// Linear layers over integers on tiles (tiles.h), where there are some. Sums of a group stay apart from the totals, as in quantized.h.
//
// Weights of eight or four bits become bf16 tiles, a group or less at a time, while the tiles before them are multiplied: what comes from
// memory is small, and every row passes over it while it lies in the first cache. Where rows are integers too, a chunk is a step of a
// tile as it lies.
#pragma once

#include "quantized.h"
#include "tiled_linear.h"
#include "wide_rows.h"

namespace {

// Whether the layer was computed here.
template <class T>
INLINE bool tiled_quantized(const QuantizedArguments&, const T*, long, void*, long, long) { return false; }

#if defined(NOVA_TILES)

constexpr long kAheadBytes = 8192;  // that integers are asked for before they are widened, for the first cache
constexpr long kIntegerRows = kTileSide;  // fewer take less time without tiles, and the bits are the same

// A stretch of one group: no deeper than a block of tiled_linear.h.
struct Piece {
    long group, start, count;  // columns [start, start + count) of the group
    bool is_first, is_last;    // of it
};

INLINE Piece piece_at(const QuantizedArguments& args, long k) {
    const long group = k / args.group, end = smaller(args.layer.k, (group + 1) * args.group), count = smaller(kBlockDepth, end - k);
    return {group, k - group * args.group, count, k == group * args.group, k + count == end};
}

// Asks for panels that lie step by step side by side, as one stream, and pass by once.
struct AskStream {
    template <int kParts, int P>
    INLINE void ask(int part, const char* const (&panels)[P], long run) {
        constexpr long bytes = kRunSteps * P * kRowBytes / kParts;
        const char* at = panels[0] + run + part * bytes;
        UNROLL for (long line = 0; line < bytes; line += kRowBytes) {
            __builtin_prefetch(at + line + kFarBytes, 0, 2);
            __builtin_prefetch(at + line + kNearBytes, 0, 3);
        }
    }
    INLINE void end_run() {}
};

// Panels of integers as bf16 tiles: [P][steps][16][2].
template <class Columns>
struct WidenedPanels {
    using Product = Bf16Product;
    using First = AskNothing;  // what the first rows ask for: whoever widens has asked
    using Format = IntegerDotPanel<Columns>;
    static constexpr long kDepth = kRunDepth, kSlotBytes = 2 * kBlockDepth * kLanes * sizeof(Bf16);
    template <int P>
    using Tiles = TilePanels<P, kRowBytes>;
    const Records<Format>& records;
    const uint8_t* packed;

    template <int P>
    INLINE Tiles<P> get(long panel, const Piece& piece, char* slot) const {
        constexpr int kPairs = Format::kPairs;
        const long step = records.step_bytes(panel), at = piece.group * records.record_bytes(panel) + piece.start / Format::kPack * step;
        const uint8_t* from[P];
        Tiles<P> tiles;
        for (int p = 0; p < P; p++) {
            from[p] = packed + records.chunks_at(panel + p) + at;
            tiles.at[p] = slot + p * kSlotBytes / 2;
        }
        for (long i = 0; i < piece.count / Format::kPack; i++) {
            UNROLL for (int p = 0; p < P; p++) {
                __m512bh pairs[kPairs];
                __builtin_prefetch(from[p] + i * step + kAheadBytes, 0, 3);
                Columns::widen(from[p] + i * step, pairs);
                UNROLL for (int j = 0; j < kPairs; j++) {
                    _mm512_store_si512(slot + p * kSlotBytes / 2 + (i * kPairs + j) * kRowBytes, (__m512i)pairs[j]);
                }
            }
        }
        return tiles;
    }
};

// Panels of `RoundedPanel`, where they lie.
struct IntegerPanels {
    using Product = IntegerProduct;
    using First = AskStream;
    static constexpr long kDepth = kRunSteps * RoundedPanel::kPack, kSlotBytes = 0;
    template <int P>
    using Tiles = TilePanels<P, P * kChunkBytes>;
    const Records<RoundedPanel>& records;
    const uint8_t* packed;

    template <int P>
    INLINE Tiles<P> get(long panel, const Piece& piece, char*) const {
        const long at = piece.group * records.record_bytes(panel) + piece.start / RoundedPanel::kPack * P * kChunkBytes;
        Tiles<P> tiles;
        for (int p = 0; p < P; p++) tiles.at[p] = (const char*)packed + records.chunks_at(panel + p) + at;
        return tiles;
    }
};

// What a group's sums of a row of the layer come to.
struct PlainSums {
    INLINE Vec value(const void* sums, long, long) const { return load((const float*)sums); }
};
struct RoundedSums {
    const RoundedRows<RoundedPanel>& rows;
    long first;  // row of the layer

    INLINE Vec value(const void* sums, long row, long group) const {
        const RoundedPanel::Sum sum{_mm512_loadu_si512(sums)};
        return RoundedPanel::sum_of(sum, rows.excess(first + row, group)) * splat(rows.scale(first + row, group));
    }
};

// A group's sums that are complete: rows [row, row + count), and where their totals are.
template <int P>
struct GroupSums {
    const char* sums;
    float* totals;
    long row, count, group;
    Vec scales[P];
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
        const long size = round_up(num_rows, kPairRows) * 2 * kRowBytes;
        char* memory = scratch.get<char>(3 * size + 2 * Panels::kSlotBytes);
        TileRegisters registers;
        long panel = begin;
        for (; panel + 2 <= end; panel += 2) sweep<2>(panel, memory, size, registers);
        if (panel < end) sweep<1>(panel, memory, size, registers);
        output.finish();
    }

    // The next piece is widened before this one is multiplied, and a block's sums are scaled when the next one has been multiplied:
    // tiles that have just been written, and sums that a tile has just stored, take long to read.
    template <int P>
    void sweep(long panel, char* memory, long size, TileRegisters& registers) const {
        float* totals = (float*)memory;
        char *sums = memory + size, *slots = memory + 3 * size;
        memset(totals, 0, num_rows * P * kRowBytes);
        GroupSums<P> finished{};
        Piece piece = piece_at(args, 0);
        auto tiles = panels.template get<P>(panel, piece, slots);
        for (long k = 0, turn = 1; k < args.layer.k; turn = 1 - turn) {
            const Piece next = piece_at(args, k + piece.count);
            const auto next_tiles = next.count > 0 ? panels.template get<P>(panel, next, slots + turn * Panels::kSlotBytes) : tiles;
            for (long row = 0; row < num_rows; row += kPairRows) {
                const long count = smaller(kPairRows, num_rows - row);
                char* to = sums + piece.group % 2 * size + row * P * kRowBytes;
                const auto multiply = [&](const auto& ask) {
                    multiply_rows<typename Panels::Product>(registers, rows.from(row, k / Panels::kDepth), count, tiles,
                                                            piece.count / Panels::kDepth, piece.is_first, to, ask);
                };
                row == 0 ? multiply(typename Panels::First{}) : multiply(AskNothing{});
                add(finished);
                finished = GroupSums<P>{to, totals + row * P * kLanes, row, piece.is_last ? count : 0, piece.group, {}};
                if (piece.is_last) get_scales(panel, finished);
            }
            k += piece.count;
            piece = next;
            tiles = next_tiles;
        }
        add(finished);
        for (long row = 0; row < num_rows; row += kPairRows) {
            output.template write_now<P>(row, panel, totals + row * P * kLanes, smaller(kPairRows, num_rows - row));
        }
    }

    template <int P>
    INLINE void get_scales(long panel, GroupSums<P>& it) const {
        for (int p = 0; p < P; p++) {
            const uint8_t* scales = panels.packed + panels.records.scales_at(panel + p) + it.group * panels.records.record_bytes(panel);
            it.scales[p] = args.half_scales ? load((const Fp16*)scales) : load((const Bf16*)scales);
        }
    }

    template <int P>
    INLINE void add(const GroupSums<P>& it) const {
        for (long m = 0; m < it.count; m++) {
            UNROLL for (int p = 0; p < P; p++) {
                float* total = it.totals + (m * P + p) * kLanes;
                store(total, fma(it.scales[p], rule.value(it.sums + (m * P + p) * kRowBytes, it.row + m, it.group), load(total)));
            }
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
        const TileRows rows = rows_as_tiles(x + first * x_stride, x_stride * sizeof(Bf16), count, bytes, scratch, threads);
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
        const TileRows rows = rows_as_tiles(integers.integers + first * integers.width, integers.width, count, layer.k, scratch, threads);
        const auto output = output_at(first);
        using Out = std::remove_const_t<decltype(output)>;
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
    } else if (wide_quantized(args, x, x_stride, y, m, threads)) {
        return;
    } else if (!tiled_quantized(args, x, x_stride, y, m, threads)) {
        vector_quantized(args, x, x_stride, y, m, threads);
    }
}

// The same of one pair of panels, whole columns of a layer without a bias: y [m, 32].
template <class T>
void quantized_pair(const QuantizedArguments& args, long pair, const T* x, long x_stride, void* y, long m) {
    static_assert(kRecordPanels == 2);
    const long pack = kChunkBytes * 8 / (kLanes * args.bits);
    const long panel_bytes = ceil_div(args.layer.k, args.group) * kScaleBytes + ceil_div(args.layer.k, pack) * kChunkBytes;
    QuantizedArguments one = args;
    one.layer.n = 2 * kLanes;
    one.layer.packed = (const uint8_t*)args.layer.packed + pair * 2 * panel_bytes;
    quantized_linear(one, x, x_stride, y, m, 1);
}

}  // namespace
