// What a gradient is known by, and the rounding to 16 bits, against golden vectors of
// kernels/reference.py; the same conditions as in adam_bits.cpp.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "golden.hpp"
#include "kernels/cpu/examine.hpp"
#include "odd_mode.hpp"

namespace {

using dos_test::Golden;
using dos_test::Guarded;
using dos_test::read;

// See golden.py for the file.
struct Gradient {
  double max_abs;
  std::uint64_t fingerprint;
  std::vector<double> squares;
  Golden g, out;
};

struct Rounding {
  Golden source, target;
};

struct Cases {
  std::vector<Gradient> gradients;
  std::vector<Rounding> roundings;
};

Cases read_cases(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK((read<std::array<char, 4>>(file) == std::array<char, 4>{'G', 'R', 'A', 'D'}));
  Cases cases;
  cases.gradients.resize(read<std::uint32_t>(file));
  cases.roundings.resize(read<std::uint32_t>(file));
  CHECK(!cases.gradients.empty() && !cases.roundings.empty());
  for (Gradient& c : cases.gradients) {
    c.max_abs = read<double>(file);
    c.fingerprint = read<std::uint64_t>(file);
    c.squares.resize(read<std::uint32_t>(file));
    for (double& square : c.squares) square = read<double>(file);
    c.g = dos_test::read_golden(file);
    c.out = dos_test::read_golden(file);
  }
  for (Rounding& c : cases.roundings) {
    c.source = dos_test::read_golden(file);
    c.target = dos_test::read_golden(file);
  }
  CHECK(file.peek() == std::ifstream::traits_type::eof());
  return cases;
}

// By bits; one NaN is as good as another.
bool same(double a, double b) {
  return (a != a && b != b) || std::memcmp(&a, &b, sizeof a) == 0;
}

void check_gradient(const Gradient& c, const dos::Isa& isa, dos::ThreadPool* pool) {
  for (const bool widened : {false, true}) {
    const Guarded g(c.g), out(c.out);
    std::vector<double> squares(c.squares.size());
    const dos::GradientFigures found =
        dos::examine({g.array(), c.g.numel, c.g.dtype}, widened ? out.floats() : nullptr,
                     squares.data(), isa, pool);
    CHECK(found.fingerprint == c.fingerprint);
    CHECK(same(found.max_abs, c.max_abs));
    for (std::size_t i = 0; i < squares.size(); ++i) CHECK(same(squares[i], c.squares[i]));
    g.check("g");
    if (widened) out.check("out");
  }
}

void check_rounding(const Rounding& c, const dos::Isa& isa, dos::ThreadPool* pool) {
  const Guarded source(c.source), target(c.target);
  dos::downscale(source.floats(), target.array(), c.source.numel, c.target.dtype, isa, pool);
  source.check("source");
  target.check("target");
}

void check(const Cases& cases, const dos::Isa& isa, dos::ThreadPool* pool) {
  for (const Gradient& c : cases.gradients) check_gradient(c, isa, pool);
  for (const Rounding& c : cases.roundings) check_rounding(c, isa, pool);
}

void check_all(const Cases& cases) {
  // The workers inherit the mode of this thread.
  dos::ThreadPool pool(3);
  for (const dos::Isa& isa : dos::available_isas()) {
    std::fprintf(stderr, "gradient_bits: %s\n", isa.name);
    check(cases, isa, nullptr);
    check(cases, isa, &pool);
  }
}

void check_two_callers(const Cases& cases) {
  dos::ThreadPool pool(3);
  const dos::Isa& isa = dos::available_isas().front();
  std::thread other([&] { check(cases, isa, &pool); });
  check(cases, isa, &pool);
  other.join();
}

}  // namespace

int main(int, char** argv) {
  const Cases cases = read_cases(std::string(argv[1]) + "/gradient.bin");
  check_all(cases);
  check_two_callers(cases);
  {
    const dos_test::OddMode mode;
    CHECK(mode.holds());
    check_all(cases);
    CHECK(mode.holds());
  }
}
