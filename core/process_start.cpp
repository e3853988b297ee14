// What a process was given by its parent, before any library has changed it (UCX takes SIGHUP in its constructor).
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>

#include "core/machine.h"

namespace tandem {
namespace {

bool ignored = false;

// Only system calls: here no library has begun. A standard stream that is closed becomes /dev/null, so that no file of
// ours gets its number, and with it what is printed.
void at_start(int, char**, char**) {
  unsigned long hangup[8] = {};  // of the kernel's struct sigaction the first is the handler
  syscall(SYS_rt_sigaction, SIGHUP, nullptr, hangup, 8);
  ignored = hangup[0] == 1;  // SIG_IGN
  for (int stream = 0; stream < 3; stream++)
    if (syscall(SYS_fcntl, stream, F_GETFD) < 0) syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR, 0);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const before_libraries)(int, char**, char**) = at_start;

}  // namespace

bool hangup_ignored() { return ignored; }

}  // namespace tandem
