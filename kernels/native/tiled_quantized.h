// Linear layers over integers on tiles (tiles.h), where there are some. Sums of a group stay apart from the totals, as in quantized.h.
//
// Weights of eight or four bits become bf16 tiles a little before they are multiplied, between the products of the tiles before them: tiles
// that have just been written take long to read. What comes from memory is small, and every row passes over it while it lies in the first
// cache. Where rows are integers too, a chunk is a step of a tile as it lies.
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
constexpr long kFewAhead = 2, kFewRing = 4;  // runs that are widened before they are multiplied, and room for so many, where rows pass by once
constexpr long kManyAhead = kBlockDepth / kRunDepth, kManyRing = 2 * kManyAhead;  // where they pass by a piece, block after block
constexpr long kIntegerRows = kTileSide;  // fewer take less time without tiles, and the bits are the same

// Columns [start, start + count) of a group: no more than a block of tiled_linear.h has.
struct Piece {
    long group, start, count;
    bool is_last;  // of the group
};

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

// The integers of panels one behind the other, P side by side: they are widened run by run, as they lie, into rings of tiles.
template <class Columns, int P>
class WidenedStream {
  public:
    using Tiles = TilePanels<P, kRowBytes, true>;

    // rings [P][ring runs][16][16][2].
    WidenedStream(const QuantizedArguments& args, const uint8_t* at, long panels, long ring, char* rings)
        : from_(at + P * kScaleBytes),
          rings_(rings),
          ring_bytes_(ring * kTileBytes),
          panel_runs_(args.layer.k / kRunDepth),
          group_runs_(smaller(args.group, args.layer.k) / kRunDepth),
          left_(panels / P * panel_runs_),
          left_of_panel_(panel_runs_),
          left_of_group_(group_runs_) {}

    INLINE void widen_runs(long count) {
        for (; count > 0 && left_ > 0; count--, go_on()) {
            for (int p = 0; p < P; p++) widen(p);
        }
    }

    // The tiles of the next piece.
    INLINE Tiles take(long, const Piece& piece) {
        Tiles tiles;
        for (int p = 0; p < P; p++) tiles.at[p] = rings_ + p * ring_bytes_;
        tiles.first = taken_;
        tiles.ring_bytes = ring_bytes_;
        taken_ += piece.count / kRunDepth * kTileBytes;
        return tiles;
    }

    // Goes on while a piece is multiplied: a panel's part behind one of a run's products.
    struct Beside {
        WidenedStream& stream;

        template <int kParts>
        INLINE void ask(int part, const char* const (&)[P], long) {
            if (part < P && stream.left_ > 0) stream.widen(part);
        }
        INLINE void end_run() { stream.go_on(); }
    };
    INLINE Beside beside() { return {*this}; }

  private:
    static constexpr int kPairs = IntegerDotPanel<Columns>::kPairs;
    static constexpr long kSteps = kRunSteps / kPairs;  // chunks of a panel in a run
    const uint8_t* from_;  // the next run
    char* rings_;
    long ring_bytes_;               // of one panel
    long written_ = 0, taken_ = 0;  // bytes of a panel, of which the ring has the last ones
    long panel_runs_, group_runs_;  // the last group may have fewer
    long left_, left_of_panel_, left_of_group_;

    INLINE void widen(int panel) const {
        const uint8_t* chunk = from_ + panel * kChunkBytes;
        char* line = rings_ + panel * ring_bytes_ + (written_ & (ring_bytes_ - 1));
        UNROLL for (long i = 0; i < kSteps; i++, chunk += P * kChunkBytes) {
            __m512bh pairs[kPairs];
            __builtin_prefetch(chunk + kAheadBytes, 0, 3);
            Columns::widen(chunk, pairs);
            UNROLL for (int j = 0; j < kPairs; j++, line += kRowBytes) _mm512_store_si512(line, (__m512i)pairs[j]);
        }
    }

    INLINE void go_on() {
        from_ += kSteps * P * kChunkBytes;
        written_ += kTileBytes;
        left_--;
        if (--left_of_panel_ == 0) left_of_panel_ = panel_runs_;
        if (--left_of_group_ == 0) {
            left_of_group_ = smaller(group_runs_, left_of_panel_);
            from_ += P * kScaleBytes;  // they lie before each group
        }
    }
};

// Panels of integers as bf16 tiles.
template <class Columns>
struct WidenedPanels {
    using Product = Bf16Product;
    using Format = IntegerDotPanel<Columns>;
    static constexpr long kDepth = kRunDepth, kMemory = 2 * kManyRing * kTileBytes;
    const Records<Format>& records;
    const uint8_t* packed;

    // Panels [begin, end), with kMemory bytes of memory.
    template <int P>
    WidenedStream<Columns, P> stream(const QuantizedArguments& args, long begin, long end, long num_rows, char* memory) const {
        const bool are_few = num_rows <= kPairRows;
        const uint8_t* at = packed + records.scales_at(begin);
        WidenedStream<Columns, P> stream(args, at, end - begin, are_few ? kFewRing : kManyRing, memory);
        stream.widen_runs(are_few ? kFewAhead : kManyAhead);
        return stream;
    }
};

// Panels of `RoundedPanel`, where they lie.
template <int P>
struct IntegerStream {
    using Tiles = TilePanels<P, P * kChunkBytes>;
    const Records<RoundedPanel>& records;
    const uint8_t* packed;

    INLINE Tiles take(long panel, const Piece& piece) const {
        const long at = piece.group * records.record_bytes(panel) + piece.start / RoundedPanel::kPack * P * kChunkBytes;
        Tiles tiles;
        for (int p = 0; p < P; p++) tiles.at[p] = (const char*)packed + records.chunks_at(panel + p) + at;
        return tiles;
    }
    INLINE AskStream beside() const { return {}; }
};
struct IntegerPanels {
    using Product = IntegerProduct;
    static constexpr long kDepth = kRunSteps * RoundedPanel::kPack, kMemory = 0;
    const Records<RoundedPanel>& records;
    const uint8_t* packed;

    template <int P>
    IntegerStream<P> stream(const QuantizedArguments&, long, long, long, char*) const { return {records, packed}; }
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

    // A block's sums are scaled when the next one has been multiplied: what a tile has just stored takes long to read.
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
        add(finished);
        for (long row = 0; row < num_rows; row += kPairRows) {
            output.template write_now<P>(row, panel, totals + row * P * kLanes, smaller(kPairRows, num_rows - row));
        }
    }

    // All rows over a piece, whose first column is k.
    template <int P, class Stream>
    INLINE void sweep_rows(long panel, long k, const Piece& piece, Stream& stream, char* memory, long size, TileRegisters& registers,
                           GroupSums<P>& finished) const {
        float* totals = (float*)memory;
        char* sums = memory + size + piece.group % 2 * size;
        const auto tiles = stream.take(panel, piece);
        for (long row = 0; row < num_rows; row += kPairRows) {
            const long count = smaller(kPairRows, num_rows - row);
            char* to = sums + row * P * kRowBytes;
            const auto multiply = [&](const auto& aside) {
                multiply_rows<typename Panels::Product>(registers, rows.from(row, k / Panels::kDepth), count, tiles, piece.count / Panels::kDepth,
                                                        piece.start == 0, to, aside);
            };
            row == 0 ? multiply(stream.beside()) : multiply(AskNothing{});
            add(finished);
            finished = GroupSums<P>{to, totals + row * P * kLanes, row, piece.is_last ? count : 0, piece.group, {}};
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
