// Normalisation, rotary embedding and gated activations: one row at a time.
#pragma once

#include "parallel.h"

// Mirrored by `kernels.rms_norm.cpu.NormArguments`. Strides count elements.
struct NormArguments {
    const void *x, *residual, *weight;  // [rows, hidden]; the same or null; [hidden]
    void *out, *sum;                    // [rows, hidden], contiguous; sum null without residual
    int64_t x_stride, residual_stride, dtype, rows, hidden;
    float eps, weight_offset;
};

// Mirrored by `kernels.rotary.cpu.RotaryArguments`. Strides count elements.
struct RotaryArguments {
    void *query, *key;         // [num_tokens, heads, head_dim]
    const int64_t* positions;  // [num_tokens]
    const float* cos_sin;      // [max_position, 2, half], contiguous
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
    int64_t dtype, num_tokens, num_heads, num_kv_heads, max_position, half;
};

// Mirrored by `kernels.act_mul.cpu.ActMulArguments`.
struct ActMulArguments {
    const void* gate_up;  // [rows, 2 * width], rows `stride` elements apart
    void* out;            // [rows, width]
    int64_t stride, dtype, activation, rows, width;
};

namespace {

enum Activation { kSilu, kGeluTanh, kGelu };  // as `kernels.backend.ACTIVATIONS` orders them

// What each number of a row is multiplied by, from the squares of them all, lane by lane.
INLINE Vec norm_scale(const NormArguments& args, const Vec& squares) {
    return splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)args.hidden + args.eps));
}

template <class T>
void rms_norm_row(const NormArguments& args, long row) {
    const T *x = (const T*)args.x + row * args.x_stride, *weight = (const T*)args.weight;
    T* out = (T*)args.out + row * args.hidden;
    if (args.residual != nullptr) {
        const T* residual = (const T*)args.residual + row * args.residual_stride;
        T* sum = (T*)args.sum + row * args.hidden;
        for (long i = 0; i < args.hidden; i += kLanes) {
            const long count = args.hidden - i;
            store_some(sum + i, load_some(x + i, count) + load_some(residual + i, count), count);
        }
        x = sum;
    }
    Vec squares = zero();
    for (long i = 0; i < args.hidden; i += kLanes) {
        const Vec v = load_some(x + i, args.hidden - i);
        squares = fma(v, v, squares);
    }
    const Vec scale = norm_scale(args, squares);
    const Vec offset = splat(args.weight_offset);
    for (long i = 0; i < args.hidden; i += kLanes) {
        const long count = args.hidden - i;
        const Vec normed = load_some(x + i, count) * scale, w = load_some(weight + i, count);
        store_some(out + i, args.weight_offset == 0.0f ? rounded(normed, x) * w : normed * (offset + w), count);
    }
}

template <class T>
void rms_norm(const NormArguments& args, long threads) {
    parallel_ranges(args.rows, 4, kElementWork * args.rows * args.hidden, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) rms_norm_row<T>(args, row);
    });
}

template <class T>
INLINE void rotate(T* head, const float* cos, const float* sin, long half) {
    for (long i = 0; i < half; i += kLanes) {
        const long count = half - i;
        const Vec first = load_some(head + i, count), second = load_some(head + half + i, count);
        const Vec c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(head + i, first * c - second * s, count);
        store_some(head + half + i, second * c + first * s, count);
    }
}

// Returns false, having changed nothing, if a position lies outside the table.
template <class T>
bool rotary(const RotaryArguments& args, long threads) {
    for (long token = 0; token < args.num_tokens; token++) {
        if (args.positions[token] < 0 || args.positions[token] >= args.max_position) return false;
    }
    const double work = kElementWork * args.num_tokens * (args.num_heads + args.num_kv_heads) * args.half * 2;
    parallel_ranges(args.num_tokens, 4, work, threads, [&](long begin, long end) {
        for (long token = begin; token < end; token++) {
            const float *cos = args.cos_sin + args.positions[token] * 2 * args.half, *sin = cos + args.half;
            T *query = (T*)args.query + token * args.query_token_stride, *key = (T*)args.key + token * args.key_token_stride;
            for (long head = 0; head < args.num_heads; head++) rotate(query + head * args.query_head_stride, cos, sin, args.half);
            for (long head = 0; head < args.num_kv_heads; head++) rotate(key + head * args.key_head_stride, cos, sin, args.half);
        }
    });
    return true;
}

INLINE Vec activate(const Vec& x, int64_t activation) {
    const Vec one = splat(1.0f), half = splat(0.5f);
    if (activation == kSilu) return x / (one + exp(zero() - x));
    if (activation == kGeluTanh) return half * x * (one + tanh(splat(0.797884561f) * (x + splat(0.044715f) * x * x * x)));
    float values[kLanes];
    store(values, x * splat(0.707106781f));
    for (long i = 0; i < kLanes; i++) values[i] = __builtin_erff(values[i]);
    return half * x * (one + load(values));
}

template <class T>
void act_mul(const ActMulArguments& args, long threads) {
    parallel_ranges(args.rows, 1, kElementWork * args.rows * args.width, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const T *gate = (const T*)args.gate_up + row * args.stride, *up = gate + args.width;
            T* out = (T*)args.out + row * args.width;
            for (long i = 0; i < args.width; i += kLanes) {
                const long count = args.width - i;
                store_some(out + i, activate(load_some(gate + i, count), args.activation) * load_some(up + i, count), count);
            }
        }
    });
}

}  // namespace
