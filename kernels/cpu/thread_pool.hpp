// Persistent worker threads that share the tasks of a call with its caller.
//
// Each thread has a seat, the caller of run() seat 0, and task i of n is at home on seat
// floor(i * threads / n). So a thread meets the same part of the same work in every call,
// and its memory pages stay where it first touched them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "topology.hpp"

namespace dos {

class ThreadPool {
 public:
  // threads counts the caller of run(): threads - 1 workers start. 0: default_thread_count().
  // The threads are bound to CPUs as seat_cpus says, the caller of run() for its duration.
  // Throws std::invalid_argument if negative.
  explicit ThreadPool(int threads = 0, bool pin = false)
      : ThreadPool(threads, pin, numa_nodes(allowed_cpus())) {}
  ThreadPool(int threads, bool pin, const std::vector<Cpus>& nodes);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls fn(i) once for each i < n_tasks and returns when all have ended. Each thread takes
  // the tasks of its own seat, in order, then what is left of the others', so that a thread
  // that is held up holds up nobody. Several threads may call it at once: the workers help
  // the first, and whoever finds seat 0 taken works unbound. The first exception is rethrown
  // here; tasks not begun by then are left out. In a forked child, which has none of the
  // workers, and after close(), the caller does all of it.
  void run(std::size_t n_tasks, const std::function<void(std::size_t)>& fn);

  // Ends the workers and waits for them. Not from inside a task.
  void close();

 private:
  struct Job;
  struct Crew;

  bool forked() const;

  const int threads_;
  const pid_t owner_;
  std::unique_ptr<Crew> crew_;
};

}  // namespace dos
