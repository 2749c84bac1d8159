// The two that only move memory: the sweep, and the first touch of new pages. What they write is
// left unguarded, so that the thread sanitizer sees whether their threads ever meet.
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "check.hpp"
#include "kernels/cpu/first_touch.hpp"
#include "kernels/cpu/sweep.hpp"

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kGroup = 32;  // elements, without which a sweep leaves out the rest

template <class T>
class LineArray {
 public:
  explicit LineArray(std::size_t numel)
      : memory_(static_cast<T*>(
            std::aligned_alloc(kLine, (numel * sizeof(T) + kLine - 1) / kLine * kLine))) {
    CHECK(memory_);
    for (std::size_t i = 0; i < numel; ++i) memory_.get()[i] = static_cast<T>(i % 1000);
  }
  T* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> memory_;
};

void check_sweep(std::size_t numel, bool stream, dos::ThreadPool* pool) {
  const LineArray<float> p(numel), m(numel), v(numel);
  const LineArray<std::uint16_t> g(numel), w(numel);
  for (std::size_t i = 0; i < numel; ++i) w.get()[i] = 7;
  dos::sweep({p.get(), m.get(), v.get(), g.get(), w.get(), numel}, stream, pool);
  for (std::size_t i = 0; i < numel; ++i) {
    const bool swept = i < numel / kGroup * kGroup;
    const auto before = static_cast<float>(i % 1000);
    for (const auto* array : {&p, &m, &v}) CHECK(array->get()[i] == before + (swept ? 1 : 0));
    CHECK(w.get()[i] == (swept ? i % 1000 : 7));
  }
}

void every_whole_group_is_swept_once() {
  dos::ThreadPool pool(3);
  for (const std::size_t numel : {1, 31, 32, 1000, 300'000}) {
    for (const bool stream : {false, true}) {
      check_sweep(numel, stream, nullptr);
      check_sweep(numel, stream, &pool);
    }
  }
}

// Of odd blocks in the middle of new memory, whose pages the kernel tells of.
void every_page_of_a_block_is_present(int threads) {
  constexpr std::size_t kPage = 4096, kPages = 100;
  void* const memory = mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  char* const start = static_cast<char*>(memory);
  dos::ThreadPool pool(threads);
  dos::first_touch({{start, 37 * kPage}, {start + 37 * kPage, 63 * kPage}}, pool);
  std::vector<unsigned char> present(kPages);
  CHECK(mincore(memory, kPages * kPage, present.data()) == 0);
  for (std::size_t page = 0; page < kPages; ++page) {
    CHECK(present[page] & 1);
    CHECK(start[page * kPage] == 0);
  }
  CHECK(munmap(memory, kPages * kPage) == 0);
}

}  // namespace

int main() {
  every_whole_group_is_swept_once();
  for (const int threads : {1, 2, 3, 7}) every_page_of_a_block_is_present(threads);
}
