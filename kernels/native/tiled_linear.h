// Linear layers on tiles (tiles.h), where there are some: a panel of linear.h, cut into runs of 16 steps, is what they want.
//
// A layer goes this way or that of linear.h by its own shape alone, never by the number of rows.
#pragma once

#include "linear.h"
#include "tiles.h"

namespace {

// Whether the layer was computed here.
template <class T>
INLINE bool tiled_linear(const LinearArguments&, const T*, long, void*, long, long) { return false; }

#if defined(NOVA_TILES)

constexpr long kPairRows = 2 * kTileSide;  // rows of a full block: two tiles
constexpr long kBlockDepth = 256;          // of a block's rows and panels, which then fit the first cache
constexpr long kPassedBytes = 1L << 20;    // of a layer's weights, which then wash its results out of the second cache
constexpr long kPassNumbers = 3L << 18;    // of rows that pass by a panel, so that they stay in the second cache

// Rows as tiles: bytes from one row to the next, from one run of K to the next, from one 16 rows to the next.
struct TileRows {
    const char* x;
    long row, run, tile;

    INLINE TileRows from(long first, long runs) const { return {x + first / kTileSide * tile + runs * run, row, run, tile}; }
};

// Where each of some panels begins, whose steps lie so many bytes apart.
template <int P, long kStep>
struct TilePanels {
    const char* at[P];
};

// What is asked for with each run, a part of it behind each product: all at once, tiles would wait for it.
// The panels themselves, which pass by once. Behind a panel's end lies one that is read beside it: what comes next is behind them all.
struct AskAhead {
    long panel_bytes;

    template <int kParts, int P>
    INLINE void ask(int part, const char* const (&panels)[P], long run) {
        if (part >= P) return;
        const long others = (P - 1) * panel_bytes, far = run + kFarBytes, near = run + kNearBytes;
        const char* far_at = panels[part] + (far < panel_bytes ? far : far + others);
        const char* near_at = panels[part] + (near < panel_bytes ? near : near + others);
        UNROLL for (int i = 0; i < kTileSide; i++) {
            __builtin_prefetch(far_at + i * kRowBytes, 0, 2);
            __builtin_prefetch(near_at + i * kRowBytes, 0, 3);
        }
    }
};

// The next panels: `lines` from `at` on. A part is not one stretch of them, but every so manieth line.
struct AskNext {
    const char* at;
    long lines;

    template <int kParts, int P>
    INLINE void ask(int part, const char* const (&)[P], long) {
        for (long i = part; i < lines; i += kParts) __builtin_prefetch(at + i * kRowBytes, 0, 2);
        if (part == kParts - 1) at += lines * kRowBytes;
    }
};

struct AskNothing {
    template <int kParts, int P>
    INLINE void ask(int, const char* const (&)[P], long) {}
};

// Registers: sums of (row tile r, panel p) in 2 r + p, rows in 4 + r, panels in 6 + p.
INLINE TileShape linear_shape(int i, long rows) {
    const int tile = i < 4 ? i / 2 : i - 4;
    return {i >= 6 ? kRunSteps : tile == 0 ? smaller(rows, kTileSide) : larger(0, rows - kTileSide), kRowBytes};
}

struct Bf16Product {
    template <int Sum, int Rows, int Columns>
    static INLINE void multiply() { tile_multiply<Sum, Rows, Columns>(); }
};
struct IntegerProduct {
    template <int Sum, int Rows, int Columns>
    static INLINE void multiply() { tile_multiply_integers<Sum, Rows, Columns>(); }
};

// sums (+)= rows times panels over `runs` runs. R: tiles of rows; P: panels. sums: [16 R][P][16].
template <int R, class Product, int P, long kStep, class Ask>
NOINLINE void multiply_tiles(const TileRows& rows, const TilePanels<P, kStep>& panels, long runs, bool is_first, void* sums, Ask& asked) {
    constexpr long stride = P * kRowBytes, run = kRunSteps * kStep;
    char* sum = (char*)sums;
    if (is_first) {
        tile_zero<0>();
        if constexpr (P > 1) tile_zero<1>();
        if constexpr (R > 1) tile_zero<2>();
        if constexpr (R > 1 && P > 1) tile_zero<3>();
    } else {
        tile_load<0>(sum, stride);
        if constexpr (P > 1) tile_load<1>(sum + kRowBytes, stride);
        if constexpr (R > 1) tile_load<2>(sum + kTileSide * stride, stride);
        if constexpr (R > 1 && P > 1) tile_load<3>(sum + kTileSide * stride + kRowBytes, stride);
    }
    const TileRows from = rows;
    const TilePanels<P, kStep> columns = panels;
    Ask ahead = asked;
    const char* x = from.x;
    for (long at = 0, end = runs * run; at < end; at += run, x += from.run) {
        tile_load<6>(columns.at[0] + at, kStep);
        tile_load<4>(x, from.row);
        Product::template multiply<0, 4, 6>();
        ahead.template ask<R * P>(0, columns.at, at);
        if constexpr (P > 1) {
            tile_load<7>(columns.at[P - 1] + at, kStep);
            Product::template multiply<1, 4, 7>();
            ahead.template ask<R * P>(1, columns.at, at);
        }
        if constexpr (R > 1) {
            tile_load<5>(x + from.tile, from.row);
            Product::template multiply<2, 5, 6>();
            ahead.template ask<R * P>(P, columns.at, at);
        }
        if constexpr (R > 1 && P > 1) {
            Product::template multiply<3, 5, 7>();
            ahead.template ask<R * P>(3, columns.at, at);
        }
    }
    asked = ahead;
    tile_store<0>(sum, stride);
    if constexpr (P > 1) tile_store<1>(sum + kRowBytes, stride);
    if constexpr (R > 1) tile_store<2>(sum + kTileSide * stride, stride);
    if constexpr (R > 1 && P > 1) tile_store<3>(sum + kTileSide * stride + kRowBytes, stride);
}

// Up to kPairRows rows, in registers that have the shape for them.
template <class Product, int P, long kStep, class Ask>
INLINE void multiply_rows(TileRegisters& registers, const TileRows& rows, long count, const TilePanels<P, kStep>& panels, long runs, bool is_first,
                          void* sums, Ask& ask) {
    registers.shape(count, [&](int i) { return linear_shape(i, count); });
    if (count > kTileSide) {
        multiply_tiles<2, Product>(rows, panels, runs, is_first, sums, ask);
    } else {
        multiply_tiles<1, Product>(rows, panels, runs, is_first, sums, ask);
    }
}

// Where results go. They pass by the caches if nothing will read them from there.
struct TileOutput {
    const LinearArguments& args;
    Output<Bf16> output;
    bool passes_by;

    // sums [count][P][16] of rows from `row` on.
    template <int P>
    INLINE void write(long row, long panel, const float* sums, long count) const {
        const long column = panel * kLanes, at[2] = {panel, panel + 1};
        if (P == 1 || column + 2 * kLanes > args.n || args.bias != nullptr) return output.write_sums(row, at, sums, count, P);
        const long first = (output.first_row + row) * args.n + column;
        if (args.out_dtype == kFloat32 || args.out_dtype == kRounded) return write_floats((float*)output.y + first, sums, count);
        // The same in few instructions, since the multiplication waits for them. (The tiles hold no subnormal numbers.)
        Bf16* to = (Bf16*)output.y + first;
        for (long m = 0; m < count; m++, to += args.n, sums += 2 * kLanes) {
            const __m512 low = (load(sums) + zero()).p[0], high = (load(sums + kLanes) + zero()).p[0];
            const __mmask32 nan = _mm512_kunpackw(_mm512_cmpunord_ps_mask(high, high), _mm512_cmpunord_ps_mask(low, low));
            const __m512i line = _mm512_mask_set1_epi16((__m512i)_mm512_cvtne2ps_pbh(high, low), nan, 0x7fc0);
            write_line(to, line);
        }
    }

    NOINLINE void write_floats(float* to, const float* sums, long count) const {
        for (long m = 0; m < count; m++, to += args.n, sums += 2 * kLanes) {
            const Vec low = load(sums) + zero(), high = load(sums + kLanes) + zero();
            const bool is_rounded = args.out_dtype == kRounded;
            write_line(to, (__m512i)(is_rounded ? round_bf16(low) : low).p[0]);
            write_line(to + kLanes, (__m512i)(is_rounded ? round_bf16(high) : high).p[0]);
        }
    }

    INLINE void write_line(void* to, const __m512i& line) const {
        passes_by ? _mm512_stream_si512((__m512i*)to, line) : _mm512_storeu_si512(to, line);
    }

    // Results that pass by are in no order with what tells other threads that they are there.
    INLINE void finish() const {
        if (passes_by) _mm_sfence();
    }
};

// Sums that are complete: rows [row, row + count) of `panels` panels.
struct Finished {
    const float* sums;
    long row, count, panel, panels;
};

struct TiledLinear {
    const LinearArguments& args;
    TileRows rows;
    long num_rows;
    TileOutput output;

    const char* panel_at(long panel) const { return (const char*)args.packed + panel * args.k * kLanes * sizeof(Bf16); }

    // All rows over panels [begin, end).
    void run(long begin, long end) const {
        static thread_local Scratch scratch;
        const long size = round_up(num_rows, kPairRows) * 2 * kLanes;
        float* sums = scratch.get<float>(2 * size);
        TileRegisters registers;
        Finished finished{};
        long panel = begin;
        for (; panel + 2 <= end; panel += 2) sweep<2>(panel, end, sums + (panel - begin) / 2 % 2 * size, registers, finished);
        if (panel < end) sweep<1>(panel, end, sums + (panel - begin) / 2 % 2 * size, registers, finished);
        write(finished);
        output.finish();
    }

    template <int P>
    void sweep(long panel, long end, float* sums, TileRegisters& registers, Finished& finished) const {
        const long blocks = ceil_div(num_rows, kPairRows);
        if (blocks == 1) {
            AskAhead ahead{args.k * kLanes * (long)sizeof(Bf16)};
            sweep<P>(panel, args.k, sums, registers, finished, ahead);
        } else {
            AskNext next{panel_at(panel + P < end ? panel + P : panel), ceil_div(P * kTileSide, blocks)};
            sweep<P>(panel, kBlockDepth, sums, registers, finished, next);
        }
    }

    // A block is written out when the next one has been multiplied: who reads what a tile has just stored waits for it long.
    template <int P, class Ask>
    INLINE void sweep(long panel, long depth, float* sums, TileRegisters& registers, Finished& finished, Ask& ask) const {
        for (long k = 0; k < args.k; k += depth) {
            const long runs = smaller(depth, args.k - k) / kRunDepth;
            TilePanels<P, kRowBytes> panels;
            for (int p = 0; p < P; p++) panels.at[p] = panel_at(panel + p) + k * kLanes * sizeof(Bf16);
            for (long row = 0; row < num_rows; row += kPairRows) {
                const long count = smaller(kPairRows, num_rows - row);
                float* to = sums + row * P * kLanes;
                multiply_rows<Bf16Product>(registers, rows.from(row, k / kRunDepth), count, panels, runs, k == 0, to, ask);
                write(finished);
                finished = k + depth >= args.k ? Finished{to, row, count, panel, P} : Finished{};
            }
        }
    }

    INLINE void write(const Finished& it) const {
        if (it.panels == 2) output.write<2>(it.row, it.panel, it.sums, it.count);
        if (it.panels == 1) output.write<1>(it.row, it.panel, it.sums, it.count);
    }
};

// Rows of a layer as tiles, over which its panels pass: in place, where they are few, else copied to [ceil(count / 16)][runs][16][64].
INLINE TileRows rows_as_tiles(const void* x, long stride, long count, long bytes, Scratch& scratch, long threads) {
    if (count <= kPairRows) return {(const char*)x, stride, kRowBytes, kTileSide * stride};
    char* to = scratch.get<char>(round_up(count, kTileSide) * bytes);
    parallel_ranges(ceil_div(count, kTileSide), 1, kElementWork * count * bytes / 2, threads, [&](long begin, long end) {
        for (long row = begin * kTileSide; row < smaller(count, end * kTileSide); row++) {
            char* at = to + row / kTileSide * bytes * kTileSide + row % kTileSide * kRowBytes;
            for (long run = 0; run < bytes; run += kRowBytes, at += kTileBytes) memcpy(at, (const char*)x + row * stride + run, kRowBytes);
        }
    });
    return {to, kRowBytes, kTileBytes, bytes * kTileSide};
}

// Whether results shall go past the caches, and are whole lines of 64 bytes: then memory need not be read to be written to, which
// takes longer than all else that is done to a result.
INLINE bool may_pass_by(const LinearArguments& args, const void* y) {
    return args.n * args.k * (long)sizeof(Bf16) > kPassedBytes && (uintptr_t)y % kRowBytes == 0 && args.n % (2 * kLanes) == 0;
}

// Calls body(first, count) for rows that pass by a panel together, of `bytes` each.
template <class Body>
INLINE void for_each_pass(long m, long bytes, const Body& body) {
    const long most = clamp(kPassNumbers * (long)sizeof(Bf16) / bytes / kPairRows * kPairRows, 2 * kPairRows, 2 * kTileRows);
    const long passes = larger(1, ceil_div(m, most)), pass = round_up(ceil_div(m, passes), kPairRows);  // all of about the same size
    for (long first = 0; first < m; first += pass) body(first, smaller(pass, m - first));
}

INLINE bool tiled_linear(const LinearArguments& args, const Bf16* x, long x_stride, void* y, long m, long threads) {
    static thread_local Scratch scratch;
    if (args.k == 0 || args.k % kRunDepth != 0) return false;
    const long bytes = args.k * sizeof(Bf16), panels = ceil_div(args.n, kLanes);
    for_each_pass(m, bytes, [&](long first, long count) {
        const TileRows rows = rows_as_tiles(x + first * x_stride, x_stride * sizeof(Bf16), count, bytes, scratch, threads);
        const TiledLinear tile{args, rows, count, {args, {args, y, first}, may_pass_by(args, y)}};
        parallel_ranges(ceil_div(panels, 2), kGroupPanels / 2, (double)count * args.n * args.k, threads, [&](long begin, long end) {
            tile.run(2 * begin, smaller(panels, 2 * end));
        });
    });
    return true;
}

#endif

// y [m, n] = x [m, k] times the packed weight, plus bias; x rows lie x_stride elements apart.
template <class T>
void linear(const LinearArguments& args, const T* x, long x_stride, void* y, long m, long threads) {
    if (!tiled_linear(args, x, x_stride, y, m, threads)) vector_linear(args, x, x_stride, y, m, threads);
}

}  // namespace
