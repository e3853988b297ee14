#!/bin/sh
# What `make install` lays down is enough: a program outside the tree, with nothing but pkg-config's word for where
# Tandem is, builds and trains; so do all lines of examples/from_pytorch.md. `make uninstall` takes everything away again.
set -eu
command -v pkg-config >/dev/null || { echo "there is no pkg-config"; exit 77; }
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
make -s --no-print-directory install PREFIX="$there/usr"

# The program of examples/from_pytorch.md, and what the page says that it prints.
page=$(pwd)/examples/from_pytorch.md
awk '/^```cpp/ { on = 1; next } /^```/ { on = 0 } on' "$page" >"$there/program.cpp"
awk '/^```/ { fence++; next } fence == 3' "$page" >"$there/expected"
# The second column of its tables, a statement a line.
{
  cat <<'END'
#include <iostream>
#include "autograd/elementwise.h"
#include "tandem.h"
using namespace tandem;
struct Softsign {
  static constexpr auto name = "softsign";
  static constexpr From from = From::x;
  template <class A> A f(A x) const { return x; }
  template <class A> A df(A g, A) const { return g; }
};
void page(std::unique_ptr<Backend> backend, RunConfig o, Module& net, Model model, Tensor t, Tensor s, Tensor labels, Tensor mask,
          Tensor index, Variable x, Variable y, Variable w, FlatParameters& flat, Optimizer& optimizer, Dataset data, Loaders& loaders) {
END
  awk -F ' *[|] *' '/^\| `/ { gsub(/^`|`$/, "", $3); print "  { " $3 "; }  // " FILENAME ":" FNR }' "$page"
  echo '}'
} >"$there/table.cpp"
cd "$there"
PKG_CONFIG_PATH=$there/usr/lib/pkgconfig
export PKG_CONFIG_PATH
# shellcheck disable=SC2046
${CXX:-g++} -std=c++20 -w -fsyntax-only table.cpp $(pkg-config --cflags tandem) || { echo "a line of $page is no C++"; exit 1; }
[ "$(grep -c '^  {' table.cpp)" -gt 40 ] || { echo "the tables of $page are no longer read"; exit 1; }
# shellcheck disable=SC2046
${CXX:-g++} -std=c++20 program.cpp $(pkg-config --cflags --libs tandem) -o program
./program >said
cmp -s said expected || { echo "the program of $page says: $(cat said)"; exit 1; }

cd "$OLDPWD"
make -s --no-print-directory uninstall PREFIX="$there/usr"
left=$(find "$there/usr" ! -type d)
[ -z "$left" ] || { echo "make uninstall left $left"; exit 1; }
