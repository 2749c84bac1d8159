#include "transfer.hpp"

#include <unistd.h>

#include <cerrno>

namespace dos::io {
namespace {

Step stalled(Transfer& transfer, int error) {
  if (++transfer.stalls == kAttempts) return {Step::over, error};
  return {Step::pause_first, 0};
}

}  // namespace

Step advance(Transfer& transfer, std::int64_t result) {
  if (result == -EINTR || result == -EAGAIN) {
    return stalled(transfer, static_cast<int>(-result));
  }
  if (result < 0) return {Step::over, static_cast<int>(-result)};
  auto moved = static_cast<std::size_t>(result);
  const std::size_t left = transfer.n_bytes - transfer.done;
  if (moved >= left) {
    transfer.done = transfer.n_bytes;
    return {Step::over, 0};
  }
  if (transfer.write) {
    // What is left of a short write goes on at the start of a block, else a direct one fails.
    moved -= moved % transfer.offset_align;
    if (moved == 0) return stalled(transfer, EIO);
  } else if (moved == 0 || moved % transfer.offset_align != 0) {
    // Only at the end of the file does a read move nothing, or a direct one stop in a block.
    return {Step::over, left - moved < kBlock ? 0 : ENODATA};
  }
  transfer.done += moved;
  transfer.stalls = 0;
  return {Step::again, 0};
}

void pause() { usleep(kPauseMicroseconds); }

}  // namespace dos::io
