#include "examine.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "fp_mode.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dos {
namespace {

// One task per block: 10 to 50 us of work, and no two threads write one line of aligned memory.
void for_each_block(std::size_t numel, ThreadPool* pool,
                    const std::function<void(std::size_t, std::size_t, std::size_t)>& fn) {
  const std::size_t n_blocks = numel / kBlockElements + (numel % kBlockElements != 0);
  const auto task = [&](std::size_t block) {
    const FpMode mode;
    const std::size_t begin = block * kBlockElements;
    fn(block, begin, std::min(numel, begin + kBlockElements));
#if defined(__x86_64__)
    // Streaming stores are not ordered by the pool's locks.
    _mm_sfence();
#endif
  };
  if (pool) {
    pool->run(n_blocks, task);
  } else {
    for (std::size_t block = 0; block < n_blocks; ++block) task(block);
  }
}

double value_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

GradientFigures examine(const Gradient& gradient, float* out, double* squares, const Isa& isa,
                        ThreadPool* pool) {
  const ExamineKernel kernel = isa.examine(gradient.dtype);
  std::vector<BlockFigures> blocks(gradient.numel / kBlockElements + 1);
  for_each_block(gradient.numel, pool,
                 [&](std::size_t block, std::size_t begin, std::size_t end) {
                   blocks[block] = kernel(gradient.g, begin, end, out);
                   squares[block] = blocks[block].squares;
                 });
  std::uint64_t fingerprint = 0;
  std::uint32_t max_bits = 0;
  for (const BlockFigures& block : blocks) {
    fingerprint += block.fingerprint;
    max_bits = std::max(max_bits, block.max_bits);
  }
  // The caller's mode could flush the largest of all subnormal elements to zero. Volatile, since
  // a compiler may move a conversion past a change of the mode, of which it knows nothing.
  const FpMode mode;
  const volatile float largest = value_of(max_bits);
  const volatile double max_abs = largest;
  return {max_abs, fingerprint};
}

void downscale(const float* source, void* target, std::size_t numel, DType format,
               const Isa& isa, ThreadPool* pool) {
  const DownscaleKernel kernel = isa.downscale(format);
  for_each_block(numel, pool, [&](std::size_t, std::size_t begin, std::size_t end) {
    kernel(source + begin, static_cast<std::uint16_t*>(target) + begin, end - begin);
  });
}

}  // namespace dos
