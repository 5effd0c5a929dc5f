// Linear layers over weights packed once.
#pragma once

#include "microkernel.h"
#include "tiles.h"

// Mirrored by `kernels.linear.cpu.LinearArguments`.
struct LinearArguments {
    const void* packed;  // panels of 16 output columns, see `pack_linear`
    const float* bias;   // [n] or null
    int64_t n, k;
    int64_t dtype, out_dtype;  // of x and packed; of y, or kRounded
    int64_t is_coded;          // packed is what `code_linear` wrote
};

namespace {

constexpr int64_t kFloat32 = 0;   // the element type's number, see isa.cpp
constexpr int64_t kRounded = 3;   // float32 that holds what the element type would
constexpr long kGroupPanels = 4;  // panels that one thread takes at a time
constexpr int kBlockRows = kWidth == 16 ? 8 : kWidth == 8 ? 6 : 4;

// Panels that lie step by step side by side. One stream from memory then feeds two sums of each row: with a single one, which waits for
// its last product to end, a thread reads no faster than that. Tiles take panels that lie one behind the other.
#if defined(NOVA_TILES)
constexpr int kSidePanels = 1;
#else
constexpr int kSidePanels = kWidth == 16 ? 2 : 1;
#endif

// Panels that share one pass over M rows, as many as the register file holds.
constexpr int panels_for(int rows) {
    return kWidth == 16 ? (rows >= 16 ? 1 : rows >= 8 ? 2 : 4) : kWidth == 8 ? (rows >= 4 ? 1 : rows == 2 ? 2 : 4) : (rows >= 2 ? 1 : 2);
}

// weight [n, k], rows row_stride elements apart -> panels [ceil(n / width)][ceil(k / kPack)][width][kPack], padded with zeros, of a width
// of 16 or, side by side, 32.
template <class T>
void pack_linear(const T* weight, T* packed, long n, long k, long row_stride, long threads) {
    constexpr int pack = FormatOf<T>::type::kPack;
    constexpr long width = kSidePanels * kLanes;
    const long steps = ceil_div(k, pack);
    parallel_for(ceil_div(n, width), (double)n * k, threads, [&](long panels) {
        T* to = packed + panels * steps * width * pack;
        for (long step = 0; step < steps; step++) {
            for (long i = 0; i < width * pack; i++) {
                const long row = panels * width + i / pack, column = step * pack + i % pack;
                *to++ = row < n && column < k ? weight[row * row_stride + column] : T{};
            }
        }
    });
}

// A tile is some rows of x and all of the weight. It has `operands`, and block<M, N>(row, panel), which computes M rows from `row`
// on times N panels from `panel` on. kStreamPanels are those that lie in memory as one stream: it is read faster than several.

// Blocks of M of the rows [row, stop), N panels of [begin, end) at a time.
template <int M, int N, class Tile>
INLINE void sweep_panels(const Tile& tile, long row, long stop, long begin, long end) {
    long panel = begin;
    for (; panel + N <= end; panel += N) {
        for (long m = row; m < stop; m += M) tile.template block<M, N>(m, panel);
    }
    for (; panel < end; panel++) {
        for (long m = row; m < stop; m += M) tile.template block<M, 1>(m, panel);
    }
}

// All blocks of M of the rows [row, stop), over panels [begin, end); returns the first row left over.
template <int M, class Tile>
long sweep(const Tile& tile, long row, long stop, long begin, long end) {
    constexpr int N = panels_for(M);
    const long row_end = row + (stop - row) / M * M;
    if (row == 0 && row_end == M) {
        sweep_panels<M, (N < Tile::kStreamPanels ? N : Tile::kStreamPanels)>(tile, row, row_end, begin, end);
    } else {
        sweep_panels<M, N>(tile, row, row_end, begin, end);
    }
    return row_end;
}

// All rows, over panels [begin, end).
template <class Tile>
void sweep_rows(const Tile& tile, long begin, long end) {
    const long rows = tile.operands.rows;
    long row = 0;
    if constexpr (kSideRows > 0) row = sweep<kSideRows>(tile, row, tile.operands.num_side, begin, end);
    row = sweep<kBlockRows>(tile, row, rows, begin, end);
    if (kBlockRows > 4) row = sweep<4>(tile, row, rows, begin, end);
    row = sweep<2>(tile, row, rows, begin, end);
    sweep<1>(tile, row, rows, begin, end);
}

template <class Tile, int N>
struct OneStream : Tile {
    static constexpr int kStreamPanels = N;
};

// Few rows over panels that lie N by N as one stream, of which each thread reads its part from end to end: so what is asked for ahead is
// what it takes next.
template <int N, class Tile>
void run_stream(const Tile& tile, long panels, double work, long threads) {
    const OneStream<Tile, N> stream{tile};
    parallel_shares(ceil_div(panels, kGroupPanels), work, threads, [&](Shares& shares) {
        for (long i; (i = shares.take()) >= 0;) sweep_rows(stream, i * kGroupPanels, smaller(panels, (i + 1) * kGroupPanels));
    });
}

// Where a tile's results go.
template <class T>
struct Output {
    const LinearArguments& args;
    void* y;  // [all rows, n], of T or float
    long first_row;  // of the tile

    // acc[m][n] of rows [row, row + M) over the columns of some panels; the bias is added to them.
    template <int M, int N>
    INLINE void write(long row, const long (&panels)[N], const Vec (&acc)[M][N]) const {
        alignas(64) float sums[M * N * kLanes];
        UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int n = 0; n < N; n++) store(sums + (m * N + n) * kLanes, acc[m][n]);
        }
        write_all<N>(row, panels, sums, M);
    }

    // Sums [num_rows][N][16].
    template <int N>
    INLINE void write_all(long row, const long (&panels)[N], const float* sums, long num_rows) const {
        const bool are_pairs = N == 2 && (panels[0] + 2) * kLanes <= args.n;
        if (are_pairs && args.out_dtype == args.dtype) {
            write_pairs((T*)y, row, panels[0], sums, num_rows);
        } else if (are_pairs && args.out_dtype == kFloat32) {
            write_pairs((float*)y, row, panels[0], sums, num_rows);
        } else {
            write_sums(row, panels, sums, num_rows, N);
        }
    }

    // Sums [num_rows][2][16] of two whole panels that lie side by side, as numbers of y's type.
    template <class Number>
    NOINLINE void write_pairs(Number* y, long row, long panel, const float* sums, long num_rows) const {
        const long column = panel * kLanes;
        Number* to = y + (first_row + row) * args.n + column;
        Vec bias[2];
        UNROLL for (int n = 0; n < 2; n++) bias[n] = args.bias == nullptr ? zero() : load(args.bias + column + n * kLanes);
        for (long m = 0; m < num_rows; m++, sums += 2 * kLanes, to += args.n) {
            const Vec values[2] = {load(sums) + bias[0], load(sums + kLanes) + bias[1]};
            store_all(to, values);
        }
    }

    // Not in line: what it needs of registers would be missing in the loop over K.
    NOINLINE void write_sums(long row, const long* panels, const float* sums, long num_rows, long num_panels) const {
        for (long m = 0; m < num_rows; m++) {  // row by row: what lies side by side there is written at once
            for (long n = 0; n < num_panels; n++) {
                const long column = panels[n] * kLanes, count = args.n - column, at = (first_row + row + m) * args.n + column;
                const Vec bias = args.bias == nullptr ? zero() : load_some(args.bias + column, count);
                const Vec values = load(sums + (m * num_panels + n) * kLanes) + bias;
                if (args.out_dtype == kFloat32) {
                    store_some((float*)y + at, values, count);
                } else if (args.out_dtype == kRounded) {
                    store_some((float*)y + at, rounded(values, (const T*)nullptr), count);
                } else {
                    store_some((T*)y + at, values, count);
                }
            }
        }
    }
};

template <class T>
struct LinearTile {
    using Format = typename FormatOf<T>::type;
    static constexpr int kStreamPanels = kSidePanels;
    const LinearArguments& args;
    const Operands<typename Format::X>& operands;
    Output<T> output;

    template <int M, int N>
    INLINE void block(long row, long panel) const {
        constexpr bool in_pairs = kSidePanels == 2;
        constexpr Prefetch wanted = streamed(M, in_pairs ? 8 : 4, in_pairs);
        multiply<M, N>(row, panel, row > 0 ? kNoPrefetch : wanted);  // the first rows have brought the panels into a cache
    }

    template <int M, int N, class Wanted>
    INLINE void multiply(long row, long panel, const Wanted& wanted) const {
        const T* w[N];
        long panels[N];
        Vec acc[M][N];
        UNROLL for (int n = 0; n < N; n++) {
            panels[n] = panel + n;
            w[n] = (const T*)panel_at(panel + n);
        }
        UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int n = 0; n < N; n++) acc[m][n] = zero();
        }
        const long steps = ceil_div(args.k, Format::kPack);
        accumulate<Format>(acc, operands.template block<M>(row), w, kSidePanels * kLanes * Format::kPack, steps, wanted);
        output.write(row, panels, acc);
    }

    INLINE long panel_bytes() const { return round_up(args.k, Format::kPack) * kLanes * (long)sizeof(T); }
    INLINE const char* panel_at(long panel) const {
        const long aside = panel % kSidePanels;
        return (const char*)args.packed + (panel - aside) * panel_bytes() + aside * kLanes * Format::kPack * (long)sizeof(T);
    }
};

constexpr long kStreamRows = 16;  // read a panel while it comes from memory

// More rows than those: all pass over a few panels, block after block, each of which asks for its part of the next panels. So memory is
// read while products go on, and as evenly.
template <class T>
struct ManyRows {
    static constexpr int kPanels = panels_for(kBlockRows);
    const LinearTile<T>& tile;
    long rows = tile.operands.rows;

    void run(long threads) const {
        const long panels = ceil_div(tile.args.n, kLanes);
        parallel_shares(ceil_div(panels, kPanels), (double)rows * tile.args.n * tile.args.k, threads, [&](Shares& shares) {
            for (long i; (i = shares.take()) >= 0;) {
                const long panel = i * kPanels, after = shares.after(i);
                const char* next = after < 0 ? nullptr : tile.panel_at(after * kPanels);
                if (panel + kPanels <= panels) {
                    sweep<kPanels>(panel, next, kPanels * tile.panel_bytes());
                } else {
                    for (long one = panel; one < panels; one++) sweep<1>(one, nullptr, 0);
                }
            }
        });
    }

    // next: what is wanted after these panels, next_bytes of it; may be null. The last block begins early enough to be whole: what is
    // computed twice has the same bits. There are kBlockRows rows or more.
    template <int N>
    INLINE void sweep(long panel, const char* next, long next_bytes) const {
        const long steps = ceil_div(tile.args.k, LinearTile<T>::Format::kPack), blocks = ceil_div(rows, kBlockRows);
        const long bytes = next == nullptr || steps == 0 ? 0 : ceil_div(next_bytes, blocks * steps);  // for which a step asks
        Ahead<1, 2> ahead{{next == nullptr ? tile.panel_at(panel) : next}, bytes};
        for (long row = 0; row < rows; row += kBlockRows, ahead.at[0] += steps * bytes) {
            if (rows - row <= kBlockRows / 2) {
                tile.template multiply<kBlockRows / 2, N>(rows - kBlockRows / 2, panel, ahead);
            } else {
                tile.template multiply<kBlockRows, N>(smaller(row, rows - kBlockRows), panel, ahead);
            }
        }
    }
};

// As `linear` of tiled_linear.h, for every instruction set and shape.
template <class T>
void vector_linear(const LinearArguments& args, const T* x, long x_stride, void* y, long m, long threads) {
    using Format = typename FormatOf<T>::type;
    using X = typename Format::X;
    for_each_tile<X, kStreamRows + 1>(x, x_stride, m, args.k, Format::kPack, threads, [&](const Operands<X>& operands) {
        const LinearTile<T> tile{args, operands, {args, y, operands.first}};
        if (operands.rows > kStreamRows) return ManyRows<T>{tile}.run(threads);
        const long panels = ceil_div(args.n, kLanes);
        parallel_shares(ceil_div(panels, kGroupPanels), (double)operands.rows * args.n * args.k, threads, [&](Shares& shares) {
            for (long i; (i = shares.take()) >= 0;) sweep_rows(tile, i * kGroupPanels, smaller(panels, (i + 1) * kGroupPanels));
        });
    });
}

}  // namespace
