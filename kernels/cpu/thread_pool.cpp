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

namespace {

// The tasks of one seat that nobody has taken. On a cache line of its own, or each thread
// would slow down all others by counting.
struct alignas(64) Seat {
  std::atomic<std::size_t> next{0};
  std::size_t end = 0;
};

// Binds the calling thread to the CPUs of seat 0 for as long as this lives, unless another
// caller sits there.
class CallerSeat {
 public:
  // Relaxed throughout: the flag guards no data, since each thread changes its own mask only.
  CallerSeat(const CpuMask& mask, std::atomic<bool>& taken) : taken_(taken) {
    if (mask.empty()) return;
    CpuMask before = CpuMask::current();
    if (before.empty() || taken.exchange(true, std::memory_order_relaxed)) return;
    before_ = std::move(before);
    mask.apply();
  }
  ~CallerSeat() {
    if (before_.empty()) return;
    before_.apply();
    taken_.store(false, std::memory_order_relaxed);
  }
  CallerSeat(const CallerSeat&) = delete;
  CallerSeat& operator=(const CallerSeat&) = delete;

 private:
  std::atomic<bool>& taken_;
  CpuMask before_;  // empty: not bound here
};

}  // namespace

// Lives on the stack of run(), which does not return while a worker holds it.
struct ThreadPool::Job {
  Job(std::size_t n_tasks, std::size_t n_seats, const std::function<void(std::size_t)>& f)
      : fn(f), seats(n_seats) {
    // The least i with floor(i * n_seats / n_tasks) >= seat, without the overflow.
    const auto first_task = [=](std::size_t seat) {
      return n_tasks / n_seats * seat + (n_tasks % n_seats * seat + n_seats - 1) / n_seats;
    };
    for (std::size_t seat = 0; seat < n_seats; ++seat) {
      // Relaxed: workers see all of the job by the mutex under which it is queued.
      seats[seat].next.store(first_task(seat), std::memory_order_relaxed);
      seats[seat].end = first_task(seat + 1);
    }
  }

  // Takes tasks until none are left, from the thread's own seat first.
  void work(std::size_t home) {
    // By exclusive or come the other of a pair, the other pair of four and so on: near
    // seats before those of another node, and not every thief to the same seat.
    for (std::size_t k = 0, seen = 0; seen < seats.size(); ++k) {
      if ((home ^ k) >= seats.size()) continue;
      take_from(seats[home ^ k]);
      ++seen;
    }
  }

  void take_from(Seat& seat) {
    // Relaxed: it is enough that each number is drawn once. What the tasks wrote is passed
    // on by the mutex under which a worker leaves the job.
    for (std::size_t i; (i = seat.next.fetch_add(1, std::memory_order_relaxed)) < seat.end;) {
      try {
        fn(i);
      } catch (...) {
        // Relaxed: a task begun a moment after the failure does no harm.
        for (Seat& each : seats) each.next.store(each.end, std::memory_order_relaxed);
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
  }

  const std::function<void(std::size_t)>& fn;
  std::vector<Seat> seats;
  std::mutex error_mutex;
  std::exception_ptr error;
  int helpers = 0;  // workers inside work(); guarded by the crew's mutex
};

struct ThreadPool::Crew {
  // One worker: helps with the oldest job, again and again.
  void serve(std::size_t seat) {
    masks[seat].apply();
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return closing || !jobs.empty(); });
      if (closing) return;  // callers finish their jobs themselves
      Job& job = *jobs.front();
      ++job.helpers;
      lock.unlock();
      job.work(seat);
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
  std::vector<CpuMask> masks;  // by seat; not changed once there are workers
  std::atomic<bool> caller_seated{false};
  std::vector<std::thread> workers;
  bool closing = false;
};

ThreadPool::ThreadPool(int threads, bool pin, const std::vector<Cpus>& nodes)
    : threads_(threads == 0 ? default_thread_count() : threads),
      owner_(getpid()),
      crew_(std::make_unique<Crew>()) {
  if (threads < 0) throw std::invalid_argument("a thread pool needs at least one thread");
  const auto n_seats = static_cast<std::size_t>(threads_);
  for (const Cpus& cpus : seat_cpus(n_seats, nodes, pin)) crew_->masks.emplace_back(cpus);
  try {
    for (std::size_t seat = 1; seat < n_seats; ++seat) {
      crew_->workers.emplace_back([crew = crew_.get(), seat] { crew->serve(seat); });
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
  Job job(n_tasks, static_cast<std::size_t>(threads_), fn);
  const CallerSeat seat(crew_->masks[0], crew_->caller_seated);
  {
    const std::lock_guard<std::mutex> lock(crew_->mutex);
    crew_->jobs.push_back(&job);
  }
  crew_->wake.notify_all();
  job.work(0);
  {
    std::unique_lock<std::mutex> lock(crew_->mutex);
    crew_->withdraw(job);
    // Without a limit: a worker still in a task holds the job, which lives on this stack.
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
