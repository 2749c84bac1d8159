#include "dispatch.hpp"

#include <stdexcept>

namespace dos {
namespace {

std::vector<Isa> detect() {
  std::vector<Isa> isas;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) isas.push_back({"avx512", avx512_kernel, avx512_examine, avx512_downscale});
  if (avx2) isas.push_back({"avx2", avx2_kernel, avx2_examine, avx2_downscale});
#elif defined(__aarch64__)
  isas.push_back({"neon", neon_kernel, neon_examine, neon_downscale});
#endif
  isas.push_back({"scalar", scalar_kernel, scalar_examine, scalar_downscale});
  return isas;
}

}  // namespace

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

const Isa& find_isa(const std::string& name) {
  for (const Isa& isa : available_isas()) {
    if (name == isa.name) return isa;
  }
  throw std::invalid_argument("no instruction set '" + name + "' in this build on this machine");
}

}  // namespace dos
