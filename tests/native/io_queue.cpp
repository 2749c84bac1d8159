// The queues of both engines on real files, and the rules by which they go on after a call that
// did less than it was asked to.
#include "kernels/io/queue.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

using dos::io::advance;
using dos::io::Completion;
using dos::io::Queue;
using dos::io::Step;
using dos::io::Transfer;

class File {
 public:
  explicit File(const char* path, int flags = O_RDWR | O_CREAT | O_TRUNC)
      : fd(open(path, flags | O_CLOEXEC, 0600)) {
    CHECK(fd >= 0);
  }
  ~File() { close(fd); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const int fd;
};

Transfer transfer(bool write, int fd, std::uint64_t offset, std::vector<char>& data,
                  std::uint64_t token) {
  return {write, fd, offset, data.data(), data.size(), 1, token};
}

std::vector<Completion> drain(Queue& queue) {
  std::vector<Completion> ended;
  for (std::size_t before = 1; before != ended.size();) {
    before = ended.size();
    queue.completed(true, ended);
  }
  return ended;
}

int error_of(Queue& queue, const Transfer& only) {
  queue.submit(only);
  const std::vector<Completion> ended = drain(queue);
  CHECK(ended.size() == 1);
  CHECK(ended[0].token == only.token);
  return ended[0].error;
}

std::vector<std::vector<char>> some_blocks(std::size_t n) {
  std::vector<std::vector<char>> blocks(n);
  for (std::size_t i = 0; i < n; ++i) blocks[i].assign(10000, static_cast<char>(i * 7 + 1));
  return blocks;
}

using Make = std::function<std::unique_ptr<Queue>(std::size_t)>;

void what_was_written_is_read(const Make& make) {
  const File file("file");
  std::vector<std::vector<char>> written = some_blocks(100);
  std::vector<std::vector<char>> read(100, std::vector<char>(10000));
  const std::unique_ptr<Queue> queue = make(7);
  for (std::size_t i = 0; i < 100; ++i) {
    queue->submit(transfer(true, file.fd, i * 10000, written[i], i));
  }
  CHECK(drain(*queue).size() == 100);
  for (std::size_t i = 0; i < 100; ++i) {
    queue->submit(transfer(false, file.fd, i * 10000, read[i], i));
  }
  std::set<std::uint64_t> tokens;
  for (const Completion& each : drain(*queue)) {
    CHECK(each.error == 0);
    tokens.insert(each.token);
  }
  CHECK(tokens.size() == 100);
  CHECK(read == written);
}

void a_queue_ends_what_it_has_begun(const Make& make) {
  const File file("file");
  std::vector<std::vector<char>> written = some_blocks(20);
  {
    const std::unique_ptr<Queue> queue = make(20);
    for (std::size_t i = 0; i < 20; ++i) {
      queue->submit(transfer(true, file.fd, i * 10000, written[i], i));
    }
  }
  for (std::size_t i = 0; i < 20; ++i) {
    std::vector<char> read(10000);
    CHECK(pread(file.fd, read.data(), read.size(), static_cast<off_t>(i * 10000)) == 10000);
    CHECK(read == written[i]);
  }
}

void nothing_in_flight_ends_a_wait(const Make& make) {
  std::vector<Completion> ended;
  make(3)->completed(true, ended);
  CHECK(ended.empty());
}

void failures_are_told_by_their_number(const Make& make) {
  std::vector<char> data(10000);
  const std::unique_ptr<Queue> queue = make(2);
  const File full("/dev/full", O_WRONLY);
  CHECK(error_of(*queue, transfer(true, full.fd, 0, data, 5)) == ENOSPC);
  CHECK(error_of(*queue, transfer(true, -1, 0, data, 6)) == EBADF);
  const File file("file");
  CHECK(error_of(*queue, transfer(true, file.fd, 0, data, 7)) == 0);
}

void a_read_may_end_a_little_behind_the_file(const Make& make) {
  const File file("file");
  const std::unique_ptr<Queue> queue = make(2);
  std::vector<char> data(10000, 'x'), more(10000 + 4095), too_much(10000 + 4096);
  CHECK(error_of(*queue, transfer(true, file.fd, 0, data, 1)) == 0);
  CHECK(error_of(*queue, transfer(false, file.fd, 0, more, 1)) == 0);
  CHECK(std::vector<char>(more.begin(), more.begin() + 10000) == data);
  CHECK(error_of(*queue, transfer(false, file.fd, 0, too_much, 1)) == ENODATA);
}

// The system writes up to the limit of a file's size first, and refuses the rest then.
void what_a_short_write_leaves_is_written(const Make& make) {
  const File file("file");
  const std::unique_ptr<Queue> queue = make(2);
  std::vector<char> data(10000, 'x');
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit{6000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  CHECK(error_of(*queue, transfer(true, file.fd, 0, data, 1)) == EFBIG);
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(lseek(file.fd, 0, SEEK_END) == 6000);
}

// What is left of a forked child's copy of a queue does no harm to its parent's.
void a_child_leaves_the_queue_alone(const Make& make) {
  const File file("file");
  std::vector<char> data(10000, 'x');
  std::unique_ptr<Queue> queue = make(2);
  CHECK(error_of(*queue, transfer(true, file.fd, 0, data, 1)) == 0);
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      queue->submit(transfer(true, file.fd, 0, data, 2));
    } catch (const std::logic_error&) {
      refused = true;
    }
    queue.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(error_of(*queue, transfer(true, file.fd, 0, data, 3)) == 0);
}

void a_depth_must_be_possible(const Make& make) {
  for (const std::size_t depth : {0, 4097}) {
    bool refused = false;
    try {
      make(depth);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

void test(const Make& make) {
  what_was_written_is_read(make);
  a_queue_ends_what_it_has_begun(make);
  nothing_in_flight_ends_a_wait(make);
  failures_are_told_by_their_number(make);
  a_read_may_end_a_little_behind_the_file(make);
  what_a_short_write_leaves_is_written(make);
  a_child_leaves_the_queue_alone(make);
  a_depth_must_be_possible(make);
}

void registered_memory_is_used_in_any_part() {
  const File file("file");
  std::vector<char> first(3 * 4096), second(2 * 4096), other(4096, 'o');
  const std::unique_ptr<Queue> queue = dos::io::make_uring_queue(
      4, {{second.data(), second.size()}, {first.data(), first.size()}});
  CHECK(queue->registered_bytes() == 0);
  first.assign(first.size(), 'f');
  second.assign(second.size(), 's');
  queue->submit({true, file.fd, 0, first.data() + 100, 4096, 1, 0});
  queue->submit({true, file.fd, 4096, second.data() + 4096, 4096, 1, 1});
  queue->submit({true, file.fd, 8192, other.data(), 4096, 1, 2});
  for (const Completion& each : drain(*queue)) CHECK(each.error == 0);
  char read[3 * 4096];
  CHECK(pread(file.fd, read, sizeof read, 0) == sizeof read);
  CHECK(read[0] == 'f' && read[4095] == 'f' && read[4096] == 's' && read[8191] == 's');
  CHECK(read[8192] == 'o');
  CHECK(queue->registered_bytes() == 5 * 4096);
}

Step after(Transfer& transfer, std::int64_t result) { return advance(transfer, result); }

void a_direct_write_goes_on_at_a_blocks_start() {
  Transfer write{true, 0, 0, nullptr, 3 * 512, 512, 0};
  CHECK(after(write, 700).kind == Step::again);
  CHECK(write.done == 512);
  CHECK(after(write, 100).kind == Step::pause_first);
  CHECK(write.done == 512);
  CHECK(after(write, 1024).kind == Step::over);
}

void a_call_is_repeated_but_not_for_ever() {
  for (const std::int64_t result : {-EINTR, -EAGAIN, 0}) {
    Transfer write{true, 0, 0, nullptr, 512, 1, 0};
    int calls = 1;
    Step step = after(write, result);
    for (; step.kind == Step::pause_first; ++calls) step = after(write, result);
    CHECK(step.kind == Step::over);
    CHECK(step.error == (result == 0 ? EIO : -result));
    CHECK(calls == dos::io::kAttempts);
  }
}

void progress_is_no_stall() {
  Transfer write{true, 0, 0, nullptr, 10 * dos::io::kAttempts, 1, 0};
  for (int i = 0; i < 2 * dos::io::kAttempts; ++i) {
    CHECK(after(write, -EAGAIN).kind == Step::pause_first);
    CHECK(after(write, 1).kind == Step::again);
  }
}

void other_errors_end_a_transfer() {
  Transfer read{false, 0, 0, nullptr, 512, 1, 0};
  const Step step = after(read, -EIO);
  CHECK(step.kind == Step::over);
  CHECK(step.error == EIO);
}

}  // namespace

int main() {
  std::signal(SIGXFSZ, SIG_IGN);
  a_direct_write_goes_on_at_a_blocks_start();
  a_call_is_repeated_but_not_for_ever();
  progress_is_no_stall();
  other_errors_end_a_transfer();
  test(dos::io::make_thread_queue);
  if (dos::io::uring_refusal().empty()) {
    test([](std::size_t depth) { return dos::io::make_uring_queue(depth, {}); });
    registered_memory_is_used_in_any_part();
  }
}
