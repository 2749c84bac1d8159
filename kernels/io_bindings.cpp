// The part of dos.kernels._native that reads and writes files; see _native.pyi.
#include "io_bindings.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "io/chunk.hpp"
#include "io/queue.hpp"

namespace py = pybind11;

namespace dos {
namespace {

// The bytes of an object that has the buffer protocol and lies in one piece.
io::Memory read_buffer(const py::buffer& source, bool writable) {
  const py::buffer_info info = source.request(writable);
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) throw py::value_error("a buffer has gaps");
  return {static_cast<char*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)};
}

// Pieces of a buffer that lie elsewhere, too: offset in the buffer, address, size.
using Pieces = std::vector<std::tuple<std::size_t, std::uintptr_t, std::size_t>>;

std::vector<io::Piece> read_pieces(const Pieces& pieces) {
  std::vector<io::Piece> read;
  read.reserve(pieces.size());
  for (const auto& [offset, address, n_bytes] : pieces) {
    read.push_back({offset, reinterpret_cast<char*>(address), n_bytes});
  }
  return read;
}

void gather(const py::buffer& target, const Pieces& pieces) {
  const io::Memory memory = read_buffer(target, true);
  const std::vector<io::Piece> read = read_pieces(pieces);
  io::check_pieces(read, memory.n_bytes);
  const GilReleased released;
  io::gather(memory, read);
}

void scatter(const py::buffer& source, const Pieces& pieces) {
  const auto [from, n_bytes] = read_buffer(source, false);
  const std::vector<io::Piece> read = read_pieces(pieces);
  io::check_pieces(read, n_bytes);
  const GilReleased released;
  for (const io::Piece& piece : read) {
    std::memcpy(piece.address, from + piece.offset, piece.n_bytes);
  }
}

using Chunk = std::tuple<py::buffer, Pieces, std::uint64_t>;

std::vector<py::bytes> fill(const std::vector<Chunk>& given) {
  std::vector<io::Chunk> chunks;
  for (const auto& [memory, pieces, seed] : given) {
    chunks.push_back({read_buffer(memory, true), read_pieces(pieces), seed});
  }
  std::vector<io::Digest> digests;
  {
    const GilReleased released;
    digests = io::fill(chunks);
  }
  std::vector<py::bytes> bytes;
  for (const io::Digest& digest : digests) {
    bytes.emplace_back(reinterpret_cast<const char*>(digest.data()), digest.size());
  }
  return bytes;
}

// Calls something whose std::system_error becomes an OSError.
template <class Call>
void with_os_error(const Call& call) {
  try {
    call();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

// A queue, and the end of it while others hold the GIL.
class IoQueue {
 public:
  IoQueue(const std::string& engine, std::size_t depth, const std::vector<py::buffer>& registered) {
    std::vector<io::Memory> memory;
    for (const py::buffer& each : registered) memory.push_back(read_buffer(each, false));
    with_os_error([&] {
      const GilReleased released;
      queue_ = make(engine, depth, memory);
    });
  }

  void submit(bool write, int fd, std::uint64_t offset, const py::buffer& buffer,
              std::size_t offset_align, std::uint64_t token) {
    const auto [data, n_bytes] = read_buffer(buffer, !write);
    if (n_bytes > io::kRequestLimit) throw py::value_error("a request above 64 MiB");
    io::Queue& queue = open();
    // To get the GIL back takes up to 5 ms wherever another thread computes in Python, so it is
    // kept where it takes less. A read may have to find memory for its buffer first.
    const std::size_t align = std::max<std::size_t>(offset_align, 1);
    const io::Transfer transfer{write, fd, offset, data, n_bytes, align, token};
    with_os_error([&] {
      std::optional<GilReleased> released;
      if (!write || queue.full()) released.emplace();
      queue.submit(transfer);
    });
  }

  std::vector<std::pair<std::uint64_t, int>> completed(bool wait) {
    io::Queue& queue = open();
    std::vector<io::Completion> ended;
    {
      std::optional<GilReleased> released;
      if (wait) released.emplace();
      queue.completed(wait, ended);
    }
    std::vector<std::pair<std::uint64_t, int>> pairs;
    for (const auto& [token, error] : ended) pairs.emplace_back(token, error);
    return pairs;
  }

  std::size_t registered_bytes() { return open().registered_bytes(); }

  void close() {
    const GilReleased released;
    queue_.reset();
  }

 private:
  static std::unique_ptr<io::Queue> make(const std::string& engine, std::size_t depth,
                                              const std::vector<io::Memory>& registered) {
    if (engine == "io_uring") return io::make_uring_queue(depth, registered);
    if (engine == "threads") return io::make_thread_queue(depth);
    throw std::invalid_argument("no engine " + engine);
  }

  io::Queue& open() {
    if (!queue_) throw py::value_error("the queue is closed");
    return *queue_;
  }

  std::unique_ptr<io::Queue> queue_;
};

}  // namespace

void bind_io(py::module_& m) {
  py::class_<IoQueue>(m, "IoQueue")
      .def(py::init<const std::string&, std::size_t, const std::vector<py::buffer>&>(),
           py::arg("engine"), py::arg("depth"), py::arg("registered"))
      .def("submit", &IoQueue::submit, py::arg("write"), py::arg("fd"), py::arg("offset_bytes"),
           py::arg("buffer"), py::arg("offset_align_bytes"), py::arg("token"))
      .def("completed", &IoQueue::completed, py::arg("wait"))
      .def_property_readonly("registered_bytes", &IoQueue::registered_bytes)
      .def("close", &IoQueue::close);
  m.def("io_uring_refusal", &io::uring_refusal);
  m.def("gather", &gather, py::arg("target"), py::arg("pieces"));
  m.def("fill", &fill, py::arg("chunks"));
  m.def("scatter", &scatter, py::arg("source"), py::arg("pieces"));
}

}  // namespace dos
