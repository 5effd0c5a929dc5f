// The two-dimensional registers of AMX ("tiles"): one instruction multiplies 16 rows by 16 columns, up to 32 elements deep.
//
// Rows hold up to 32 bf16 numbers; columns lie in pairs, as in the panels of microkernel.h: 16 steps of a panel are a tile. Per output
// the instruction sums the even and the odd products, each in order, and adds both to the accumulator: other bits than one product
// after the other, but the same for every number of rows.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__) || defined(NOVA_EMULATED_TILES)
#define NOVA_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr long kRunSteps = 16, kRunDepth = 2 * kRunSteps;  // pairs, and elements of the summed dimension, in one tile
constexpr long kTileSide = 16, kRowBytes = 64, kTileBytes = kTileSide * kRowBytes;
constexpr int kTileRegisters = 8;

// As the processor wants it.
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

}  // namespace

#if defined(NOVA_EMULATED_TILES)
#include "emulated_tiles.h"
#else

namespace {

// From and to memory whose rows lie `stride` bytes apart.
template <int Register>
INLINE void tile_load(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Register) : "memory");
}
// The same of what will not be read again soon: it takes nothing else's place in the first cache.
template <int Register>
INLINE void tile_load_past(const void* from, long stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Register) : "memory");
}
template <int Register>
INLINE void tile_store(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Register) : "memory");
}
template <int Register>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Register));
}
template <int Sum, int Rows, int Columns>
INLINE void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Rows), "i"(Columns));
}
// Rows of 64 signed bytes, columns of four unsigned ones side by side; sums in 32-bit integers.
template <int Sum, int Rows, int Columns>
INLINE void tile_multiply_integers() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Rows), "i"(Columns));
}

INLINE void tile_configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
INLINE void tile_release() { asm volatile("tilerelease"); }

// A process has to ask the system for the registers before it uses them.
__attribute__((constructor)) void ask_for_tiles() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    syscall(SYS_arch_prctl, kRequest, kTileData);
}

}  // namespace

#endif

namespace {

struct TileShape {
    long rows, row_bytes;
};

// The registers of this thread, as long as this lives: it must call nobody who has one, too.
class TileRegisters {
  public:
    ~TileRegisters() {
        if (rows_ != 0) tile_release();
    }

    // Shapes register i as shape_of(i) says, if that was not done for so many rows before.
    template <class ShapeOf>
    INLINE void shape(long rows, const ShapeOf& shape_of) {
        if (rows == rows_) return;
        rows_ = rows;
        TileConfig config;
        for (int i = 0; i < kTileRegisters; i++) {
            const TileShape shape = shape_of(i);
            config.rows[i] = shape.rows;
            config.row_bytes[i] = shape.rows > 0 ? shape.row_bytes : 0;
        }
        tile_configure(config);
    }

  private:
    long rows_ = 0;
};

}  // namespace

#endif
