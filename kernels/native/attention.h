// Causal attention over the paged cache.
//
// Softmax runs online over chunks of 64 tokens and starts afresh in every segment of 512; the segments' results are combined
// in order. Chunks and segments are aligned to position 0 of the context, so a row's operations depend on the row's own
// context alone: the token decoded at a position has the bits that its prefill row would have, however the prompt was cut, and
// the segments of a long context can run on different threads.
#pragma once

#include "attention_tiles.h"

namespace {

constexpr long kRunsPerThread = 8;

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

// A step's tasks: sequence by sequence, head by head, and those of a head from its longest context down; so what lies behind one
// another in a list reads memory side by side, or the same.
struct TaskList {
    const AttentionTask* tasks;
    long count;
    double work;   // multiply-adds
    long longest;  // context
};

INLINE double work_of(const AttentionArguments& args, const AttentionTask& task) {
    return 2.0 * task.rows * seen_by(args, task, task.rows - 1).end * args.head_dim;
}

// Of up to task_rows rows each. Clears rows without context.
template <class T>
TaskList list_tasks(const AttentionArguments& args, long task_rows, Scratch& scratch) {
    const long group = args.num_heads / args.num_kv_heads;
    const long most = (args.num_tokens * ceil_div(group, task_rows) + args.num_seqs) * args.num_kv_heads;
    AttentionTask* tasks = scratch.get<AttentionTask>(most);
    TaskList list{tasks, 0, 0.0, 0};
    for (long seq = 0; seq < args.num_seqs; seq++) {
        const long start = args.query_start_loc[seq], stop = args.query_start_loc[seq + 1], rows = (stop - start) * group;
        if (args.seq_lens[seq] == 0) {
            clear_rows<T>(args, start, stop);
            continue;
        }
        list.longest = larger(list.longest, args.seq_lens[seq]);
        for (long head = 0; head < args.num_kv_heads; head++) {
            for (long first = (rows - 1) / task_rows * task_rows; first >= 0 && rows > 0; first -= task_rows) {
                const AttentionTask task = {(int32_t)seq, (int32_t)head, (int32_t)first, (int32_t)smaller(task_rows, rows - first)};
                list.work += work_of(args, task);
                tasks[list.count++] = task;
            }
        }
    }
    clear_rows<T>(args, args.query_start_loc[args.num_seqs], args.num_tokens);
    return list;
}

// Cuts a list into runs of about the same work, of which threads take one after the other: [begins[i], begins[i + 1]). Returns how
// many there are, `most` at the most.
long cut_list(const AttentionArguments& args, const TaskList& list, long most, long* begins) {
    long count = 0;
    double work = 0.0;
    for (long i = 0; i < list.count; i++) {
        if (work >= list.work / most * count) begins[count++] = i;
        work += work_of(args, list.tasks[i]);
    }
    begins[count] = list.count;
    return count;
}

template <class Cache>
void attend_whole(const AttentionArguments& args, const AttentionTask& task, const AttentionTask* next, ChunkTiles<Cache>& tiles) {
    TaskRows<Cache> rows(args, task);
    Totals total, part;
    total.clear(task.rows, args.padded_dim);
    for (long segment = rows.seen_begin / kSegment * kSegment; segment < rows.seen_end; segment += kSegment) {
        attend_segment(rows, tiles, segment, {rows.seen_end, next}, part);
        combine(total, part, task.rows, args.padded_dim);
    }
    rows.write(total);
}

template <class Cache>
void combine_parts(const AttentionArguments& args, const AttentionTask& task, const Totals* parts) {
    const TaskRows<Cache> rows(args, task);
    Totals total;
    total.clear(task.rows, args.padded_dim);
    for (long segment = rows.seen_begin / kSegment; segment * kSegment < rows.seen_end; segment++) {
        combine(total, parts[segment], task.rows, args.padded_dim);
    }
    rows.write(total);
}

constexpr long kPartsPerThread = 32;  // that are kept at a time: one is large, and contexts may be long

// Few tasks with long contexts: the segments of each run on different threads.
template <class Cache>
void attend_segments(const AttentionArguments& args, const TaskList& list, long threads) {
    static thread_local Scratch scratch;
    const long segments = ceil_div(list.longest, kSegment), some = clamp(kPartsPerThread * threads / segments, 1, list.count);
    Totals* parts = scratch.get<Totals>(some * segments);
    for (long first = 0; first < list.count; first += some) {
        const AttentionTask* tasks = list.tasks + first;
        const long count = smaller(some, list.count - first);
        parallel_for(count * segments, list.work * count / list.count, threads, [&](long i) {
            const long segment = i % segments * kSegment;
            TaskRows<Cache> rows(args, tasks[i / segments]);
            if (segment >= rows.seen_end || segment + kSegment <= rows.seen_begin) return;
            ChunkTiles<Cache> tiles;
            attend_segment(rows, tiles, segment, {smaller(segment + kSegment, rows.seen_end), nullptr}, parts[i]);
        });
        parallel_for(count, 0.0, threads, [&](long i) { combine_parts<Cache>(args, tasks[i], parts + i * segments); });
    }
}

template <class Cache>
void attend_all(const AttentionArguments& args, long threads) {
    static thread_local Scratch task_scratch, run_scratch;
    const TaskList list = list_tasks<typename Cache::T>(args, ChunkTiles<Cache>::task_rows(args), task_scratch);
    if (list.count < 2 * threads && list.longest > kSegment && threads > 1) return attend_segments<Cache>(args, list, threads);
    const long most = kRunsPerThread * threads;
    long* begins = run_scratch.get<long>(most + 2);
    parallel_for(cut_list(args, list, most, begins), list.work, threads, [&](long run) {
        ChunkTiles<Cache> tiles;
        for (long i = begins[run]; i < begins[run + 1]; i++) {
            attend_whole(args, list.tasks[i], i + 1 < begins[run + 1] ? list.tasks + i + 1 : nullptr, tiles);
        }
    });
}

// Returns false, having changed nothing, if a sequence names rows or blocks that do not exist.
template <class T>
bool paged_attention(const AttentionArguments& args, long threads) {
    for (long seq = 0; seq < args.num_seqs; seq++) {
        if (!rows_and_blocks_exist(args, seq)) return false;
    }
    args.quantized ? attend_all<IntegerCache<T>>(args, threads) : attend_all<PlainCache<T>>(args, threads);
    return true;
}

}  // namespace
