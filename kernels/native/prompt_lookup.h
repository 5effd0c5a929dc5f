// Drafts by prompt lookup: `kernels.prompt_lookup` states the definition.
#pragma once

#include "parallel.h"

// Mirrored by `kernels.prompt_lookup.cpu.LookupArguments`.
struct LookupArguments {
    int32_t* token_ids;  // rows of tokens, `stride` apart
    const int64_t *rows, *num_tokens, *most;  // [count]
    int64_t* found;  // [count]: drafts written behind each row's tokens
    int64_t count, stride, min_match, max_match;
};

namespace {

// How many tokens before and at `place` are those at the end, at most `limit`.
INLINE long match(const int32_t* tokens, long n, long place, long limit) {
    long length = 0;
    while (length < limit && length <= place && tokens[place - length] == tokens[n - 1 - length]) length++;
    return length;
}

void find_drafts(const LookupArguments& args, long threads) {
    double work = 0;
    for (long i = 0; i < args.count; i++) work += args.most[i] > 0 ? args.num_tokens[i] : 0;
    parallel_for(args.count, work, threads, [&](long i) {
        int32_t* tokens = args.token_ids + args.rows[i] * args.stride;
        const long n = args.num_tokens[i], most = args.most[i];
        long best = args.min_match - 1, place = -1;
        for (long p = most > 0 ? n - 2 : -1; p >= args.min_match - 1 && best < args.max_match; p--) {
            if (tokens[p] != tokens[n - 1] || tokens[p - 1] != tokens[n - 2]) continue;
            const long length = match(tokens, n, p, args.max_match);
            if (length > best) best = length, place = p;
        }
        args.found[i] = place < 0 ? 0 : most;
        for (long k = n; k < n + args.found[i]; k++) tokens[k] = tokens[k - (n - 1 - place)];
    });
}

}  // namespace
