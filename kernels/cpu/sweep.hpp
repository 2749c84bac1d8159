// What memory allows an update: the same arrays and bytes with next to no arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "thread_pool.hpp"

namespace dos {

// numel elements at each address, on cache lines; the arrays do not overlap.
struct SweptArrays {
  float* p;
  float* m;
  float* v;
  const std::uint16_t* g;
  std::uint16_t* w;
  std::size_t numel;
};

// Adds 1 to p, m and v and copies g to w: 28 bytes of memory traffic per element, as an update
// with 16-bit gradients and weights has. A rest of less than 32 elements is left out. w goes
// past the caches if `stream` is true, where the machine can. Returns when every write can
// be seen by every thread; without a pool, the calling thread does it alone.
void sweep(const SweptArrays& arrays, bool stream, ThreadPool* pool);

}  // namespace dos
