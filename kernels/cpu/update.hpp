// One call: many segments, shared among the threads of a pool.
#pragma once

#include <vector>

#include "adam.hpp"
#include "dispatch.hpp"
#include "thread_pool.hpp"

namespace dos {

// How many of `length` elements one task of a pool takes; about the same for each.
std::size_t chunk_length(std::size_t length, const ThreadPool* pool);

// Updates all segments and returns when every write can be seen by every thread.
// Without a pool the calling thread does it alone.
void update(const std::vector<Segment>& segments, const Isa& isa, ThreadPool* pool);

}  // namespace dos
