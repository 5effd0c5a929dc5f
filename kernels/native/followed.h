// Rows of which some are followed by what was rounded away of them: the products of both are added.
#pragma once

#include "quantized.h"

namespace {

// y [m, n]. follows [m]: which row has what was rounded away of one, of `count` behind the m; 0: none. multiply(args, sums): the sums
// [m + count, n] of all of them.
template <class Multiply>
void multiply_followed(const QuantizedArguments& args, const long* follows, void* y, long m, long count, long threads, const Multiply& multiply) {
    static thread_local Scratch memory;
    const long n = args.layer.n;
    float* sums = memory.get<float>((m + count) * n + kLanes);  // the last panel may be read behind its end
    QuantizedArguments sums_args = args;
    sums_args.layer.bias = nullptr;
    sums_args.layer.out_dtype = kFloat32;
    multiply(sums_args, sums);
    const Output<Bf16> output{args.layer, y, 0};
    parallel_ranges(m, 1, kElementWork * m * n, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            for (long panel = 0; panel < ceil_div(n, kLanes); panel++) {
                alignas(64) float values[kLanes];
                Vec sum = load(sums + row * n + panel * kLanes);
                if (follows[row]) sum = sum + load(sums + follows[row] * n + panel * kLanes);
                store(values, sum);
                output.write_sums(row, &panel, values, 1, 1);
            }
        }
    });
}

}  // namespace
