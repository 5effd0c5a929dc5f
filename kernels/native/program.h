// The layers of a step as one list of operations, so that hundreds of small kernels cost one call.
//
// Operations name buffers that stay where they are. What changes with the step stands in StepInputs and is put into a copy
// of each operation's arguments when its turn comes.
#pragma once

#include "attention.h"
#include "kv_store.h"
#include "quantized.h"
#include "rowwise.h"
#include "tiled_linear.h"

// Mirrored by `kernels.native.program.StepInputs`.
struct StepInputs {
    const int64_t *positions, *slots;    // [num_tokens]
    const int32_t* query_start_loc;      // [num_seqs + 1]
    const int32_t* seq_lens;             // [num_seqs]
    const int32_t* block_table;          // [num_seqs, table_stride]
    int64_t num_tokens, num_seqs, table_stride, table_width;
    int64_t* num_done;                   // operations that have ended, counted up for a thread that watches
};

// Mirrored by `kernels.native.program.Operation`. `arguments` are those of the kernel; x and y those of a linear layer.
// rows: of a norm, for each token, where they are not one; the tokens then lie token_stride elements apart.
struct Operation {
    int64_t kind;
    const void *arguments, *x;
    void* y;
    int64_t x_stride, rows, token_stride;
};

namespace {

// As `kernels.native.program` has them.
enum OperationKind { kNormOp, kLinearOp, kQuantizedOp, kRotaryOp, kStoreKvOp, kAttentionOp, kActMulOp };

template <class T>
void norm_heads(const NormArguments& args, const Operation& operation, long num_tokens, long threads) {
    const double work = kElementWork * num_tokens * operation.rows * args.hidden;
    parallel_ranges(num_tokens, 4, work, threads, [&](long begin, long end) {
        NormArguments heads = args;
        heads.rows = operation.rows;
        for (long token = begin; token < end; token++) {
            heads.x = (const T*)args.x + token * operation.token_stride;
            heads.out = (T*)args.out + token * operation.token_stride;
            rms_norm<T>(heads, 1);
        }
    });
}

// False if an index in the step's inputs points outside its table.
template <class T>
bool run_operation(const Operation& operation, const StepInputs& step, long threads) {
    switch (operation.kind) {
        case kNormOp: {
            NormArguments args = *(const NormArguments*)operation.arguments;
            args.rows = step.num_tokens;
            operation.rows > 0 ? norm_heads<T>(args, operation, step.num_tokens, threads) : rms_norm<T>(args, threads);
            return true;
        }
        case kLinearOp: {
            const LinearArguments& args = *(const LinearArguments*)operation.arguments;
            linear(args, (const T*)operation.x, operation.x_stride, operation.y, step.num_tokens, threads);
            return true;
        }
        case kQuantizedOp: {
            const QuantizedArguments& args = *(const QuantizedArguments*)operation.arguments;
            quantized_linear(args, (const T*)operation.x, operation.x_stride, operation.y, step.num_tokens, threads);
            return true;
        }
        case kRotaryOp: {
            RotaryArguments args = *(const RotaryArguments*)operation.arguments;
            args.positions = step.positions;
            args.num_tokens = step.num_tokens;
            return rotary<T>(args, threads);
        }
        case kStoreKvOp: {
            KvStoreArguments args = *(const KvStoreArguments*)operation.arguments;
            args.slots = step.slots;
            args.num_tokens = step.num_tokens;
            return store_kv<T>(args, threads);
        }
        case kAttentionOp: {
            AttentionArguments args = *(const AttentionArguments*)operation.arguments;
            args.query_start_loc = step.query_start_loc;
            args.seq_lens = step.seq_lens;
            args.block_table = step.block_table;
            args.table_stride = step.table_stride;
            args.table_width = step.table_width;
            args.num_tokens = step.num_tokens;
            args.num_seqs = step.num_seqs;
            return paged_attention<T>(args, threads);
        }
        default: {
            ActMulArguments args = *(const ActMulArguments*)operation.arguments;
            args.rows = step.num_tokens;
            act_mul<T>(args, threads);
            return true;
        }
    }
}

// Returns how many operations ran: all, unless one found an index outside its table.
template <class T>
long run_program(const Operation* operations, long count, const StepInputs& step, long threads) {
    for (long i = 0; i < count; i++) {
        if (!run_operation<T>(operations[i], step, threads)) return i;
        __atomic_fetch_add(step.num_done, 1, __ATOMIC_RELAXED);
    }
    return count;
}

}  // namespace
