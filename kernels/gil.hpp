// Python's global interpreter lock, given away and taken back.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace dos {

// Calls something that takes the GIL. While the interpreter ends, Python before 3.14 answers
// a thread that asks for it by unwinding its stack, which would run destructors that need
// the GIL and abort the process in one that may not throw. Such a thread waits for the end
// of the process here, as it does in Python 3.14.
template <class Call>
void with_gil(const Call& call) {
#if defined(__GLIBCXX__)
  try {
    call();
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  call();
#endif
}

// Gives the GIL away for as long as it lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    with_gil([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace dos
