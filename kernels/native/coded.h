// Linear layers over bf16 weights in twelve bits, without loss: what limits few rows is how fast weights come from memory.
//
// The upper byte of a weight, its sign and most of its exponent, takes few values in one layer: sixteen of them have a code of four bits.
// The lower byte stays as it is. A chunk of eight steps in which another upper byte occurs stays as it was, sixteen bits a weight.
//
// A pair of panels of linear.h is one stream, its chunks one behind the other. Two steps of a coded chunk are a unit of three lines:
// the codes, the first step's in the lower half of each byte, then the lower bytes of the first step and of the second. Within each 16
// bytes the first panel's numbers come before the second's, so that interleaving lower and upper bytes gives one panel and the other.
//
// Products are added in the order of linear.h, so that no bit of a result depends on how its weights lie.
#pragma once

#include "linear.h"

namespace {

constexpr long kCodedSteps = 8;  // of a chunk: one weight in some seven thousand has no code, which costs its chunk a third more
constexpr long kUnitSteps = 2, kUnitBytes = 3 * kLineBytes, kChunkUnits = kCodedSteps / kUnitSteps;
constexpr long kPlainStepBytes = 2 * kLineBytes;
constexpr long kCodedBytes = kChunkUnits * kUnitBytes, kPlainBytes = kCodedSteps * kPlainStepBytes;  // of a chunk
constexpr long kNumCodes = 16;

// The packed weights: where each pair's stream begins and the last one ends, in bytes from here; then the streams. All are whole lines.
// A stream begins with its upper bytes by their codes, and the bits of its chunks that are plain.
struct CodedIndex {
    const char* packed;
    long pairs, chunks;
    long first = 0;  // pairs that are left out before the others

    CodedIndex(const void* at, long n, long k)
        : packed((const char*)at), pairs(ceil_div(n, 2 * kLanes)), chunks(k / (2 * kCodedSteps)) {}

    long words() const { return ceil_div(chunks, 64); }
    long head_bytes() const { return round_up(kNumCodes + words() * (long)sizeof(uint64_t), kLineBytes); }
    long bytes() const { return round_up((pairs + 1) * (long)sizeof(int64_t), kLineBytes); }

    int64_t* starts() const { return (int64_t*)packed + first; }
    long end(long pair) const { return starts()[pair + 1]; }
    INLINE const char* stream(long pair) const {
        __builtin_prefetch(starts() + pair + kLineBytes / sizeof(int64_t));
        return packed + starts()[pair];
    }
};

#if defined(__AVX512F__) && !defined(NOVA_TILES)

INLINE bool is_plain(const uint64_t* plain, long chunk) { return plain[chunk / 64] >> chunk % 64 & 1; }

INLINE __m512i codes_of(const uint8_t* codes) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes)); }

// The upper bytes of the codes in the lower half of each byte.
INLINE __m512i upper_bytes(__m512i codes, __m512i both) {
#if defined(__AVX512VBMI__)  // it heeds six bits of its index; the table is the same for all values of the upper two
    return _mm512_permutexvar_epi8(both, codes);
#else
    return _mm512_shuffle_epi8(codes, _mm512_and_si512(both, _mm512_set1_epi8(15)));
#endif
}

// Two steps of a pair.
struct Unit {
    __m512i low[2], high[2];

    INLINE Unit(const char* at, __m512i codes) {
        const __m512i both = _mm512_loadu_si512(at);
        low[0] = _mm512_loadu_si512(at + kLineBytes);
        low[1] = _mm512_loadu_si512(at + 2 * kLineBytes);
        high[0] = upper_bytes(codes, both);
        high[1] = upper_bytes(codes, _mm512_srli_epi16(both, 4));
    }

    INLINE __m512i line(int step, int panel) const {
        return panel == 0 ? _mm512_unpacklo_epi8(low[step], high[step]) : _mm512_unpackhi_epi8(low[step], high[step]);
    }
};

// ---- packing ----

// Columns [column, column + 32) of the weight as a plain pair: [steps][2][16][2].
void lay_out_pair(const Bf16* weight, long n, long k, long row_stride, long column, Bf16* to) {
    const Bf16 nothing[2 * kLanes] = {};
    for (long panel = 0; panel < 2; panel++) {
        for (long step = 0; step < k / 2; step += kLanes) {
            __m512i words[16];
            UNROLL for (int i = 0; i < 16; i++) {
                const long row = column + panel * kLanes + i;
                words[i] = _mm512_loadu_si512(row < n ? weight + row * row_stride + 2 * step : nothing);
            }
            transpose(words);
            UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512((char*)to + (step + i) * kPlainStepBytes + panel * kLineBytes, words[i]);
        }
    }
}

// The upper bytes of a pair that occur most often, the lowest first; of a deep one every fourth step counts.
void choose_codes(const Bf16* pair, long steps, uint8_t* codes) {
    int32_t counts[256] = {};
    for (long step = 0; step < steps; step += steps < 256 ? 1 : 4) {
        for (long i = 0; i < 4 * kLanes; i++) counts[pair[step * 4 * kLanes + i].bits >> 8]++;
    }
    bool chosen[256] = {};
    for (long code = 0; code < kNumCodes; code++) {
        long best = -1;
        for (long value = 0; value < 256; value++) {
            if (!chosen[value] && (best < 0 || counts[value] > counts[best])) best = value;
        }
        chosen[best] = true;
    }
    for (long value = 0, code = 0; value < 256; value++) {
        if (chosen[value]) codes[code++] = (uint8_t)value;
    }
}

// The codes of upper bytes; 0x80 where there is none.
struct Coder {
    const uint8_t* codes;

    INLINE __m512i operator()(__m512i high) const {
        __m512i found = _mm512_set1_epi8((char)0x80);
        UNROLL for (int code = 0; code < kNumCodes; code++) {
            found = _mm512_mask_mov_epi8(found, _mm512_cmpeq_epi8_mask(high, _mm512_set1_epi8((char)codes[code])), _mm512_set1_epi8((char)code));
        }
        return found;
    }
};

// A plain chunk, coded. False if a byte in it has no code.
bool code_chunk(const char* plain, const Coder& coder, char* to) {
    uint64_t missing = 0;
    for (long unit = 0; unit < kChunkUnits; unit++, to += kUnitBytes) {
        __m512i both = _mm512_setzero_si512();
        for (int step = 0; step < 2; step++, plain += kPlainStepBytes) {
            const __m512i lines[2] = {_mm512_loadu_si512(plain), _mm512_loadu_si512(plain + kLineBytes)}, byte = _mm512_set1_epi16(0xff);
            const __m512i low = _mm512_packus_epi16(_mm512_and_si512(lines[0], byte), _mm512_and_si512(lines[1], byte));
            const __m512i codes = coder(_mm512_packus_epi16(_mm512_srli_epi16(lines[0], 8), _mm512_srli_epi16(lines[1], 8)));
            _mm512_storeu_si512(to + (1 + step) * kLineBytes, low);
            missing |= _mm512_movepi8_mask(codes);
            both = _mm512_or_si512(both, step == 0 ? codes : _mm512_slli_epi16(codes, 4));
        }
        _mm512_storeu_si512(to, both);
    }
    return missing == 0;
}

// Bytes of the pair's stream, written to `to` if that is not null.
long code_pair(const CodedIndex& index, const char* pair, char* to) {
    uint8_t codes[kNumCodes];
    choose_codes((const Bf16*)pair, index.chunks * kCodedSteps, codes);
    const Coder coder{codes};
    if (to != nullptr) {
        memset(to, 0, index.head_bytes());
        memcpy(to, codes, kNumCodes);
    }
    uint64_t* plain = to == nullptr ? nullptr : (uint64_t*)(to + kNumCodes);
    alignas(64) char coded[kCodedBytes];
    long bytes = index.head_bytes();
    for (long chunk = 0; chunk < index.chunks; chunk++, pair += kPlainBytes) {
        const bool has_codes = code_chunk(pair, coder, coded);
        const long size = has_codes ? kCodedBytes : kPlainBytes;
        if (to != nullptr) {
            memcpy(to + bytes, has_codes ? coded : pair, size);
            if (!has_codes) plain[chunk / 64] |= 1ull << chunk % 64;
        }
        bytes += size;
    }
    return bytes;
}

// How many bytes the weight [n, k] takes in codes; 0 if that is not much less, or K no multiple of 32. They are written to `to` if it is
// not null.
long code_linear(const Bf16* weight, void* to, long n, long k, long row_stride, long threads) {
    const CodedIndex index(to, n, k);
    if (n * k == 0 || k % (2 * kLanes) != 0) return 0;
    int64_t* starts = to == nullptr ? (int64_t*)malloc((index.pairs + 1) * sizeof(int64_t)) : index.starts();
    if (starts == nullptr) abort();
    const auto for_all = [&](bool write) {
        parallel_for(index.pairs, (double)n * k, threads, [&](long pair) {
            static thread_local Scratch scratch;
            Bf16* plain = scratch.get<Bf16>(2 * kLanes * k);
            lay_out_pair(weight, n, k, row_stride, pair * 2 * kLanes, plain);
            const long bytes = code_pair(index, (const char*)plain, write ? (char*)to + starts[pair] : nullptr);
            if (!write) starts[pair] = bytes;
        });
    };
    for_all(false);
    long end = index.bytes();
    for (long pair = 0; pair < index.pairs; pair++) {
        const long size = starts[pair];
        starts[pair] = end;
        end += size;
    }
    starts[index.pairs] = end;
    to != nullptr ? for_all(true) : free(starts);
    return end <= index.pairs * index.chunks * kPlainBytes * 9 / 10 ? end : 0;
}

// ---- products: decoded on the way, beside which the processor has room for it, or of many rows before ----

using CodedFormat = Bf16Format;
using CodedX = CodedFormat::X;

// Widened to fp32, products take so long that of more rows than a block has decoding each pair once, into a cache, is faster.
constexpr bool kDecodesOnce = sizeof(CodedX) == sizeof(float);

// A stream that is wanted next, of which each unit asks for its part: two places, half of `bytes` apart.
struct Wanted {
    const char* at;
    long bytes;

    INLINE void ask(const char*, long) {
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + bytes / 2, 0, 2);
        at += bytes;
    }
};
struct NothingWanted {
    INLINE void ask(const char*, long) {}
};

// The stream that is being read itself, where the processor does not ask for it in time.
struct Hinted {
    // reads: where the stream is being read now, and so many bytes of it.
    INLINE void ask(const char* reads, long bytes) {
        UNROLL for (long line = 0; line < bytes; line += kLineBytes) {
            __builtin_prefetch(reads + line + kBothCaches.near, 0, 3);
            __builtin_prefetch(reads + line + kBothCaches.far, 0, 2);
        }
    }
};

struct CodedTile {
    using Format = CodedFormat;
    const LinearArguments& args;
    const Operands<CodedX>& operands;
    Output<Bf16> output;
    CodedIndex index;

    // One of `parts` of a pair's stream, for a block that passes over another pair.
    Wanted part_of(long pair, long part, long parts) const {
        const long bytes = ceil_div(index.end(pair) - index.starts()[pair], parts * index.chunks * kChunkUnits);
        return {index.packed + index.starts()[pair] + part * index.chunks * kChunkUnits * bytes, bytes};
    }

    // Rows [row, row + M) times the first N panels of a pair.
    template <int M, int N, class Next>
    INLINE void block(long row, long pair, Next next) const {
        long panels[N];
        Vec acc[M][N];
        UNROLL for (int n = 0; n < N; n++) panels[n] = 2 * pair + n;
        UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int n = 0; n < N; n++) acc[m][n] = zero();
        }
        const auto x = operands.template block<M>(row);
        const char *stream = index.stream(pair), *at = stream + index.head_bytes();
        const __m512i codes = codes_of((const uint8_t*)stream);
        const uint64_t* plain = (const uint64_t*)(stream + kNumCodes);
        for (long chunk = 0; chunk < index.chunks; chunk++) {
            const auto rows = x.from(chunk * 2 * kCodedSteps);
            if (__builtin_expect(is_plain(plain, chunk), false)) {
                const Bf16* w[N];
                UNROLL for (int n = 0; n < N; n++) w[n] = (const Bf16*)(at + n * kLineBytes);
                for (long unit = 0; unit < kChunkUnits; unit++) next.ask(at + unit * (kPlainBytes / kChunkUnits), kPlainBytes / kChunkUnits);
                accumulate<Format>(acc, rows, w, 4 * kLanes, kCodedSteps);
                at += kPlainBytes;
                continue;
            }
            for (long step = 0; step < kCodedSteps; step += kUnitSteps, at += kUnitBytes) {
                next.ask(at, kUnitBytes);
                multiply_unit<M, N>(acc, rows.from(2 * step), Unit(at, codes));
            }
        }
        output.write(row, panels, acc);
    }

    template <int M, int N, class Rows>
    static INLINE void multiply_unit(Vec (&acc)[M][N], const Rows& rows, const Unit& unit) {
        UNROLL for (int step = 0; step < kUnitSteps; step++) {
            Pairs pairs[N];
            UNROLL for (int n = 0; n < N; n++) pairs[n][0] = (PartBits)unit.line(step, n);
            Format::multiply(acc, rows, 2 * step, pairs);
        }
    }

    // M rows over all of a pair, whose second panel may lie behind the last column.
    template <int M, class Next>
    INLINE void block_of_pair(long row, long pair, const Next& next) const {
        (2 * pair + 1) * kLanes < args.n ? block<M, 2>(row, pair, next) : block<M, 1>(row, pair, next);
    }

    // One to eight rows over a pair.
    template <class Next>
    void some_rows(long row, long count, long pair, const Next& next) const {
        switch (count) {
            case 1: return block_of_pair<1>(row, pair, next);
            case 2: return block_of_pair<2>(row, pair, next);
            case 3: return block_of_pair<3>(row, pair, next);
            case 4: return block_of_pair<4>(row, pair, next);
            case 5: return block_of_pair<5>(row, pair, next);
            case 6: return block_of_pair<6>(row, pair, next);
            case 7: return block_of_pair<7>(row, pair, next);
            default: return block_of_pair<8>(row, pair, next);
        }
    }

    // All rows. A single block meets its pair in memory. Of more blocks, each asks for its part of the pair that comes after.
    void all_rows(long pair, long after) const {
        const long rows = operands.rows, blocks = ceil_div(rows, kBlockRows);
        if (blocks == 1) {
            if constexpr (kAsksByItself) return some_rows(0, rows, pair, NothingWanted());
            return some_rows(0, rows, pair, Hinted());
        }
        if constexpr (kDecodesOnce) return rows_over_decoded(pair, after);
        for (long i = 0; i < blocks; i++) {
            const long row = i * kBlockRows;
            some_rows(row, smaller(kBlockRows, rows - row), pair, part_of(after, i, blocks));
        }
    }

    // All rows, a block or more, over the pair as plain panels.
    void rows_over_decoded(long pair, long after) const {
        static thread_local Scratch scratch;
        const long pair_bytes = index.chunks * kPlainBytes;
        char* plain = scratch.get<char>(pair_bytes);
        decode(pair, plain);
        LinearArguments decoded = args;
        decoded.packed = plain - pair * pair_bytes;  // of which this pair alone is there
        const LinearTile<Bf16> tile{decoded, operands, output};
        const char* next = index.packed + index.starts()[after];
        if ((2 * pair + 1) * kLanes < args.n) {
            ManyRows<Bf16>{tile}.template sweep<2>(2 * pair, next, index.end(after) - index.starts()[after]);
        } else {
            ManyRows<Bf16>{tile}.template sweep<1>(2 * pair, nullptr, 0);
        }
    }

    // The pair as linear.h has it.
    void decode(long pair, char* to) const {
        const char *stream = index.stream(pair), *at = stream + index.head_bytes();
        const __m512i codes = codes_of((const uint8_t*)stream);
        for (long chunk = 0; chunk < index.chunks; chunk++, to += kPlainBytes) {
            if (is_plain((const uint64_t*)(stream + kNumCodes), chunk)) {
                memcpy(to, at, kPlainBytes);
                at += kPlainBytes;
                continue;
            }
            for (long unit = 0; unit < kChunkUnits; unit++, at += kUnitBytes) {
                const Unit decoded(at, codes);
                UNROLL for (int line = 0; line < 2 * kUnitSteps; line++) {
                    _mm512_storeu_si512(to + (unit * 2 * kUnitSteps + line) * kLineBytes, decoded.line(line / 2, line % 2));
                }
            }
        }
    }
};

// As `vector_linear`, of weights in codes: all those of the index.
void coded_linear(const LinearArguments& args, const CodedIndex& index, const Bf16* x, long x_stride, void* y, long m, long threads) {
    for_each_tile<CodedX, 1>(x, x_stride, m, args.k, 2, threads, [&](const Operands<CodedX>& operands) {
        const CodedTile tile{args, operands, {args, y, operands.first}, index};
        parallel_shares(tile.index.pairs, (double)operands.rows * args.n * args.k, threads, [&](Shares& shares) {
            for (long pair; (pair = shares.take()) >= 0;) {
                const long after = shares.after(pair);
                tile.all_rows(pair, after < 0 ? pair : after);
            }
        });
    });
}

#endif

template <class T>
long code_linear(const T*, void*, long, long, long, long) { return 0; }
template <class T>
INLINE void coded_linear(const LinearArguments&, const CodedIndex&, const T*, long, void*, long, long) {}

}  // namespace
