// Which CPUs this process has, on which NUMA nodes they are, and which thread sits where.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace dos {

using Cpus = std::vector<int>;  // their numbers

// The affinity mask of a thread, on a machine of any size.
class CpuMask {
 public:
  CpuMask() = default;
  explicit CpuMask(const Cpus& cpus);

  // Of the calling thread; empty where the system does not tell.
  static CpuMask current();

  bool empty() const { return words_.empty(); }
  Cpus cpus() const;

  // Binds the calling thread. An empty mask and one that the system refuses change nothing:
  // where a thread runs is a matter of speed only.
  void apply() const noexcept;

 private:
  std::vector<unsigned long> words_;  // as the kernel lays them out
};

// The CPUs that the calling thread may use, ascending; at least one.
Cpus allowed_cpus();

// The allowed CPUs by NUMA node, in the nodes' order; none is empty. Within a node one CPU
// of each core comes first, then their hyperthreads. A system that does not tell the node
// of every CPU has one node.
std::vector<Cpus> numa_nodes(const Cpus& allowed,
                             const std::string& root = "/sys/devices/system");

// The CPUs that each seat of a pool is bound to; empty: not bound. The seats are divided
// over the nodes in runs, in proportion to their CPUs, and bound to the CPUs of the node;
// with pin, each to one CPU, which nobody shares before all are taken. With one node and
// no pin nobody is bound.
std::vector<Cpus> seat_cpus(std::size_t threads, const std::vector<Cpus>& nodes, bool pin);

}  // namespace dos
