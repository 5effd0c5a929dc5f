// Causal attention over the paged cache.
//
// Softmax runs online over chunks of 64 tokens and starts afresh in every segment of 512; the segments' results are combined
// in order. Chunks and segments are aligned to position 0 of the context, so a row's operations depend on the row's own
// context alone: the token decoded at a position has the bits that its prefill row would have, however the prompt was cut, and
// the segments of a long context can run on different threads.
//
// A "row" is one query token of one head. Rows that share a key/value head are worked on together: token-major, then head.
#pragma once

#include "linear.h"
#include "totals.h"

// Mirrored by `kernels.paged_attention.cpu.AttentionArguments`. Strides count elements.
struct AttentionArguments {
    const void* query;                         // [num_tokens, num_heads, head_dim]
    void* out;                                 // the same
    const void *key_cache, *value_cache;       // see kv_store.h
    const int32_t* query_start_loc;            // [num_seqs + 1]
    const int32_t* seq_lens;                   // [num_seqs]
    const int32_t* block_table;                // [num_seqs, table_stride]
    int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride, table_stride, table_width;
    int64_t dtype, num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, padded_dim, num_blocks, block_size;
    int64_t window;                            // 0 = none
    float scale, soft_cap;                     // soft_cap 0 = none
};

namespace {

constexpr long kChunk = 64, kChunkPanels = kChunk / kLanes;
constexpr long kSegment = 512;
constexpr int kTileQueries = kWidth == 16 ? 8 : 4;  // rows that share a pass over the keys

// Rows of one sequence and one key/value head that one call of a thread computes.
struct AttentionTask {
    int32_t seq, first_row, rows;
};

template <class T>
struct Chunk {
    long start;                      // position of its first token
    long first_panel, end_panel;     // those that some row of the task sees
    const T* key[kChunkPanels];      // null outside first_panel .. end_panel
    const T* value[kChunkPanels];
};

template <class T>
struct TaskRows {
    using Format = typename FormatOf<T>::type;
    using X = typename Format::X;
    static constexpr long kPack = Format::kPack;

    const AttentionArguments& args;
    const AttentionTask& task;
    const long kv_head;
    long seen_begin, seen_end;                      // positions that some row sees
    long begin[kTaskRows], end[kTaskRows];          // positions that each row sees
    alignas(64) X query[kTaskRows * kMaxDim];       // [rows, padded_dim]
    Vec sums[kTaskRows];                            // of the segment in progress, lane by lane

    TaskRows(const AttentionArguments& arguments, const AttentionTask& its_task, long head)
        : args(arguments), task(its_task), kv_head(head) {
        const long group = args.num_heads / args.num_kv_heads;
        const long first_token = args.query_start_loc[task.seq], tokens = args.query_start_loc[task.seq + 1] - first_token;
        seen_begin = args.seq_lens[task.seq];
        seen_end = 0;
        for (long r = 0; r < task.rows; r++) {
            const long token = (task.first_row + r) / group;
            end[r] = args.seq_lens[task.seq] - tokens + token + 1;
            begin[r] = args.window > 0 ? larger(0, end[r] - args.window) : 0;
            seen_begin = smaller(seen_begin, begin[r]);
            seen_end = larger(seen_end, end[r]);
            const T* from = (const T*)args.query + (first_token + token) * args.query_token_stride;
            from += query_head(r) * args.query_head_stride;
            to_operand(from, args.head_dim, query + r * args.padded_dim, args.padded_dim);
        }
    }

    long query_head(long r) const {
        const long group = args.num_heads / args.num_kv_heads;
        return kv_head * group + (task.first_row + r) % group;
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

    Chunk<T> chunk_at(long start) const {
        Chunk<T> chunk{};
        chunk.start = start;
        chunk.first_panel = larger(0, seen_begin - start) / kLanes;
        chunk.end_panel = ceil_div(smaller(kChunk, seen_end - start), kLanes);
        const long panels_per_block = args.block_size / kLanes, panel_size = kLanes * args.padded_dim;
        for (long p = chunk.first_panel; p < chunk.end_panel; p++) {
            const long position = start + p * kLanes;
            const long block = args.block_table[task.seq * args.table_stride + position / args.block_size];
            const long panel = (block * args.num_kv_heads + kv_head) * panels_per_block + position % args.block_size / kLanes;
            chunk.key[p] = (const T*)args.key_cache + panel * panel_size;
            chunk.value[p] = (const T*)args.value_cache + panel * panel_size;
        }
        return chunk;
    }

    // The rows' attention to positions [segment, segment + kSegment).
    void attend(long segment, Totals& part) {
        part.clear(task.rows, args.padded_dim);
        for (long r = 0; r < task.rows; r++) sums[r] = zero();
        const long stop = smaller(segment + kSegment, seen_end);
        for (long start = larger(segment, seen_begin / kChunk * kChunk); start < stop; start += kChunk) {
            const Chunk<T> chunk = chunk_at(start);
            long r = 0;
            for (; r + kTileQueries <= task.rows; r += kTileQueries) attend_chunk<kTileQueries>(chunk, r, part);
            if (kTileQueries == 8 && r + 4 <= task.rows) attend_chunk<4>(chunk, r, part), r += 4;
            if (r + 2 <= task.rows) attend_chunk<2>(chunk, r, part), r += 2;
            if (r < task.rows) attend_chunk<1>(chunk, r, part);
        }
        for (long r = 0; r < task.rows; r++) part.sum[r] = sum_lanes(sums[r]);
    }

    // Rows [row, row + R) over one chunk.
    template <int R>
    void attend_chunk(const Chunk<T>& chunk, long row, Totals& part) {
        alignas(64) float scores[R][kChunk];
        alignas(64) X probs[R][kChunk];
        long low[R], high[R], shared_low = 0, shared_high = kChunk;  // lanes that each row sees, that all see
        scores_of<R>(chunk, row, scores);
        for (int r = 0; r < R; r++) {
            low[r] = clamp(begin[row + r] - chunk.start, 0, kChunk);
            high[r] = clamp(end[row + r] - chunk.start, 0, kChunk);
            if (low[r] < high[r]) softmax_row(scores[r], low[r], high[r], row + r, part, probs[r]);
            shared_low = larger(shared_low, round_up(low[r], kPack));
            shared_high = smaller(shared_high, high[r] / kPack * kPack);
        }
        if (shared_low >= shared_high) shared_low = shared_high = kChunk;
        // Positions ascend for every row: what it sees alone, what all rows see, the rest. Values that a row does not see are
        // left out rather than multiplied by zero: a stale cache slot may hold NaN.
        for (int r = 0; r < R; r++) add_values_row(chunk, probs[r], low[r], smaller(high[r], shared_low), part.acc[row + r]);
        add_values<R>(chunk, &probs[0][0], shared_low, shared_high, row, part);
        for (int r = 0; r < R; r++) add_values_row(chunk, probs[r], larger(low[r], shared_high), high[r], part.acc[row + r]);
    }

    template <int R>
    INLINE void scores_of(const Chunk<T>& chunk, long row, float (&scores)[R][kChunk]) const {
        constexpr int N = panels_for(R);
        long panel = chunk.first_panel;
        for (; panel + N <= chunk.end_panel; panel += N) score_panels<R, N>(chunk, row, panel, scores);
        for (; panel < chunk.end_panel; panel++) score_panels<R, 1>(chunk, row, panel, scores);
    }

    template <int R, int N>
    INLINE void score_panels(const Chunk<T>& chunk, long row, long panel, float (&scores)[R][kChunk]) const {
        Vec acc[R][N];
        const T* keys[N];
        UNROLL for (int n = 0; n < N; n++) keys[n] = chunk.key[panel + n];
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int n = 0; n < N; n++) acc[r][n] = zero();
        }
        const long steps = ceil_div(args.head_dim, kPack);
        const Rows<X> rows{query + row * args.padded_dim, args.padded_dim};
        accumulate<Format>(acc, rows, keys, kLanes * kPack, steps);
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int n = 0; n < N; n++) store(&scores[r][(panel + n) * kLanes], acc[r][n] * splat(args.scale));
        }
    }

    // Takes one row's scores of lanes [low, high) into its state, and leaves exp(score - max) in probs.
    void softmax_row(float* scores, long low, long high, long row, Totals& part, X* probs) {
        if (low == 0 && high == kChunk && args.soft_cap == 0.0f) return softmax_whole_row(scores, row, part, probs);
        const long first = low / kLanes, stop = ceil_div(high, kLanes);
        Vec top = splat(-kInfinity);
        for (long p = first; p < stop; p++) {
            Vec s = load(scores + p * kLanes);
            if (args.soft_cap != 0.0f) s = tanh(s / splat(args.soft_cap)) * splat(args.soft_cap);
            s = keep_lanes(s, low - p * kLanes, high - p * kLanes, -kInfinity);
            store(scores + p * kLanes, s);
            top = max(top, s);
        }
        const float new_max = raise_max(max_lanes(top), row, part);
        Vec sum = sums[row];
        for (long p = first; p < stop; p++) {
            const Vec e = keep_lanes(exp(load(scores + p * kLanes) - splat(new_max)), low - p * kLanes, high - p * kLanes, 0.0f);
            sum = sum + e;
            store_probs(probs + p * kLanes, e);
        }
        sums[row] = sum;
    }

    // The same of a row that sees the whole chunk: nothing to cut, and nothing leaves the registers in between.
    void softmax_whole_row(const float* scores, long row, Totals& part, X* probs) {
        Vec s[kChunkPanels], top = splat(-kInfinity);
        UNROLL for (int p = 0; p < kChunkPanels; p++) {
            s[p] = load(scores + p * kLanes);
            top = max(top, s[p]);
        }
        const Vec new_max = splat(raise_max(max_lanes(top), row, part));
        UNROLL for (int p = 0; p < kChunkPanels; p++) {
            s[p] = exp(s[p] - new_max);
            store_probs(probs + p * kLanes, s[p]);
        }
        Vec sum = sums[row];
        UNROLL for (int p = 0; p < kChunkPanels; p++) sum = sum + s[p];
        sums[row] = sum;
    }

    // The row's maximum when it has met a score; if that is higher, what the row has summed up so far shrinks.
    INLINE float raise_max(float score, long row, Totals& part) {
        const float old_max = part.max[row];
        const float new_max = score <= old_max ? old_max : score;  // NaN passes through
        if (new_max != old_max) {
            const Vec shrink = exp(splat(old_max - new_max));
            sums[row] = sums[row] * shrink;
            for (long d = 0; d < args.padded_dim; d += kLanes) store(&part.acc[row][d], load(&part.acc[row][d]) * shrink);
            part.max[row] = new_max;
        }
        return new_max;
    }

    // bf16 models take their probabilities in bf16, as the bf16 products need them; on every instruction set, so that all agree.
    static INLINE void store_probs(float* probs, const Vec& e) { store(probs, kPack == 2 ? round_bf16(e) : e); }
    static INLINE void store_probs(Bf16* probs, const Vec& e) { store(probs, e); }

    template <int R>
    INLINE void add_values(const Chunk<T>& chunk, const X* probs, long low, long high, long row, Totals& part) const {
        constexpr int N = panels_for(R);
        if (low >= high) return;
        long d = 0;
        for (; d + N * kLanes <= args.padded_dim; d += N * kLanes) add_columns<R, N>(chunk, probs, low, high, row, d, part);
        for (; d < args.padded_dim; d += kLanes) add_columns<R, 1>(chunk, probs, low, high, row, d, part);
    }

    template <int R, int N>
    INLINE void add_columns(const Chunk<T>& chunk, const X* probs, long low, long high, long row, long d, Totals& part) const {
        Vec acc[R][N];
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int n = 0; n < N; n++) acc[r][n] = load(&part.acc[row + r][d + n * kLanes]);
        }
        const long w_stride = args.padded_dim * kPack;
        for (long lane = low; lane < high;) {
            const long panel = lane / kLanes, stop = smaller(high, (panel + 1) * kLanes);
            const T* values[N];
            UNROLL for (int n = 0; n < N; n++) {
                values[n] = chunk.value[panel] + lane % kLanes / kPack * w_stride + (d + n * kLanes) * kPack;
            }
            accumulate<Format>(acc, Rows<X>{probs + lane, kChunk}, values, w_stride, (stop - lane) / kPack);
            lane = stop;
        }
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int n = 0; n < N; n++) store(&part.acc[row + r][d + n * kLanes], acc[r][n]);
        }
    }

    // One row over lanes [low, high), whose ends may cut a pair.
    void add_values_row(const Chunk<T>& chunk, const X* probs, long low, long high, float* out) const {
        if (low >= high) return;
        const long w_stride = args.padded_dim * kPack;
        for (long d = 0; d < args.padded_dim; d += kLanes) {
            Vec acc[1][1] = {{load(out + d)}};
            for (long lane = low; lane < high;) {
                const long even = lane / kPack * kPack;
                const T* values[1] = {chunk.value[lane / kLanes] + even % kLanes / kPack * w_stride + d * kPack};
                if (lane == even && even + kPack <= high) {
                    Format::step(acc, Rows<X>{probs + even, kChunk}, 0, values, 0);
                } else {
                    Format::half_step(acc[0][0], probs + even, values[0], 0, lane != even);
                }
                lane = lane == even && even + kPack <= high ? lane + kPack : lane + 1;
            }
            store(out + d, acc[0][0]);
        }
    }
};

template <class T>
void clear_rows(const AttentionArguments& args, long begin, long end) {
    for (long token = begin; token < end; token++) {
        for (long head = 0; head < args.num_heads; head++) {
            memset((T*)args.out + token * args.out_token_stride + head * args.out_head_stride, 0, args.head_dim * sizeof(T));
        }
    }
}

// Whether the sequence's rows, and every block that they can see, exist.
bool rows_and_blocks_exist(const AttentionArguments& args, long seq) {
    const long queries = args.query_start_loc[seq + 1] - args.query_start_loc[seq], length = args.seq_lens[seq];
    const long first = args.window > 0 ? larger(0, length - queries + 1 - args.window) : 0;
    const int32_t* blocks = args.block_table + seq * args.table_stride;
    if (queries < 0 || args.query_start_loc[seq] < 0 || args.query_start_loc[seq + 1] > args.num_tokens) return false;
    if (length == 0) return true;
    if (queries > length || ceil_div(length, args.block_size) > args.table_width) return false;
    for (long b = first / args.block_size; b * args.block_size < length; b++) {
        if (blocks[b] < 0 || blocks[b] >= args.num_blocks) return false;
    }
    return true;
}

// Lists the step's tasks, those of a sequence from its longest context down; returns their number. Clears rows without context.
template <class T>
long list_tasks(const AttentionArguments& args, Scratch& scratch, double& work, long& longest) {
    const long group = args.num_heads / args.num_kv_heads;
    AttentionTask* tasks = scratch.get<AttentionTask>(args.num_tokens * ceil_div(group, kTaskRows) + args.num_seqs);
    long count = 0;
    for (long seq = 0; seq < args.num_seqs; seq++) {
        const long start = args.query_start_loc[seq], stop = args.query_start_loc[seq + 1];
        if (args.seq_lens[seq] == 0) {
            clear_rows<T>(args, start, stop);
            continue;
        }
        const long rows = (stop - start) * group;
        work += (double)rows * args.seq_lens[seq] * args.head_dim * 2 * args.num_kv_heads;
        longest = larger(longest, args.seq_lens[seq]);
        for (long first = (rows - 1) / kTaskRows * kTaskRows; first >= 0 && rows > 0; first -= kTaskRows) {
            tasks[count++] = {(int32_t)seq, (int32_t)first, (int32_t)smaller(kTaskRows, rows - first)};
        }
    }
    clear_rows<T>(args, args.query_start_loc[args.num_seqs], args.num_tokens);
    return count;
}

template <class T>
void attend_whole(const AttentionArguments& args, const AttentionTask& task, long kv_head) {
    TaskRows<T> rows(args, task, kv_head);
    Totals total, part;
    total.clear(task.rows, args.padded_dim);
    for (long segment = rows.seen_begin / kSegment * kSegment; segment < rows.seen_end; segment += kSegment) {
        rows.attend(segment, part);
        combine(total, part, task.rows, args.padded_dim);
    }
    rows.write(total);
}

template <class T>
void combine_parts(const AttentionArguments& args, const AttentionTask& task, long kv_head, const Totals* parts) {
    const TaskRows<T> rows(args, task, kv_head);
    Totals total;
    total.clear(task.rows, args.padded_dim);
    for (long segment = rows.seen_begin / kSegment; segment * kSegment < rows.seen_end; segment++) {
        combine(total, parts[segment], task.rows, args.padded_dim);
    }
    rows.write(total);
}

// Returns false, having changed nothing, if a sequence names rows or blocks that do not exist.
template <class T>
bool paged_attention(const AttentionArguments& args, long threads) {
    for (long seq = 0; seq < args.num_seqs; seq++) {
        if (!rows_and_blocks_exist(args, seq)) return false;
    }
    static thread_local Scratch task_scratch, part_scratch;
    double work = 0.0;
    long longest = 0;
    const long count = list_tasks<T>(args, task_scratch, work, longest) * args.num_kv_heads, heads = args.num_kv_heads;
    const AttentionTask* tasks = task_scratch.get<AttentionTask>(0);
    const long segments = ceil_div(longest, kSegment);
    if (count >= 2 * threads || segments < 2 || threads == 1) {
        parallel_for(count, work, threads, [&](long i) { attend_whole<T>(args, tasks[i / heads], i % heads); });
        return true;
    }
    Totals* parts = part_scratch.get<Totals>(count * segments);
    parallel_for(count * segments, work, threads, [&](long i) {
        const long job = i / segments, segment = i % segments * kSegment;
        TaskRows<T> rows(args, tasks[job / heads], job % heads);
        if (segment < rows.seen_end && segment + kSegment > rows.seen_begin) rows.attend(segment, parts[i]);
    });
    parallel_for(count, 0.0, threads, [&](long i) { combine_parts<T>(args, tasks[i / heads], i % heads, parts + i * segments); });
    return true;
}

}  // namespace
