// The engine of threads that call pread and pwrite: for systems without io_uring.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "queue.hpp"

namespace dos::io {
namespace {

// They wait for the disk most of the time. More requests in flight than this gain nothing at
// the sizes a checkpoint writes.
constexpr std::size_t kMostThreads = 16;

std::int64_t call(const Transfer& transfer) {
  char* const data = transfer.data + transfer.done;
  const std::size_t n_bytes = transfer.n_bytes - transfer.done;
  const auto offset = static_cast<off_t>(transfer.offset + transfer.done);
  const ssize_t moved = transfer.write ? pwrite(transfer.fd, data, n_bytes, offset)
                                       : pread(transfer.fd, data, n_bytes, offset);
  return moved < 0 ? -errno : moved;
}

int carry_out(Transfer transfer) {
  for (;;) {
    const Step step = advance(transfer, call(transfer));
    if (step.kind == Step::over) return step.error;
    if (step.kind == Step::pause_first) pause();
  }
}

class ThreadQueue final : public Queue {
 public:
  explicit ThreadQueue(std::size_t depth) : depth_(depth), crew_(std::make_unique<Crew>()) {
    if (depth < 1 || depth > 4096) throw std::invalid_argument("depth is not 1 to 4096");
  }

  ~ThreadQueue() override {
    if (forked()) {
      // Leaked on purpose: the threads do not exist here, and joining them would never return.
      static_cast<void>(crew_.release());
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(crew_->mutex);
      crew_->closing = true;
    }
    crew_->wake.notify_all();
    for (std::thread& thread : crew_->threads) thread.join();
  }

  void submit(const Transfer& transfer) override {
    refuse_fork();
    std::unique_lock<std::mutex> lock(crew_->mutex);
    crew_->ended_one.wait(lock, [this] { return crew_->in_flight < depth_; });
    const std::size_t most = std::min(depth_, kMostThreads);
    if (crew_->in_flight >= crew_->threads.size() && crew_->threads.size() < most) {
      start_thread();
    }
    crew_->waiting.push_back(transfer);
    ++crew_->in_flight;
    lock.unlock();
    crew_->wake.notify_one();
  }

  bool full() override {
    refuse_fork();
    const std::lock_guard<std::mutex> lock(crew_->mutex);
    return crew_->in_flight >= depth_;
  }

  void completed(bool wait, std::vector<Completion>& ended) override {
    refuse_fork();
    std::unique_lock<std::mutex> lock(crew_->mutex);
    if (wait) {
      crew_->ended_one.wait(lock,
                            [this] { return !crew_->ended.empty() || crew_->in_flight == 0; });
    }
    ended.insert(ended.end(), crew_->ended.begin(), crew_->ended.end());
    crew_->ended.clear();
  }

 private:
  void start_thread() {
    try {
      crew_->threads.emplace_back([crew = crew_.get()] { crew->serve(); });
    } catch (const std::system_error&) {
      if (crew_->threads.empty()) throw;  // else those that there are do all of it
    }
  }

  struct Crew {
    void serve() {
      std::unique_lock<std::mutex> lock(mutex);
      for (;;) {
        wake.wait(lock, [this] { return closing || !waiting.empty(); });
        if (waiting.empty()) return;
        const Transfer transfer = waiting.front();
        waiting.pop_front();
        lock.unlock();
        const int error = carry_out(transfer);
        lock.lock();
        ended.push_back({transfer.token, error});
        --in_flight;
        ended_one.notify_one();
      }
    }

    std::mutex mutex;
    std::condition_variable wake, ended_one;
    std::deque<Transfer> waiting;
    std::vector<Completion> ended;
    std::vector<std::thread> threads;
    std::size_t in_flight = 0;  // waiting, and in a thread's hands
    bool closing = false;
  };

  const std::size_t depth_;
  std::unique_ptr<Crew> crew_;
};

}  // namespace

std::unique_ptr<Queue> make_thread_queue(std::size_t depth) {
  return std::make_unique<ThreadQueue>(depth);
}

}  // namespace dos::io
