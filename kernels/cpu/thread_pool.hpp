// Persistent worker threads that share the tasks of a call with its caller.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace dos {

class ThreadPool {
 public:
  // threads counts the caller of run(): threads - 1 workers start. 0: default_thread_count().
  // Throws std::invalid_argument if negative.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls fn(i) once for each i < n_tasks, in any order, and returns when all have ended.
  // Several threads may call it at once. The first exception is rethrown here; tasks not
  // begun by then are left out. In a forked child, which has none of the workers, and
  // after close(), the caller does all of it.
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
