// How many threads this process may keep busy.
#pragma once

#include <string>

namespace dos {

// CPUs' worth of time that the control groups of this process allow, v2 or v1; infinity
// without a limit. groups lists them, mount is where their files are.
double cpu_quota(const std::string& groups = "/proc/self/cgroup",
                 const std::string& mount = "/sys/fs/cgroup");

// CPUs in the affinity mask, or the cgroup's CPU quota rounded up if that is less; at
// least 1.
int default_thread_count();

}  // namespace dos
