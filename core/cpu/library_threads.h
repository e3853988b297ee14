// oneDNN's parallel regions on the threads of our team (core/team.h). Its builds in Debian and Ubuntu call libgomp, whose threads
// look for work for milliseconds before they sleep: beside another program on the same cores both collapse. libgomp reads the
// variables that bound this when it is loaded, before any code of a library's user runs.
#pragma once
#include "core/team.h"

namespace tandem::cpu {

// While one exists, the calling thread's regions of the library have `threads` threads of our team. What else in the program uses
// OpenMP has libgomp's, as ever. Signals wait until it ends.
class LibraryThreads {
 public:
  explicit LibraryThreads(int threads);
  ~LibraryThreads();
  LibraryThreads(const LibraryThreads&) = delete;

 private:
  SignalsWait wait_;
  int before_;
};

long library_regions();  // of this thread that ran on our team, so far; for tests

}  // namespace tandem::cpu
