#include "topology.hpp"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <numeric>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif

namespace dos {
namespace {

constexpr std::size_t kWordBits = 8 * sizeof(unsigned long);
// More than any kernel is built for; ends the search for a mask that is large enough.
constexpr int kMostCpus = 1 << 16;

// Lists such as "0-3,8-11", sorted; empty where there is no such file.
Cpus read_list(const std::string& path) {
  Cpus numbers;
  std::ifstream file(path);
  for (int first; file >> first;) {
    int last = first;
    if (file.peek() == '-') file.ignore() >> last;
    for (int i = first; i <= std::min(last, kMostCpus); ++i) numbers.push_back(i);
    if (file.peek() != ',') break;
    file.ignore();
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// Sorts by the place within the core, then by number.
Cpus one_of_each_core_first(const Cpus& cpus, const std::string& root) {
  std::vector<std::pair<std::ptrdiff_t, int>> placed;
  for (const int cpu : cpus) {
    const Cpus siblings =
        read_list(root + "/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    const auto before = std::count_if(siblings.begin(), siblings.end(), [&](int sibling) {
      return sibling < cpu && std::binary_search(cpus.begin(), cpus.end(), sibling);
    });
    placed.emplace_back(before, cpu);
  }
  std::sort(placed.begin(), placed.end());
  Cpus ordered;
  for (const auto& [place, cpu] : placed) ordered.push_back(cpu);
  return ordered;
}

}  // namespace

CpuMask::CpuMask(const Cpus& cpus) {
  for (const int cpu : cpus) {
    if (cpu < 0 || cpu >= kMostCpus) continue;
    const auto bit = static_cast<std::size_t>(cpu);
    if (bit / kWordBits >= words_.size()) words_.resize(bit / kWordBits + 1);
    words_[bit / kWordBits] |= 1ul << bit % kWordBits;
  }
}

CpuMask CpuMask::current() {
  CpuMask mask;
#if defined(__linux__)
  // The kernel refuses a mask shorter than its own, whose length it tells nobody.
  for (std::size_t bits = 1024; bits <= kMostCpus; bits *= 2) {
    mask.words_.assign(bits / kWordBits, 0);
    auto* const set = reinterpret_cast<cpu_set_t*>(mask.words_.data());
    if (sched_getaffinity(0, bits / 8, set) == 0) return mask;
    if (errno != EINVAL) break;
  }
  mask.words_.clear();
#endif
  return mask;
}

Cpus CpuMask::cpus() const {
  Cpus cpus;
  for (std::size_t bit = 0; bit < words_.size() * kWordBits; ++bit) {
    if (words_[bit / kWordBits] >> bit % kWordBits & 1) cpus.push_back(static_cast<int>(bit));
  }
  return cpus;
}

void CpuMask::apply() const noexcept {
#if defined(__linux__)
  if (empty()) return;
  const auto* const set = reinterpret_cast<const cpu_set_t*>(words_.data());
  static_cast<void>(sched_setaffinity(0, words_.size() * sizeof words_[0], set));
#endif
}

Cpus allowed_cpus() {
  Cpus cpus = CpuMask::current().cpus();
  if (cpus.empty()) {
    cpus.resize(std::max(1u, std::thread::hardware_concurrency()));
    std::iota(cpus.begin(), cpus.end(), 0);
  }
  return cpus;
}

std::vector<Cpus> numa_nodes(const Cpus& allowed, const std::string& root) {
  Cpus sorted = allowed;
  std::sort(sorted.begin(), sorted.end());
  std::vector<Cpus> nodes;
  std::size_t found = 0;
  for (const int node : read_list(root + "/node/online")) {
    const Cpus all = read_list(root + "/node/node" + std::to_string(node) + "/cpulist");
    Cpus ours;
    std::set_intersection(all.begin(), all.end(), sorted.begin(), sorted.end(),
                          std::back_inserter(ours));
    found += ours.size();
    if (!ours.empty()) nodes.push_back(one_of_each_core_first(ours, root));
  }
  if (found != sorted.size()) return {one_of_each_core_first(sorted, root)};
  return nodes;
}

std::vector<Cpus> seat_cpus(std::size_t threads, const std::vector<Cpus>& nodes, bool pin) {
  std::vector<Cpus> seats(threads);
  if (nodes.size() < 2 && !pin) return seats;
  std::size_t total = 0;
  for (const Cpus& node : nodes) total += node.size();
  std::size_t seat = 0, reached = 0;
  for (const Cpus& node : nodes) {
    reached += node.size();
    for (std::size_t k = 0; seat < threads && seat * total / threads < reached; ++seat, ++k) {
      seats[seat] = pin ? Cpus{node[k % node.size()]} : node;
    }
  }
  return seats;
}

}  // namespace dos
