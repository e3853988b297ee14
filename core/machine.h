// The cores and the memory that this process may use, which can be less than the machine has, because of a cgroup (a
// container, a batch system).
#pragma once
#include <cstddef>
#include <string>

namespace tandem {

// The CPU time that the cgroup grants, in cores: cpu.max, or v1's cpu.cfs_quota_us. Very large: no limit.
double core_quota();

// Bytes that can be allocated before the kernel ends a process: the smaller of MemAvailable and the remainder of the
// cgroup's limit (memory.max, or v1's memory.limit_in_bytes), in which memory that the kernel can drop counts as free.
// SIZE_MAX: unknown.
std::size_t available_memory();

// Whether the parent made this process ignore SIGHUP (nohup). In a program that calls this, standard streams that were
// closed are opened to /dev/null before main() (process_start.cpp).
bool hangup_ignored();

std::string host_name();  // "localhost": unknown
std::string cpu_model();  // "AMD EPYC 9R14", from /proc/cpuinfo; "CPU": unknown

}  // namespace tandem
