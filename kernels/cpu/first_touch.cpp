#include "first_touch.hpp"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace dos {
namespace {

// The least that the system hands out; a larger page is touched more than once.
constexpr std::size_t kPageBytes = 4096;

// Longer than workers take to wake. A pool may also be closed, or busy for another caller.
constexpr std::chrono::seconds kPatience{1};

// Where threads wait for one another before they begin.
class Gathering {
 public:
  explicit Gathering(std::size_t threads) : missing_(threads) {}

  void join() {
    std::unique_lock<std::mutex> lock(mutex_);
    --missing_;
    const auto over = [this] { return missing_ == 0 || given_up_; };
    if (!changed_.wait_for(lock, kPatience, over)) given_up_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t missing_;
  bool given_up_ = false;  // after one wait in vain nobody waits again
};

}  // namespace

void first_touch(const std::vector<Block>& blocks, ThreadPool& pool) {
  const auto threads = static_cast<std::size_t>(pool.threads());
  // One task per seat, and none is over before all have begun: a thread that wakes late
  // finds its own share still to do.
  Gathering all(threads);
  pool.run(threads, [&](std::size_t seat) {
    all.join();
    for (const Block& block : blocks) {
      const auto cut = [&](std::size_t k) {
        return block.n_bytes / threads * k + block.n_bytes % threads * k / threads;
      };
      const auto address = reinterpret_cast<std::uintptr_t>(block.address);
      std::size_t at = cut(seat);
      at += -(address + at) % kPageBytes;
      // Volatile, since a compiler may know that nobody reads it. One byte is enough: the
      // system hands out pages of zeros.
      for (; at < cut(seat + 1); at += kPageBytes) {
        *static_cast<volatile char*>(block.address + at) = 0;
      }
    }
  });
}

}  // namespace dos
