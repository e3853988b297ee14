// Runs oneDNN's parallel regions on the threads of our team (core/team.h). The builds in Debian and Ubuntu call
// libgomp, whose threads spin for milliseconds before they sleep, which slows down all programs on the same cores.
// libgomp reads the variables that limit this when it is loaded, before a program can set them.
#pragma once
#include "core/team.h"

namespace tandem::cpu {

// While an object exists, the library's parallel regions on the calling thread use `threads` threads of our team, and
// signals are blocked on this thread. Other OpenMP code in the program uses libgomp's threads.
class LibraryThreads {
 public:
  explicit LibraryThreads(int threads);
  ~LibraryThreads();
  LibraryThreads(const LibraryThreads&) = delete;

 private:
  SignalsWait wait_;
  int before_;
};

}  // namespace tandem::cpu
