// Every kernel for one instruction set. The build compiles this file once per set, with NOVA_ISA naming it.
#include "attention.h"
#include "kv_store.h"
#include "program.h"
#include "prompt_lookup.h"
#include "quantize.h"
#include "rowwise.h"
#include "screen.h"

#define JOIN(a, b, c) a##b##_##c
#define EXPAND(a, b, c) JOIN(a, b, c)
// nova_<isa>_<name>, called through ctypes. Each returns 0, or 1 if an index in its arguments points outside its table; then it
// has done nothing.
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) int64_t EXPAND(nova_, NOVA_ISA, name)

// Element types as `kernels.native.library.DTYPES` numbers them.
#define BY_DTYPE(code, call)     \
    do {                         \
        if ((code) == 0) {       \
            using T = float;     \
            call;                \
        } else if ((code) == 1) {\
            using T = Bf16;      \
            call;                \
        } else {                 \
            using T = Fp16;      \
            call;                \
        }                        \
    } while (0)

EXPORT(pack_linear)(const void* weight, void* packed, int64_t n, int64_t k, int64_t row_stride, int64_t dtype, int64_t threads) {
    BY_DTYPE(dtype, pack_linear((const T*)weight, (T*)packed, n, k, row_stride, threads));
    return 0;
}

// Returns how many bytes there are, or 0; see coded.h.
EXPORT(code_linear)(const void* weight, void* out, int64_t n, int64_t k, int64_t row_stride, int64_t dtype, int64_t threads) {
    BY_DTYPE(dtype, return code_linear((const T*)weight, out, n, k, row_stride, threads));
}

EXPORT(linear)(const LinearArguments* args, const void* x, int64_t x_stride, void* y, int64_t m, int64_t threads) {
    BY_DTYPE(args->dtype, linear(*args, (const T*)x, x_stride, y, m, threads));
    return 0;
}

EXPORT(quantize)(const QuantizedArguments* args, const void* weight, int64_t row_stride, const float* peaks, float* squares, int64_t threads) {
    BY_DTYPE(args->layer.dtype, quantize(*args, (const T*)weight, row_stride, peaks, squares, threads));
    return 0;
}

EXPORT(pack_integers)(const QuantizedArguments* args, const int8_t* integers, const void* scales, int64_t threads) {
    BY_DTYPE(args->layer.dtype, pack_integers<T>(*args, integers, (const uint16_t*)scales, threads));
    return 0;
}

EXPORT(quantized_linear)(const QuantizedArguments* args, const void* x, int64_t x_stride, void* y, int64_t m, int64_t threads) {
    BY_DTYPE(args->layer.dtype, quantized_linear(*args, (const T*)x, x_stride, y, m, threads));
    return 0;
}

EXPORT(store_kv)(const KvStoreArguments* args, int64_t threads) {
    BY_DTYPE(args->dtype, return !store_kv<T>(*args, threads));
}

EXPORT(paged_attention)(const AttentionArguments* args, int64_t threads) {
    BY_DTYPE(args->dtype, return !paged_attention<T>(*args, threads));
}

EXPORT(rms_norm)(const NormArguments* args, int64_t threads) {
    BY_DTYPE(args->dtype, rms_norm<T>(*args, threads));
    return 0;
}

EXPORT(rotary)(const RotaryArguments* args, int64_t threads) {
    BY_DTYPE(args->dtype, return !rotary<T>(*args, threads));
}

EXPORT(act_mul)(const ActMulArguments* args, int64_t threads) {
    BY_DTYPE(args->dtype, act_mul<T>(*args, threads));
    return 0;
}

// Returns how many of the operations ran.
EXPORT(run_program)(const Operation* operations, int64_t count, const StepInputs* step, int64_t dtype, int64_t threads) {
    BY_DTYPE(dtype, return run_program<T>(operations, count, *step, threads));
}

EXPORT(find_drafts)(const LookupArguments* args, int64_t threads) {
    find_drafts(*args, threads);
    return 0;
}

EXPORT(sample)(const SampleArguments* args, int64_t threads) {
    sample(*args, threads);
    return 0;
}

// Returns what became of it; see screen.h.
EXPORT(screen)(const ScreenArguments* args, const SampleArguments* rows, const void* x, int64_t x_stride, int64_t threads) {
    BY_DTYPE(args->rough.layer.dtype, return screen(*args, *rows, (const T*)x, x_stride, threads));
}
