// The Python module dos.kernels._native; see _native.pyi for what each function promises.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/cpu_count.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/examine.hpp"
#include "cpu/fp_mode.hpp"
#include "cpu/thread_pool.hpp"
#include "cpu/update.hpp"

namespace py = pybind11;

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
  const py::gil_scoped_release release;
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
    const py::gil_scoped_release release;
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
  const py::gil_scoped_release release;
  dos::downscale(reinterpret_cast<const float*>(source), reinterpret_cast<void*>(target), n,
                 format, chosen, pool);
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const dos::Isa& isa : dos::available_isas()) names.emplace_back(isa.name);
  return names;
}

void run_python(dos::ThreadPool& pool, std::size_t n_tasks, const py::function& fn) {
  const py::gil_scoped_release release;
  pool.run(n_tasks, [&fn](std::size_t i) {
    const py::gil_scoped_acquire acquire;
    fn(i);
  });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Compiled kernels; the types and promises are in _native.pyi.";
  // Workers take the GIL for Python tasks only, so joining them never needs it.
  py::class_<dos::ThreadPool>(m, "ThreadPool")
      .def(py::init<int>(), py::arg("threads") = 0)
      .def_property_readonly("threads", &dos::ThreadPool::threads)
      .def("run", &run_python, py::arg("n_tasks"), py::arg("fn"))
      .def("close", &dos::ThreadPool::close, py::call_guard<py::gil_scoped_release>());
  m.def("adam_update", &adam_update, py::arg("tasks"), py::arg("isa"),
        py::arg("pool") = py::none());
  m.def("examine", &examine_gradient, py::arg("g"), py::arg("numel"), py::arg("g_dtype"),
        py::arg("out"), py::arg("squares"), py::arg("isa"), py::arg("pool") = py::none());
  m.def("downscale", &downscale, py::arg("source"), py::arg("target"), py::arg("numel"),
        py::arg("w_dtype"), py::arg("isa"), py::arg("pool") = py::none());
  m.def("available_isas", &isa_names);
  m.def("default_thread_count", &dos::default_thread_count);
}
