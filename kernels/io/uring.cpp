// The engine of io_uring. Without liburing at build time it only says so.
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "queue.hpp"

#ifdef DOS_HAVE_LIBURING

#include <liburing.h>

#include <algorithm>

namespace dos::io {
namespace {

// The kernel refuses larger registered buffers.
constexpr std::size_t kPieceLimit = std::size_t{1} << 30;
// And more of them than this.
constexpr std::size_t kPiecesLimit = 16384;
// Of a request that is none: one that could not be submitted.
constexpr std::uint64_t kNobody = ~std::uint64_t{0};

// A ring that is given back.
class Ring {
 public:
  explicit Ring(std::size_t depth) {
    const int result = io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0);
    if (result < 0) throw std::system_error(-result, std::generic_category(), "io_uring");
  }
  ~Ring() { io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  io_uring* get() { return &ring_; }

 private:
  io_uring ring_{};
};

// Memory that the ring prepares, cut where the kernel wants it cut.
class Pieces {
 public:
  Pieces(io_uring* ring, const std::vector<Memory>& registered) : ring_(ring) {
    for (const Memory& memory : registered) {
      for (std::size_t at = 0; at < memory.n_bytes; at += kPieceLimit) {
        const std::size_t n_bytes = std::min(kPieceLimit, memory.n_bytes - at);
        if (pieces_.size() < kPiecesLimit) pieces_.push_back({memory.address + at, n_bytes});
      }
    }
    std::sort(pieces_.begin(), pieces_.end(),
              [](const Piece& a, const Piece& b) { return a.address < b.address; });
    const auto count = static_cast<unsigned>(pieces_.size());
    // An empty table, because a refusal (the limit of locked memory, or a kernel without such
    // tables) then leaves what was taken before.
    refused_ = count == 0 || io_uring_register_buffers_sparse(ring_, count) != 0;
  }

  // The index of the prepared piece that holds all of it; -1: none. A piece is prepared when it
  // is used for the first time: by then its pages are there, and nothing waits for those of
  // the others.
  int find(const char* data, std::size_t n_bytes) {
    auto after = std::upper_bound(pieces_.begin(), pieces_.end(), data,
                                  [](const char* at, const Piece& p) { return at < p.address; });
    if (after == pieces_.begin()) return -1;
    Piece& piece = *--after;
    if (data + n_bytes > piece.address + piece.n_bytes) return -1;
    const auto index = static_cast<unsigned>(after - pieces_.begin());
    if (!piece.taken && !refused_) take(piece, index);
    return piece.taken ? static_cast<int>(index) : -1;
  }

  std::size_t n_bytes() const {
    std::size_t sum = 0;
    for (const Piece& piece : pieces_) sum += piece.taken ? piece.n_bytes : 0;
    return sum;
  }

 private:
  struct Piece {
    char* address;
    std::size_t n_bytes;
    bool taken = false;
  };

  void take(Piece& piece, unsigned index) {
    const iovec memory{piece.address, piece.n_bytes};
    const __u64 tag = 0;
    piece.taken = io_uring_register_buffers_update_tag(ring_, index, &memory, &tag, 1) == 1;
    refused_ = !piece.taken;
  }

  io_uring* const ring_;
  std::vector<Piece> pieces_;  // by address, each at its index in the kernel's table
  bool refused_ = false;
};

class UringQueue final : public Queue {
 public:
  UringQueue(std::size_t depth, const std::vector<Memory>& registered)
      : ring_(depth), pieces_(ring_.get(), registered), slots_(depth) {
    for (std::size_t slot = depth; slot-- > 0;) free_.push_back(slot);
  }

  ~UringQueue() override {
    // The kernel goes on with what is in flight after a ring is gone.
    if (!forked()) wait_for_free(slots_.size());
  }

  void submit(const Transfer& transfer) override {
    refuse_fork();
    wait_for_free(1);
    const std::size_t slot = free_.back();
    free_.pop_back();
    slots_[slot] = transfer;
    push(slot);
  }

  bool full() override {
    refuse_fork();
    reap();
    return free_.empty();
  }

  void completed(bool wait, std::vector<Completion>& ended) override {
    refuse_fork();
    reap();
    while (wait && ended_.empty() && free_.size() < slots_.size()) wait_and_reap();
    ended.insert(ended.end(), ended_.begin(), ended_.end());
    ended_.clear();
  }

  std::size_t registered_bytes() const override { return pieces_.n_bytes(); }

 private:
  void push(std::size_t slot) {
    Transfer& transfer = slots_[slot];
    io_uring_sqe* const sqe = io_uring_get_sqe(ring_.get());
    if (sqe == nullptr) {  // there is one for every slot, but for those of nobody
      end(slot, EBUSY);
      return;
    }
    prepare(sqe, transfer);
    io_uring_sqe_set_data64(sqe, slot);
    // A submission may fall short, for want of memory or because of a signal.
    int result = 0;
    for (int attempt = 0; io_uring_sq_ready(ring_.get()) > 0; ++attempt) {
      result = io_uring_submit(ring_.get());
      if (result > 0) continue;
      const bool passing =
          result == 0 || result == -EAGAIN || result == -EBUSY || result == -EINTR;
      if (!passing || attempt == kAttempts) {
        // It lies in the ring all the same, and goes along with the next one.
        io_uring_prep_nop(sqe);
        io_uring_sqe_set_data64(sqe, kNobody);
        end(slot, result == 0 ? EAGAIN : -result);
        return;
      }
      pause();
    }
  }

  void prepare(io_uring_sqe* sqe, const Transfer& transfer) {
    char* const data = transfer.data + transfer.done;
    const auto n_bytes = static_cast<unsigned>(transfer.n_bytes - transfer.done);
    const std::uint64_t offset = transfer.offset + transfer.done;
    const int piece = pieces_.find(data, n_bytes);
    if (piece < 0) {
      const auto plain = transfer.write ? IORING_OP_WRITE : IORING_OP_READ;
      io_uring_prep_rw(plain, sqe, transfer.fd, data, n_bytes, offset);
    } else if (transfer.write) {
      io_uring_prep_write_fixed(sqe, transfer.fd, data, n_bytes, offset, piece);
    } else {
      io_uring_prep_read_fixed(sqe, transfer.fd, data, n_bytes, offset, piece);
    }
  }

  void reap() {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(ring_.get(), &cqe) == 0) {
      const std::uint64_t slot = io_uring_cqe_get_data64(cqe);
      const int result = cqe->res;
      io_uring_cqe_seen(ring_.get(), cqe);
      if (slot == kNobody) continue;
      const Step step = advance(slots_[slot], result);
      if (step.kind == Step::over) {
        end(slot, step.error);
      } else {
        if (step.kind == Step::pause_first) pause();
        push(slot);
      }
    }
  }

  void wait_and_reap() {
    io_uring_cqe* cqe = nullptr;
    const int result = io_uring_wait_cqe(ring_.get(), &cqe);
    if (result < 0) pause();  // a signal, or memory is short for a moment
    reap();
  }

  void wait_for_free(std::size_t n_slots) {
    while (free_.size() < n_slots) wait_and_reap();
  }

  void end(std::size_t slot, int error) {
    ended_.push_back({slots_[slot].token, error});
    free_.push_back(slot);
  }

  Ring ring_;
  Pieces pieces_;
  std::vector<Transfer> slots_;  // those not in free_ are in flight
  std::vector<std::size_t> free_;
  std::vector<Completion> ended_;
};

}  // namespace

std::unique_ptr<Queue> make_uring_queue(std::size_t depth,
                                        const std::vector<Memory>& registered) {
  if (depth < 1 || depth > 4096) throw std::invalid_argument("depth is not 1 to 4096");
  return std::make_unique<UringQueue>(depth, registered);
}

std::string uring_refusal() {
  try {
    const Ring ring(1);
    return {};
  } catch (const std::system_error& error) {
    return error.code().message();
  }
}

}  // namespace dos::io

#else

namespace dos::io {

std::unique_ptr<Queue> make_uring_queue(std::size_t, const std::vector<Memory>&) {
  throw std::system_error(ENOSYS, std::generic_category(), "io_uring");
}

std::string uring_refusal() { return "this build is without liburing"; }

}  // namespace dos::io

#endif
