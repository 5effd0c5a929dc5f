// The best instruction set of this processor, by the names that `kernels.native.build.ISA_FLAGS` has for them.

extern "C" __attribute__((visibility("default"))) const char* nova_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "portable";
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!avx512) return "avx2";
    // Only Cooper Lake has the bf16 products without byte look-ups in two registers, which quantised weights are widened by.
    const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                      __builtin_cpu_supports("avx512vnni");
    return bf16 ? "avx512bf16" : "avx512f";
#else
    return "portable";
#endif
}
