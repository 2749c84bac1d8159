// Reads and writes in flight, by one of two engines: io_uring, or threads that call pread and
// pwrite. Used by one thread at a time. Buffers belong to the caller, and stay as they are until
// their transfer is told by completed().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transfer.hpp"

namespace dos::io {

struct Completion {
  std::uint64_t token;
  int error;  // an errno, or 0
};

struct Memory {
  char* address;
  std::size_t n_bytes;
};

class Queue {
 public:
  Queue();
  virtual ~Queue() = default;  // waits for all in flight, except in a forked child
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Begins a transfer; waits while as many as the queue's depth are in flight. Throws
  // std::logic_error in a forked child, whose parent goes on using the queue.
  virtual void submit(const Transfer& transfer) = 0;

  // Would submit() wait?
  virtual bool full() = 0;

  // Appends what ended since the last call. With `wait` at least one, if any is in flight.
  virtual void completed(bool wait, std::vector<Completion>& ended) = 0;

  // Bytes of the registered memory that the system took so far.
  virtual std::size_t registered_bytes() const { return 0; }

 protected:
  bool forked() const;
  void refuse_fork() const;

 private:
  const int owner_;
};

// Throws std::invalid_argument unless 1 <= depth <= 4096.
std::unique_ptr<Queue> make_thread_queue(std::size_t depth);

// As much of `registered` as the system takes is prepared once, when it is first used, instead of
// for each transfer: each entry as a whole. Throws std::system_error where io_uring is refused.
std::unique_ptr<Queue> make_uring_queue(std::size_t depth, const std::vector<Memory>& registered);

// Why there is no io_uring here; empty if it works.
std::string uring_refusal();

}  // namespace dos::io
