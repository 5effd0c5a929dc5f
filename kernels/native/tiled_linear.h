// Linear layers on tiles (tiles.h), where there are some: a panel of linear.h, cut into runs of 16 steps, is what they want.
//
// A layer goes this way or that of linear.h by its own shape alone, never by the number of rows.
#pragma once

#include "coded.h"
#include "tiles.h"

namespace {

// Whether the layer was computed here.
template <class T>
INLINE bool tiled_linear(const LinearArguments&, const T*, long, void*, long, long) { return false; }

#if defined(NOVA_TILES)

constexpr long kPairRows = 2 * kTileSide;    // rows of a full block: two tiles
constexpr long kBlockDepth = 256;            // of a block's rows and widened panels, which then fit the first cache
constexpr long kSweepDepth = 512;            // of a block's rows and plain panels, which stay in the first cache while rows go past it
constexpr long kPassedBytes = 1L << 20;      // of a layer's weights, which then wash its results out of the second cache
constexpr long kPassNumbers = 3L << 18;      // of rows that pass by a quantised panel, so that they stay in the second cache
constexpr long kPassRows = 512;              // that pass by a panel
constexpr long kPlaceRows = 256, kPlaceOutputs = 1024;  // no more than these: too few panels pass by to make up for a copy of the rows
constexpr long kStretchNumbers = 1L << 19;   // of these rows: as deep as they stay in the second cache
constexpr long kKeptSums = 1L << 17;         // that a thread keeps from one stretch of the depth to the next, in the second cache too

// Rows as tiles: bytes from one row to the next, from one run of K to the next, from one 16 rows to the next.
struct TileRows {
    const char* x;
    long row, run, tile;

    INLINE TileRows from(long first, long runs) const { return {x + first / kTileSide * tile + runs * run, row, run, tile}; }
};

// Where each of some panels begins, whose steps lie so many bytes apart; of rings also where in them, and their size, a power of two.
template <int P, long kStep, bool kAreRings = false>
struct TilePanels {
    const char* at[P];
    long first = 0, ring_bytes = 0;

    INLINE const char* tile(int p, long run) const { return at[p] + (kAreRings ? (first + run) & (ring_bytes - 1) : run); }
};

// Results of two whole panels, that wait to be written: a few rows with each run of the next products. All at once the lines, which
// go to memory, would hold up what these products read. (And who reads what a tile has just stored waits for it long.)
struct Results {
    const float* sums;  // [rows][2][16]
    char* to;           // the first row that is left
    long left, row_bytes;
    int64_t dtype;      // as LinearArguments has it
    bool passes_by;     // the caches: nothing will read the lines from there
    Vec bias[2];

    INLINE void write(long rows) {
        for (long i = smaller(rows, left); i > 0; i--) {
            Vec values[2] = {load(sums) + bias[0], load(sums + kLanes) + bias[1]};
            if (dtype == kFloat32 || dtype == kRounded) {
                if (dtype == kRounded) round_all(values, (const Bf16*)nullptr);
                write_line(to, (__m512i)values[0].p[0]);
                write_line(to + kRowBytes, (__m512i)values[1].p[0]);
            } else if (are_usual(values)) {
                write_line(to, (__m512i)_mm512_cvtne2ps_pbh(values[1].p[0], values[0].p[0]));
            } else {
                alignas(64) Bf16 line[2 * kLanes];
                store_all(line, values);
                write_line(to, _mm512_load_si512(line));
            }
            sums += 2 * kLanes;
            to += row_bytes;
            left--;
        }
    }

    INLINE void write_line(char* at, const __m512i& line) const {
        passes_by ? _mm512_stream_si512((__m512i*)at, line) : _mm512_storeu_si512(at, line);
    }
};

// What is done besides with each run: some results are written when it ends, and what comes next is asked for, a part behind each
// product. All at once, tiles would wait for it.
struct WriteBehind {
    Results& results;
    long rows;  // a run

    INLINE void end_run() { results.write(rows); }
};

constexpr long kNearBytes = 1024, kFarBytes = 8192;  // ahead of their use, for the first cache and for the second

// Asks for the panels themselves, which pass by once. Behind a panel's end lies one that is read beside it: what comes next is behind
// them all.
struct AskAhead : WriteBehind {
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

// Asks for the next panels: `lines` from `at` on. A part is not one stretch of them, but every so manieth line.
struct AskLines {
    const char* at;
    long lines;

    template <int kParts, int P>
    INLINE void ask(int part, const char* const (&)[P], long) {
        for (long i = part; i < lines; i += kParts) __builtin_prefetch(at + i * kRowBytes, 0, 2);
        if (part == kParts - 1) at += lines * kRowBytes;
    }
};
struct AskNext : WriteBehind, AskLines {};

struct AskNothing {
    template <int kParts, int P>
    INLINE void ask(int, const char* const (&)[P], long) {}
    INLINE void end_run() {}
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

// A tile of rows: one alone comes again with the next panels, and stays in the first cache; two are more than it keeps beside panels.
template <int Register, int R>
INLINE void load_rows(const char* x, long stride) {
    R == 1 ? tile_load<Register>(x, stride) : tile_load_past<Register>(x, stride);
}

// sums (+)= rows times panels over `runs` runs. R: tiles of rows; P: panels. sums: [16 R][P][16].
template <int R, class Product, int P, long kStep, bool kAreRings, class Ask>
NOINLINE void multiply_tiles(const TileRows& rows, const TilePanels<P, kStep, kAreRings>& panels, long runs, bool is_first, void* sums,
                             const Ask& aside) {
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
    const TilePanels<P, kStep, kAreRings> columns = panels;
    Ask ahead = aside;
    const char* x = from.x;
    for (long at = 0, end = runs * run; at < end; at += run, x += from.run) {
        tile_load<6>(columns.tile(0, at), kStep);  // all of them first: tiles that wait for each other hold up loads, too
        load_rows<4, R>(x, from.row);
        if constexpr (P > 1) tile_load<7>(columns.tile(P - 1, at), kStep);
        if constexpr (R > 1) load_rows<5, R>(x + from.tile, from.row);
        Product::template multiply<0, 4, 6>();
        ahead.template ask<R * P>(0, columns.at, at);
        if constexpr (P > 1) {
            Product::template multiply<1, 4, 7>();
            ahead.template ask<R * P>(1, columns.at, at);
        }
        if constexpr (R > 1) {
            Product::template multiply<2, 5, 6>();
            ahead.template ask<R * P>(P, columns.at, at);
        }
        if constexpr (R > 1 && P > 1) {
            Product::template multiply<3, 5, 7>();
            ahead.template ask<R * P>(3, columns.at, at);
        }
        ahead.end_run();
    }
    tile_store<0>(sum, stride);
    if constexpr (P > 1) tile_store<1>(sum + kRowBytes, stride);
    if constexpr (R > 1) tile_store<2>(sum + kTileSide * stride, stride);
    if constexpr (R > 1 && P > 1) tile_store<3>(sum + kTileSide * stride + kRowBytes, stride);
}

// Up to kPairRows rows, in registers that have the shape for them.
template <class Product, int P, long kStep, bool kAreRings, class Ask>
INLINE void multiply_rows(TileRegisters& registers, const TileRows& rows, long count, const TilePanels<P, kStep, kAreRings>& panels, long runs,
                          bool is_first, void* sums, const Ask& aside) {
    registers.shape(count, [&](int i) { return linear_shape(i, count); });
    if (count > kTileSide) {
        multiply_tiles<2, Product>(rows, panels, runs, is_first, sums, aside);
    } else {
        multiply_tiles<1, Product>(rows, panels, runs, is_first, sums, aside);
    }
}

// Where results go. They pass by the caches if nothing will read them from there.
struct TileOutput {
    const LinearArguments& args;
    Output<Bf16> output;
    bool passes_by;

    // Sums [count][P][16] of rows from `row` on: written, or given to `results`, which is then to be finished.
    template <int P>
    INLINE void write(long row, long panel, const float* sums, long count, Results& results) const {
        const long column = panel * kLanes, at[2] = {panel, panel + 1};
        if (P == 1 || column + 2 * kLanes > args.n) return output.write_sums(row, at, sums, count, P);
        const bool is_wide = args.out_dtype == kFloat32 || args.out_dtype == kRounded;
        const long bytes = is_wide ? sizeof(float) : sizeof(Bf16);
        results = {sums, (char*)output.y + ((output.first_row + row) * args.n + column) * bytes, count, args.n * bytes, args.out_dtype, passes_by, {}};
        for (int p = 0; p < 2; p++) results.bias[p] = args.bias == nullptr ? zero() : load(args.bias + column + p * kLanes);
    }

    // The same, at once.
    template <int P>
    NOINLINE void write_now(long row, long panel, const float* sums, long count) const {
        Results results{};
        write<P>(row, panel, sums, count, results);
        results.write(count);
    }

    // Results that pass by are in no order with what tells other threads that they are there.
    INLINE void finish() const {
        if (passes_by) _mm_sfence();
    }
};

// Columns [begin, end) of the rows.
struct Stretch {
    long begin, end;

    INLINE long runs() const { return (end - begin) / kRunDepth; }
};

// Rows times pairs of panels. Where they are too deep for the second cache they are cut into stretches: all pairs over the first one,
// then over the next, and sums are kept that long. It makes no difference to any bit: a sum goes through the same registers' width.
struct TiledLinear {
    const LinearArguments& args;
    TileRows rows;
    long num_rows;
    TileOutput output;

    INLINE long num_pairs() const { return ceil_div(args.n, 2 * kLanes); }
    INLINE long panel_bytes() const { return args.k * kLanes * (long)sizeof(Bf16); }
    INLINE const char* panel_at(long panel, long k) const { return (const char*)args.packed + panel * panel_bytes() + k * kLanes * sizeof(Bf16); }
    INLINE long pair_sums() const { return round_up(num_rows, kPairRows) * 2 * kLanes; }

    void run(long threads) const {
        const long numbers = num_rows * args.k, stretches = num_rows > kPairRows ? ceil_div(numbers, kStretchNumbers) : 1;
        if (stretches == 1) return run_stretch({0, args.k}, 0, num_pairs(), nullptr, threads);
        static thread_local Scratch scratch;
        const long depth = round_up(ceil_div(args.k, stretches), kBlockDepth), some = clamp(threads * kKeptSums / pair_sums(), 1, num_pairs());
        float* kept = scratch.get<float>(some * pair_sums());
        for (long pair = 0; pair < num_pairs(); pair += some) {
            for (long k = 0; k < args.k; k += depth) {
                run_stretch({k, smaller(args.k, k + depth)}, pair, smaller(some, num_pairs() - pair), kept, threads);
            }
        }
    }

    // All rows over a stretch of pairs [first, first + count), whose sums are in `kept` if they are more than this.
    void run_stretch(const Stretch& k, long first, long count, float* kept, long threads) const {
        const double work = (double)num_rows * count * 2 * kLanes * (k.end - k.begin);
        parallel_shares(count, work, threads, [&](Shares& shares) {
            static thread_local Scratch scratch;
            float* own = kept == nullptr ? scratch.get<float>(2 * pair_sums()) : nullptr;
            TileRegisters registers;
            Results results{};
            long turn = 0;
            for (long i; (i = shares.take()) >= 0; turn = 1 - turn) {
                float* sums = kept == nullptr ? own + turn * pair_sums() : kept + i * pair_sums();
                const long after = shares.after(i);
                const char* next = after >= 0                ? panel_at(2 * (first + after), k.begin)
                                   : k.end < args.k ? panel_at(2 * (first + shares.first()), k.end)
                                                    : nullptr;
                const long panel = 2 * (first + i);
                (panel + 1) * kLanes < args.n ? sweep<2>(panel, k, next, sums, registers, results) : sweep<1>(panel, k, next, sums, registers, results);
            }
            results.write(num_rows);
            output.finish();
        });
    }

    // The results of the pair before are written meanwhile.
    template <int P>
    void sweep(long panel, const Stretch& k, const char* next, float* sums, TileRegisters& registers, Results& results) const {
        const long blocks = ceil_div(num_rows, kPairRows);
        const WriteBehind behind{results, ceil_div(num_rows, k.runs() * blocks)};
        if (blocks == 1) {
            multiply_rows<Bf16Product>(registers, rows.from(0, 0), num_rows, panels_at<P>(panel, 0), k.runs(), true, sums,
                                       AskAhead{behind, panel_bytes()});
        } else {
            sweep_blocks<P>(panel, k, next, sums, registers, behind);
        }
        results.write(num_rows);
        if (k.end == args.k) output.write<P>(0, panel, sums, num_rows, results);
    }

    template <int P>
    void sweep_blocks(long panel, const Stretch& k, const char* next, float* sums, TileRegisters& registers, const WriteBehind& behind) const {
        const long panel_lines = k.runs() * kTileSide, lines = next == nullptr ? 0 : ceil_div(P * kTileSide, ceil_div(num_rows, kPairRows));
        long asked = 0;  // of the next pair's lines
        for (long at = k.begin; at < k.end; at += kSweepDepth) {
            const long runs = smaller(kSweepDepth, k.end - at) / kRunDepth;
            for (long row = 0; row < num_rows; row += kPairRows, asked += runs * lines) {
                const AskNext ask{behind, {next + asked / panel_lines * panel_bytes() + asked % panel_lines * kRowBytes, lines}};
                multiply_rows<Bf16Product>(registers, rows.from(row, at / kRunDepth), smaller(kPairRows, num_rows - row), panels_at<P>(panel, at), runs,
                                           at == 0, sums + row * P * kLanes, ask);
            }
        }
    }

    template <int P>
    INLINE TilePanels<P, kRowBytes> panels_at(long panel, long k) const {
        TilePanels<P, kRowBytes> panels;
        for (int p = 0; p < P; p++) panels.at[p] = panel_at(panel + p, k);
        return panels;
    }
};

// Rows of a layer as tiles, over which its panels pass: in place, where they or the panels are few, else copied to
// [ceil(count / 16)][runs][16][64].
INLINE TileRows rows_as_tiles(const void* x, long stride, long count, long bytes, long n, Scratch& scratch, long threads) {
    if (count <= kPairRows || (count <= kPlaceRows && n <= kPlaceOutputs)) return {(const char*)x, stride, kRowBytes, kTileSide * stride};
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

// Calls body(first, count) for rows that pass by a panel together, `most` of them.
template <class Body>
INLINE void for_each_pass(long m, long most, const Body& body) {
    const long passes = larger(1, ceil_div(m, most)), pass = round_up(ceil_div(m, passes), kPairRows);  // all of about the same size
    for (long first = 0; first < m; first += pass) body(first, smaller(pass, m - first));
}

INLINE bool tiled_linear(const LinearArguments& args, const Bf16* x, long x_stride, void* y, long m, long threads) {
    static thread_local Scratch scratch;
    if (args.k == 0 || args.k % kRunDepth != 0) return false;
    const long bytes = args.k * sizeof(Bf16);
    for_each_pass(m, kPassRows, [&](long first, long count) {
        const TileRows rows = rows_as_tiles(x + first * x_stride, x_stride * sizeof(Bf16), count, bytes, args.n, scratch, threads);
        TiledLinear{args, rows, count, {args, {args, y, first}, may_pass_by(args, y)}}.run(threads);
    });
    return true;
}

#endif

// y [m, n] = x [m, k] times the packed weight, plus bias; x rows lie x_stride elements apart.
template <class T>
void linear(const LinearArguments& args, const T* x, long x_stride, void* y, long m, long threads) {
    if (args.is_coded) return coded_linear(args, {args.packed, args.n, args.k}, x, x_stride, y, m, threads);
    if (!tiled_linear(args, x, x_stride, y, m, threads)) vector_linear(args, x, x_stride, y, m, threads);
}

// The same of one pair of panels, whole columns of a layer without a bias: y [m, 32].
template <class T>
void linear_pair(const LinearArguments& args, long pair, const T* x, long x_stride, void* y, long m) {
    LinearArguments one = args;
    one.n = 2 * kLanes;
    if (args.is_coded) {
        CodedIndex index(args.packed, args.n, args.k);
        index.first = pair;
        index.pairs = 1;
        return coded_linear(one, index, x, x_stride, y, m, 1);
    }
    one.packed = (const T*)args.packed + pair * one.n * round_up(args.k, FormatOf<T>::type::kPack);
    linear(one, x, x_stride, y, m, 1);
}

}  // namespace
