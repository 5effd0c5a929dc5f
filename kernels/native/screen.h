// The next token of each row without most of its logits.
//
// A second copy of a vocabulary projection's weights, rounded to eight bits, says of every logit between which two numbers it lies: the
// difference of both weights' products with a row is no larger than the product of its norm with the norm of what rounding took away
// (Cauchy, Schwarz). Logits that cannot be the largest, or cannot with their noise, are never computed; the others are, by the layer
// itself, and choose the token. Of rows with top-k those are left out that cannot be among the k. So it is the token that all logits would have chosen, from half of the bytes that sixteen bits take.
#pragma once

#include "sampling.h"
#include "tiled_quantized.h"

// Mirrored by `kernels.linear.screened.ScreenArguments`.
struct ScreenArguments {
    LinearArguments layer;     // to kRounded, without a bias; n is a multiple of 64
    QuantizedArguments rough;  // its weights in eight bits, to float32
    const float* reach;        // [n]: times a row's norm, how far apart a logit and its rough one can be
    double largest;            // above the norm of every output's weights
    int64_t most_pairs;        // of panels; if more are wanted, all logits might as well be computed
};

namespace {

constexpr long kPairColumns = 2 * kLanes;
constexpr long kSearched = 256 * kPairColumns;  // ids that one call of a thread looks at
constexpr double kLeastNorm = 1e-12, kMostLogit = 1e30, kMostHalfLogit = 6e4;  // beyond these, numbers get lost or become infinite

// The bounds of a row's logits.
template <class T>
struct Bounds {
    const float *rough, *reach;
    Vec norm;

    INLINE Vec highest(long id) const { return rounded(fma(norm, load(reach + id), load(rough + id)), (const T*)nullptr); }
    INLINE Vec lowest(long id) const { return rounded(load(rough + id) - norm * load(reach + id), (const T*)nullptr); }
};

// Pairs of panels that are wanted, by threads that may want the same one.
struct WantedPairs {
    uint8_t* is_wanted;

    INLINE void add(long id) const { __atomic_store_n(is_wanted + id / kPairColumns, 1, __ATOMIC_RELAXED); }
};

template <class T>
struct Screen {
    const ScreenArguments& args;
    const SampleArguments& rows;
    const float* rough;  // [rows, n]
    const float* norms;  // [rows]
    WantedPairs wanted;
    long n = args.layer.n;

    Bounds<T> bounds(long row) const { return {rough + row * n, args.reach, splat(norms[row])}; }
    bool is_greedy(long row) const { return rows.temperature[row] == 0.0f; }
    bool has_top_k(long row) const { return rows.top_k[row] > 0 && rows.top_k[row] < n; }

    // Pairs with ids that could be the largest of a greedy row. lowest: [rows][number of stretches] memory.
    void want_largest(float* lowest, long threads) const {
        const long stretches = ceil_div(n, kSearched);
        const double work = kElementWork * rows.rows * n;
        const auto for_stretches = [&](const auto& body) {
            parallel_for(stretches, work, threads, [&](long i) {
                for (long row = 0; row < rows.rows; row++) {
                    if (is_greedy(row)) body(bounds(row), i, smaller(n, (i + 1) * kSearched), lowest + row * stretches);
                }
            });
        };
        for_stretches([](const Bounds<T>& bound, long i, long stop, float* found) {
            Vec top = splat(-kInfinity);
            for (long id = i * kSearched; id < stop; id += kLanes) top = max(bound.lowest(id), top);
            found[i] = max_lanes(top);
        });
        for (long row = 0; row < rows.rows; row++) {
            float* found = lowest + row * stretches;
            for (long i = 1; i < stretches; i++) found[0] = larger_of(found[0], found[i]);
        }
        for_stretches([&](const Bounds<T>& bound, long i, long stop, const float* found) {
            for (long id = i * kSearched; id < stop; id += kPairColumns) {
                if (max_lanes(max(bound.highest(id), bound.highest(id + kLanes))) >= found[0]) wanted.add(id);
            }
        });
    }

    // Pairs with ids that could win with their noise; as `RowSampler::draw`. The noise of few is made: it lies below kMostNoise.
    void want_winners(long row) const {
        static thread_local Scratch scratch;
        Candidate* candidates = scratch.get<Candidate>(n);
        const Bounds<T> bound = bounds(row);
        const Vec divisor = splat(rows.temperature[row]), most = splat(kLargest);
        float top = -kInfinity;
        for (long id = 0; id < n; id += kLanes) top = larger_of(top, max_lanes(bound.lowest(id)));
        float best = scaled(top, row) + least_noise();
        long count = 0;
        for (long first = 0; first < n; first += kNoiseGroup) {
            alignas(64) float highest[kNoiseGroup], lowest[kNoiseGroup];
            Vec above = splat(-kInfinity);
            for (long i = 0; i < kNoiseGroup; i += kLanes) {
                const Vec high = min(bound.highest(first + i) / divisor, most);
                store(highest + i, high);
                store(lowest + i, min(bound.lowest(first + i) / divisor, most));
                above = max(high, above);
            }
            if (max_lanes(above) + kMostNoise < best) continue;
            uint32_t bits[kNoiseGroup];
            make_noise(row, first, bits);
            for (long part = 0; part < kNoiseGroup; part += kLanes) {
                if (!RowSampler::may_win(bits + part, load(highest + part), best)) continue;
                for (long i = part; i < part + kLanes; i++) {
                    const float noise = RowSampler::gumbel(RowSampler::uniform(bits[i]));
                    if (highest[i] + noise >= best) candidates[count++] = {highest[i] + noise, (int32_t)(first + i)};
                    best = larger_of(best, lowest[i] + noise);
                }
            }
        }
        for (long i = 0; i < count; i++) {
            if (candidates[i].x >= best) wanted.add(candidates[i].id);
        }
    }

    // Pairs with ids that could be among the row's top_k, whatever its other filters leave of those. So many pairs have an id that is no
    // lower than the best of their lower bounds: nobody below all of these is among them.
    void want_top(long row) const {
        static thread_local Scratch scratch;
        const long num_pairs = n / kPairColumns;
        const Bounds<T> bound = bounds(row);
        Candidate* best = scratch.get<Candidate>(num_pairs);
        for (long pair = 0; pair < num_pairs; pair++) {
            const long id = pair * kPairColumns;
            best[pair] = {scaled(max_lanes(max(bound.lowest(id), bound.lowest(id + kLanes))), row), (int32_t)pair};
        }
        Candidate* last = best + rows.top_k[row] - 1;
        std::nth_element(best, last, best + num_pairs);
        for (long id = 0; id < n; id += kPairColumns) {
            if (scaled(max_lanes(max(bound.highest(id), bound.highest(id + kLanes))), row) >= last->x) wanted.add(id);
        }
    }

    // The token, from the logits [pairs][rows][32] of what is wanted; ids rise.
    long winner(long row, const float* logits, const int32_t* pairs, long count) const {
        if (!is_greedy(row) && has_top_k(row)) return winner_of_top(row, logits, pairs, count);
        float best = -kInfinity;
        long best_id = 0;
        for (long i = 0; i < count; i++) {
            const long first = pairs[i] * kPairColumns;
            float values[kPairColumns];
            memcpy(values, logits + (i * rows.rows + row) * kPairColumns, sizeof values);
            if (!is_greedy(row)) add_noise(row, first, values, best);
            for (long j = 0; j < kPairColumns; j++) {
                if (values[j] > best) best = values[j], best_id = first + j;
            }
        }
        return best_id;
    }

  private:
    // Beside what is not among the top_k all others might as well be forbidden.
    long winner_of_top(long row, const float* logits, const int32_t* pairs, long count) const {
        static thread_local Scratch scratch;
        float* all = scratch.get<float>(n);
        for (long id = 0; id < n; id += kLanes) store(all + id, splat(-kInfinity));
        for (long i = 0; i < count; i++) {
            memcpy(all + pairs[i] * kPairColumns, logits + (i * rows.rows + row) * kPairColumns, kPairColumns * sizeof(float));
        }
        SampleArguments one = rows;
        one.logits = all;
        one.stride = 0;
        return sample_row(one, row);
    }

    static INLINE float larger_of(float a, float b) { return a > b ? a : b; }
    static float least_noise() { return RowSampler::gumbel(1.0f - 0x1p-24f); }  // noise falls as its number rises
    float scaled(float logit, long row) const {
        const float x = logit / rows.temperature[row];
        return x < kLargest ? x : kLargest;
    }

    void make_noise(long row, long first, uint32_t (&bits)[kNoiseGroup]) const {
        philox((uint32_t)(first / 4), (uint32_t)rows.index[row], (uint32_t)rows.choice[row], (uint64_t)rows.seed[row], bits);
    }

    // Logits become what they compete with; those that lose against `best` whatever their noise stay below it.
    void add_noise(long row, long first, float (&values)[kPairColumns], float best) const {
        float top = -kInfinity;
        for (float& value : values) top = larger_of(top, value = scaled(value, row));
        if (top + kMostNoise < best) {
            for (float& value : values) value = -kInfinity;
            return;
        }
        const long group = first / kNoiseGroup * kNoiseGroup;
        uint32_t bits[kNoiseGroup];
        make_noise(row, group, bits);
        for (long j = 0; j < kPairColumns; j++) values[j] += RowSampler::gumbel(RowSampler::uniform(bits[first - group + j]));
    }
};

// The norm of a row; NaN if one of its numbers is not finite.
template <class T>
double norm_of(const T* x, long count) {
    Vec squares = zero();
    for (long k = 0; k < count; k += kLanes) {
        const Vec value = load_some(x + k, count - k);
        squares = fma(value, value, squares);
    }
    return std::sqrt((double)sum_lanes(squares));
}

// Whether a row may be screened: its token depends on no more than the largest logits, and nothing comes near what a float can hold.
template <class T>
bool may_screen(const ScreenArguments& args, const SampleArguments& rows, long row, double norm) {
    const double most = norm * args.largest;
    if (!(norm > kLeastNorm && most < (std::is_same_v<T, Fp16> ? kMostHalfLogit : kMostLogit))) return false;
    if (rows.temperature[row] == 0.0f) return true;
    if (!(most / rows.temperature[row] < kMostLogit)) return false;
    if (rows.top_k[row] > 0 && rows.top_k[row] < args.layer.n) return rows.top_k[row] <= args.most_pairs;
    return rows.top_p[row] >= 1.0f && rows.min_p[row] <= 0.0f;  // these weigh an id against all others
}

// The pairs that are wanted, in order; how many, or -1 if they are more than so many.
long take_wanted(const WantedPairs& wanted, long num_pairs, long most, int32_t* pairs) {
    long count = 0;
    for (long pair = 0; pair < num_pairs; pair++) {
        if (!wanted.is_wanted[pair]) continue;
        if (count == most) return -1;
        pairs[count++] = (int32_t)pair;
    }
    return count;
}

constexpr int64_t kNeedsAll = 0, kIsDone = 1, kInVain = 2;  // what becomes of rows; kInVain: it took time to find out that they need all

// rows.out and rows.is_bad for x [rows, k], as `sample` writes them for the layer's logits; rows.logits is not read. Nothing is written if
// that was not possible.
template <class T>
int64_t screen(const ScreenArguments& args, const SampleArguments& rows, const T* x, long x_stride, long threads) {
    static thread_local Scratch rough_memory, small_memory, wanted_memory, pair_memory, logit_memory;
    const long n = args.layer.n, m = rows.rows, num_pairs = n / kPairColumns;
    float* norms = small_memory.get<float>(m * (1 + ceil_div(n, kSearched)));
    for (long row = 0; row < m; row++) {
        const double norm = norm_of(x + row * x_stride, args.layer.k);
        if (!may_screen<T>(args, rows, row, norm)) return kNeedsAll;
        norms[row] = (float)(norm * 1.001);  // its own error, and this product's
    }
    float* rough = rough_memory.get<float>(m * n);
    quantized_linear(args.rough, x, x_stride, rough, m, threads);
    uint8_t* flags = wanted_memory.get<uint8_t>(num_pairs);
    memset(flags, 0, num_pairs);
    const Screen<T> screen{args, rows, rough, norms, {flags}};
    screen.want_largest(norms + m, threads);
    parallel_for(m, kElementWork * m * n, threads, [&](long row) {
        if (screen.is_greedy(row)) return;
        screen.has_top_k(row) ? screen.want_top(row) : screen.want_winners(row);
    });
    int32_t* pairs = pair_memory.get<int32_t>(args.most_pairs);
    const long count = take_wanted(screen.wanted, num_pairs, args.most_pairs, pairs);
    if (count < 0) return kInVain;
    float* logits = logit_memory.get<float>(count * m * kPairColumns);
    parallel_for(count, (double)count * m * kPairColumns * args.layer.k, threads, [&](long i) {
        linear_pair(args.layer, pairs[i], x, x_stride, logits + i * m * kPairColumns, m);
    });
    parallel_for(m, kElementWork * m * count * kPairColumns, threads, [&](long row) {
        rows.out[row] = screen.winner(row, logits, pairs, count);
        rows.is_bad[row] = 0;
    });
    return kIsDone;
}

}  // namespace
