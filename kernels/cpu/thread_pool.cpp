#include "thread_pool.hpp"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_count.hpp"

namespace dos {

// Lives on the stack of run(), which does not return while a worker holds it.
struct ThreadPool::Job {
  Job(std::size_t n, const std::function<void(std::size_t)>& f) : n_tasks(n), fn(f) {}

  // Takes tasks until none are left.
  void work() {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
      try {
        fn(i);
      } catch (...) {
        next.store(n_tasks, std::memory_order_relaxed);
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
  }

  const std::size_t n_tasks;
  const std::function<void(std::size_t)>& fn;
  std::atomic<std::size_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;
  int helpers = 0;  // workers inside work(); guarded by the crew's mutex
};

struct ThreadPool::Crew {
  // One worker: helps with the oldest job, again and again.
  void serve() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return closing || !jobs.empty(); });
      if (closing) return;  // callers finish their jobs themselves
      Job& job = *jobs.front();
      ++job.helpers;
      lock.unlock();
      job.work();
      lock.lock();
      withdraw(job);
      if (--job.helpers == 0) done.notify_all();
    }
  }

  // Takes a job with no tasks left from the queue, so that nobody joins it any more.
  // Whoever finds it empty first does this; the mutex is held.
  void withdraw(const Job& job) {
    for (auto it = jobs.begin(); it != jobs.end(); ++it) {
      if (*it == &job) {
        jobs.erase(it);
        return;
      }
    }
  }

  std::mutex mutex;
  std::condition_variable wake, done;
  std::deque<Job*> jobs;
  std::vector<std::thread> workers;
  bool closing = false;
};

ThreadPool::ThreadPool(int threads)
    : threads_(threads == 0 ? default_thread_count() : threads),
      owner_(getpid()),
      crew_(std::make_unique<Crew>()) {
  if (threads < 0) throw std::invalid_argument("a thread pool needs at least one thread");
  try {
    for (int i = 1; i < threads_; ++i) {
      crew_->workers.emplace_back([crew = crew_.get()] { crew->serve(); });
    }
  } catch (...) {
    close();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (forked()) {
    // Leaked on purpose: the workers do not exist in this process, so joining them, or
    // destroying the condition variable that they wait for, would never return.
    static_cast<void>(crew_.release());
    return;
  }
  close();
}

bool ThreadPool::forked() const { return getpid() != owner_; }

void ThreadPool::run(std::size_t n_tasks, const std::function<void(std::size_t)>& fn) {
  if (n_tasks <= 1 || threads_ == 1 || forked()) {
    for (std::size_t i = 0; i < n_tasks; ++i) fn(i);
    return;
  }
  Job job(n_tasks, fn);
  {
    const std::lock_guard<std::mutex> lock(crew_->mutex);
    crew_->jobs.push_back(&job);
  }
  crew_->wake.notify_all();
  job.work();
  {
    std::unique_lock<std::mutex> lock(crew_->mutex);
    crew_->withdraw(job);
    crew_->done.wait(lock, [&job] { return job.helpers == 0; });
  }
  if (job.error) std::rethrow_exception(job.error);
}

void ThreadPool::close() {
  if (forked()) return;
  std::vector<std::thread> workers;
  {
    const std::lock_guard<std::mutex> lock(crew_->mutex);
    crew_->closing = true;
    workers.swap(crew_->workers);
  }
  crew_->wake.notify_all();
  for (std::thread& worker : workers) worker.join();
}

}  // namespace dos
