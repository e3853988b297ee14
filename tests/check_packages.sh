#!/bin/sh
# On a machine that lacks something, `make test` says what, installs it by apt-get and goes on. apt-get and dpkg-query are
# stand-ins here, on a machine that seems to have no GoogleTest; tests/fresh.sh shows the same on a fresh Debian.
set -u
limit=60
. tests/says.sh
mkdir "$there/bin"
printf '#!/bin/sh\necho "$*" >>%s/calls\n' "$there" >"$there/bin/apt-get"
printf '#!/bin/sh\nfor p; do :; done\ncase $p in *gtest*) ;; *) printf installed ;; esac\n' >"$there/bin/dpkg-query"
printf '#!/bin/sh\n[ "$1" != -n ] || shift\nexec "$@"\n' >"$there/bin/sudo"
chmod +x "$there"/bin/*
seems() {  # says, of a make to which GoogleTest is not there
  says "$1" "$2" env -u MAKEFLAGS -u MAKELEVEL -u CUDA PATH="$there/bin:$PATH" make -j1 BUILD="$there/build" GTEST_NEEDS=no/such.h "$3" "$4"
}
seems 0 '' test -n
[ ! -e "$there/calls" ] || complain "make -n test installs: $(cat "$there/calls")"
seems 2 'Not installed: libgtest-dev' test CUDA=0
grep -q 'make test needs GoogleTest (off: no/such.h not found)' "$there/out" ||  # which the stand-in has not brought
  complain "make test without GoogleTest says $(tail -n 3 "$there/out")"
grep -q ' install --no-install-recommends libgtest-dev$' "$there/calls" || complain "make test installs $(cat "$there/calls")"
rm -f "$there/calls"
seems 2 'needs GoogleTest (off: GTEST=0)' test GTEST=0
[ ! -e "$there/calls" ] || complain "make test GTEST=0 installs: $(cat "$there/calls")"

# CUDA is built unasked only for a GPU of this machine.
if ! [ -e /dev/nvidia0 ] && ! [ -e /proc/driver/nvidia ] && ! [ -e /dev/dxg ]; then
  rm -rf "$there/build"
  seems 0 '' all -n
  grep -q 'nvcc .*-o ' "$there/out" && complain "make uses nvcc where there is no GPU"
  grep -q '^  CUDA off: ' "$there/build/summary" || complain "make says of CUDA: $(grep CUDA "$there/build/summary")"
fi

mkdir -p "$there/tree/build-old" "$there/tree/core" "$there/tree/tests" "$there/tree/examples/course"
for f in Makefile core/dependencies.mk tests/targets.mk examples/course/targets.mk; do cp $f "$there/tree/$f"; done
says 0 'removed build' make -C "$there/tree" clean
[ ! -e "$there/tree/build-old" ] || complain "make clean leaves build-old"
exit $wrong
