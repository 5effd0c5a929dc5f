// Panels whose columns have one scale each as tiles take them (tiled_whole.h): bytes as they lie, or widened to bytes on their way.
#pragma once

#include "factors.h"
#include "tiled_streams.h"

#if defined(NOVA_TILES)

namespace {

// Panels of RoundedPanel, all columns in one group.
struct BytePanels {
    static constexpr long kMemory = 0;
    Records<RoundedPanel> records;
    const uint8_t* packed;
    long columns = 1024;  // of a pair of panels that stays in the first cache while rows go past it

    BytePanels(const QuantizedArguments& args, long) : records(args), packed((const uint8_t*)args.layer.packed) {}

    INLINE const uint8_t* scales(long panel) const { return packed + records.scales_at(panel); }

    template <int P>
    class Stream {
      public:
        INLINE Stream(const BytePanels& panels, long blocks, char*) : panels_(panels), blocks_(blocks), ask_{} {}

        // Columns [begin, begin + columns) of P panels; `next` follows on them.
        INLINE TilePanels<P, P * kChunkBytes> take(long panel, long begin, long next) {
            const BytePanels& all = panels_;
            if (begin == 0) ask_ = {(const char*)all.scales(next < 0 ? panel : next), next < 0 ? 0 : ceil_div(P * kTileSide, blocks_)};
            TilePanels<P, P * kChunkBytes> tiles;
            for (int p = 0; p < P; p++) {
                tiles.at[p] = (const char*)all.packed + all.records.chunks_at(panel + p) + begin / RoundedPanel::kPack * P * kChunkBytes;
            }
            return tiles;
        }

        // body(what is done beside the next block's products)
        template <class Body>
        INLINE void with_aside(long runs, const Body& body) {
            blocks_ == 1 ? body(AskStream{}) : body(AskBeside{ask_});
            ask_.at += runs * ask_.lines * kRowBytes;
        }

      private:
        struct AskBeside : AskLines {
            INLINE void end_run() {}
        };
        const BytePanels& panels_;
        long blocks_;
        AskLines ask_;
    };
};

// Panels of FactorPanel, whose groups are whole runs of tiles.
struct FactorPanels {
    static constexpr long kMostColumns = 512, kMemory = 2 * 2 * kMostColumns * kLanes;
    Records<FactorPanel> records;
    const uint8_t* packed;
    long columns;  // that are widened at a time, while those before them are multiplied: the first cache has room for both, and for few rows

    FactorPanels(const QuantizedArguments& args, long num_rows)
        : records(args), packed((const uint8_t*)args.layer.packed), columns(num_rows <= 2 * kPairRows ? kMostColumns / 2 : kMostColumns) {}

    INLINE const uint8_t* scales(long panel) const { return packed + records.own_scales_at(panel); }

    template <int P>
    class Stream {
      public:
        using Tiles = TilePanels<P, kRowBytes>;

        INLINE Stream(const FactorPanels& panels, long blocks, char* memory) : panels_(panels), memory_(memory), blocks_(blocks) {}

        INLINE Tiles take(long panel, long begin, long next) {
            if (panel != panel_ || begin != begin_) start(panel, begin);  // nothing is there at first
            while (done_ < runs_) widen_run();
            Tiles tiles;
            for (int p = 0; p < P; p++) tiles.at[p] = line(p, 0);
            half_ ^= 1;
            const long after = begin + panels_.columns;
            after < panels_.records.k ? start(panel, after) : start(next, 0);
            return tiles;
        }

        template <class Body>
        INLINE void with_aside(long, const Body& body) { body(Beside{*this}); }

      private:
        static constexpr long kRun = kRunSteps * RoundedPanel::kPack, kChunks = kRun / FactorPanel::kPack;  // columns and chunks of a run
        const FactorPanels& panels_;
        char* memory_;              // two halves, in each P panels of tiles
        long blocks_, half_ = 0;    // of rows, by which all pass; which half is written
        long panel_ = -1, begin_ = 0, runs_ = 0, done_ = 0;  // what is widened, and how far it is
        long products_ = 0;         // since the last run was widened

        // A panel's part behind one of a run's products, of one run while as many pass by as there are blocks.
        struct Beside {
            Stream& stream;

            template <int kParts>
            INLINE void ask(int part, const char* const (&)[P], long) {
                if (part < P && stream.is_due()) stream.widen(part);
            }
            INLINE void end_run() {
                if (stream.is_due()) stream.done_++, stream.products_ = 0;
                else stream.products_++;
            }
        };

        INLINE bool is_due() const { return products_ == blocks_ - 1 && done_ < runs_; }
        INLINE char* line(int p, long run) const { return memory_ + ((half_ * P + p) * kMostColumns + run * kRun) * kLanes; }

        INLINE void start(long panel, long begin) {
            panel_ = panel;
            begin_ = begin;
            runs_ = panel < 0 ? 0 : smaller(panels_.columns, panels_.records.k - begin) / kRun;
            done_ = products_ = 0;
        }

        INLINE void widen_run() {
            for (int p = 0; p < P; p++) widen(p);
            done_++;
        }

        INLINE void widen(int p) const {
            const Records<FactorPanel>& records = panels_.records;
            const long k = begin_ + done_ * kRun, group = k / records.group, record = group * records.record_bytes(panel_);
            const uint8_t* factors = panels_.packed + records.scales_at(panel_) + p * kScaleBytes + record;
            const uint8_t* chunk = panels_.packed + records.chunks_at(panel_) + p * kChunkBytes + record;
            chunk += (k - group * records.group) / FactorPanel::kPack * P * kChunkBytes;
            const __m512i words = FactorPanel::words_at(factors), offsets = FactorPanel::offsets_of(words);
            const FactorPanel::Group its = FactorPanel::group_of(words);
            char* to = line(p, done_);
            UNROLL for (long i = 0; i < kChunks; i++, chunk += P * kChunkBytes) {
                __m512i bytes[FactorPanel::kSteps];
                __builtin_prefetch(chunk + kFarBytes, 0, 3);
                FactorPanel::multiply(chunk, its, bytes);
                UNROLL for (int j = 0; j < FactorPanel::kSteps; j++, to += kRowBytes) _mm512_storeu_si512(to, _mm512_add_epi8(bytes[j], offsets));
            }
        }
    };
};

}  // namespace

#endif
