// Which instruction sets this build and this machine share.
#pragma once

#include <string>
#include <vector>

#include "adam.hpp"
#include "gradient.hpp"

namespace dos {

struct Isa {
  const char* name;
  KernelTable kernel;
  ExamineKernel (*examine)(DType g);
  DownscaleKernel (*downscale)(DType w);
};

// Best first; "scalar" is always the last.
const std::vector<Isa>& available_isas();

// Throws std::invalid_argument for a name that is not among available_isas().
const Isa& find_isa(const std::string& name);

}  // namespace dos
