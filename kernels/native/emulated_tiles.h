// What tiles.h needs of AMX, in AVX-512 and bit for bit, for processors without: slow, there to test what is made of tiles.
//
// The process ends where a processor would end it: at registers without a shape, or of shapes that do not belong together.
#pragma once

#include <stdlib.h>

namespace {

struct EmulatedTile {
    long rows, row_bytes;
    alignas(64) uint8_t lines[kTileSide][kRowBytes];

    INLINE __m512i line(long row) const { return _mm512_load_si512(lines[row]); }
};

thread_local EmulatedTile emulated_tiles[kTileRegisters];

INLINE void demand(bool is_allowed) {
    if (!is_allowed) abort();
}

INLINE EmulatedTile& emulated_tile(int index) {
    EmulatedTile& tile = emulated_tiles[index];
    demand(tile.rows > 0 && tile.row_bytes > 0);
    return tile;
}

// Denormal numbers are zero to the tiles' multiplication, and it rounds to nearest.
class TileRounding {
  public:
    TileRounding() : before_(_mm_getcsr()) { _mm_setcsr(kDefault | kFlush); }
    ~TileRounding() { _mm_setcsr(before_); }

  private:
    static constexpr unsigned kDefault = 0x1f80, kFlush = 0x8040;
    unsigned before_;
};

template <int Register>
NOINLINE void tile_load(const void* from, long stride) {
    EmulatedTile& tile = emulated_tile(Register);
    memset(tile.lines, 0, sizeof tile.lines);
    for (long row = 0; row < tile.rows; row++) memcpy(tile.lines[row], (const char*)from + row * stride, tile.row_bytes);
}

template <int Register>
INLINE void tile_load_past(const void* from, long stride) {
    tile_load<Register>(from, stride);
}

template <int Register>
NOINLINE void tile_store(void* to, long stride) {
    const EmulatedTile& tile = emulated_tile(Register);
    for (long row = 0; row < tile.rows; row++) memcpy((char*)to + row * stride, tile.lines[row], tile.row_bytes);
}

template <int Register>
NOINLINE void tile_zero() {
    memset(emulated_tile(Register).lines, 0, kTileBytes);
}

// Calls body(sums of a row, that row of `rows`, columns, steps) for each row, and keeps of the sums what the shape has room for.
template <int Sum, int Rows, int Columns, class Body>
INLINE void multiply_emulated(const Body& body) {
    EmulatedTile &sum = emulated_tile(Sum), &rows = emulated_tile(Rows), &columns = emulated_tile(Columns);
    demand(Sum != Rows && Sum != Columns && Rows != Columns);
    demand(sum.rows == rows.rows && sum.row_bytes == columns.row_bytes && rows.row_bytes == 4 * columns.rows);
    for (long row = 0; row < sum.rows; row++) {
        const __m512i result = body(sum.line(row), (const uint32_t*)rows.lines[row], columns);
        memset(sum.lines[row], 0, kRowBytes);
        memcpy(sum.lines[row], &result, sum.row_bytes);
    }
}

template <int Sum, int Rows, int Columns>
NOINLINE void tile_multiply() {
    const TileRounding rounding;
    multiply_emulated<Sum, Rows, Columns>([](__m512i sums, const uint32_t* row, const EmulatedTile& columns) {
        const __m512i high = _mm512_set1_epi32(0xffff0000);
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (long k = 0; k < columns.rows; k++) {
            const __m512i x = _mm512_set1_epi32(row[k]), w = columns.line(k);
            even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(w, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, high), (__m512)_mm512_and_si512(w, high), odd);
        }
        return (__m512i)((__m512)sums + (even + odd));
    });
}

template <int Sum, int Rows, int Columns>
NOINLINE void tile_multiply_integers() {
    multiply_emulated<Sum, Rows, Columns>([](__m512i sums, const uint32_t* row, const EmulatedTile& columns) {
        for (long k = 0; k < columns.rows; k++) sums = _mm512_dpbusd_epi32(sums, columns.line(k), _mm512_set1_epi32(row[k]));
        return sums;
    });
}

INLINE void tile_configure(const TileConfig& config) {
    for (int i = 0; i < kTileRegisters; i++) {
        EmulatedTile& tile = emulated_tiles[i];
        demand(config.rows[i] <= kTileSide && config.row_bytes[i] <= kRowBytes && (config.rows[i] > 0) == (config.row_bytes[i] > 0));
        tile.rows = config.rows[i];
        tile.row_bytes = config.row_bytes[i];
        memset(tile.lines, 0, sizeof tile.lines);
    }
}

INLINE void tile_release() {
    for (EmulatedTile& tile : emulated_tiles) tile.rows = tile.row_bytes = 0;
}

}  // namespace
