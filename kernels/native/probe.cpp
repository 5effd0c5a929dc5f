// The best instruction set of this processor, by the names that `kernels.native.build.ISA_FLAGS` has for them.

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether there are tile registers that multiply bf16 and integers, and the system lets this process use them.
static bool has_tiles() {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInteger = 1u << 25, kAll = kBf16 | kTile | kInteger;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

extern "C" __attribute__((visibility("default"))) const char* nova_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "portable";
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!avx512) return "avx2";
    // Only Cooper Lake has the bf16 products without byte look-ups in two registers, which quantised weights are widened by.
    const bool vnni = __builtin_cpu_supports("avx512vnni");
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    if (!bf16) return vnni ? "avx512vnni" : "avx512f";
    return has_tiles() ? "amxbf16" : "avx512bf16";
#else
    return "portable";
#endif
}
