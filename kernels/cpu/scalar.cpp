// Baseline kernels, for machines with none of the others.
#include "update_range.hpp"

namespace dos {

RangeKernel scalar_kernel(DType g, DType w, bool decoupled) {
  return kernel_for<ScalarLane>(g, w, decoupled);
}

}  // namespace dos
