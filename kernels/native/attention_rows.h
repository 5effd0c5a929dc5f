// Rows of attention over the paged cache: what one call of a thread computes; see attention.h.
//
// A "row" is one query token of one head. Rows that share a key/value head are worked on together: token-major, then head.
#pragma once

#include "linear.h"
#include "totals.h"

// Mirrored by `kernels.paged_attention.cpu.AttentionArguments`. Strides count elements.
struct AttentionArguments {
    const void* query;                         // [num_tokens, num_heads, head_dim]
    void* out;                                 // the same
    const void *key_cache, *value_cache;       // see kv_cache.h
    const int32_t* query_start_loc;            // [num_seqs + 1]
    const int32_t* seq_lens;                   // [num_seqs]
    const int32_t* block_table;                // [num_seqs, table_stride]
    int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride, table_stride, table_width;
    int64_t dtype, num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, padded_dim, num_blocks, block_size;
    int64_t window;                            // 0 = none
    float scale, soft_cap;                     // soft_cap 0 = none
    int64_t quantized;                         // whether the caches are IntegerCache
};

namespace {

constexpr long kChunk = 64, kChunkPanels = kChunk / kLanes;
constexpr long kSegment = 512;
constexpr float kTopSlack = 8.0f;                   // a score may lie so far above what scores are counted from: few need to shrink a sum
constexpr int kTileQueries = kWidth == 16 ? 8 : 4;  // rows that share a pass over the keys

// What comes next is asked for in the second cache: of lines on their way to the first one a processor can wait for few, so a thread
// got 13 GB/s of keys and values in place of 20 (AMD EPYC). One or two rows read faster than they are answered, and ask again.
template <int R, int P>
using FarAhead = Ahead<P, 2, kWidth == 16 && R <= 2 ? 512 : 0>;

// Rows of one sequence and one key/value head that one call of a thread computes.
struct AttentionTask {
    int32_t seq, kv_head, first_row, rows;
};

struct Positions {
    long begin, end;
};

// Those that a row of the task sees, `row` counted from its first one.
INLINE Positions seen_by(const AttentionArguments& args, const AttentionTask& task, long row) {
    const long token = (task.first_row + row) / (args.num_heads / args.num_kv_heads);
    const long behind = args.query_start_loc[task.seq + 1] - args.query_start_loc[task.seq] - token - 1;
    const long end = args.seq_lens[task.seq] - behind;
    return {args.window > 0 ? larger(0, end - args.window) : 0, end};
}

// What a thread does after a segment: it goes on up to `stop`, then to another task, if there is one.
struct After {
    long stop;
    const AttentionTask* task;
};

template <class Stored>
struct Chunk {
    long start;                        // position of its first token
    long first_panel, end_panel;       // those that some row of the task sees
    const Stored* key[kChunkPanels];   // their first steps; null outside first_panel .. end_panel
    const Stored* value[kChunkPanels];
    const Stored* next[kChunkPanels];  // keys that are read after these values
    long num_next;
};

template <class Cache>
struct TaskRows {
    using T = typename Cache::T;
    using Format = typename Cache::Format;
    using Stored = typename Format::T;
    using X = typename Format::X;
    static constexpr long kPack = Format::kPack, kStepBytes = kLanes * kPack * sizeof(Stored);

    const AttentionArguments& args;
    const AttentionTask& task;
    long seen_begin, seen_end;                      // positions that some row sees
    long begin[kTaskRows], end[kTaskRows];          // positions that each row sees
    alignas(64) X query[kTaskRows * kMaxDim];       // [rows, kMaxDim]
    Vec sums[kTaskRows];                            // of the segment in progress, lane by lane

    TaskRows(const AttentionArguments& arguments, const AttentionTask& its_task) : args(arguments), task(its_task) {
        const long group = args.num_heads / args.num_kv_heads, first_token = args.query_start_loc[task.seq];
        for (long r = 0; r < task.rows; r++) {
            const Positions seen = seen_by(args, task, r);
            begin[r] = seen.begin;
            end[r] = seen.end;
            const T* from = (const T*)args.query + (first_token + (task.first_row + r) / group) * args.query_token_stride;
            from += query_head(r) * args.query_head_stride;
            to_operand(from, args.head_dim, query + r * kMaxDim, args.padded_dim);
        }
        seen_begin = begin[0];
        seen_end = end[task.rows - 1];
    }

    long query_head(long r) const {
        const long group = args.num_heads / args.num_kv_heads;
        return task.kv_head * group + (task.first_row + r) % group;
    }

    void write(const Totals& total) const {
        const long group = args.num_heads / args.num_kv_heads;
        for (long r = 0; r < task.rows; r++) {
            const long token = args.query_start_loc[task.seq] + (task.first_row + r) / group;
            T* to = (T*)args.out + token * args.out_token_stride + query_head(r) * args.out_head_stride;
            const Vec sum = splat(total.sum[r]);
            for (long d = 0; d < args.head_dim; d += kLanes) store_some(to + d, load(&total.acc[r][d]) / sum, args.head_dim - d);
        }
    }

    // Elements from the beginning of a cache to the first step of the panel that holds a position.
    long panel_at(const AttentionTask& of, long position) const {
        const long block = args.block_table[of.seq * args.table_stride + position / args.block_size];
        const long panel = (block * args.num_kv_heads + of.kv_head) * (args.block_size / kLanes) + position % args.block_size / kLanes;
        return panel * panel_size<Cache>(args.padded_dim) + Cache::kHeader;
    }

    Chunk<Stored> chunk_at(long start, const After& after) const {
        Chunk<Stored> chunk{};
        chunk.start = start;
        chunk.first_panel = larger(0, seen_begin - start) / kLanes;
        chunk.end_panel = ceil_div(smaller(kChunk, seen_end - start), kLanes);
        for (long p = chunk.first_panel; p < chunk.end_panel; p++) {
            const long at = panel_at(task, start + p * kLanes);
            chunk.key[p] = (const Stored*)args.key_cache + at;
            chunk.value[p] = (const Stored*)args.value_cache + at;
        }
        if (start + kChunk < after.stop) {
            look_ahead(chunk, task, start + kChunk, after.stop);
        } else if (after.task != nullptr) {
            look_ahead(chunk, *after.task, seen_by(args, *after.task, 0).begin, seen_by(args, *after.task, after.task->rows - 1).end);
        }
        return chunk;
    }

    // The chunk of positions [from, stop) is read next.
    void look_ahead(Chunk<Stored>& chunk, const AttentionTask& of, long from, long stop) const {
        const long end = smaller(stop, from / kChunk * kChunk + kChunk);
        for (long at = from / kLanes * kLanes; at < end; at += kLanes) {
            chunk.next[chunk.num_next++] = (const Stored*)args.key_cache + panel_at(of, at);
        }
    }

    // All rows that see some of a chunk over it.
    INLINE void attend_rows(const Chunk<Stored>& chunk, Totals& part) {
        long row = 0, stop = task.rows;
        while (row < stop && end[row] <= chunk.start) row++;
        while (row < stop && begin[stop - 1] >= chunk.start + kChunk) stop--;
        for (; row + kTileQueries <= stop; row += kTileQueries) attend_chunk<kTileQueries>(chunk, row, part);
        if (kTileQueries == 8 && row + 4 <= stop) attend_chunk<4>(chunk, row, part), row += 4;
        if (row + 2 <= stop) attend_chunk<2>(chunk, row, part), row += 2;
        if (row < stop) attend_chunk<1>(chunk, row, part);
    }

    // Rows [row, row + R) over one chunk. They see one part of it each: from row to row it begins and ends later.
    template <int R>
    void attend_chunk(const Chunk<Stored>& chunk, long row, Totals& part) {
        alignas(64) float scores[R][kChunk];
        alignas(64) X probs[R][kChunk];
        long low[R], high[R];  // lanes that each row sees
        for (int r = 0; r < R; r++) {
            low[r] = clamp(begin[row + r] - chunk.start, 0, kChunk);
            high[r] = clamp(end[row + r] - chunk.start, 0, kChunk);
        }
        const long first = low[0] / kLanes, stop = ceil_div(high[R - 1], kLanes);
        scores_of<R>(chunk, first, stop, row, scores);
        if (args.soft_cap == 0.0f && low[R - 1] == 0 && high[0] == kChunk) {
            softmax_whole_rows<R>(chunk, scores, row, part, probs);
            return add_values<R>(chunk, &probs[0][0], 0, kChunk, row, part);
        }
        if (args.soft_cap != 0.0f) {
            memset(probs, 0, sizeof probs);
            for (int r = 0; r < R; r++) softmax_row(chunk, scores[r], low[r], high[r], row + r, part, probs[r]);
        } else {
            softmax_cut_rows<R>(chunk, scores, low, high, row, part, probs);
        }
        add_all_values<R>(chunk, probs, low, high, row, part);
    }

    template <int R>
    INLINE void scores_of(const Chunk<Stored>& chunk, long panel, long stop, long row, float (&scores)[R][kChunk]) const {
        constexpr int N = panels_for(R);
        for (; panel + N <= stop; panel += N) score_panels<R, N>(chunk, row, panel, scores);
        for (; panel < stop; panel++) score_panels<R, 1>(chunk, row, panel, scores);
    }

    // A value that a row does not see has no part in its result: it is multiplied by zero, or, since a stale slot of the cache and
    // what came of a later token may not be finite, left out.
    template <int R>
    INLINE void add_all_values(const Chunk<Stored>& chunk, X (&probs)[R][kChunk], const long (&low)[R], const long (&high)[R], long row,
                               Totals& part) const {
        const long begin = low[0] / kPack * kPack, end = round_up(high[R - 1], kPack);            // that some row sees
        long all_begin = round_up(low[R - 1], kPack), all_end = high[0] / kPack * kPack;          // that all see
        if (all_begin >= all_end) all_begin = all_end = end;
        if (are_finite(chunk, begin, all_begin) && are_finite(chunk, all_end, end)) {
            return add_values<R>(chunk, &probs[0][0], begin, end, row, part);
        }
        // Positions ascend for every row: what it sees alone, what all rows see, the rest.
        for (int r = 0; r < R; r++) add_values_row(chunk, probs[r], low[r], smaller(high[r], all_begin), part.acc[row + r]);
        add_values<R>(chunk, &probs[0][0], all_begin, all_end, row, part);
        for (int r = 0; r < R; r++) add_values_row(chunk, probs[r], larger(low[r], all_end), high[r], part.acc[row + r]);
    }

    // Zeros for numbers, else NaN.
    static INLINE Vec zero_of(const uint8_t*) { return zero(); }
    template <class Number>
    static INLINE Vec zero_of(const Number* x) { return load(x) * zero(); }

    // Whether all values of lanes [lane, end) are, whole steps of them.
    INLINE bool are_finite(const Chunk<Stored>& chunk, long lane, long end) const {
        const long stride = args.padded_dim * kPack;
        if (Cache::kIsFinite || lane >= end) return true;
        Vec zeros = zero();
        for (; lane < end; lane += kPack) {
            const Stored* step = chunk.value[lane / kLanes] + lane % kLanes / kPack * stride;
            for (long i = 0; i < stride; i += kLanes) zeros = zeros + zero_of(step + i);
        }
        return sum_lanes(zeros) == 0.0f;
    }

    template <int R, int N>
    INLINE void score_panels(const Chunk<Stored>& chunk, long row, long panel, float (&scores)[R][kChunk]) const {
        Vec acc[R][N];
        const Stored* keys[N];
        UNROLL for (int n = 0; n < N; n++) keys[n] = chunk.key[panel + n];
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int n = 0; n < N; n++) acc[r][n] = zero();
        }
        const long steps = ceil_div(args.head_dim, kPack);
        const Rows<X> rows{query + row * kMaxDim, kMaxDim};
        FarAhead<R, N> ahead{{}, kStepBytes};
        UNROLL for (int n = 0; n < N; n++) ahead.at[n] = (const char*)(chunk.value[panel + n] - Cache::kHeader);
        accumulate<Format>(acc, rows, keys, kLanes * kPack, steps, ahead);
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int n = 0; n < N; n++) {
                store(&scores[r][(panel + n) * kLanes], Cache::scaled(acc[r][n], keys[n]) * splat(args.scale));
            }
        }
    }

    // Takes one row's scores of lanes [low, high) into its state, and leaves exp(score - top), times the values' scales, in probs.
    void softmax_row(const Chunk<Stored>& chunk, float* scores, long low, long high, long row, Totals& part, X* probs) {
        const long first = low / kLanes, stop = ceil_div(high, kLanes);
        Vec top = splat(-kInfinity);
        for (long p = first; p < stop; p++) {
            Vec s = load(scores + p * kLanes);
            if (args.soft_cap != 0.0f) s = tanh(s / splat(args.soft_cap)) * splat(args.soft_cap);
            s = keep_lanes(s, low - p * kLanes, high - p * kLanes, -kInfinity);
            store(scores + p * kLanes, s);
            top = max(top, s);
        }
        const float zero_at = raise_top(max_lanes(top), row, part);
        Vec sum = sums[row];
        for (long p = first; p < stop; p++) {
            const long begin = low - p * kLanes, end = high - p * kLanes;
            const Vec e = keep_lanes(exp(load(scores + p * kLanes) - splat(zero_at)), begin, end, 0.0f);
            sum = sum + e;
            store_probs(probs + p * kLanes, Cache::kHeader ? keep_lanes(Cache::scaled(e, chunk.value[p]), begin, end, 0.0f) : e);
        }
        sums[row] = sum;
    }

    // The same of rows that see the whole chunk: nothing to cut, and what one row waits for does not hold up the others.
    template <int R>
    INLINE void softmax_whole_rows(const Chunk<Stored>& chunk, const float (&scores)[R][kChunk], long row, Totals& part,
                                   X (&probs)[R][kChunk]) {
        float tops[R];
        UNROLL for (int r = 0; r < R; r++) {
            Vec top = load(scores[r]);
            UNROLL for (int p = 1; p < kChunkPanels; p++) top = max(top, load(scores[r] + p * kLanes));
            tops[r] = max_lanes(max(splat(-kInfinity), top));
        }
        for (int r = 0; r < R; r++) tops[r] = raise_top(tops[r], row + r, part);
        for (int r = 0; r < R; r++) {
            const Vec zero_at = splat(tops[r]);
            Vec sum = sums[row + r];
            UNROLL for (int p = 0; p < kChunkPanels; p++) {
                const Vec e = exp_below_88(load(scores[r] + p * kLanes) - zero_at);
                store_probs(&probs[r][p * kLanes], Cache::scaled(e, chunk.value[p]));
                sum = sum + e;
            }
            sums[row + r] = sum;
        }
    }

    // The same of rows that see a part of the chunk; elsewhere their probabilities are zero, in the panels that some row sees.
    template <int R>
    INLINE void softmax_cut_rows(const Chunk<Stored>& chunk, const float (&scores)[R][kChunk], const long (&low)[R], const long (&high)[R],
                                 long row, Totals& part, X (&probs)[R][kChunk]) {
        const long first = low[0] / kLanes, stop = ceil_div(high[R - 1], kLanes);
        float tops[R];
        for (int r = 0; r < R; r++) {
            Vec top = splat(-kInfinity);
            for (long p = first; p < stop; p++) {
                top = max(top, keep_lanes(load(scores[r] + p * kLanes), low[r] - p * kLanes, high[r] - p * kLanes, -kInfinity));
            }
            tops[r] = max_lanes(top);
        }
        for (int r = 0; r < R; r++) tops[r] = raise_top(tops[r], row + r, part);
        for (int r = 0; r < R; r++) {
            const Vec zero_at = splat(tops[r]);
            Vec sum = sums[row + r];
            for (long p = first; p < stop; p++) {
                const long begin = low[r] - p * kLanes, end = high[r] - p * kLanes;
                const Vec e = keep_lanes(exp_below_88(load(scores[r] + p * kLanes) - zero_at), begin, end, 0.0f);
                store_probs(&probs[r][p * kLanes], Cache::kHeader ? keep_lanes(Cache::scaled(e, chunk.value[p]), begin, end, 0.0f) : e);
                sum = sum + e;
            }
            sums[row + r] = sum;
        }
    }

    // What the row's scores are counted from, when it has met `score`. If that is much higher, what the row has summed up so far
    // shrinks. NaN passes through.
    INLINE float raise_top(float score, long row, Totals& part) {
        const float old_top = part.top[row];
        if (__builtin_expect(score <= old_top + kTopSlack, true)) return old_top;
        part.top[row] = score;
        if (old_top != -kInfinity) shrink(exp(splat(old_top - score)), row, part);
        return score;
    }

    NOINLINE void shrink(const Vec& factor, long row, Totals& part) {
        sums[row] = sums[row] * factor;
        for (long d = 0; d < args.padded_dim; d += kLanes) store(&part.acc[row][d], load(&part.acc[row][d]) * factor);
    }

    // bf16 models take their probabilities in bf16, as the bf16 products need them; on every instruction set, so that all agree.
    static INLINE void store_probs(float* probs, const Vec& e) { store(probs, FormatOf<T>::type::kPack == 2 ? round_bf16(e) : e); }
#if defined(__AVX512BF16__)
    static INLINE void store_probs(Bf16* probs, const Vec& e) {  // subnormal numbers are zero here, and would be in the products
        const __m256bh rounded = _mm512_cvtneps_pbh(e.p[0]);
        memcpy(probs, &rounded, sizeof rounded);
    }
#endif

    template <int R>
    INLINE void add_values(const Chunk<Stored>& chunk, const X* probs, long low, long high, long row, Totals& part) const {
        constexpr int N = panels_for(R), kWide = kWidth == 16 && R <= 2 ? 2 * N : N;  // a step of a common head is one stream in memory
        if (low >= high) return;
        long d = 0;
        for (; d + kWide * kLanes <= args.padded_dim; d += kWide * kLanes) add_columns<R, kWide>(chunk, probs, low, high, row, d, part);
        for (; d + N * kLanes <= args.padded_dim; d += N * kLanes) add_columns<R, N>(chunk, probs, low, high, row, d, part);
        for (; d < args.padded_dim; d += kLanes) add_columns<R, 1>(chunk, probs, low, high, row, d, part);
    }

    template <int R, int N>
    INLINE void add_columns(const Chunk<Stored>& chunk, const X* probs, long low, long high, long row, long d,
                            Totals& part) const {
        Vec acc[R][N];
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int n = 0; n < N; n++) acc[r][n] = load(&part.acc[row + r][d + n * kLanes]);
        }
        const long w_stride = args.padded_dim * kPack;
        for (long lane = low; lane < high;) {
            const long panel = lane / kLanes, stop = smaller(high, (panel + 1) * kLanes);
            const Stored* values[N];
            UNROLL for (int n = 0; n < N; n++) {
                values[n] = chunk.value[panel] + lane % kLanes / kPack * w_stride + (d + n * kLanes) * kPack;
            }
            const Rows<X> rows{probs + lane, kChunk};
            const long after = panel - chunk.first_panel;
            const Stored* next = after < chunk.num_next ? chunk.next[after] : chunk.value[panel];
            FarAhead<R, N> ahead{{}, N * kStepBytes};
            UNROLL for (int n = 0; n < N; n++) ahead.at[n] = (const char*)(next - Cache::kHeader + d * kLanes) + n * kStepBytes;
            accumulate<Format>(acc, rows, values, w_stride, (stop - lane) / kPack, ahead);
            lane = stop;
        }
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int n = 0; n < N; n++) store(&part.acc[row + r][d + n * kLanes], acc[r][n]);
        }
    }

    // One row over lanes [low, high), whose ends may cut a step. Then half a pair is taken, or the whole step if it is finite: the
    // probabilities of lanes that the row does not see are zero.
    void add_values_row(const Chunk<Stored>& chunk, const X* probs, long low, long high, float* out) const {
        if (low >= high) return;
        const long w_stride = args.padded_dim * kPack;
        for (long d = 0; d < args.padded_dim; d += kLanes) {
            Vec acc[1][1] = {{load(out + d)}};
            for (long lane = low; lane < high;) {
                const long even = lane / kPack * kPack;
                const Stored* values[1] = {chunk.value[lane / kLanes] + even % kLanes / kPack * w_stride + d * kPack};
                if (Cache::kIsFinite || (lane == even && even + kPack <= high)) {
                    Format::step(acc, Rows<X>{probs + even, kChunk}, 0, values, 0);
                    lane = even + kPack;
                } else {
                    if constexpr (!Cache::kIsFinite) Format::half_step(acc[0][0], probs + even, values[0], 0, lane != even);
                    lane++;
                }
            }
            store(out + d, acc[0][0]);
        }
    }
};

}  // namespace
