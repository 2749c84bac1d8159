// What the Python module has for reading and writing files.
#pragma once

#include <pybind11/pybind11.h>

namespace dos {

void bind_io(pybind11::module_& m);

}  // namespace dos
