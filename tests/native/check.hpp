// CHECK of the native tests: a condition that does not hold is named, and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace dos_test {

[[noreturn]] inline void fail(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
  // At once: another thread may hold what a destructor would wait for.
  std::_Exit(1);
}

}  // namespace dos_test

#define CHECK(condition) \
  ((condition) ? static_cast<void>(0) : dos_test::fail(__FILE__, __LINE__, #condition))
