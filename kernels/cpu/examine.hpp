// One call: one gradient examined, or one array rounded, shared among the threads of a pool.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.hpp"
#include "gradient.hpp"
#include "thread_pool.hpp"

namespace dos {

struct Gradient {
  const void* g;  // in dtype, aligned to the element
  std::size_t numel;
  DType dtype;
};

struct GradientFigures {
  double max_abs;
  std::uint64_t fingerprint;
};

// Writes the sum of squares of each block to squares, and the gradient as fp32 to out unless
// that is null. Returns when every write can be seen by every thread. Without a pool the
// calling thread does it alone.
GradientFigures examine(const Gradient& gradient, float* out, double* squares, const Isa& isa,
                        ThreadPool* pool);

// Rounds numel values to a 16-bit format; the arrays do not overlap. The same promises.
void downscale(const float* source, void* target, std::size_t numel, DType format,
               const Isa& isa, ThreadPool* pool);

}  // namespace dos
