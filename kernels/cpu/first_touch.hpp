// Puts new memory near the threads that will update it.
#pragma once

#include <cstddef>
#include <vector>

#include "thread_pool.hpp"

namespace dos {

struct Block {
  char* address;
  std::size_t n_bytes;
};

// Makes the pages of new, zeroed memory present: each thread of the pool touches those
// that begin in its share of each block, which is the share that update() gives it of an
// array there. The system takes a page from the node of the thread that touches it first.
void first_touch(const std::vector<Block>& blocks, ThreadPool& pool);

}  // namespace dos
