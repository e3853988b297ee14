// What this process may have of the machine: cores and memory, where a cgroup (a container, a batch system) grants
// less.
#pragma once
#include <cstddef>
#include <string>

namespace tandem {

// Cores' worth of time that the cgroup grants: cpu.max, or v1's cpu.cfs_quota_us. Very large: no limit.
double core_quota();

// Bytes that can be taken before the kernel ends a process: MemAvailable, and what the cgroup (memory.max, or v1's
// memory.limit_in_bytes) leaves beside what it could drop. SIZE_MAX: unknown.
std::size_t available_memory();

// Whether the parent had this process ignore SIGHUP (nohup). A program that calls it has its closed standard streams
// opened to /dev/null before main() (process_start.cpp).
bool hangup_ignored();

std::string cpu_model();  // "AMD EPYC 9R14", as /proc/cpuinfo has it; "CPU": unknown

}  // namespace tandem
