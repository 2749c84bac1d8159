#include "queue.hpp"

#include <unistd.h>

#include <stdexcept>

namespace dos::io {

Queue::Queue() : owner_(getpid()) {}

bool Queue::forked() const { return getpid() != owner_; }

void Queue::refuse_fork() const {
  if (forked()) throw std::logic_error("this queue belongs to the parent process");
}

}  // namespace dos::io
