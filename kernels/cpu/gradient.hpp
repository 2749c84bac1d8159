// What a gradient is known by, and the casts between fp32 and 16 bits: what every instruction
// set's kernels take. Only declarations, as in adam.hpp and for its reason.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adam.hpp"

namespace dos {

// The values are those of dos.kernels.scalars.
constexpr std::size_t kBlockElements = 65536;
constexpr std::size_t kRowElements = 1024;
constexpr std::size_t kSumLanes = 64;
constexpr std::uint64_t kFingerprintStep = 0x9E3779B97F4A7C15u;

struct BlockFigures {
  double squares;
  std::uint64_t fingerprint;
  // The largest magnitude as fp32 bits, which are in the order of the values; NaN is above all.
  std::uint32_t max_bits;
};

// Examines the elements [begin, end) of a gradient: one block, the last of which may be shorter.
// Writes them as fp32 to the same places of out, unless that is null. Expects the mode of FpMode;
// its streaming stores need a fence before another thread may read out.
using ExamineKernel = BlockFigures (*)(const void* g, std::size_t begin, std::size_t end,
                                       float* out);

// Rounds n values to a 16-bit format. The same expectations.
using DownscaleKernel = void (*)(const float* source, void* target, std::size_t n);

ExamineKernel scalar_examine(DType g);
ExamineKernel avx2_examine(DType g);
ExamineKernel avx512_examine(DType g);
ExamineKernel neon_examine(DType g);

DownscaleKernel scalar_downscale(DType w);
DownscaleKernel avx2_downscale(DType w);
DownscaleKernel avx512_downscale(DType w);
DownscaleKernel neon_downscale(DType w);

}  // namespace dos
