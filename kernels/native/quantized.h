// Linear layers over weights quantised to small integers: y = bias + sum over groups of scale * (sum over a group's k of x * q).
//
// A group is a run of K with one scale for each output column. Its inner sum has one accumulator per output and takes its
// products in order, as in linear.h; the groups' sums are scaled and added in order too. That is so for every number of rows.
#pragma once

#include "integers.h"
#include "linear.h"

// Mirrored by `kernels.linear.quantized.QuantizedArguments`.
struct QuantizedArguments {
    LinearArguments layer;
    int64_t bits, group;  // 8 or 4; a multiple of 8
};

namespace {

constexpr long kScaleBytes = kLanes * sizeof(Bf16);  // of one panel in one group

// Where things lie: blocks of kGroupPanels panels (the last one may have fewer), in each one record per group. A record holds
// the scales of its panels, then for each step one chunk per panel. So whoever multiplies reads one stream from end to end.
template <class Format>
struct Records {
    static constexpr long pack = Format::kPack;
    long panels, groups, k, group;

    explicit Records(const QuantizedArguments& args)
        : panels(ceil_div(args.layer.n, kLanes)),
          groups(ceil_div(args.layer.k, args.group)),
          k(args.layer.k),
          group(args.group) {}

    long blocks() const { return ceil_div(panels, kGroupPanels); }
    long width(long block) const { return smaller(kGroupPanels, panels - block * kGroupPanels); }
    long count(long index) const { return smaller(group, k - index * group); }  // integers of a column in a group
    long steps(long index) const { return ceil_div(count(index), pack); }
    long record_bytes(long block) const { return width(block) * (kScaleBytes + group / pack * kChunkBytes); }

    long block_start(long block) const {
        return block * kGroupPanels * (groups * kScaleBytes + ceil_div(k, pack) * kChunkBytes);
    }
};

template <class T, class Format>
struct QuantizedTile {
    const Records<Format>& records;
    const uint8_t* packed;
    const typename Format::X* x;  // [rows, x_stride]
    long x_stride, rows;
    Output<T> output;

    template <int M, int N>
    INLINE void block(long row, long panel) const {
        const long block = panel / kGroupPanels, first = panel % kGroupPanels, width = records.width(block);
        const uint8_t* record = packed + records.block_start(block);
        const typename Format::X* from = x + row * x_stride;
        Vec total[M][N];
        UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int n = 0; n < N; n++) total[m][n] = zero();
        }
        for (long group = 0; group < records.groups; group++) {
            const uint8_t* w[N];
            Vec acc[M][N];
            UNROLL for (int n = 0; n < N; n++) w[n] = record + width * kScaleBytes + (first + n) * kChunkBytes;
            UNROLL for (int m = 0; m < M; m++) {
                UNROLL for (int n = 0; n < N; n++) acc[m][n] = zero();
            }
            accumulate<Format, M, N, kWeightPrefetch>(acc, from, x_stride, w, width * kChunkBytes, records.steps(group));
            UNROLL for (int n = 0; n < N; n++) {
                const Vec scale = load((const Bf16*)(record + (first + n) * kScaleBytes));
                UNROLL for (int m = 0; m < M; m++) total[m][n] = fma(scale, acc[m][n], total[m][n]);
            }
            record += records.record_bytes(block);
            from += records.group;
        }
        output.template write<M, N>(row, panel, total);
    }
};

template <class T, class Format>
void quantized_linear(const QuantizedArguments& args, const T* x, long x_stride, void* y, long m, long threads) {
    using X = typename Format::X;
    const LinearArguments& layer = args.layer;
    const Records<Format> records(args);
    for_each_tile<X>(x, x_stride, m, layer.k, Format::kPack, threads, [&](const X* operand, long stride, long first, long rows) {
        const uint8_t* packed = (const uint8_t*)layer.packed;
        const QuantizedTile<T, Format> tile{records, packed, operand, stride, rows, {layer, y, first}};
        const double work = (double)rows * layer.n * layer.k;
        parallel_ranges(records.blocks(), 1, work, threads, [&](long begin, long end) {
            for (long block = begin; block < end; block++) {
                sweep_rows(tile, block * kGroupPanels, block * kGroupPanels + records.width(block));
            }
        });
    });
}

// y [m, n] = x [m, k] times the packed weight, plus bias; x rows lie x_stride elements apart.
template <class T>
void quantized_linear(const QuantizedArguments& args, const T* x, long x_stride, void* y, long m, long threads) {
    if (args.bits == 8) {
        quantized_linear<T, typename IntegerFormats<T>::Bits8>(args, x, x_stride, y, m, threads);
    } else {
        quantized_linear<T, typename IntegerFormats<T>::Bits4>(args, x, x_stride, y, m, threads);
    }
}

}  // namespace
