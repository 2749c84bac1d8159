// The Adam kernels against golden vectors of kernels/reference.py: every instruction set, alone
// and with a pool, in the ordinary floating-point mode and in one that should not matter.
#include <array>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "golden.hpp"
#include "kernels/cpu/update.hpp"
#include "odd_mode.hpp"

namespace {

using dos_test::Golden;
using dos_test::Guarded;
using dos_test::read;

enum Name { P, M, V, G, W, kNames };

// See golden.py for the file.
struct Case {
  dos::Scalars scalars;
  std::array<Golden, kNames> arrays;
};

Case read_case(std::istream& file) {
  Case c;
  const auto x = read<std::array<float, 10>>(file);
  const bool decoupled = read<std::uint32_t>(file) != 0;
  c.scalars = {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], decoupled};
  for (Golden& array : c.arrays) array = dos_test::read_golden(file);
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

// A copy of a case's arrays.
class Arrays {
 public:
  explicit Arrays(const Case& c) : case_(c) {
    for (const Golden& array : c.arrays) copies_.emplace_back(array);
  }

  dos::Segment segment() const {
    const Golden &g = case_.arrays[G], &w = case_.arrays[W];
    return {copies_[P].floats(), copies_[M].floats(), copies_[V].floats(),
            copies_[G].array(),  copies_[W].array(),  g.numel,
            g.dtype,             w.dtype,             case_.scalars};
  }

  void check() const {
    for (int name = 0; name < kNames; ++name) copies_[name].check(kText[name]);
  }

 private:
  static constexpr const char* kText[] = {"p", "m", "v", "g", "w"};
  const Case& case_;
  std::vector<Guarded> copies_;
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
      elements += segments.back().numel;
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

// Two updates at once, through one pool: the kernels have no state that they could share.
void check_two_callers(const std::vector<Case>& cases) {
  dos::ThreadPool pool(3);
  const dos::Isa& isa = dos::available_isas().front();
  std::thread other([&] { check_together(cases, isa, pool); });
  check_together(cases, isa, pool);
  other.join();
}

void nothing_is_a_valid_update() {
  for (const dos::Isa& isa : dos::available_isas()) {
    dos::update({}, isa, nullptr);
    for (const int threads : {1, 2}) {
      dos::ThreadPool pool(threads);
      dos::update({}, isa, &pool);
    }
  }
}

}  // namespace

int main(int, char** argv) {
  const std::vector<Case> cases = read_cases(std::string(argv[1]) + "/adam.bin");
#if defined(__aarch64__)
  CHECK(dos::available_isas().front().name == std::string("neon"));
#endif
  nothing_is_a_valid_update();
  check_all(cases);
  check_two_callers(cases);
  {
    const dos_test::OddMode mode;
    CHECK(mode.holds());
    check_all(cases);
    CHECK(mode.holds());
  }
}
