// The Python module dos.kernels._native; see _native.pyi for what each function promises.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cpu_count.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/examine.hpp"
#include "cpu/first_touch.hpp"
#include "cpu/fp_mode.hpp"
#include "cpu/sweep.hpp"
#include "cpu/thread_pool.hpp"
#include "cpu/topology.hpp"
#include "cpu/update.hpp"
#include "gil.hpp"
#include "io_bindings.hpp"

namespace py = pybind11;

using dos::GilReleased;
using dos::with_gil;

namespace {

// Reads the attributes of a dos.kernels.scalars.AdamScalars.
dos::Scalars read_scalars(py::handle source) {
  const auto number = [source](const char* name) { return source.attr(name).cast<float>(); };
  const float scale = number("scale");
  return {number("c1"),           number("d1"),
          number("c2"),           number("d2"),
          number("step_size"),    number("inv_sqrt_bc2"),
          number("decay"),        number("weight_decay"),
          number("eps"),          source.attr("maximize").cast<bool>() ? -scale : scale,
          source.attr("decoupled").cast<bool>()};
}

dos::DType read_dtype(py::handle source, dos::DType smallest) {
  const int code = source.cast<int>();
  if (code < static_cast<int>(smallest) || code > static_cast<int>(dos::DType::fp16)) {
    throw py::value_error("unknown number format " + std::to_string(code));
  }
  return static_cast<dos::DType>(code);
}

std::size_t read_numel(py::ssize_t numel) {
  if (numel < 0) throw py::value_error("negative number of elements");
  return static_cast<std::size_t>(numel);
}

template <class T>
T* read_address(py::handle source) {
  return reinterpret_cast<T*>(source.cast<std::uintptr_t>());
}

std::vector<dos::Segment> read_segments(const py::sequence& tasks) {
  // A conversion from Python's double would flush a subnormal eps in the caller's mode.
  const dos::FpMode mode;
  std::vector<dos::Segment> segments;
  segments.reserve(tasks.size());
  py::object previous;
  dos::Scalars scalars{};
  for (const py::handle item : tasks) {
    const auto task = py::reinterpret_borrow<py::object>(item).cast<py::tuple>();
    if (task.size() != 9) throw py::value_error("a task has nine fields");
    // Neighbours mostly share their scalars, whose eleven attributes are read only once.
    if (!previous.is(task[8])) {
      previous = task[8];
      scalars = read_scalars(previous);
    }
    const std::size_t numel = read_numel(task[5].cast<py::ssize_t>());
    segments.push_back({read_address<float>(task[0]), read_address<float>(task[1]),
                        read_address<float>(task[2]), read_address<const void>(task[3]),
                        read_address<void>(task[4]), numel,
                        read_dtype(task[6], dos::DType::fp32),
                        read_dtype(task[7], dos::DType::none), scalars});
  }
  return segments;
}

void adam_update(const py::sequence& tasks, const std::string& isa, dos::ThreadPool* pool) {
  const dos::Isa& chosen = dos::find_isa(isa);
  const std::vector<dos::Segment> segments = read_segments(tasks);
  const GilReleased released;
  dos::update(segments, chosen, pool);
}

py::tuple examine_gradient(std::uintptr_t g, py::ssize_t numel, const py::handle& g_dtype,
                           std::uintptr_t out, std::uintptr_t squares, const std::string& isa,
                           dos::ThreadPool* pool) {
  const dos::Isa& chosen = dos::find_isa(isa);
  const dos::Gradient gradient{reinterpret_cast<const void*>(g), read_numel(numel),
                               read_dtype(g_dtype, dos::DType::fp32)};
  dos::GradientFigures figures;
  {
    const GilReleased released;
    figures = dos::examine(gradient, reinterpret_cast<float*>(out),
                           reinterpret_cast<double*>(squares), chosen, pool);
  }
  return py::make_tuple(figures.max_abs, figures.fingerprint);
}

void downscale(std::uintptr_t source, std::uintptr_t target, py::ssize_t numel,
               const py::handle& w_dtype, const std::string& isa, dos::ThreadPool* pool) {
  const dos::Isa& chosen = dos::find_isa(isa);
  const dos::DType format = read_dtype(w_dtype, dos::DType::bf16);
  const std::size_t n = read_numel(numel);
  const GilReleased released;
  dos::downscale(reinterpret_cast<const float*>(source), reinterpret_cast<void*>(target), n,
                 format, chosen, pool);
}

void sweep(std::uintptr_t p, std::uintptr_t m, std::uintptr_t v, std::uintptr_t g,
           std::uintptr_t w, std::size_t numel, bool stream, dos::ThreadPool* pool) {
  if ((p | m | v | g | w) % 64 != 0) throw py::value_error("an array is not on a cache line");
  const auto fp32 = [](std::uintptr_t address) { return reinterpret_cast<float*>(address); };
  const auto words = [](std::uintptr_t at) { return reinterpret_cast<std::uint16_t*>(at); };
  const GilReleased released;
  dos::sweep({fp32(p), fp32(m), fp32(v), words(g), words(w), numel}, stream, pool);
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const dos::Isa& isa : dos::available_isas()) names.emplace_back(isa.name);
  return names;
}

void run_python(dos::ThreadPool& pool, std::size_t n_tasks, const py::function& fn) {
  const GilReleased released;
  pool.run(n_tasks, [&fn](std::size_t i) {
    std::optional<py::gil_scoped_acquire> acquired;
    with_gil([&] { acquired.emplace(); });
    with_gil([&] { fn(i); });
  });
}

using Nodes = std::vector<dos::Cpus>;

std::unique_ptr<dos::ThreadPool> make_pool(int threads, bool pin,
                                           const std::optional<Nodes>& nodes) {
  if (!nodes) return std::make_unique<dos::ThreadPool>(threads, pin);
  return std::make_unique<dos::ThreadPool>(threads, pin, *nodes);
}

Nodes numa_nodes(const std::optional<dos::Cpus>& cpus, const std::string& root) {
  return dos::numa_nodes(cpus ? *cpus : dos::allowed_cpus(), root);
}

void first_touch(const std::vector<std::pair<std::uintptr_t, std::size_t>>& blocks,
                 dos::ThreadPool& pool) {
  std::vector<dos::Block> read;
  read.reserve(blocks.size());
  for (const auto& [address, n_bytes] : blocks) {
    read.push_back({reinterpret_cast<char*>(address), n_bytes});
  }
  const GilReleased released;
  dos::first_touch(read, pool);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Compiled kernels; the types and promises are in _native.pyi.";
  // Workers take the GIL for Python tasks only, so joining them never needs it.
  py::class_<dos::ThreadPool>(m, "ThreadPool")
      .def(py::init(&make_pool), py::arg("threads") = 0, py::arg("pin") = false,
           py::arg("nodes") = py::none())
      .def_property_readonly("threads", &dos::ThreadPool::threads)
      .def("run", &run_python, py::arg("n_tasks"), py::arg("fn"))
      .def("close", &dos::ThreadPool::close, py::call_guard<GilReleased>());
  m.def("adam_update", &adam_update, py::arg("tasks"), py::arg("isa"),
        py::arg("pool") = py::none());
  m.def("examine", &examine_gradient, py::arg("g"), py::arg("numel"), py::arg("g_dtype"),
        py::arg("out"), py::arg("squares"), py::arg("isa"), py::arg("pool") = py::none());
  m.def("downscale", &downscale, py::arg("source"), py::arg("target"), py::arg("numel"),
        py::arg("w_dtype"), py::arg("isa"), py::arg("pool") = py::none());
  m.def("sweep", &sweep, py::arg("p"), py::arg("m"), py::arg("v"), py::arg("g"), py::arg("w"),
        py::arg("numel"), py::kw_only(), py::arg("stream"), py::arg("pool") = py::none());
  m.def("available_isas", &isa_names);
  m.def("first_touch", &first_touch, py::arg("blocks"), py::arg("pool"));
  m.def("default_thread_count", &dos::default_thread_count);
  m.def("cpu_quota", &dos::cpu_quota, py::arg("groups") = "/proc/self/cgroup",
        py::arg("mount") = "/sys/fs/cgroup");
  m.def("numa_nodes", &numa_nodes, py::arg("cpus") = py::none(),
        py::arg("root") = "/sys/devices/system");
  dos::bind_io(m);
  m.def("seat_cpus", &dos::seat_cpus, py::arg("threads"), py::arg("nodes"), py::arg("pin"));
}
