// Causal attention over the paged cache.
//
// Softmax runs online over chunks of 64 tokens and starts afresh in every segment of 512; the segments' results are combined
// in order. Chunks and segments are aligned to position 0 of the context, so a row's operations depend on the row's own
// context alone: the token decoded at a position has the bits that its prefill row would have, however the prompt was cut, and
// the segments of a long context can run on different threads.
#pragma once

#include "attention_tiles.h"

namespace {

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

template <class Cache>
void attend_whole(const AttentionArguments& args, const AttentionTask& task, long kv_head) {
    TaskRows<Cache> rows(args, task, kv_head);
    Totals total, part;
    total.clear(task.rows, args.padded_dim);
    for (long segment = rows.seen_begin / kSegment * kSegment; segment < rows.seen_end; segment += kSegment) {
        attend_segment(rows, segment, part);
        combine(total, part, task.rows, args.padded_dim);
    }
    rows.write(total);
}

template <class Cache>
void combine_parts(const AttentionArguments& args, const AttentionTask& task, long kv_head, const Totals* parts) {
    const TaskRows<Cache> rows(args, task, kv_head);
    Totals total;
    total.clear(task.rows, args.padded_dim);
    for (long segment = rows.seen_begin / kSegment; segment * kSegment < rows.seen_end; segment++) {
        combine(total, parts[segment], task.rows, args.padded_dim);
    }
    rows.write(total);
}

template <class Cache>
void attend_all(const AttentionArguments& args, long threads) {
    static thread_local Scratch task_scratch, part_scratch;
    double work = 0.0;
    long longest = 0;
    const long heads = args.num_kv_heads, count = list_tasks<typename Cache::T>(args, task_scratch, work, longest) * heads;
    const AttentionTask* tasks = task_scratch.get<AttentionTask>(0);
    const long segments = ceil_div(longest, kSegment);
    if (count >= 2 * threads || segments < 2 || threads == 1) {
        parallel_for(count, work, threads, [&](long i) { attend_whole<Cache>(args, tasks[i / heads], i % heads); });
        return;
    }
    Totals* parts = part_scratch.get<Totals>(count * segments);
    parallel_for(count * segments, work, threads, [&](long i) {
        const long job = i / segments, segment = i % segments * kSegment;
        TaskRows<Cache> rows(args, tasks[job / heads], job % heads);
        if (segment < rows.seen_end && segment + kSegment > rows.seen_begin) attend_segment(rows, segment, parts[i]);
    });
    parallel_for(count, 0.0, threads, [&](long i) {
        combine_parts<Cache>(args, tasks[i / heads], i % heads, parts + i * segments);
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
