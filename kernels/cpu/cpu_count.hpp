// How many threads this process may keep busy.
#pragma once

namespace dos {

// CPUs in the affinity mask, or the cgroup's CPU quota (v2 or v1) rounded up if that is
// less; at least 1.
int default_thread_count();

}  // namespace dos
