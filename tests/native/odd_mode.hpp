// A floating-point mode that would change nearly every result: flushes subnormals, rounds
// towards zero.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dos_test {

class OddMode {
 public:
  OddMode() : before_(read()) { write(before_ | kOdd); }
  ~OddMode() { write(before_); }
  OddMode(const OddMode&) = delete;
  OddMode& operator=(const OddMode&) = delete;

  // Is this thread in the mode, and do its computations show it?
  bool holds() const {
    volatile float smallest_normal = 0x1p-126f, three = 3.0f;
    const bool flushes = smallest_normal * 0.5f == 0.0f;
    const bool truncates = 2.0f / three * three < 2.0f;
    return read() == (before_ | kOdd) && flushes && truncates;
  }

 private:
  using Word = std::uint64_t;
#if defined(__x86_64__)
  static constexpr Word kOdd = 0xE040;  // FTZ, rounding, DAZ
  // The lowest bits are flags of past exceptions, which any computation sets.
  static Word read() { return _mm_getcsr() & ~0x3Fu; }
  static void write(Word mxcsr) { _mm_setcsr(static_cast<unsigned>(mxcsr)); }
#elif defined(__aarch64__)
  static constexpr Word kOdd = 0x7C80000;  // AHP, DN, FZ, rounding, FZ16
  static Word read() {
    Word fpcr;
    asm volatile("mrs %0, fpcr" : "=r"(fpcr) : : "memory");
    return fpcr;
  }
  static void write(Word fpcr) { asm volatile("msr fpcr, %0" : : "r"(fpcr) : "memory"); }
#endif

  const Word before_;
};

}  // namespace dos_test
