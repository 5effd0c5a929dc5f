// Weights of four bits that have factors (FactorPanel) beside rows of bytes: widened in registers for a few rows, and for more of them once,
// to a pair of RoundedPanel's panels in a cache. Sums are whole numbers either way, so the bits are the same.
#pragma once

#include "quantized.h"
#include "rounding.h"

#if defined(NOVA_FACTORS)

namespace {

constexpr long kFactorRows = 8;  // of bytes; so many are multiplied by what is widened in registers

// What comes next of the memory that passes by.
INLINE void ask_for_factors(const uint8_t* chunk) {
    if (kAsksByItself) return;
    __builtin_prefetch(chunk + kBothCaches.far, 0, 2);
    __builtin_prefetch(chunk + kBothCaches.near, 0, 3);
}

// Calls widened(group, panel, step, its chunk's integers) of P panels side by side, for each of their chunks.
template <int P, class Body>
INLINE void for_each_chunk(const Records<FactorPanel>& records, const uint8_t* packed, long panel, const Body& body) {
    const uint8_t *factors = packed + records.scales_at(panel), *chunks = packed + records.chunks_at(panel);
    for (long group = 0, k = 0; group < records.groups; group++) {
        FactorPanel::Group groups[P];
        UNROLL for (int p = 0; p < P; p++) groups[p] = FactorPanel::group_at(factors + p * kScaleBytes);
        const uint8_t* chunk = chunks;
        for (const long end = k + records.count(group); k < end; k += FactorPanel::kPack, chunk += P * kChunkBytes) {
            __m512i bytes[P][FactorPanel::kSteps];
            UNROLL for (int p = 0; p < P; p++) {
                ask_for_factors(chunk + p * kChunkBytes);
                FactorPanel::widen(chunk + p * kChunkBytes, groups[p], bytes[p]);
            }
            body(k, bytes);
        }
        factors += records.record_bytes(panel);
        chunks += records.record_bytes(panel);
    }
}

// All rows times panels of that kind; Out has `write_all`.
template <class Out>
struct FactorTile {
    const QuantizedArguments& args;
    const Records<FactorPanel>& records;
    const Operands<int8_t>& operands;
    const Out& output;
    const RoundedRows<RoundedPanel>& rows;

    void run(long threads) const {
        const double work = (double)operands.rows * args.layer.n * args.layer.k;
        if (operands.rows > kFactorRows) {
            return parallel_shares(ceil_div(records.panels, kRecordPanels), work, threads, [&](Shares& shares) {
                for (long i; (i = shares.take()) >= 0;) {
                    const long panel = i * kRecordPanels;
                    records.width(panel) == kRecordPanels ? widen_once<kRecordPanels>(panel) : widen_once<1>(panel);
                }
            });
        }
        parallel_ranges(ceil_div(records.panels, kRecordPanels), 1, work, threads, [&](long begin, long end) {
            for (long panel = begin * kRecordPanels; panel < smaller(records.panels, end * kRecordPanels); panel += kRecordPanels) {
                records.width(panel) == kRecordPanels ? few_rows<kRecordPanels>(panel) : few_rows<1>(panel);
            }
        });
    }

  private:
    INLINE const uint8_t* packed() const { return (const uint8_t*)args.layer.packed; }

    template <int P>
    INLINE void few_rows(long panel) const {
        if (operands.rows <= 2) return multiply<2, P>(panel);
        operands.rows <= 4 ? multiply<4, P>(panel) : multiply<8, P>(panel);
    }

    // Up to M rows: what lies behind the last one of them is multiplied and forgotten. Few have two sums each, for one would be waited for.
    template <int M, int P>
    NOINLINE void multiply(long panel) const {
        constexpr int kSums = M <= 2 ? FactorPanel::kSteps : 1;
        const auto from = operands.template block<M>(0);
        __m512i sums[kSums][M][P] = {};
        for_each_chunk<P>(records, packed(), panel, [&](long k, const __m512i (&bytes)[P][FactorPanel::kSteps]) __attribute__((always_inline)) {
            UNROLL for (int i = 0; i < FactorPanel::kSteps; i++) {
                UNROLL for (int m = 0; m < M; m++) {
                    int32_t word;
                    memcpy(&word, from.at(m, k + i * RoundedPanel::kPack), 4);
                    const __m512i row = _mm512_set1_epi32(word);
                    UNROLL for (int p = 0; p < P; p++) {  // as in RoundedPanel
                        asm("vpdpbusd %2, %1, %0" : "+v"(sums[i % kSums][m][p]) : "v"(bytes[p][i]), "v"(row));
                    }
                }
            }
        });
        alignas(64) float values[M * P * kLanes];
        long panels[P];
        UNROLL for (int p = 0; p < P; p++) {
            const Vec scale = load((const Bf16*)(packed() + records.own_scales_at(panel + p)));
            panels[p] = panel + p;
            for (long m = 0; m < operands.rows; m++) {
                const RoundedPanel::Sum sum{kSums == 2 ? _mm512_add_epi32(sums[0][m][p], sums[kSums - 1][m][p]) : sums[0][m][p]};
                const Vec value = RoundedPanel::sum_of(sum, rows.excess(m, 0)) * splat(rows.scale(m, 0));
                store(values + (m * P + p) * kLanes, fma(scale, value, zero()));
            }
        }
        output.template write_all<P>(0, panels, values, operands.rows);
    }

    // Results of panels that lie in a cache, as those of the layer.
    struct Moved {
        const Out& output;
        long panel;

        template <int N>
        INLINE void write_all(long row, const long (&panels)[N], const float* sums, long count) const {
            long moved[N];
            UNROLL for (int n = 0; n < N; n++) moved[n] = panel + panels[n];
            output.template write_all<N>(row, moved, sums, count);
        }
    };

    template <int P>
    NOINLINE void widen_once(long panel) const {
        static thread_local Scratch scratch;
        QuantizedArguments bytes = args;
        bytes.bits = RoundedPanel::kBits;
        bytes.group = round_up(args.layer.k, FactorPanel::kPack);
        bytes.layer.k = bytes.group;
        bytes.layer.n = P * kLanes;
        uint8_t* to = scratch.get<uint8_t>(P * (kScaleBytes + bytes.group * kLanes));
        bytes.layer.packed = to;
        memcpy(to, packed() + records.own_scales_at(panel), P * kScaleBytes);
        for_each_chunk<P>(records, packed(), panel, [&](long k, const __m512i (&integers)[P][FactorPanel::kSteps]) __attribute__((always_inline)) {
            uint8_t* chunks = to + P * (kScaleBytes + k * kLanes);
            UNROLL for (int i = 0; i < FactorPanel::kSteps; i++) {
                UNROLL for (int p = 0; p < P; p++) _mm512_storeu_si512(chunks + (i * P + p) * kChunkBytes, integers[p][i]);
            }
        });
        const Records<RoundedPanel> pair(bytes);
        QuantizedTile<Moved, RoundedPanel, ScaledRows<RoundedPanel>>{pair, to, operands, {output, panel}, false, {rows, 0}}.run_record(0, -1);
    }
};

}  // namespace

#endif
