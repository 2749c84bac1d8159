// Golden vectors: arrays before and after, as golden.py wrote them, and guarded copies of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <istream>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "check.hpp"
#include "kernels/cpu/adam.hpp"

namespace dos_test {

using Bytes = std::vector<unsigned char>;

template <class T>
T read(std::istream& file) {
  T value;
  CHECK(file.read(reinterpret_cast<char*>(&value), sizeof value));
  return value;
}

inline Bytes read_bytes(std::istream& file, std::size_t size) {
  Bytes bytes(size);
  CHECK(file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size)));
  return bytes;
}

// An array inside a buffer.
struct Golden {
  dos::DType dtype;  // none: there is no array
  std::size_t start, numel, length;  // of the array, and of the buffer, in elements
  Bytes before, after;               // the buffer

  std::size_t itemsize() const {
    return dtype == dos::DType::none ? 0 : dtype == dos::DType::fp32 ? 4 : 2;
  }

  std::uint32_t word(const unsigned char* buffer, std::size_t i) const {
    std::uint32_t bits = 0;  // little-endian: the two bytes of a short one are its lower half
    std::memcpy(&bits, buffer + i * itemsize(), itemsize());
    return bits;
  }

  bool is_nan(std::uint32_t bits) const {
    switch (dtype) {
      case dos::DType::fp32: return (bits & 0x7FFFFFFFu) > 0x7F800000u;
      case dos::DType::bf16: return (bits & 0x7FFFu) > 0x7F80u;
      default: return (bits & 0x7FFFu) > 0x7C00u;
    }
  }
};

inline Golden read_golden(std::istream& file) {
  Golden golden{};
  golden.dtype = static_cast<dos::DType>(read<std::uint32_t>(file));
  golden.start = read<std::uint32_t>(file);
  golden.numel = read<std::uint32_t>(file);
  golden.length = read<std::uint32_t>(file);
  golden.before = read_bytes(file, golden.length * golden.itemsize());
  golden.after = read_bytes(file, golden.before.size());
  return golden;
}

// A copy of the buffer, beginning on a cache line, whose surroundings may not even be read while
// it lives, where the address sanitizer watches.
class Guarded {
 public:
  explicit Guarded(const Golden& golden) : golden_(golden) {
    const Bytes& bytes = golden.before;
    buffer_.reset(static_cast<unsigned char*>(
        std::aligned_alloc(kLine, (bytes.size() / kLine + 1) * kLine)));
    CHECK(buffer_);
    std::copy(bytes.begin(), bytes.end(), buffer_.get());
    guard(true);
  }

  void* array() const { return buffer_.get() + golden_.start * golden_.itemsize(); }
  float* floats() const { return static_cast<float*>(array()); }

  // The expected bits inside the array, where one NaN is as good as another, and the old ones
  // around it.
  void check(const char* name) const {
    guard(false);
    const Bytes& after = golden_.after;
    if (std::equal(after.begin(), after.end(), buffer_.get())) return;
    for (std::size_t i = 0; i < golden_.length; ++i) {
      const std::uint32_t got = golden_.word(buffer_.get(), i);
      const std::uint32_t expected = golden_.word(after.data(), i);
      const std::size_t place = i - golden_.start;  // wraps before the start
      const bool inside = place < golden_.numel;
      const bool both_nan = golden_.is_nan(got) && golden_.is_nan(expected);
      if (got == expected || (inside && both_nan)) continue;
      std::fprintf(stderr, "%s[%td] of %zu, format %d, is %#x, expected %#x\n", name,
                   static_cast<std::ptrdiff_t>(place), golden_.numel,
                   static_cast<int>(golden_.dtype), got, expected);
      CHECK(got == expected);
    }
  }

 private:
  static constexpr std::size_t kLine = 64;
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };

  void guard([[maybe_unused]] bool on) const {
#if defined(__SANITIZE_ADDRESS__)
    const std::size_t size = golden_.before.size();
    if (on) {
      __asan_poison_memory_region(buffer_.get(), size);
      __asan_unpoison_memory_region(array(), golden_.numel * golden_.itemsize());
    } else {
      __asan_unpoison_memory_region(buffer_.get(), size);
    }
#endif
  }

  const Golden& golden_;
  std::unique_ptr<unsigned char, Free> buffer_;
};

}  // namespace dos_test
