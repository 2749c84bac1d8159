// Round to nearest, keep subnormals, trap nothing; the thread's own mode comes back after.
//
// A thread inherits what its creator was told (torch.set_flush_denormal), and a mode kept
// from before would change the bits of an update.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace dos {

class FpMode {
 public:
#if defined(__x86_64__)
  FpMode() : before_(_mm_getcsr()) { _mm_setcsr(kAllMasked); }
  ~FpMode() { _mm_setcsr(before_); }
#else
  FpMode() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FpMode() { std::fesetenv(&before_); }
#endif
  FpMode(const FpMode&) = delete;
  FpMode& operator=(const FpMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kAllMasked = 0x1F80;
  unsigned before_;
#else
  std::fenv_t before_;
#endif
};

}  // namespace dos
