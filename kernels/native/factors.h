// Weights of four bits that have factors (FactorPanel) beside rows of bytes: widened in registers for a few rows, and for more of them once,
// to a pair of RoundedPanel's panels in a cache. Sums are whole numbers either way, so the bits are the same.
#pragma once

#include "quantized.h"
#include "rounding.h"

#if defined(NOVA_FACTORS)

namespace {

constexpr long kFactorGroup = 255;  // columns whose bytes add up to 16 bits
constexpr long kFactorRows = 8;     // of bytes; so many are multiplied by what is widened in registers

// What comes next of the memory that passes by.
INLINE void ask_for_factors(const uint8_t* chunk) {
    if (kAsksByItself) return;
    __builtin_prefetch(chunk + kBothCaches.far, 0, 2);
    __builtin_prefetch(chunk + kBothCaches.near, 0, 3);
}

// Of P panels side by side: calls begin(group, [P] words of their factors) for each group, then body(k, [P] products) for each of its chunks.
template <int P, class Begin, class Body>
INLINE void for_each_chunk(const Records<FactorPanel>& records, const uint8_t* packed, long panel, const Begin& begin, const Body& body) {
    const uint8_t *factors = packed + records.scales_at(panel), *chunks = packed + records.chunks_at(panel);
    for (long group = 0, k = 0; group < records.groups; group++) {
        FactorPanel::Group groups[P];
        __m512i words[P];
        UNROLL for (int p = 0; p < P; p++) {
            words[p] = FactorPanel::words_at(factors + p * kScaleBytes);
            groups[p] = FactorPanel::group_of(words[p]);
        }
        begin(group, words);
        const uint8_t* chunk = chunks;
        for (const long end = k + records.count(group); k < end; k += FactorPanel::kPack, chunk += P * kChunkBytes) {
            __m512i bytes[P][FactorPanel::kSteps];
            UNROLL for (int p = 0; p < P; p++) {
                ask_for_factors(chunk + p * kChunkBytes);
                FactorPanel::multiply(chunk + p * kChunkBytes, groups[p], bytes[p]);
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
    const int32_t* group_sums = nullptr;  // [rows][groups] of bytes, where there are no more than kFactorRows rows

    void run(long threads) {
        if (operands.rows <= kFactorRows) add_up_groups();
        const double work = (double)operands.rows * args.layer.n * args.layer.k;
        parallel_shares(ceil_div(records.panels, kRecordPanels), work, threads, [&](Shares& shares) {
            for (long i; (i = shares.take()) >= 0;) {
                const long panel = i * kRecordPanels;
                records.width(panel) == kRecordPanels ? all_rows<kRecordPanels>(panel) : all_rows<1>(panel);
            }
        });
    }

  private:
    INLINE const uint8_t* packed() const { return (const uint8_t*)args.layer.packed; }

    void add_up_groups() {
        static thread_local Scratch scratch;
        int32_t* sums = scratch.get<int32_t>(kFactorRows * records.groups);
        group_sums = sums;
        for (long row = 0; row < operands.rows; row++) {
            for (long group = 0; group < records.groups; group++) {
                const int8_t* x = operands.below.at(row, group * records.group);
                __m512i sum = _mm512_setzero_si512();
                for (long left = records.count(group); left > 0; left -= kChunkBytes, x += kChunkBytes) {
                    const __m512i bytes = _mm512_maskz_loadu_epi8(left < kChunkBytes ? (1ull << left) - 1 : ~0ull, x);
                    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), bytes);
                }
                *sums++ = _mm512_reduce_add_epi32(sum);
            }
        }
    }

    template <int P>
    INLINE void all_rows(long panel) const {
        if (operands.rows > kFactorRows) return widen_once<P>(panel);
        if (operands.rows <= 2) return multiply<2, P>(panel);
        operands.rows <= 4 ? multiply<4, P>(panel) : multiply<8, P>(panel);
    }

    // Up to M rows: what lies behind the last one of them is multiplied and forgotten. Few have two sums each, for one would be waited for.
    template <int M, int P>
    NOINLINE void multiply(long panel) const {
        constexpr int kSums = M <= 2 ? FactorPanel::kSteps : 1;
        const auto from = operands.template block<M>(0);
        __m512i sums[kSums][M][P] = {};
        const auto begin = [&](long group, const __m512i (&words)[P]) __attribute__((always_inline)) {
            UNROLL for (int m = 0; m < M; m++) {
                const __m512i sum = _mm512_set1_epi32((uint16_t)group_sums[smaller(m, operands.rows - 1) * records.groups + group]);
                UNROLL for (int p = 0; p < P; p++) {
                    asm("vpdpwssd %2, %1, %0" : "+v"(sums[0][m][p]) : "v"(FactorPanel::centers_of(words[p])), "v"(sum));
                }
            }
        };
        for_each_chunk<P>(records, packed(), panel, begin, [&](long k, const __m512i (&bytes)[P][FactorPanel::kSteps]) __attribute__((always_inline)) {
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
                const Vec value = RoundedPanel::sum_of(sum, 0) * splat(rows.scale(m, 0));
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
        bytes.group = larger(FactorPanel::kPack, round_up(args.layer.k, FactorPanel::kPack));
        bytes.layer.n = P * kLanes;
        uint8_t* to = scratch.get<uint8_t>(P * (kScaleBytes + bytes.group * kLanes));
        bytes.layer.packed = to;
        memcpy(to, packed() + records.own_scales_at(panel), P * kScaleBytes);
        __m512i offsets[P];
        const auto begin = [&](long, const __m512i (&words)[P]) __attribute__((always_inline)) {
            UNROLL for (int p = 0; p < P; p++) offsets[p] = FactorPanel::offsets_of(words[p]);
        };
        for_each_chunk<P>(records, packed(), panel, begin, [&](long k, const __m512i (&products)[P][FactorPanel::kSteps]) __attribute__((always_inline)) {
            uint8_t* chunks = to + P * (kScaleBytes + k * kLanes);
            UNROLL for (int i = 0; i < FactorPanel::kSteps; i++) {
                UNROLL for (int p = 0; p < P; p++) {
                    _mm512_storeu_si512(chunks + (i * P + p) * kChunkBytes, _mm512_add_epi8(products[p][i], offsets[p]));
                }
            }
        });
        const Records<RoundedPanel> pair(bytes);
        QuantizedTile<Moved, RoundedPanel, ScaledRows<RoundedPanel>>{pair, to, operands, {output, panel}, false, {rows, 0}}.run_record(0, -1);
    }
};

template <class Out>
void multiply_factors(const QuantizedArguments& args, const Operands<int8_t>& operands, const Out& output, const RoundedRows<RoundedPanel>& rows,
                      long threads) {
    const Records<FactorPanel> records(args);
    FactorTile<Out>{args, records, operands, output, rows}.run(threads);
}

}  // namespace

#endif
