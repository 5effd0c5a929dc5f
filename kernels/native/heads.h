// The heads of tokens between the projection and attention in one pass: norms of queries and keys, rotary embedding, keys and values
// into the cache. It takes sixteen tokens of one head, then of the next: so what they have of a panel of the cache is written once, in
// whole lines if they begin where it does.
//
// The bits are those of the operations one by one, each of which leaves its results in T (rowwise.h, kv_store.h).
#pragma once

#include "kv_store.h"
#include "operands.h"
#include "rowwise.h"

namespace {

constexpr long kPassTokens = kLanes;  // those of a panel
constexpr long kHeadsAhead = 2;       // a head is asked for so many heads before its turn
constexpr long kFewTokens = 4;        // are put into their panel one by one

// What a pass does, of all tokens of a step. Null: the model has no such norm.
struct HeadOperations {
    const NormArguments *query_norm, *key_norm;
    RotaryArguments rotary;
    KvStoreArguments store;
};

// Whether one pass can do it: it takes heads of whole vectors, all of whose numbers are rotated.
INLINE bool fits_a_pass(const HeadOperations& all) {
    const RotaryArguments& rotary = all.rotary;
    const KvStoreArguments& store = all.store;
    const auto is_norm_of = [&](const NormArguments* norm, const void* heads, long stride) {
        return norm == nullptr || (norm->x == heads && norm->out == heads && norm->hidden == store.head_dim && stride == store.head_dim);
    };
    const bool has_width = store.head_dim == 64 || store.head_dim == 128 || store.head_dim == 256;
    const bool has_keys = rotary.key == store.key && store.value != store.key && rotary.key_token_stride == store.key_token_stride &&
                          rotary.key_head_stride == store.key_head_stride && rotary.num_kv_heads == store.num_kv_heads;
    return has_width && has_keys && store.padded_dim == store.head_dim && 2 * rotary.half == store.head_dim &&
           is_norm_of(all.query_norm, rotary.query, rotary.query_head_stride) && is_norm_of(all.key_norm, rotary.key, rotary.key_head_stride);
}

// What rms_norm_row does, on numbers that stay in registers.
template <class T, int N>
INLINE void norm_head(const NormArguments& args, Vec (&x)[N]) {
    const T* weight = (const T*)args.weight;
    Vec squares = zero();
    UNROLL for (int i = 0; i < N; i++) squares = fma(x[i], x[i], squares);
    const Vec scale = norm_scale(args, squares);
    UNROLL for (int i = 0; i < N; i++) x[i] = x[i] * scale;
    if (args.weight_offset == 0.0f) {
        round_all(x, weight);
        UNROLL for (int i = 0; i < N; i++) x[i] = x[i] * load(weight + i * kLanes);
    } else {
        const Vec offset = splat(args.weight_offset);
        UNROLL for (int i = 0; i < N; i++) x[i] = x[i] * (offset + load(weight + i * kLanes));
    }
    round_all(x, weight);
}

// A head of N vectors, normalised and rotated. cos_sin [2, half].
template <class T, int N>
INLINE void turn_head(const NormArguments* norm, const float* cos_sin, const T* head, T* to) {
    Vec x[N];
    UNROLL for (int i = 0; i < N; i++) x[i] = load(head + i * kLanes);
    if (norm != nullptr) norm_head<T>(*norm, x);
    UNROLL for (int i = 0; i < N / 2; i++) {
        const Vec cos = load(cos_sin + i * kLanes), sin = load(cos_sin + (N / 2 + i) * kLanes);
        const Vec first = x[i] * cos - x[N / 2 + i] * sin;
        x[N / 2 + i] = x[N / 2 + i] * cos + x[i] * sin;
        x[i] = first;
    }
    store_all(to, x);
}

// Tokens in lanes [lane, lane + count) of one head's panels. keys [count, head_dim], values [count, head_dim] with their own stride.
template <class T>
struct HeadRun {
    const KvStoreArguments& args;
    const T *keys, *values;
    long lane, count;

    template <class Cache, class Stored>
    INLINE void put(Cache cache, Stored* key_panel, Stored* value_panel) const {
        for (long i = 0; i < count; i++) {
            store_head(cache, args, keys + i * args.head_dim, values + i * args.value_token_stride, key_panel, value_panel, lane + i);
        }
    }

#if defined(__AVX512BW__)
    INLINE void put(PlainCache<float> cache, float* key_panel, float* value_panel) const {
        put_keys(cache, key_panel);
        for (long i = 0; i < count; i++) {
            memcpy(value_panel + (lane + i) * args.head_dim, values + i * args.value_token_stride, args.head_dim * sizeof(float));
        }
    }

    INLINE void put(PlainCache<Bf16> cache, Bf16* key_panel, Bf16* value_panel) const {
        put_keys(cache, key_panel);
        for (long at = lane / 2 * 2; at < lane + count; at += 2) {  // two tokens share a word
            const bool has_even = at >= lane, has_odd = at + 1 < lane + count;
            const Bf16 *even = values + (at - lane) * args.value_token_stride, *odd = even + args.value_token_stride;
            const __mmask32 halves = (has_even ? 0x55555555u : 0) | (has_odd ? 0xaaaaaaaau : 0);
            for (long d = 0; d < args.head_dim; d += kLanes) {
                const __m512i low = has_even ? words_of(even + d) : __m512i{}, high = has_odd ? words_of(odd + d) : __m512i{};
                _mm512_mask_storeu_epi16(value_panel + at * args.head_dim + 2 * d, halves, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
    }

    static INLINE __m512i words_of(const Bf16* x) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)); }

    // A step of keys holds a word of 4 bytes for each token.
    INLINE void put_keys(PlainCache<T>, T* panel) const {
        if (count < kFewTokens) {
            for (long i = 0; i < count; i++) put_key<PlainCache<T>>(keys + i * args.head_dim, args.head_dim, panel, lane + i);
            return;
        }
        const long words = args.head_dim * (long)sizeof(T) / 4;
        const __mmask16 lanes = (__mmask16)(((1u << count) - 1) << lane);
        for (long first = 0; first < words; first += kLanes) {
            __m512i rows[16];
            UNROLL for (long i = 0; i < 16; i++) {
                const bool is_there = i >= lane && i < lane + count;
                rows[i] = is_there ? _mm512_loadu_si512((const int32_t*)(keys + (i - lane) * args.head_dim) + first) : __m512i{};
            }
            transpose(rows);
            int32_t* to = (int32_t*)panel + first * kLanes;
            UNROLL for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(to + i * kLanes, lanes, rows[i]);
        }
    }
#endif
};

// Tokens [begin, stop), at most kPassTokens, of heads of N vectors.
template <class T, int N>
struct HeadPass {
    static constexpr long kDim = N * kLanes;

    const HeadOperations& all;
    long begin, stop;

    void run() const {
        const RotaryArguments& rotary = all.rotary;
        for (long head = 0; head < rotary.num_heads; head++) {
            for (long token = begin; token < stop; token++) {
                T* at = (T*)rotary.query + token * rotary.query_token_stride + head * rotary.query_head_stride;
                ask(at + kHeadsAhead * rotary.query_head_stride);
                turn_head<T, N>(all.query_norm, cos_sin_of(token), at, at);
            }
        }
        for (long head = 0; head < rotary.num_kv_heads; head++) run_kv_head(head);
    }

    INLINE const float* cos_sin_of(long token) const { return all.rotary.cos_sin + all.rotary.positions[token] * kDim; }

    static INLINE void ask(const T* head) {
        for (long at = 0; at < kDim * (long)sizeof(T); at += kLineBytes) __builtin_prefetch((const char*)head + at, 0, 3);
    }

    NOINLINE void run_kv_head(long head) const {
        const KvStoreArguments& store = all.store;
        alignas(64) T keys[kPassTokens][kDim];
        for (long token = begin; token < stop; token++) {
            const T* at = (const T*)store.key + token * store.key_token_stride + head * store.key_head_stride;
            ask(at + kHeadsAhead * store.key_head_stride);
            ask(value_of(token, head) + kHeadsAhead * store.value_head_stride);
            turn_head<T, N>(all.key_norm, cos_sin_of(token), at, keys[token - begin]);
        }
        for (long token = begin, count; token < stop; token += count) {
            const long slot = store.slots[token];
            for (count = 1; token + count < stop && (slot + count) % kLanes != 0 && store.slots[token + count] == slot + count;) count++;
            if (slot < 0) {
                count = 1;
                continue;
            }
            const HeadRun<T> run{store, keys[token - begin], value_of(token, head), slot % kLanes, count};
            store.quantized ? put<IntegerCache<T>>(run, head, slot) : put<PlainCache<T>>(run, head, slot);
        }
    }

    INLINE const T* value_of(long token, long head) const {
        return (const T*)all.store.value + token * all.store.value_token_stride + head * all.store.value_head_stride;
    }

    template <class Cache>
    INLINE void put(const HeadRun<T>& run, long head, long slot) const {
        using Stored = typename Cache::Format::T;
        const KvStoreArguments& store = all.store;
        const long at = panel_of<Cache>(store, head, slot);
        run.put(Cache(), (Stored*)store.key_cache + at, (Stored*)store.value_cache + at);
    }
};

// Tokens [begin, stop), at most kPassTokens.
template <class T>
void pass_heads(const HeadOperations& all, long begin, long stop) {
    switch (all.store.head_dim) {
        case 64: return HeadPass<T, 4>{all, begin, stop}.run();
        case 128: return HeadPass<T, 8>{all, begin, stop}.run();
        default: return HeadPass<T, 16>{all, begin, stop}.run();
    }
}

}  // namespace
