// Reads the state that a process inherits, before a library changes it (UCX handles SIGHUP in its constructor).
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>

#include "core/machine.h"

namespace tandem {
namespace {

bool ignored = false;

// Uses system calls only: no library is initialised yet. A closed standard stream is opened to /dev/null; otherwise the
// next opened file would get its number, and with it the printed output.
void at_start(int, char**, char**) {
  unsigned long hangup[8] = {};  // the first member of the kernel's struct sigaction is the handler
  syscall(SYS_rt_sigaction, SIGHUP, nullptr, hangup, 8);
  ignored = hangup[0] == 1;  // SIG_IGN
  for (int stream = 0; stream < 3; stream++)
    if (syscall(SYS_fcntl, stream, F_GETFD) < 0) syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR, 0);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const before_libraries)(int, char**, char**) = at_start;

}  // namespace

bool hangup_ignored() { return ignored; }

}  // namespace tandem
