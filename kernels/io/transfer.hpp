// One read or write that a queue has been asked for, and what its engine does next after each
// system call for it: the same rules for every engine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dos::io {

struct Transfer {
  bool write = false;
  int fd = -1;
  std::uint64_t offset = 0;         // in the file
  char* data = nullptr;             // not written to if `write`
  std::size_t n_bytes = 0;          // at most kRequestLimit
  std::size_t offset_align = 1;     // of the file's offsets and lengths
  std::uint64_t token = 0;          // the caller's name for it
  std::size_t done = 0;             // bytes moved so far
  int stalls = 0;                   // calls in a row that moved nothing
};

// What one call may move; Linux itself stops at 2 GiB less a page.
constexpr std::size_t kRequestLimit = std::size_t{64} << 20;

// Less than this of a read may lie behind the end of the file.
constexpr std::size_t kBlock = 4096;

// Calls in a row that may move nothing, and the pause after each.
constexpr int kAttempts = 1000;
constexpr int kPauseMicroseconds = 1000;

struct Step {
  enum Kind { again, pause_first, over } kind;
  int error;  // an errno if `over` and failed
};

// Takes the result of a call for what is left of a transfer: bytes moved, or a negative errno.
Step advance(Transfer& transfer, std::int64_t result);

// The pause before a call is repeated.
void pause();

}  // namespace dos::io
