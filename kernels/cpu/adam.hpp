// What every instruction set's kernel takes, and how the right one is found.
//
// Only declarations: this header is compiled under different instruction-set flags, and an
// inline function emitted twice could leave its AVX-512 copy to run on an older machine.
#pragma once

#include <cstddef>

namespace dos {

// The values are those of dos.kernels.scalars.DType.
enum class DType { none = 0, fp32 = 1, bf16 = 2, fp16 = 3 };

// See dos.kernels.scalars.AdamScalars; scale is negative to maximize, which gives the bits
// of negating the gradient, because rounding to nearest is symmetric.
struct Scalars {
  float c1, d1, c2, d2, step_size, inv_sqrt_bc2, decay, weight_decay, eps, scale;
  bool decoupled;
};

// numel elements at each address, aligned to the element; the arrays do not overlap.
struct Segment {
  float* p;
  float* m;
  float* v;
  const void* g;  // in g_dtype
  void* w;        // in w_dtype; unused if that is none
  std::size_t numel;
  DType g_dtype, w_dtype;
  Scalars scalars;
};

// Updates the elements [begin, end) of a segment. Expects the floating-point mode of
// FpMode; its streaming stores need a fence before another thread may read w.
using RangeKernel = void (*)(const Segment&, std::size_t begin, std::size_t end);

// Picks the kernel for the formats of gradient and weight, and for AdamW (decoupled) or Adam.
using KernelTable = RangeKernel (*)(DType g, DType w, bool decoupled);

RangeKernel scalar_kernel(DType g, DType w, bool decoupled);
RangeKernel avx2_kernel(DType g, DType w, bool decoupled);
RangeKernel avx512_kernel(DType g, DType w, bool decoupled);
RangeKernel neon_kernel(DType g, DType w, bool decoupled);

}  // namespace dos
