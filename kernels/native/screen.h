// The next token of each row without most of its logits.
//
// A second copy of a vocabulary projection's weights, rounded to eight bits as the rows are, says of every logit between which two numbers
// it lies: the difference of both weights' products with a row is no larger than the product of its norm with the norm of what rounding
// took away (Cauchy, Schwarz), and so on for what it took away from the row. Logits that cannot be the largest, or cannot with their noise,
// are never computed; the others are, by the layer itself, and choose the token. Of rows with top-k those are left out that cannot be among
// the k. So it is the token that all logits would have chosen, from half of the bytes that sixteen bits take. Where the weights are
// integers of eight bits, these are what rough rows are multiplied by, too (or a copy in another order), and in half of the time, or less.
#pragma once

#include "sampling.h"
#include "screen_bounds.h"

namespace {

constexpr long kSearched = 256;  // pairs that one call of a thread looks at
constexpr long kFewWanting = 3;  // computed one by one in less time than all together
constexpr double kLeastNorm = 1e-12, kMostLogit = 1e30, kMostHalfLogit = 6e4;  // beyond these, numbers get lost or become infinite

// Pairs of panels that rows want, by threads that may want the same one.
struct WantedPairs {
    uint64_t* rows;  // [pairs]: a bit for each row; of more than there are bits, the same one for several

    INLINE void add(long pair, long row) const { __atomic_fetch_or(rows + pair, bit_of(row), __ATOMIC_RELAXED); }
    INLINE bool has(long pair, long row) const { return rows[pair] & bit_of(row); }
    static INLINE uint64_t bit_of(long row) { return 1ull << row % 64; }
};

template <class T>
struct Screen {
    const ScreenArguments& args;
    const SampleArguments& rows;
    const T* x;  // [rows, k]
    long x_stride;
    const float* rough;  // [rows, n]
    const float* norms;  // as TopBounds has them
    WantedPairs wanted;
    long n = args.rough.layer.n;

    Bounds<T> bounds(long row) const { return {rough + row * n, args.reach, args.size, splat(norms[row]), splat(norms[rows.rows + row])}; }
    bool is_greedy(long row) const { return rows.temperature[row] == 0.0f; }
    bool has_top_k(long row) const { return rows.top_k[row] > 0 && rows.top_k[row] < n; }

    // The bounds of greedy rows, from products that have been written.
    void tops_of_rough(const TopBounds& tops, long threads) const {
        const long num_pairs = n / kPairColumns;
        parallel_for(ceil_div(num_pairs, kSearched), kElementWork * rows.rows * n, threads, [&](long i) {
            for (long row = 0; row < rows.rows; row++) {
                for (long pair = i * kSearched; pair < smaller(num_pairs, (i + 1) * kSearched) && is_greedy(row); pair++) {
                    tops.note(row, pair, rough + row * n + pair * kPairColumns, 1);
                }
            }
        });
    }

    // Pairs with ids that could be the largest of a greedy row. (What rounds a logit, rounds its bounds, and keeps their order.) The one
    // that looks best is computed first: the others need not reach the least that it could be, but what it is, which few do.
    void want_largest(const TopBounds& tops, long threads) const {
        const long num_pairs = n / kPairColumns;
        parallel_for(rows.rows, kElementWork * rows.rows * num_pairs, threads, [&](long row) {
            if (!is_greedy(row)) return;
            Vec low = tops.lowest[row];
            for (long thread = 1; thread < threads; thread++) low = max(tops.lowest[thread * rows.rows + row], low);
            const float* bounds = tops.highest + row * num_pairs;
            alignas(64) float logits[kPairColumns];
            compute_row(std::max_element(bounds, bounds + num_pairs) - bounds, row, logits);
            low = max(rounded(low, (const T*)nullptr), max(load(logits), load(logits + kLanes)));
            const float least = max_lanes(low);
            for (long first = 0; first < num_pairs; first += kLanes) {
                alignas(64) float highest[kLanes];
                store(highest, rounded(load_some(bounds + first, num_pairs - first), (const T*)nullptr));
                for (long i = 0; i < smaller(kLanes, num_pairs - first); i++) {
                    if (highest[i] >= least) wanted.add(first + i, row);
                }
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
        best = larger_of(best, best_beside(candidates, count, row));
        for (long i = 0; i < count; i++) {
            if (candidates[i].x >= best) wanted.add(candidates[i].id / kPairColumns, row);
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
            if (scaled(max_lanes(max(bound.highest(id), bound.highest(id + kLanes))), row) >= last->x) {
                wanted.add(id / kPairColumns, row);
            }
        }
    }

    // Logits [rows][32] of a pair: of those rows that want it, if these are few.
    void compute(long pair, float* logits) const {
        const uint64_t wanting = wanted.rows[pair];
        if (__builtin_popcountll(wanting) > kFewWanting) return compute_rows(pair, 0, rows.rows, logits);
        for (long row = 0; row < rows.rows; row++) {
            if (wanted.has(pair, row)) compute_row(pair, row, logits + row * kPairColumns);
        }
    }

    // The token, from the logits [pairs][rows][32] of what is wanted; ids rise.
    long winner(long row, const float* logits, const int32_t* pairs, long count) const {
        if (!is_greedy(row) && has_top_k(row)) return winner_of_top(row, logits, pairs, count);
        float best = -kInfinity;
        long best_id = 0;
        for (long i = 0; i < count; i++) {
            if (!wanted.has(pairs[i], row)) continue;
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
    void compute_rows(long pair, long row, long count, float* logits) const {
        const T* from = x + row * x_stride;
        if (args.exact.bits == 0) return linear_pair(args.exact.layer, pair, from, x_stride, logits, count);
        quantized_pair(args.exact, pair, from, x_stride, logits, count);
    }
    void compute_row(long pair, long row, float* logits) const { compute_rows(pair, row, 1, logits); }

    // What the pair of the best candidate has to compete with.
    float best_beside(const Candidate* candidates, long count, long row) const {
        const Candidate* most = candidates;
        for (long i = 1; i < count; i++) most = candidates[i].x > most->x ? candidates + i : most;
        const long pair = most->id / kPairColumns;
        float values[kPairColumns];
        compute_row(pair, row, values);
        add_noise(row, pair * kPairColumns, values, -kInfinity);
        return *std::max_element(values, values + kPairColumns);
    }

    // Beside what is not among the top_k all others might as well be forbidden.
    long winner_of_top(long row, const float* logits, const int32_t* pairs, long count) const {
        static thread_local Scratch scratch;
        float* all = scratch.get<float>(n);
        for (long id = 0; id < n; id += kLanes) store(all + id, splat(-kInfinity));
        for (long i = 0; i < count; i++) {
            if (!wanted.has(pairs[i], row)) continue;
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

// Whether a row may be screened: its token depends on no more than the largest logits, and nothing comes near what a float can hold.
template <class T>
bool may_screen(const ScreenArguments& args, const SampleArguments& rows, long row, double norm) {
    const double most = norm * args.largest;
    if (!(norm > kLeastNorm && most < (std::is_same_v<T, Fp16> ? kMostHalfLogit : kMostLogit))) return false;
    if (rows.temperature[row] == 0.0f) return true;
    if (!(most / rows.temperature[row] < kMostLogit)) return false;
    if (rows.top_k[row] > 0 && rows.top_k[row] < args.rough.layer.n) return rows.top_k[row] <= args.most_pairs;
    return rows.top_p[row] >= 1.0f && rows.min_p[row] <= 0.0f;  // these weigh an id against all others
}

// The pairs that are wanted, in order; how many, or -1 if they are more than so many.
long take_wanted(const WantedPairs& wanted, long num_pairs, long most, int32_t* pairs) {
    long count = 0;
    for (long pair = 0; pair < num_pairs; pair++) {
        if (wanted.rows[pair] == 0) continue;
        if (count == most) return -1;
        pairs[count++] = (int32_t)pair;
    }
    return count;
}

bool all_greedy(const SampleArguments& rows) {
    for (long row = 0; row < rows.rows; row++) {
        if (rows.temperature[row] != 0.0f) return false;
    }
    return true;
}

constexpr int64_t kNeedsAll = 0, kIsDone = 1, kInVain = 2;  // what becomes of rows; kInVain: it took time to find out that they need all

// rows.out and rows.is_bad for x [rows, k], as `sample` writes them for the layer's logits; rows.logits is not read. Nothing is written if
// that was not possible.
template <class T>
int64_t screen(const ScreenArguments& args, const SampleArguments& rows, const T* x, long x_stride, long threads) {
    static thread_local Scratch integer_memory, rough_memory, small_memory, second_memory, highest_memory, lowest_memory, wanted_memory, pair_memory, logit_memory;
    const long n = args.rough.layer.n, k = args.rough.layer.k, m = rows.rows, num_pairs = n / kPairColumns;
    float* norms = small_memory.get<float>(2 * m);
    for (long row = 0; row < m; row++) {
        const double norm = norm_of(x + row * x_stride, k);
        if (!may_screen<T>(args, rows, row, norm)) return kNeedsAll;
        norms[row] = (float)(norm * 1.001);  // its own error, and this product's
    }
    const RoughRows<T> rough_rows{args, x, x_stride, m, norms + m, second_memory.get<int32_t>(m)};
    RoundedRows<RoundedPanel> integers;
    const long num_integers = rough_rows.round(integer_memory, integers);
    TopBounds tops{args, norms, highest_memory.get<float>(m * num_pairs), lowest_memory.get<Vec>(larger(1, threads) * m), m};
    for (long i = 0; i < larger(1, threads) * m; i++) tops.lowest[i] = splat(-kInfinity);
    uint64_t* wanting = wanted_memory.get<uint64_t>(num_pairs);
    memset(wanting, 0, num_pairs * sizeof(uint64_t));
    const bool has_tops = all_greedy(rows) && tops_of_products(args.rough, integers, num_integers, tops, threads);
    float* rough = has_tops ? nullptr : rough_memory.get<float>(num_integers * n);
    const Screen<T> screen{args, rows, x, x_stride, rough, norms, {wanting}};
    if (!has_tops) {
        rounded_linear<T>(args.rough, integers, rough, num_integers, threads);
        if (num_integers > m) rough_rows.join(rough, n, threads);
        screen.tops_of_rough(tops, threads);
    }
    screen.want_largest(tops, threads);
    parallel_for(m, kElementWork * m * n, threads, [&](long row) {
        if (screen.is_greedy(row)) return;
        screen.has_top_k(row) ? screen.want_top(row) : screen.want_winners(row);
    });
    int32_t* pairs = pair_memory.get<int32_t>(args.most_pairs);
    const long count = take_wanted(screen.wanted, num_pairs, args.most_pairs, pairs);
    if (count < 0) return kInVain;
    float* logits = logit_memory.get<float>(count * m * kPairColumns);
    parallel_for(count, (double)count * m * kPairColumns * k, threads, [&](long i) {
        screen.compute(pairs[i], logits + i * m * kPairColumns);
    });
    parallel_for(m, kElementWork * m * count * kPairColumns, threads, [&](long row) {
        rows.out[row] = screen.winner(row, logits, pairs, count);
        rows.is_bad[row] = 0;
    });
    return kIsDone;
}

}  // namespace
