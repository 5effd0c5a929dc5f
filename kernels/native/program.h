// The layers of a step as one list of operations, so that hundreds of small kernels cost one call.
//
// Operations name buffers that stay where they are. What changes with the step stands in StepInputs and is put into a copy
// of each operation's arguments when its turn comes.
#pragma once

#include "attention.h"
#include "heads.h"
#include "tiled_quantized.h"

// Mirrored by `kernels.native.program.StepInputs`.
struct StepInputs {
    const int64_t *positions, *slots;    // [num_tokens]
    const int32_t* query_start_loc;      // [num_seqs + 1]
    const int32_t* seq_lens;             // [num_seqs]
    const int32_t* block_table;          // [num_seqs, table_stride]
    int64_t num_tokens, num_seqs, table_stride, table_width;
    int64_t* num_done;                   // operations that have ended, counted up for a thread that watches
    const StepInputs* kept;              // from the first kKeepOp on; null: those of all tokens. Without positions and slots
    const int64_t* kept_index;           // which tokens these are, rising
};

// Mirrored by `kernels.native.program.Operation`. `arguments` are those of the kernel; x and y those of a linear layer.
// rows: of a norm, for each token, where they are not one; the tokens then lie token_stride elements apart. kKeepOp has `rows` numbers of
// each token at x, token_stride elements apart.
struct Operation {
    int64_t kind;
    const void *arguments, *x;
    void* y;
    int64_t x_stride, rows, token_stride;
};

namespace {

// As `kernels.native.program` has them.
enum OperationKind { kNormOp, kLinearOp, kQuantizedOp, kRotaryOp, kStoreKvOp, kAttentionOp, kActMulOp, kKeepOp };

constexpr long kAheadTokens = 4;  // a token is asked for so many before its turn
constexpr long kTogether = kPassTokens;  // that operations on single tokens work on one after the other: they stay in a cache

INLINE bool is_by_token(const Operation& operation) {
    return operation.kind == kNormOp || operation.kind == kRotaryOp || operation.kind == kStoreKvOp || operation.kind == kActMulOp;
}

template <class T>
INLINE const void* shifted(const void* x, long count) { return x == nullptr ? x : (const T*)x + count; }
template <class T>
INLINE void* shifted(void* x, long count) { return x == nullptr ? x : (T*)x + count; }

template <class T>
void norm_tokens(const Operation& operation, long begin, long end) {
    NormArguments args = *(const NormArguments*)operation.arguments;
    if (operation.rows > 0) {
        NormArguments heads = args;
        heads.rows = operation.rows;
        for (long token = begin; token < end; token++) {
            heads.x = shifted<T>(args.x, token * operation.token_stride);
            heads.out = shifted<T>(args.out, token * operation.token_stride);
            rms_norm<T>(heads, 1);
        }
        return;
    }
    args.x = shifted<T>(args.x, begin * args.x_stride);
    args.residual = shifted<T>(args.residual, begin * args.residual_stride);
    args.out = shifted<T>(args.out, begin * args.hidden);
    args.sum = shifted<T>(args.sum, begin * args.hidden);
    args.rows = end - begin;
    rms_norm<T>(args, 1);
}

// An operation that is by token, on tokens [begin, end). False, having changed nothing, if an index of theirs points outside its table.
template <class T>
bool run_tokens(const Operation& operation, const StepInputs& step, long begin, long end) {
    if (operation.kind == kRotaryOp) {
        RotaryArguments args = *(const RotaryArguments*)operation.arguments;
        args.query = shifted<T>(args.query, begin * args.query_token_stride);
        args.key = shifted<T>(args.key, begin * args.key_token_stride);
        args.positions = step.positions + begin;
        args.num_tokens = end - begin;
        return rotary<T>(args, 1);
    }
    if (operation.kind == kStoreKvOp) {
        KvStoreArguments args = *(const KvStoreArguments*)operation.arguments;
        args.key = shifted<T>(args.key, begin * args.key_token_stride);
        args.value = shifted<T>(args.value, begin * args.value_token_stride);
        args.slots = step.slots + begin;
        args.num_tokens = end - begin;
        return store_kv<T>(args, 1);
    }
    if (operation.kind == kNormOp) {
        norm_tokens<T>(operation, begin, end);
        return true;
    }
    ActMulArguments args = *(const ActMulArguments*)operation.arguments;
    args.gate_up = shifted<T>(args.gate_up, begin * args.stride);
    args.out = shifted<T>(args.out, begin * args.width);
    args.rows = end - begin;
    act_mul<T>(args, 1);
    return true;
}

// Numbers of a token that an operation reads or writes, about.
double numbers_of_token(const Operation& operation) {
    if (operation.kind == kNormOp) return (double)((const NormArguments*)operation.arguments)->hidden * larger(1, operation.rows);
    if (operation.kind == kActMulOp) return (double)((const ActMulArguments*)operation.arguments)->width;
    if (operation.kind == kRotaryOp) {
        const RotaryArguments& args = *(const RotaryArguments*)operation.arguments;
        return 2.0 * (args.num_heads + args.num_kv_heads) * args.half;
    }
    const KvStoreArguments& args = *(const KvStoreArguments*)operation.arguments;
    return 2.0 * args.num_kv_heads * args.head_dim;
}

// Asks for what an operation reads of a token: what a product has left in memory.
template <class T>
INLINE void ask_for_token(const Operation& operation, long token) {
    const auto ask = [&](const void* rows, long stride) {
        const char* row = (const char*)shifted<T>(rows, token * stride);
        for (long at = 0; row != nullptr && at < stride * (long)sizeof(T); at += kLineBytes) __builtin_prefetch(row + at, 0, 2);
    };
    if (operation.kind == kNormOp) {
        const NormArguments& args = *(const NormArguments*)operation.arguments;
        ask(args.x, operation.rows > 0 ? operation.token_stride : args.x_stride);
        ask(args.residual, args.residual_stride);
    } else if (operation.kind == kActMulOp) {
        const ActMulArguments& args = *(const ActMulArguments*)operation.arguments;
        ask(args.gate_up, args.stride);
    }
}

// One of several operations on tokens [begin, stop). The first one finds them in memory, which it asks for ahead up to `end`; those after
// it find them in a cache.
template <class T>
bool run_one(const Operation& operation, bool is_first, const StepInputs& step, long begin, long stop, long end) {
    if (!is_first || operation.kind == kStoreKvOp) return run_tokens<T>(operation, step, begin, stop);  // tokens share lines of the cache
    for (long token = begin; token < stop; token++) {
        if (token + kAheadTokens < end) ask_for_token<T>(operation, token + kAheadTokens);
        if (!run_tokens<T>(operation, step, token, token + 1)) return false;
    }
    return true;
}

// Operations that one pass over heads does, of some that all are by token: norms, if there are any, rotary and store.
struct HeadPassPlan {
    HeadOperations all;
    long first, count;  // count 0: there are none

    HeadPassPlan(const Operation* operations, long num, const StepInputs& step) : all{}, first(0), count(0) {
        while (first + 1 < num && !(operations[first].kind == kRotaryOp && operations[first + 1].kind == kStoreKvOp)) first++;
        if (first + 1 >= num) return;
        all.rotary = *(const RotaryArguments*)operations[first].arguments;
        all.store = *(const KvStoreArguments*)operations[first + 1].arguments;
        all.rotary.positions = step.positions;
        all.store.slots = step.slots;
        const long stop = first + 2;
        for (; first > 0 && operations[first - 1].kind == kNormOp && take_norm(operations[first - 1]); first--) {
        }
        if (fits_a_pass(all)) count = stop - first;
    }

    // Of tokens [begin, end). False if an index of theirs points outside its table: `failed` is that operation.
    template <class T>
    bool run(long begin, long end, long& failed) const {
        bool have_positions = true, have_slots = true;
        for (long token = begin; token < end; token++) {
            have_positions = have_positions && all.rotary.positions[token] >= 0 && all.rotary.positions[token] < all.rotary.max_position;
            have_slots = have_slots && all.store.slots[token] < all.store.num_slots;
        }
        failed = first + count - (have_positions ? 1 : 2);
        if (have_positions && have_slots) pass_heads<T>(all, begin, end);
        return have_positions && have_slots;
    }

  private:
    bool take_norm(const Operation& operation) {
        const NormArguments* norm = (const NormArguments*)operation.arguments;
        const RotaryArguments& rotary = all.rotary;
        if (norm->x == rotary.key && operation.rows == rotary.num_kv_heads && operation.token_stride == rotary.key_token_stride) {
            return take(all.key_norm, norm);
        }
        const bool is_of_query = norm->x == rotary.query && operation.rows == rotary.num_heads && operation.token_stride == rotary.query_token_stride;
        return is_of_query && take(all.query_norm, norm);
    }

    static bool take(const NormArguments*& place, const NormArguments* norm) {
        if (place != nullptr) return false;
        place = norm;
        return true;
    }
};

// Operations that all are by token. Returns how many of them ran on all tokens.
template <class T>
long run_by_token(const Operation* operations, long count, const StepInputs& step, long threads) {
    const HeadPassPlan heads(operations, count, step);
    double numbers = 0.0;
    for (long i = 0; i < count; i++) numbers += numbers_of_token(operations[i]);
    long done = count;  // the first one that found a wrong index
    parallel_ranges(step.num_tokens, token_grain(step.num_tokens, threads), kElementWork * numbers * step.num_tokens, threads, [&](long begin, long end) {
        for (long token = begin; token < end; token += kTogether) {
            const long stop = smaller(end, token + kTogether);
            for (long i = 0; i < count;) {
                const bool is_pass = heads.count > 0 && i == heads.first;
                long failed = i;
                if (is_pass ? heads.run<T>(token, stop, failed) : run_one<T>(operations[i], i == 0, step, token, stop, end)) {
                    i += is_pass ? heads.count : 1;
                    continue;
                }
                long known = __atomic_load_n(&done, __ATOMIC_RELAXED);
                while (failed < known && !__atomic_compare_exchange_n(&done, &known, failed, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
                }
                return;
            }
        }
    });
    return done;
}

// False if an index in the step's inputs points outside its table.
template <class T>
bool run_operation(const Operation& operation, const StepInputs& step, long threads) {
    if (operation.kind == kLinearOp) {
        const LinearArguments& args = *(const LinearArguments*)operation.arguments;
        linear(args, (const T*)operation.x, operation.x_stride, operation.y, step.num_tokens, threads);
        return true;
    }
    if (operation.kind == kQuantizedOp) {
        const QuantizedArguments& args = *(const QuantizedArguments*)operation.arguments;
        quantized_linear(args, (const T*)operation.x, operation.x_stride, operation.y, step.num_tokens, threads);
        return true;
    }
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

// Rows of kept tokens move up, to where the first ones were. False if these are not some of the step's, one behind the other.
template <class T>
bool keep_rows(const Operation& operation, const StepInputs& step) {
    T* rows = (T*)operation.x;
    for (long i = 0, last = -1; i < step.kept->num_tokens; last = step.kept_index[i++]) {
        const long from = step.kept_index[i];
        if (from <= last || from >= step.num_tokens) return false;
        memmove(rows + i * operation.token_stride, rows + from * operation.token_stride, operation.rows * sizeof(T));
    }
    return true;
}

// Returns how many operations ran, or had no token to run on: all, unless one found an index outside its table. What came of that one's
// other tokens, and of operations on single tokens around it, is then undefined.
template <class T>
long run_program(const Operation* operations, long count, const StepInputs& step, long threads) {
    const StepInputs* now = &step;
    for (long i = 0; i < count;) {
        long stop = i, done = 1;
        while (stop < count && is_by_token(operations[stop])) stop++;
        if (stop > i) {
            done = run_by_token<T>(operations + i, stop - i, *now, threads);
        } else {
            stop++;
            if (operations[i].kind != kKeepOp) {
                if (!run_operation<T>(operations[i], *now, threads)) done = 0;
            } else if (step.kept != nullptr) {
                now = step.kept;
                if (!keep_rows<T>(operations[i], step)) done = 0;
                if (now->num_tokens == 0) done = (stop = count) - i;
            }
        }
        __atomic_fetch_add(step.num_done, done, __ATOMIC_RELAXED);
        if (done != stop - i) return i + done;
        i = stop;
    }
    return count;
}

}  // namespace
