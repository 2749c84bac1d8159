// Baseline kernels, for machines with none of the others.
#include "gradient_range.hpp"

namespace dos {

RangeKernel scalar_kernel(DType g, DType w, bool decoupled) {
  return kernel_for<ScalarLane>(g, w, decoupled);
}

ExamineKernel scalar_examine(DType g) { return examine_for<ScalarLane>(g); }

DownscaleKernel scalar_downscale(DType w) { return downscale_for<ScalarLane>(w); }

}  // namespace dos
