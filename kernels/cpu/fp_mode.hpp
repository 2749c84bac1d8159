// Round to nearest, keep subnormals, trap nothing; the thread's own mode comes back after.
//
// A thread inherits what its creator was told (torch.set_flush_denormal), and a mode kept
// from before would change the bits of an update.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#else
#include <cfenv>
#endif

namespace dos {

class FpMode {
 public:
  FpMode() : before_(read()) { make_exact(); }
  ~FpMode() { write(before_); }
  FpMode(const FpMode&) = delete;
  FpMode& operator=(const FpMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = unsigned;
  static Word read() { return _mm_getcsr(); }
  static void write(Word mxcsr) { _mm_setcsr(mxcsr); }
  static void make_exact() { write(0x1F80); }  // all exceptions masked, nothing else
#elif defined(__aarch64__)
  // By hand: fesetenv would clear the flags of past exceptions, too.
  using Word = std::uint64_t;
  static Word read() {
    Word fpcr;
    asm volatile("mrs %0, fpcr" : "=r"(fpcr) : : "memory");
    return fpcr;
  }
  static void write(Word fpcr) { asm volatile("msr fpcr, %0" : : "r"(fpcr) : "memory"); }
  // Each bit asks for something out of the ordinary: FZ, FZ16, AH, AHP, DN, traps.
  static void make_exact() { write(0); }
#else
  using Word = std::fenv_t;
  static Word read() {
    Word environment;
    std::fegetenv(&environment);
    return environment;
  }
  static void write(const Word& environment) { std::fesetenv(&environment); }
  static void make_exact() { std::fesetenv(FE_DFL_ENV); }
#endif

  const Word before_;
};

}  // namespace dos
