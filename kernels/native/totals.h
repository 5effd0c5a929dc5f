// What a row of attention has seen of its context so far: the running top, sum and values of its softmax.
#pragma once

#include "kv_cache.h"

namespace {

constexpr long kTaskRows = 128;  // the most that one call of a thread computes

// Softmax state of up to kTaskRows rows over a part of their context.
struct Totals {
    float top[kTaskRows], sum[kTaskRows];  // top: about the highest score, from which all are counted
    alignas(64) float acc[kTaskRows][kMaxDim + kLanes];  // rows that lay 1 KiB apart would crowd the same lines of the cache

    void clear(long rows, long dim) {
        for (long r = 0; r < rows; r++) {
            top[r] = -kInfinity;
            sum[r] = 0.0f;
            memset(acc[r], 0, dim * sizeof(float));
        }
    }
};

// Sums the parts of a context in the order in which it is called.
void combine(Totals& total, const Totals& part, long rows, long dim) {
    for (long r = 0; r < rows; r++) {
        if (part.top[r] == -kInfinity) continue;  // the row sees nothing of this part
        const float top = total.top[r] > part.top[r] ? total.top[r] : part.top[r];
        const bool first = total.top[r] == -kInfinity;
        const Vec a = first ? zero() : exp(splat(total.top[r] - top)), b = first ? splat(1.0f) : exp(splat(part.top[r] - top));
        for (long d = 0; d < dim; d += kLanes) {
            store(&total.acc[r][d], fma(load(&total.acc[r][d]), a, load(&part.acc[r][d]) * b));
        }
        total.sum[r] = total.sum[r] * a.p[0][0] + part.sum[r] * b.p[0][0];
        total.top[r] = first ? part.top[r] : top;
    }
}

}  // namespace
