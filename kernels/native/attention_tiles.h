// Attention on tiles (tiles.h), where there are some: sixteen rows at a time, over the panels that any of them sees.
//
// What a row does not see has no part in its result: such scores are left out of the softmax, and such values are multiplied by zero.
// Those that no row of the task sees are zero themselves, for a stale slot of the cache may hold NaN; where one that only some of the rows
// see is not a number or infinite, each row takes the values by itself.
//
// A panel is too short for the processor to see what will be read behind it. So the values are asked for while the keys are
// multiplied, and the next chunk's keys while the values are: in the second cache, for the first one has no room for both.
#pragma once

#include "attention_rows.h"
#include "tiles.h"

namespace {

constexpr long kFewRows = 32;  // of a task, whose sums then stay in the first cache

// Computes a task's rows over a chunk.
template <class Cache>
struct ChunkTiles {
    static INLINE bool fits(const AttentionArguments&) { return false; }
    static INLINE long task_rows(const AttentionArguments&) { return kFewRows; }
    INLINE void attend(TaskRows<Cache>&, const Chunk<typename Cache::Format::T>&, Totals&) {}
};

#if defined(NOVA_TILES)

template <>
struct ChunkTiles<PlainCache<Bf16>> {
    using Rows = TaskRows<PlainCache<Bf16>>;
    static constexpr long kValueSteps = kLanes / 2, kValueBytes = kLanes * sizeof(Bf16);  // of a panel
    static constexpr int kQuery = 4, kKeys = 5, kProbs = 6, kValues = 7;                  // registers; 0 to 3 are sums
    TileRegisters registers;
    alignas(64) Bf16 cleaned[2][kLanes * kMaxDim];  // values of the panels at the ends of what the task's rows see
    alignas(64) Bf16 own[2][kLanes * kMaxDim];      // of what one row sees

    static INLINE bool fits(const AttentionArguments& args) { return args.head_dim % kRunDepth == 0; }

    // Tiles are so fast that keys and values, which come from the second cache again for every task, shall come for many rows.
    static INLINE long task_rows(const AttentionArguments& args) { return fits(args) ? kTaskRows : kFewRows; }

    static TileShape shape_of(int i, long rows) {
        if (i == kKeys) return {kRunSteps, kRowBytes};
        return i == kValues ? TileShape{kValueSteps, kRowBytes} : TileShape{rows, i == kProbs ? kValueBytes : kRowBytes};
    }

    void attend(Rows& rows, Chunk<Bf16> chunk, Totals& part) {
        clean_ends(rows, chunk, rows.seen_begin, rows.seen_end, cleaned);
        const long first = chunk.first_panel, end = chunk.end_panel;
        bool asks = true;
        for (long row = 0; row < rows.task.rows; row += kTileSide) {
            const long count = smaller(kTileSide, rows.task.rows - row);
            chunk.first_panel = larger(first, (rows.begin[row] - chunk.start) / kLanes);
            chunk.end_panel = smaller(end, ceil_div(rows.end[row + count - 1] - chunk.start, kLanes));
            if (chunk.first_panel >= chunk.end_panel) continue;
            alignas(64) float scores[kTileSide][kChunk];
            alignas(64) Bf16 probs[kTileSide][kChunk];
            registers.shape(count, [&](int i) { return shape_of(i, count); });
            scores_of(rows, chunk, row, count, scores, asks ? end : 0);
            softmax(rows, chunk, row, count, scores, part, probs);
            if (may_share(rows, chunk, row, count)) {
                add_all_values(rows, chunk, probs, row, part);
            } else {
                for (long r = 0; r < count; r++) add_values_alone(rows, chunk, probs + r, row + r, part);
            }
            chunk.num_next = 0;  // the first tile has asked for what comes next
            asks = false;
        }
    }

    // Copies of the values at the ends of positions [begin, end), without those beyond, in place of the chunk's own.
    static void clean_ends(const Rows& rows, Chunk<Bf16>& chunk, long begin, long end, Bf16 (*copies)[kLanes * kMaxDim]) {
        const long first = chunk.first_panel, last = chunk.end_panel - 1;
        chunk.value[first] = seen_values(rows, chunk, first, begin, end, copies[0]);
        if (last > first) chunk.value[last] = seen_values(rows, chunk, last, begin, end, copies[1]);
    }

    // The panel's values, or a copy in which those outside positions [begin, end) are zero.
    static const Bf16* seen_values(const Rows& rows, const Chunk<Bf16>& chunk, long panel, long begin, long end, Bf16* copy) {
        const long start = chunk.start + panel * kLanes, dims = rows.args.padded_dim;
        const long low = larger(0, begin - start), high = smaller(kLanes, end - start);
        if (low == 0 && high == kLanes) return chunk.value[panel];
        for (long pair = 0; pair < kLanes / 2; pair++) {
            const bool even = low <= 2 * pair && 2 * pair < high, odd = low <= 2 * pair + 1 && 2 * pair + 1 < high;
            const __m512i keep = _mm512_set1_epi32((odd ? 0xffff0000u : 0) | (even ? 0xffffu : 0));
            for (long d = 0; d < dims; d += kLanes) {
                const long at = 2 * (pair * dims + d);
                _mm512_storeu_si512(copy + at, _mm512_and_si512(_mm512_loadu_si512(chunk.value[panel] + at), keep));
            }
        }
        return copy;
    }

    // Whether all values that some of these rows see, and some do not, are finite.
    static bool may_share(const Rows& rows, const Chunk<Bf16>& chunk, long row, long count) {
        const long begin = rows.begin[row + count - 1], end = rows.end[row];  // what all of them see: from row to row it ends later
        for (long p = chunk.first_panel; p < chunk.end_panel; p++) {
            const long start = chunk.start + p * kLanes;
            if (begin <= larger(start, rows.seen_begin) && smaller(start + kLanes, rows.seen_end) <= end) continue;
            const __m512i exponent = _mm512_set1_epi16(0x7f80);
            for (long i = 0; i < kLanes * rows.args.padded_dim; i += 2 * kLanes) {
                const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(chunk.value[p] + i), exponent);
                if (_mm512_cmpeq_epi16_mask(bits, exponent) != 0) return false;
            }
        }
        return true;
    }

    // One row, over what it sees; probs are its own.
    NOINLINE void add_values_alone(const Rows& rows, Chunk<Bf16> chunk, const Bf16 (*probs)[kChunk], long row, Totals& part) {
        const long low = clamp(rows.begin[row] - chunk.start, 0, kChunk), high = clamp(rows.end[row] - chunk.start, 0, kChunk);
        if (low >= high) return;
        chunk.first_panel = low / kLanes;
        chunk.end_panel = ceil_div(high, kLanes);
        clean_ends(rows, chunk, rows.begin[row], rows.end[row], own);
        registers.shape(1, [&](int i) { return shape_of(i, 1); });
        add_all_values(rows, chunk, probs, row, part);
    }

    static INLINE void add_all_values(const Rows& rows, const Chunk<Bf16>& chunk, const Bf16 (*probs)[kChunk], long row, Totals& part) {
        const long dims = rows.args.head_dim;  // of an even number of panels
        long d = 0;
        for (; d + 4 * kLanes <= dims; d += 4 * kLanes) add_values<4>(rows, chunk, probs, row, d, part);
        for (; d < dims; d += 2 * kLanes) add_values<2>(rows, chunk, probs, row, d, part);
    }

    // Those of panels that no row sees are anything.
    static INLINE void scores_of(const Rows& rows, const Chunk<Bf16>& chunk, long row, long count, float (*scores)[kChunk], long asked) {
        constexpr long stride = kChunk * sizeof(float);
        const Bf16* keys[kChunkPanels];
        for (long p = 0; p < kChunkPanels; p++) keys[p] = chunk.key[p] == nullptr ? chunk.key[chunk.first_panel] : chunk.key[p];
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (long k = 0; k < rows.args.head_dim; k += kRunDepth) {
            const long at = k * kLanes;
            for (long p = chunk.first_panel; p < asked; p++) ask<kTileBytes, 1>(chunk.value[p] + at);
            tile_load<kQuery>(rows.query + row * kMaxDim + k, kMaxDim * sizeof(Bf16));
            tile_load<kKeys>(keys[0] + at, kRowBytes);
            tile_multiply<0, kQuery, kKeys>();
            tile_load<kKeys>(keys[1] + at, kRowBytes);
            tile_multiply<1, kQuery, kKeys>();
            tile_load<kKeys>(keys[2] + at, kRowBytes);
            tile_multiply<2, kQuery, kKeys>();
            tile_load<kKeys>(keys[3] + at, kRowBytes);
            tile_multiply<3, kQuery, kKeys>();
        }
        tile_store<0>(&scores[0][0], stride);
        tile_store<1>(&scores[0][kLanes], stride);
        tile_store<2>(&scores[0][2 * kLanes], stride);
        tile_store<3>(&scores[0][3 * kLanes], stride);
        const Vec scale = splat(rows.args.scale);
        for (long i = 0; i < count * kChunk; i += kLanes) store(&scores[0][i], load(&scores[0][i]) * scale);
    }

    static INLINE void softmax(Rows& rows, const Chunk<Bf16>& chunk, long row, long count, float (*scores)[kChunk], Totals& part,
                               Bf16 (*probs)[kChunk]) {
        for (long r = 0; r < count;) {
            long whole = 0;  // rows from here on that see the whole chunk
            while (rows.args.soft_cap == 0.0f && r + whole < count && sees_all(rows, chunk, row + r + whole)) whole++;
            const long next = whole >= 8 ? 8 : whole >= 2 ? 2 : 1;
            if (whole >= 8) {
                rows.softmax_whole_rows<8>(chunk, *(float(*)[8][kChunk])scores[r], row + r, part, *(Bf16(*)[8][kChunk])probs[r]);
            } else if (whole >= 2) {
                rows.softmax_whole_rows<2>(chunk, *(float(*)[2][kChunk])scores[r], row + r, part, *(Bf16(*)[2][kChunk])probs[r]);
            } else {
                const long low = clamp(rows.begin[row + r] - chunk.start, 0, kChunk);
                const long high = clamp(rows.end[row + r] - chunk.start, 0, kChunk);
                memset(probs[r], 0, sizeof probs[r]);
                if (low < high) rows.softmax_row(chunk, scores[r], low, high, row + r, part, probs[r]);
            }
            r += next;
        }
    }

    static INLINE bool sees_all(const Rows& rows, const Chunk<Bf16>& chunk, long row) {
        return rows.begin[row] <= chunk.start && rows.end[row] >= chunk.start + kChunk;
    }

    // Asks for the lines of so many bytes, in the first cache or the second.
    template <long Bytes, int kCache>
    static INLINE void ask(const Bf16* from) {
        for (long at = 0; at < Bytes; at += 8 * kRowBytes) {
            UNROLL for (int i = 0; i < 8; i++) __builtin_prefetch((const char*)from + at + i * kRowBytes, 0, 4 - kCache);
        }
    }

    // Adds the values' dimensions from d on, N times 16 of them.
    template <int N>
    static INLINE void add_values(const Rows& rows, const Chunk<Bf16>& chunk, const Bf16 (*probs)[kChunk], long row, long d, Totals& part) {
        constexpr long stride = sizeof part.acc[0];
        const long value_stride = rows.args.padded_dim * 2 * sizeof(Bf16);
        float* sums = &part.acc[row][d];
        tile_load<0>(sums, stride);
        tile_load<1>(sums + kLanes, stride);
        if constexpr (N > 2) tile_load<2>(sums + 2 * kLanes, stride);
        if constexpr (N > 2) tile_load<3>(sums + 3 * kLanes, stride);
        for (long p = chunk.first_panel; p < chunk.end_panel; p++) {
            const Bf16* values = chunk.value[p] + 2 * d;
            for (long q = p - chunk.first_panel; q < chunk.num_next; q += chunk.end_panel - chunk.first_panel) {
                ask<N * kLanes * kLanes * sizeof(Bf16), 2>(chunk.next[q] + d * kLanes);
            }
            tile_load<kProbs>(&probs[0][p * kLanes], kChunk * sizeof(Bf16));
            tile_load<kValues>(values, value_stride);
            tile_multiply<0, kProbs, kValues>();
            tile_load<kValues>(values + 2 * kLanes, value_stride);
            tile_multiply<1, kProbs, kValues>();
            if constexpr (N > 2) {
                tile_load<kValues>(values + 4 * kLanes, value_stride);
                tile_multiply<2, kProbs, kValues>();
                tile_load<kValues>(values + 6 * kLanes, value_stride);
                tile_multiply<3, kProbs, kValues>();
            }
        }
        tile_store<0>(sums, stride);
        tile_store<1>(sums + kLanes, stride);
        if constexpr (N > 2) tile_store<2>(sums + 2 * kLanes, stride);
        if constexpr (N > 2) tile_store<3>(sums + 3 * kLanes, stride);
    }
};

#endif

// The rows' attention to positions [segment, segment + kSegment).
template <class Cache>
void attend_segment(TaskRows<Cache>& rows, ChunkTiles<Cache>& tiles, long segment, const After& after, Totals& part) {
    const bool is_tiled = tiles.fits(rows.args);
    part.clear(rows.task.rows, rows.args.padded_dim);
    for (long r = 0; r < rows.task.rows; r++) rows.sums[r] = zero();
    const long stop = smaller(segment + kSegment, rows.seen_end);
    for (long start = larger(segment, rows.seen_begin / kChunk * kChunk); start < stop; start += kChunk) {
        const auto chunk = rows.chunk_at(start, after);
        is_tiled ? tiles.attend(rows, chunk, part) : rows.attend_rows(chunk, part);
    }
    for (long r = 0; r < rows.task.rows; r++) part.sum[r] = sum_lanes(rows.sums[r]);
}

}  // namespace
