// The thread pool, by its public interface. What tasks write is left unguarded, so that the
// thread sanitizer sees whether run() orders it before its return.
#include "kernels/cpu/thread_pool.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

using dos::ThreadPool;

// Runs n tasks; each of them once?
bool runs_each_once(ThreadPool& pool, std::size_t n) {
  std::vector<int> runs(n, 0);
  pool.run(n, [&runs](std::size_t i) { ++runs[i]; });
  return runs == std::vector<int>(n, 1);
}

void every_task_runs_once() {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (const std::size_t n : {0, 1, 2, 6, 7, 8, 1000}) CHECK(runs_each_once(pool, n));
  }
}

void tasks_see_what_the_caller_wrote() {
  ThreadPool pool(3);
  std::vector<int> numbers(100);
  for (int round = 1; round < 50; ++round) {
    for (int& number : numbers) number = round;
    pool.run(numbers.size(), [&](std::size_t i) { numbers[i] -= round; });
    CHECK(numbers == std::vector<int>(numbers.size(), 0));
  }
}

void an_exception_reaches_the_caller() {
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    std::string caught;
    try {
      pool.run(100, [](std::size_t i) {
        if (i % 10 == 5) throw std::runtime_error("a fifth");
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    CHECK(caught == "a fifth");
    CHECK(runs_each_once(pool, 100));
  }
}

void several_callers_each_get_their_tasks() {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&pool] {
      for (std::size_t n = 0; n < 60; ++n) CHECK(runs_each_once(pool, n));
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void one_callers_exception_is_not_anothers() {
  ThreadPool pool(3);
  std::thread thrower([&pool] {
    for (int round = 0; round < 100; ++round) {
      bool caught = false;
      try {
        pool.run(8, [](std::size_t) { throw std::logic_error("mine"); });
      } catch (const std::logic_error&) {
        caught = true;
      }
      CHECK(caught);
    }
  });
  for (int round = 0; round < 100; ++round) CHECK(runs_each_once(pool, 8));
  thrower.join();
}

void a_task_may_be_a_caller() {
  ThreadPool pool(3);
  std::vector<int> runs(20, 0);
  pool.run(4, [&](std::size_t i) { pool.run(5, [&](std::size_t j) { ++runs[5 * i + j]; }); });
  CHECK(runs == std::vector<int>(20, 1));
}

void closing_leaves_no_task_out() {
  for (int round = 0; round < 30; ++round) {
    ThreadPool pool(4);
    std::atomic<int> started{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 2; ++i) {
      callers.emplace_back([&] {
        ++started;
        for (int n = 0; n < 20; ++n) CHECK(runs_each_once(pool, 64));
      });
    }
    while (started < 2) std::this_thread::yield();
    pool.close();
    for (std::thread& caller : callers) caller.join();
    pool.close();
    CHECK(runs_each_once(pool, 64));
  }
}

void pools_come_and_go() {
  for (int round = 0; round < 200; ++round) {
    ThreadPool pool(1 + round % 5);
    if (round % 2 == 0) CHECK(runs_each_once(pool, 10));
  }
}

void a_negative_count_is_refused() {
  bool refused = false;
  try {
    const ThreadPool pool(-1);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

void a_forked_child_works_alone_and_drops_the_pool() {
  auto pool = std::make_unique<ThreadPool>(3);
  CHECK(runs_each_once(*pool, 100));
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);  // a child that hangs is ended by the signal
    const bool right = runs_each_once(*pool, 100);
    pool.reset();
    _exit(right ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(runs_each_once(*pool, 100));
}

}  // namespace

int main() {
  every_task_runs_once();
  tasks_see_what_the_caller_wrote();
  an_exception_reaches_the_caller();
  several_callers_each_get_their_tasks();
  one_callers_exception_is_not_anothers();
  a_task_may_be_a_caller();
  closing_leaves_no_task_out();
  pools_come_and_go();
  a_negative_count_is_refused();
  a_forked_child_works_alone_and_drops_the_pool();
}
