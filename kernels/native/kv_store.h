// Keys and values into the paged cache, in the panels that attention multiplies.
#pragma once

#include "kv_cache.h"

// Mirrored by `kernels.kv_store.cpu.KvStoreArguments`. Strides count elements.
struct KvStoreArguments {
    const void *key, *value;           // [num_tokens, num_kv_heads, head_dim]
    void *key_cache, *value_cache;     // [num_blocks, num_kv_heads, block_size / 16, panel], see kv_cache.h
    const int64_t* slots;              // [num_tokens], -1 skips
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t dtype, num_tokens, num_kv_heads, head_dim, padded_dim, block_size, num_slots;
    int64_t quantized;                 // whether the caches are IntegerCache
};

namespace {

constexpr float kNaN = __builtin_nanf("");

INLINE void store_integers(int* to, const Vec& a) {
    UNROLL for (int i = 0; i < kParts; i++) {
        const PartInt integers = __builtin_convertvector(a.p[i], PartInt);
        memcpy(to + i * kWidth, &integers, sizeof integers);
    }
}

// x [count] -> integers [count, rounded up to 16] and their scale: `kernels.kv_store.reference.quantize` is the definition.
template <class T>
float to_integers(const T* x, long count, int* integers) {
    alignas(64) float numbers[kMaxDim];
    const long padded = round_up(count, kLanes);
    to_operand(x, count, numbers, padded);
    Vec largest = zero(), not_finite = zero();
    for (long d = 0; d < padded; d += kLanes) {
        const Vec value = load(numbers + d);
        largest = max(absolute(value), largest);
        not_finite = fma(value, zero(), not_finite);  // NaN from NaN and from infinity
    }
    const float scale = sum_lanes(not_finite) == 0.0f ? max_lanes(largest) / (float)kMaxInteger8 : kNaN;
    const bool is_usable = scale > 0.0f;
    for (long d = 0; d < padded; d += kLanes) {
        const Vec integer = clamp(round_integer(load(numbers + d) / splat(scale)), -kMaxInteger8, kMaxInteger8);
        store_integers(integers + d, is_usable ? integer : zero());
    }
    return scale;
}

// x [dim] into a token's column of a panel of keys.
template <class Cache, class Number>
INLINE void put_key(const Number* x, long dim, typename Cache::Format::T* steps, long lane) {
    constexpr long pack = Cache::Format::kPack;
    long d = 0;
    for (; d + pack <= dim; d += pack, steps += kLanes * pack) {
        UNROLL for (int k = 0; k < pack; k++) Cache::put(steps, lane, k, x[d + k]);
    }
    for (int k = 0; k < dim - d; k++) Cache::put(steps, lane, k, x[d + k]);
}

// x [dim] into a token's row of a panel of values.
template <class Cache, class Number>
INLINE void put_value(const Number* x, long dim, typename Cache::Format::T* steps, long lane, long padded_dim) {
    constexpr long pack = Cache::Format::kPack;
    steps += lane / pack * padded_dim * pack;
    long d = 0;
    for (; d + kLanes <= dim; d += kLanes, steps += kLanes * pack) {
        UNROLL for (int column = 0; column < kLanes; column++) Cache::put(steps, column, lane % pack, x[d + column]);
    }
    for (int column = 0; column < dim - d; column++) Cache::put(steps, column, lane % pack, x[d + column]);
}

// One head of a token into the panels at key_panel and value_panel.
template <class T>
INLINE void store_head(PlainCache<T>, const KvStoreArguments& args, const T* key, const T* value, T* key_panel, T* value_panel,
                       long lane) {
    put_key<PlainCache<T>>(key, args.head_dim, key_panel, lane);
    put_value<PlainCache<T>>(value, args.head_dim, value_panel, lane, args.padded_dim);
}

template <class T>
INLINE void store_head(IntegerCache<T> cache, const KvStoreArguments& args, const T* key, const T* value, uint8_t* key_panel,
                       uint8_t* value_panel, long lane) {
    alignas(64) int integers[kMaxDim];
    ((float*)key_panel)[lane] = to_integers(key, args.head_dim, integers);
    put_key<IntegerCache<T>>(integers, args.head_dim, key_panel + cache.kHeader, lane);
    ((float*)value_panel)[lane] = to_integers(value, args.head_dim, integers);
    put_value<IntegerCache<T>>(integers, args.head_dim, value_panel + cache.kHeader, lane, args.padded_dim);
}

// Elements from the beginning of a cache to the panel of a slot.
template <class Cache>
INLINE long panel_of(const KvStoreArguments& args, long head, long slot) {
    const long block = slot / args.block_size, offset = slot % args.block_size;
    return ((block * args.num_kv_heads + head) * (args.block_size / kLanes) + offset / kLanes) * panel_size<Cache>(args.padded_dim);
}

template <class Cache>
void store_token(const KvStoreArguments& args, long token) {
    using T = typename Cache::T;
    using Stored = typename Cache::Format::T;
    const long slot = args.slots[token];
    if (slot < 0) return;
    for (long head = 0; head < args.num_kv_heads; head++) {
        const T* key = (const T*)args.key + token * args.key_token_stride + head * args.key_head_stride;
        const T* value = (const T*)args.value + token * args.value_token_stride + head * args.value_head_stride;
        const long at = panel_of<Cache>(args, head, slot);
        store_head(Cache(), args, key, value, (Stored*)args.key_cache + at, (Stored*)args.value_cache + at, slot % kLanes);
    }
}

// How many tokens a thread takes at least: those of a panel, if that leaves work for all threads. Keys of 16 tokens share each line of
// memory, which would go to and fro between threads.
INLINE long token_grain(long num_tokens, long threads) { return num_tokens >= kLanes * threads ? kLanes : 4; }

// Returns false, having changed nothing, if a slot lies outside the cache.
template <class T>
bool store_kv(const KvStoreArguments& args, long threads) {
    for (long token = 0; token < args.num_tokens; token++) {
        if (args.slots[token] >= args.num_slots) return false;
    }
    const double work = kElementWork * args.num_tokens * args.num_kv_heads * args.head_dim * 2;
    parallel_ranges(args.num_tokens, token_grain(args.num_tokens, threads), work, threads, [&](long begin, long end) {
        for (long token = begin; token < end; token++) {
            args.quantized ? store_token<IntegerCache<T>>(args, token) : store_token<PlainCache<T>>(args, token);
        }
    });
    return true;
}

}  // namespace
