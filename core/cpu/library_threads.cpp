// Defines the OpenMP entry points that oneDNN calls. The loader finds definitions in the program before those in
// libgomp. Inside a LibraryThreads they use our team; otherwise they forward to libgomp.
#include "core/cpu/library_threads.h"

#include <dlfcn.h>

#include <utility>

#include "core/error.h"

namespace tandem::cpu {
namespace {

struct Region {  // a parallel region of the library, and this thread's index in it
  int part = 0, parts = 1;
  team::Barrier* barrier = nullptr;
};
thread_local Region region;
thread_local int threads_wanted = 0;  // 0: outside of LibraryThreads

bool ours() { return threads_wanted > 0; }

// libgomp's function of this name.
template <class F>
F* beyond(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (!found) fail("OpenMP: this program has no ", name, ": link it with -fopenmp");
  return reinterpret_cast<F*>(found);
}

}  // namespace

LibraryThreads::LibraryThreads(int threads) : before_(std::exchange(threads_wanted, threads)) {}
LibraryThreads::~LibraryThreads() { threads_wanted = before_; }

}  // namespace tandem::cpu

using namespace tandem;
using namespace tandem::cpu;

extern "C" {

int omp_get_max_threads() {
  static auto* const other = beyond<int()>("omp_get_max_threads");
  return ours() ? threads_wanted : other();
}
int omp_get_thread_num() {
  static auto* const other = beyond<int()>("omp_get_thread_num");
  return ours() ? region.part : other();
}
int omp_get_num_threads() {
  static auto* const other = beyond<int()>("omp_get_num_threads");
  return ours() ? region.parts : other();
}
int omp_in_parallel() {
  static auto* const other = beyond<int()>("omp_in_parallel");
  return ours() ? region.parts > 1 : other();
}
void GOMP_barrier() {
  static auto* const other = beyond<void()>("GOMP_barrier");
  if (!ours()) return other();
  if (region.barrier) region.barrier->wait();
}
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  static auto* const other = beyond<void(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel");
  if (!ours()) return other(body, data, threads, flags);
  const int wanted = threads_wanted, parts = team::inside() ? 1 : threads ? int(threads) : wanted;
  team::Barrier barrier(parts);
  auto run = [&](int part) {
    const Region outer = std::exchange(region, {part, parts, parts > 1 ? &barrier : nullptr});
    const int before = std::exchange(threads_wanted, wanted);
    body(data);
    region = outer;
    threads_wanted = before;
  };
  team::run(
      parts, [](const void* r, int part) { (*static_cast<const decltype(run)*>(r))(part); }, &run);
}
}
