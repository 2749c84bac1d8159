#include "update.hpp"

#include <algorithm>
#include <cstdint>

#include "fp_mode.hpp"

namespace dos {
namespace {

// A smaller chunk costs more to hand to another thread than it saves (about 10 us of work).
constexpr std::size_t kSmallestChunk = std::size_t{1} << 15;
// A larger one leaves the other threads idle at the end for longer (about 1 ms of work).
constexpr std::size_t kLargestChunk = std::size_t{1} << 19;
constexpr std::size_t kChunksPerThread = 8;
// 64 fp32 elements: then 16-bit arrays that begin on a line are cut on a line, too.
constexpr std::uintptr_t kCutAlignment = 256;

// All elements of a call in one row, cut into chunks of nearly equal length.
class Row {
 public:
  explicit Row(const std::vector<Segment>& segments) : segments_(segments) {
    starts_.reserve(segments.size() + 1);
    starts_.push_back(0);
    for (const Segment& s : segments) starts_.push_back(starts_.back() + s.numel);
  }

  std::size_t length() const { return starts_.back(); }

  // Where chunk k of n begins; never inside a line of p if the segment's p allows it.
  std::size_t cut(std::size_t k, std::size_t n) const {
    if (k == n) return length();
    // length * k could overflow; this is the same to within one element.
    const std::size_t at = length() / n * k + length() % n * k / n;
    const std::size_t index = segment_at(at);
    const std::size_t offset = at - starts_[index];
    const auto address = reinterpret_cast<std::uintptr_t>(segments_[index].p + offset);
    return at - std::min<std::size_t>(offset, address % kCutAlignment / sizeof(float));
  }

  void update(const Isa& isa, std::size_t begin, std::size_t end) const {
    for (std::size_t index = segment_at(begin); begin < end; ++index) {
      const Segment& s = segments_[index];
      const std::size_t stop = std::min(end, starts_[index + 1]);
      const RangeKernel kernel = isa.kernel(s.g_dtype, s.w_dtype, s.scalars.decoupled);
      if (begin < stop) kernel(s, begin - starts_[index], stop - starts_[index]);
      begin = stop;
    }
  }

 private:
  // The segment that holds an element; empty ones hold none and are passed over.
  std::size_t segment_at(std::size_t element) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end() - 1, element);
    return static_cast<std::size_t>(after - starts_.begin()) - 1;
  }

  const std::vector<Segment>& segments_;
  std::vector<std::size_t> starts_;
};

}  // namespace

std::size_t chunk_length(std::size_t length, const ThreadPool* pool) {
  const std::size_t threads = pool ? static_cast<std::size_t>(pool->threads()) : 1;
  return std::clamp(length / (threads * kChunksPerThread), kSmallestChunk, kLargestChunk);
}

void update(const std::vector<Segment>& segments, const Isa& isa, ThreadPool* pool) {
  const Row row(segments);
  const std::size_t length = row.length();
  if (length == 0) return;  // no segment could be found to begin in
  const std::size_t threads = pool ? static_cast<std::size_t>(pool->threads()) : 1;
  const std::size_t chunk = chunk_length(length, pool);
  std::size_t n = threads == 1 ? 1 : (length + chunk - 1) / chunk;
  // Then thread t's share of an array is [t, t+1) / threads of it whatever the length, and
  // that is the share of each array that first_touch put near it.
  if (n > threads) n -= n % threads;
  const auto task = [&](std::size_t k) {
    const FpMode mode;
    row.update(isa, row.cut(k, n), row.cut(k + 1, n));
#if defined(__x86_64__)
    // Streaming stores are not ordered by the pool's locks.
    _mm_sfence();
#endif
  };
  if (pool) {
    pool->run(n, task);
  } else {
    task(0);
  }
}

}  // namespace dos
