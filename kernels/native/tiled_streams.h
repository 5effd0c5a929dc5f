// Panels of integers as tiles take them (tiled_quantized.h): widened to bf16 on their way, or as they lie.
#pragma once

#include "quantized.h"
#include "tiled_linear.h"

#if defined(NOVA_TILES)

namespace {

constexpr long kFewAhead = 2, kFewRing = 4;  // runs that are widened before they are multiplied, and room for so many, where rows pass by once
constexpr long kManyAhead = kBlockDepth / kRunDepth, kManyRing = 2 * kManyAhead;  // where they pass by a piece, block after block

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
    static constexpr bool kIsWidened = true;
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

    // Goes on while a piece is multiplied by the only block of rows: a panel's part behind one of a run's products.
    struct Beside {
        WidenedStream& stream;

        template <int kParts>
        INLINE void ask(int part, const char* const (&)[P], long) {
            if (part < P && stream.left_ > 0) stream.widen(part);
        }
        INLINE void end_run() { stream.go_on(); }
    };
    INLINE Beside beside() { return {*this}; }

    // The same of several blocks, evenly among them all: a panel's part behind one of some products.
    struct Spread {
        WidenedStream& stream;
        long blocks;

        template <int kParts>
        INLINE void ask(int part, const char* const (&)[P], long) {
            if (part == 0 && (stream.due_ += P) >= blocks) stream.widen_part(blocks);
        }
        INLINE void end_run() {}
    };
    INLINE Spread spread(long blocks) { return {*this, blocks}; }

  private:
    static constexpr int kPairs = IntegerDotPanel<Columns>::kPairs;
    static constexpr long kSteps = kRunSteps / kPairs;  // chunks of a panel in a run
    static constexpr bool kIsDense = kPairs == 2;  // so few numbers come with a line that memory is what they wait for
    const uint8_t* from_;  // the next run
    char* rings_;
    long ring_bytes_;               // of one panel
    long written_ = 0, taken_ = 0;  // bytes of a panel, of which the ring has the last ones
    long panel_runs_, group_runs_;  // the last group may have fewer
    long left_, left_of_panel_, left_of_group_;
    long due_ = 0, panel_ = 0;  // of what is spread: parts times blocks, and whose part is next

    INLINE void widen_part(long blocks) {
        due_ -= blocks;
        if (left_ > 0) widen(panel_);
        if (++panel_ == P) panel_ = 0, go_on();
    }

    INLINE void widen(int panel) const {
        const uint8_t* chunk = from_ + panel * kChunkBytes;
        char* line = rings_ + panel * ring_bytes_ + (written_ & (ring_bytes_ - 1));
        UNROLL for (long i = 0; i < kSteps; i++, chunk += P * kChunkBytes) {
            __m512bh pairs[kPairs];
            __builtin_prefetch(chunk + kFarBytes, 0, kIsDense ? 2 : 3);
            if (kIsDense) __builtin_prefetch(chunk + kNearBytes, 0, 3);
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
    static constexpr bool kIsWidened = false;
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

}  // namespace

#endif
