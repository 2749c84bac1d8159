// The Adam kernels against golden vectors of kernels/reference.py: every instruction set, alone
// and with a pool, in the ordinary floating-point mode and in one that should not matter.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "check.hpp"
#include "kernels/cpu/update.hpp"
#include "odd_mode.hpp"

namespace {

enum Name { P, M, V, G, W, kNames };
using Bytes = std::vector<unsigned char>;

// See golden.py for the file.
struct Case {
  dos::Scalars scalars;
  dos::DType g_dtype, w_dtype;
  std::size_t numel;
  std::array<std::size_t, kNames> starts;   // of the array in its buffer, in elements
  std::array<std::size_t, kNames> lengths;  // of the buffer
  std::array<Bytes, kNames> before, after;

  dos::DType dtype(int name) const {
    return name == G ? g_dtype : name == W ? w_dtype : dos::DType::fp32;
  }
  std::size_t itemsize(int name) const {
    if (dtype(name) == dos::DType::none) return 0;
    return dtype(name) == dos::DType::fp32 ? 4 : 2;
  }
};

template <class T>
T read(std::istream& file) {
  T value;
  CHECK(file.read(reinterpret_cast<char*>(&value), sizeof value));
  return value;
}

Case read_case(std::istream& file) {
  Case c;
  const auto x = read<std::array<float, 10>>(file);
  const auto n = read<std::array<std::uint32_t, 4>>(file);
  c.scalars = {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], n[0] != 0};
  c.g_dtype = static_cast<dos::DType>(n[1]);
  c.w_dtype = static_cast<dos::DType>(n[2]);
  c.numel = n[3];
  for (int name = 0; name < kNames; ++name) {
    c.starts[name] = read<std::uint32_t>(file);
    c.lengths[name] = read<std::uint32_t>(file);
  }
  for (auto* buffers : {&c.before, &c.after}) {
    for (int name = 0; name < kNames; ++name) {
      Bytes& bytes = (*buffers)[name];
      bytes.resize(c.lengths[name] * c.itemsize(name));
      CHECK(file.read(reinterpret_cast<char*>(bytes.data()),
                      static_cast<std::streamsize>(bytes.size())));
    }
  }
  return c;
}

std::vector<Case> read_cases(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK((read<std::array<char, 4>>(file) == std::array<char, 4>{'A', 'D', 'A', 'M'}));
  std::vector<Case> cases(read<std::uint32_t>(file));
  CHECK(!cases.empty());
  for (Case& c : cases) c = read_case(file);
  CHECK(file.peek() == std::ifstream::traits_type::eof());
  return cases;
}

// A copy of a case's buffers, each beginning on a cache line, whose surroundings may not even
// be read while it lives, where the address sanitizer watches.
class Arrays {
 public:
  explicit Arrays(const Case& c) : case_(c) {
    for (int name = 0; name < kNames; ++name) {
      const Bytes& bytes = c.before[name];
      void* memory = std::aligned_alloc(kLine, (bytes.size() / kLine + 1) * kLine);
      CHECK(memory);
      std::copy(bytes.begin(), bytes.end(), static_cast<unsigned char*>(memory));
      buffers_[name].reset(static_cast<unsigned char*>(memory));
      guard(name, true);
    }
  }

  dos::Segment segment() const {
    const auto fp32 = [this](int name) { return static_cast<float*>(array(name)); };
    return {fp32(P),     fp32(M),        fp32(V),        array(G),      array(W),
            case_.numel, case_.g_dtype, case_.w_dtype, case_.scalars};
  }

  // The expected bits inside the arrays, where one NaN is as good as another, and the old
  // ones around them.
  void check() const {
    for (int name = 0; name < kNames; ++name) {
      guard(name, false);
      for (std::size_t i = 0; i < case_.lengths[name]; ++i) {
        const std::uint32_t got = word(name, buffers_[name].get(), i);
        const std::uint32_t expected = word(name, case_.after[name].data(), i);
        // Numbers wrap before the start.
        const bool inside = i - case_.starts[name] < case_.numel;
        if (got == expected || (inside && is_nan(name, got) && is_nan(name, expected))) continue;
        std::fprintf(stderr, "%c[%td] of %zu is %#x, expected %#x; g format %d, w format %d\n",
                     "pmvgw"[name], static_cast<std::ptrdiff_t>(i - case_.starts[name]),
                     case_.numel, got, expected, static_cast<int>(case_.g_dtype),
                     static_cast<int>(case_.w_dtype));
        CHECK(got == expected);
      }
    }
  }

 private:
  static constexpr std::size_t kLine = 64;
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };

  void* array(int name) const {
    return buffers_[name].get() + case_.starts[name] * case_.itemsize(name);
  }

  std::uint32_t word(int name, const unsigned char* buffer, std::size_t i) const {
    std::uint32_t bits = 0;  // little-endian: the two bytes of a short one are its lower half
    std::memcpy(&bits, buffer + i * case_.itemsize(name), case_.itemsize(name));
    return bits;
  }

  bool is_nan(int name, std::uint32_t bits) const {
    switch (case_.dtype(name)) {
      case dos::DType::fp32: return (bits & 0x7FFFFFFFu) > 0x7F800000u;
      case dos::DType::bf16: return (bits & 0x7FFFu) > 0x7F80u;
      default: return (bits & 0x7FFFu) > 0x7C00u;
    }
  }

  void guard([[maybe_unused]] int name, [[maybe_unused]] bool on) const {
#if defined(__SANITIZE_ADDRESS__)
    const unsigned char* buffer = buffers_[name].get();
    const std::size_t size = case_.before[name].size();
    if (on) {
      __asan_poison_memory_region(buffer, size);
      __asan_unpoison_memory_region(array(name), case_.numel * case_.itemsize(name));
    } else {
      __asan_unpoison_memory_region(buffer, size);
    }
#endif
  }

  const Case& case_;
  std::array<std::unique_ptr<unsigned char, Free>, kNames> buffers_;
};

void check_one_by_one(const std::vector<Case>& cases, const dos::Isa& isa) {
  for (const Case& c : cases) {
    const Arrays arrays(c);
    dos::update({arrays.segment()}, isa, nullptr);
    arrays.check();
  }
}

// So often that the pool has many chunks to share, with cuts inside segments.
void check_together(const std::vector<Case>& cases, const dos::Isa& isa, dos::ThreadPool& pool) {
  constexpr std::size_t kElements = 200'000;
  std::vector<Arrays> all;
  std::vector<dos::Segment> segments;
  for (std::size_t elements = 0; elements < kElements;) {
    for (const Case& c : cases) {
      all.emplace_back(c);
      segments.push_back(all.back().segment());
      elements += c.numel;
    }
  }
  dos::update(segments, isa, &pool);
  for (const Arrays& arrays : all) arrays.check();
}

void check_all(const std::vector<Case>& cases) {
  // The workers inherit the mode of this thread.
  dos::ThreadPool pool(3);
  for (const dos::Isa& isa : dos::available_isas()) {
    std::fprintf(stderr, "adam_bits: %s\n", isa.name);
    check_one_by_one(cases, isa);
    check_together(cases, isa, pool);
  }
}

}  // namespace

int main(int, char** argv) {
  const std::vector<Case> cases = read_cases(std::string(argv[1]) + "/adam.bin");
#if defined(__aarch64__)
  CHECK(dos::available_isas().front().name == std::string("neon"));
#endif
  check_all(cases);
  {
    const dos_test::OddMode mode;
    CHECK(mode.holds());
    check_all(cases);
    CHECK(mode.holds());
  }
}
