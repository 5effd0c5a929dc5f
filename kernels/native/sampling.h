// The next token of each row. `kernels.sampling` states the definition.
#pragma once

#include <algorithm>
#include <cmath>

#include "parallel.h"

// Mirrored by `kernels.sampling.cpu.SampleArguments`.
struct SampleArguments {
    const float* logits;  // [rows, vocab_size], rows `stride` elements apart
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k, *choice;
    const int64_t *seed, *index;
    int64_t* out;     // [rows]
    uint8_t* is_bad;  // [rows]: see `KernelBackend.choose`; the row's token is then 0. May be null
    int64_t rows, vocab_size, stride;
};

namespace {

constexpr float kLargest = 3.40282347e38f;
constexpr long kScan = 1024;           // elements per step of the search for the maximum
constexpr long kBuckets = 2048;        // of distances from the maximum, kBucketsPerUnit to one
constexpr float kBucketsPerUnit = 64.0f;
constexpr float kMostNoise = 23.0f;       // above -log(-log1p(-2^-33))
constexpr long kNoiseGroup = 4 * kLanes;  // ids whose noise is made at a time

typedef uint64_t PartWide __attribute__((vector_size(4 * kWidth)));
constexpr int kWideParts = 2 * kParts;  // registers for 16 words of 64 bits
struct Words {
    PartWide p[kWideParts];
};

// Products of the lower 32 bits of each lane.
INLINE PartWide multiply(PartWide a, uint32_t b) {
#if defined(__AVX512F__)
    return (PartWide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (PartWide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
    return a * (uint64_t)b;
#endif
}

// Philox4x32-10 of 16 counters (first_group + i, index, choice, 0), as the noise bits of 64 ids in order.
void philox(uint32_t first_group, uint32_t index, uint32_t choice, uint64_t seed, uint32_t (&bits)[kNoiseGroup]) {
    const uint64_t low = 0xffffffff;
    Words c[4];
    uint64_t groups[kLanes];
    for (int i = 0; i < kLanes; i++) groups[i] = (uint32_t)(first_group + i);
    memcpy(&c[0], groups, sizeof groups);
    for (int i = 0; i < kWideParts; i++) {
        c[1].p[i] = PartWide{} + (uint64_t)index;
        c[2].p[i] = PartWide{} + (uint64_t)choice;
        c[3].p[i] = PartWide{};
    }
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        UNROLL for (int i = 0; i < kWideParts; i++) {
            const PartWide first = multiply(c[0].p[i], 0xD2511F53), second = multiply(c[2].p[i], 0xCD9E8D57);
            c[0].p[i] = (second >> 32) ^ c[1].p[i] ^ (uint64_t)k0;
            c[1].p[i] = second & low;
            c[2].p[i] = (first >> 32) ^ c[3].p[i] ^ (uint64_t)k1;
            c[3].p[i] = first & low;
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    for (int word = 0; word < 4; word++) {
        uint64_t words[kLanes];
        memcpy(words, &c[word], sizeof words);
        for (int i = 0; i < kLanes; i++) bits[4 * i + word] = (uint32_t)words[i];
    }
}

// The end of a prefix of the order "x descending, id ascending".
struct Cut {
    float x = -kInfinity;
    long id = INT64_MAX;

    bool keeps(float other, long other_id) const { return other > x || (other == x && other_id <= id); }
};

struct Candidate {
    float x;
    int32_t id;

    bool operator<(const Candidate& other) const { return x > other.x || (x == other.x && id < other.id); }
};

// Index of the first largest element; NaN counts as -inf, and 0 is the answer where nothing is larger.
long first_argmax(const float* x, long count) {
    float best = -kInfinity;
    long best_at = 0;
    for (long at = 0; at < count; at += kScan) {
        const long stop = smaller(count, at + kScan);
        Vec top = splat(-kInfinity);
        long i = at;
        for (; i + kLanes <= stop; i += kLanes) top = max(load(x + i), top);
        float highest = max_lanes(top);
        for (; i < stop; i++) highest = x[i] > highest ? x[i] : highest;
        if (highest > best) best = highest, best_at = at;
    }
    while (best > -kInfinity && x[best_at] != best) best_at++;
    return best_at;
}

// One row at a temperature above zero.
struct RowSampler {
    const SampleArguments& args;
    const long row;
    const float* x;         // [vocab_size rounded up to kNoiseGroup, the rest -inf], logits / temperature
    Candidate* candidates;  // [vocab_size]
    float top;
    Cut cut;

    Vec masses(const Vec& values) const { return exp(values - splat(top)); }
    Vec buckets(const Vec& values) const {
        return min((splat(top) - values) * splat(kBucketsPerUnit), splat((float)(kBuckets - 1)));
    }
    float mass(float value) const { return masses(splat(value)).p[0][0]; }
    long bucket(float value) const { return (long)buckets(splat(value)).p[0][0]; }

    // Shortens the kept prefix to the shortest one whose masses sum to `fraction` of all that is kept, or, where kCount is
    // set, to that many ids. Only one bucket of distances from the maximum has to be sorted.
    template <bool kCount>
    void shorten(double fraction) {
        double sums[kBuckets] = {}, total = 0.0, sum = 0.0;
        for (long first = 0; first < args.vocab_size; first += kLanes) {
            float mass_of[kLanes], bucket_of[kLanes];
            store(mass_of, kCount ? splat(1.0f) : masses(load(x + first)));
            store(bucket_of, buckets(load(x + first)));
            for (long i = 0; i < smaller(kLanes, args.vocab_size - first); i++) {
                if (cut.keeps(x[first + i], first + i)) sums[(long)bucket_of[i]] += mass_of[i];
            }
        }
        for (long i = 0; i < kBuckets; i++) total += sums[i];
        const double target = kCount ? fraction : fraction * total;
        long last = 0;
        while (last < kBuckets - 1 && sum + sums[last] < target) sum += sums[last++];
        long count = 0;
        const float lowest = last == kBuckets - 1 ? -kInfinity : top - (float)(last + 2) / kBucketsPerUnit;
        for (long id = 0; id < args.vocab_size; id++) {
            if (x[id] >= lowest && cut.keeps(x[id], id) && bucket(x[id]) == last) candidates[count++] = {x[id], (int32_t)id};
        }
        std::sort(candidates, candidates + count);
        for (long i = 0; i < count; i++) {
            sum += kCount ? 1.0 : mass(candidates[i].x);
            if (sum >= target) {
                cut = {candidates[i].x, candidates[i].id};
                return;
            }
        }
    }

    // Argmax of x + Gumbel noise over the ids that are kept. `start` is the first id of the order.
    long draw(long start) const {
        uint32_t bits[kNoiseGroup];
        make_noise(start / kNoiseGroup * kNoiseGroup, bits);
        float best = x[start] + gumbel(uniform(bits[start % kNoiseGroup]));
        long best_id = start;
        for (long first = 0; first < args.vocab_size; first += kNoiseGroup) {
            Vec highest = load(x + first);
            for (long i = kLanes; i < kNoiseGroup; i += kLanes) highest = max(highest, load(x + first + i));
            const float top = max_lanes(highest);
            if (top < cut.x || top + kMostNoise < best) continue;  // noise lies below kMostNoise
            make_noise(first, bits);
            for (long i = 0; i < kNoiseGroup; i += kLanes) {
                if (may_win(bits + i, load(x + first + i), best)) consider(first + i, bits + i, best, best_id);
            }
        }
        return best_id;
    }

    void consider(long first, const uint32_t* bits, float& best, long& best_id) const {
        for (long i = 0; i < kLanes; i++) {
            const long id = first + i;
            if (x[id] == -kInfinity) continue;
            const float noisy = x[id] + gumbel(uniform(bits[i]));
            if (noisy < best || (noisy == best && id >= best_id) || !keeps(id)) continue;
            best = noisy;
            best_id = id;
        }
    }

    bool keeps(long id) const {
        const float min_p = args.min_p[row];
        return cut.keeps(x[id], id) && (min_p <= 0.0f || mass(x[id]) >= min_p);
    }

    void make_noise(long first, uint32_t (&bits)[kNoiseGroup]) const {
        philox((uint32_t)(first / 4), (uint32_t)args.index[row], (uint32_t)args.choice[row], (uint64_t)args.seed[row], bits);
    }

    // Whether one of 16 ids may reach `best` with its noise. -log(-log1p(-u)) <= -log u, so only u < exp(x - best) can, or a little larger
    // ones, where rounding the sum takes it up to `best`: two logarithms are spared to nearly all.
    static INLINE bool may_win(const uint32_t* bits, const Vec& x, float best) {
        const float rounding = (best < 0.0f ? -best : best) * 0x1p-23f;
        return any_less(uniforms(bits), exp(x - splat(best) + splat(rounding)) * splat(1.001f));
    }

    static INLINE Vec uniforms(const uint32_t* bits) {
        Vec u;
        UNROLL for (int i = 0; i < kParts; i++) {
            u.p[i] = __builtin_convertvector(*(const PartBitsLoad*)(bits + i * kWidth), Part);
        }
        return min((u + splat(0.5f)) * splat(0x1p-32f), splat(1.0f - 0x1p-24f));
    }
    static INLINE float uniform(uint32_t bits) {
        const float u = ((float)bits + 0.5f) * 0x1p-32f;
        return u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
    }
    static float gumbel(float u) { return (float)-std::log((double)(float)-std::log1p(-(double)u)); }
};

long sample_row(const SampleArguments& args, long row) {
    static thread_local Scratch x_scratch, candidate_scratch;
    const float *logits = args.logits + row * args.stride, temperature = args.temperature[row];
    const long size = args.vocab_size, best = first_argmax(logits, size);
    if (temperature == 0.0f || !(logits[best] > -kInfinity)) return best;
    const long padded = round_up(size, kNoiseGroup);
    float* x = x_scratch.get<float>(padded);
    const Vec divisor = splat(temperature), lowest = splat(-kInfinity), largest = splat(kLargest);
    for (long i = 0; i < size; i += kLanes) {
        store(x + i, min(max(load_some(logits + i, size - i), lowest) / divisor, largest));  // max turns NaN into -inf
    }
    for (long i = size; i < padded; i++) x[i] = -kInfinity;
    const long start = first_argmax(x, size);
    RowSampler sampler{args, row, x, candidate_scratch.get<Candidate>(size), x[start], Cut()};
    if (args.top_k[row] > 0 && args.top_k[row] < size) sampler.shorten<true>(args.top_k[row]);
    if (args.top_p[row] < 1.0f) sampler.shorten<false>(args.top_p[row]);
    return sampler.draw(start);
}

// Whether a row holds NaN or infinity above; -infinity for some ids is a legal mask.
bool is_spoilt(const float* logits, long size) {
    Vec sum = zero();
    long i = 0;
    for (; i + kLanes <= size; i += kLanes) sum = sum + load(logits + i);
    if (i < size) sum = sum + load_some(logits + i, size - i);
    return !(sum_lanes(sum) < kInfinity);
}

void sample(const SampleArguments& args, long threads) {
    const double work = (double)args.rows * args.vocab_size;
    parallel_for(args.rows, work, threads, [&](long row) {
        const float* logits = args.logits + row * args.stride;
        args.out[row] = sample_row(args, row);
        if (args.is_bad == nullptr) return;
        args.is_bad[row] = logits[args.out[row]] == -kInfinity || is_spoilt(logits, args.vocab_size);
        if (args.is_bad[row]) args.out[row] = 0;
    });
}

}  // namespace
