#include "cpu_count.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "topology.hpp"

namespace dos {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// v2: "max 100000" or "150000 100000", in microseconds.
double quota_v2(const std::string& directory) {
  double quota = 0, period = 0;
  std::ifstream file(directory + "/cpu.max");
  return file >> quota >> period && quota > 0 && period > 0 ? quota / period : kUnlimited;
}

// v1: the quota is -1 when there is none.
double quota_v1(const std::string& directory) {
  double quota = 0, period = 0;
  std::ifstream quota_file(directory + "/cpu.cfs_quota_us");
  std::ifstream period_file(directory + "/cpu.cfs_period_us");
  const bool read = quota_file >> quota && period_file >> period;
  return read && quota > 0 && period > 0 ? quota / period : kUnlimited;
}

// The tightest quota of a group and its ancestors. In a container the group's path may be
// the host's and not exist here; the walk then ends at the mount, which is the container's.
double tightest(double (*quota)(const std::string&), const std::string& mount,
                std::string group) {
  double limit = quota(mount);
  while (!group.empty()) {
    limit = std::min(limit, quota(mount + group));
    const std::size_t slash = group.rfind('/');
    group.erase(slash == std::string::npos ? 0 : slash);
  }
  return limit;
}

}  // namespace

double cpu_quota(const std::string& groups, const std::string& mount) {
  double limit = kUnlimited;
  std::ifstream file(groups);
  // Lines are "id:controllers:/path"; v2 has no controllers.
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string id, controllers, path;
    std::getline(fields, id, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    if (controllers.empty()) {
      limit = std::min(limit, tightest(quota_v2, mount, path));
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      limit = std::min(limit, tightest(quota_v1, mount + "/cpu", path));
    }
  }
  return limit;
}

int default_thread_count() {
  const auto allowed = static_cast<double>(allowed_cpus().size());
  return std::max(1, static_cast<int>(std::min(allowed, std::ceil(cpu_quota()))));
}

}  // namespace dos
