#include "sweep.hpp"

#include <algorithm>
#include <cstring>

#include "update.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

// A copy for each width of register, chosen when the module is loaded: too early for the thread
// sanitizer, which such a choice would crash.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define DOS_EVERY_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DOS_EVERY_WIDTH
#endif

namespace dos {
namespace {

constexpr std::size_t kGroup = 32;  // one line of w

inline __attribute__((always_inline)) void sweep_group(float* x) {
  for (std::size_t i = 0; i < kGroup; ++i) x[i] += 1.0f;
}

DOS_EVERY_WIDTH void sweep_stored(const SweptArrays& a, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; i += kGroup) {
    for (float* x : {a.p, a.m, a.v}) sweep_group(x + i);
    std::memcpy(a.w + i, a.g + i, kGroup * sizeof *a.w);
  }
}

#if defined(__x86_64__)
DOS_EVERY_WIDTH void sweep_streamed(const SweptArrays& a, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; i += kGroup) {
    for (float* x : {a.p, a.m, a.v}) sweep_group(x + i);
    for (std::size_t k = 0; k < kGroup; k += 8) {
      const auto* from = reinterpret_cast<const __m128i*>(a.g + i + k);
      _mm_stream_si128(reinterpret_cast<__m128i*>(a.w + i + k), _mm_load_si128(from));
    }
  }
  _mm_sfence();  // streaming stores are not ordered by the pool's locks
}
#else
constexpr auto sweep_streamed = sweep_stored;
#endif

}  // namespace

void sweep(const SweptArrays& arrays, bool stream, ThreadPool* pool) {
  const SweptArrays a = arrays;
  const std::size_t groups = a.numel / kGroup;
  const std::size_t chunk = (chunk_length(a.numel, pool) + kGroup - 1) / kGroup;  // in groups
  const auto task = [&](std::size_t k) {
    const std::size_t end = std::min(groups, (k + 1) * chunk);
    (stream ? sweep_streamed : sweep_stored)(a, k * chunk * kGroup, end * kGroup);
  };
  const std::size_t n = (groups + chunk - 1) / chunk;
  if (pool) {
    pool->run(n, task);
  } else {
    for (std::size_t k = 0; k < n; ++k) task(k);
  }
}

}  // namespace dos
