// Keys and values into the paged cache, in the panels that attention multiplies.
#pragma once

#include "microkernel.h"
#include "parallel.h"

// Mirrored by `kernels.kv_store.cpu.KvStoreArguments`. Strides count elements.
struct KvStoreArguments {
    const void *key, *value;           // [num_tokens, num_kv_heads, head_dim]
    void *key_cache, *value_cache;     // [num_blocks, num_kv_heads, block_size / 16, panel]
    const int64_t* slots;              // [num_tokens], -1 skips
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t dtype, num_tokens, num_kv_heads, head_dim, padded_dim, block_size, num_slots;
};

namespace {

// A panel holds 16 tokens of one head. Keys: [padded_dim / kPack][16][kPack], so that tokens are the columns of the product
// with a query. Values: [16 / kPack][padded_dim][kPack], so that head dimensions are the columns of the product with the
// probabilities.
template <class T>
void store_token(const KvStoreArguments& args, long token) {
    constexpr long pack = FormatOf<T>::type::kPack;
    const long slot = args.slots[token];
    if (slot < 0) return;
    const long block = slot / args.block_size, offset = slot % args.block_size, lane = offset % kLanes;
    for (long head = 0; head < args.num_kv_heads; head++) {
        const T* key = (const T*)args.key + token * args.key_token_stride + head * args.key_head_stride;
        const T* value = (const T*)args.value + token * args.value_token_stride + head * args.value_head_stride;
        const long panel = (block * args.num_kv_heads + head) * (args.block_size / kLanes) + offset / kLanes;
        const long at = panel * kLanes * args.padded_dim;
        T* key_panel = (T*)args.key_cache + at + lane * pack;
        T* value_panel = (T*)args.value_cache + at + lane / pack * args.padded_dim * pack + lane % pack;
        for (long d = 0; d < args.head_dim; d++) key_panel[d / pack * kLanes * pack + d % pack] = key[d];
        for (long d = 0; d < args.head_dim; d++) value_panel[d * pack] = value[d];
    }
}

// Returns false, having changed nothing, if a slot lies outside the cache.
template <class T>
bool store_kv(const KvStoreArguments& args, long threads) {
    for (long token = 0; token < args.num_tokens; token++) {
        if (args.slots[token] >= args.num_slots) return false;
    }
    const double work = kElementWork * args.num_tokens * args.num_kv_heads * args.head_dim * 2;
    parallel_ranges(args.num_tokens, 4, work, threads, [&](long begin, long end) {
        for (long token = begin; token < end; token++) store_token<T>(args, token);
    });
    return true;
}

}  // namespace
