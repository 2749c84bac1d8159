// Does what the sanitizers must notice; a check that cannot fail proves nothing.
#include <climits>
#include <cstddef>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

namespace {

void overflow() {
  const std::vector<int> numbers(7);
  const volatile std::size_t after = numbers.size();
  std::printf("%d\n", numbers.data()[after]);
}

void undefined() {
  const volatile int largest = INT_MAX;
  std::printf("%d\n", largest + 1);
}

void race() {
  volatile int shared = 0;
  std::thread other([&shared] { shared = 1; });
  shared = 2;
  other.join();
}

}  // namespace

int main(int argc, char** argv) {
  // Without a fault: does a program with this sanitizer run here at all?
  const std::string fault = argc > 1 ? argv[1] : "none";
  if (fault == "overflow") overflow();
  if (fault == "undefined") undefined();
  if (fault == "race") race();
}
