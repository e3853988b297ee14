#!/bin/sh
# What `make install` lays down is enough: a program outside the tree, with nothing but pkg-config's word for where
# Tandem is, builds and trains a step; `make uninstall` takes everything away again.
set -eu
command -v pkg-config >/dev/null || { echo "there is no pkg-config"; exit 77; }
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
make -s --no-print-directory install PREFIX="$there/usr"

cat >"$there/program.cpp" <<'END'
#include <cstdio>
#include "autograd/ops.h"
#include "core/backend.h"
#include "layers/layers.h"
#include "layers/optim/optimizer.h"

int main() {
  using namespace tandem;
  auto backend = cpu_backend(1);
  Linear layer(2, 1);
  ParameterSpace space(layer, *backend, 1);
  SGD sgd({.learning_rate = 0.05});
  sgd.bind(space);
  Variable x(Tensor::of(*backend, {2, 2}, {1, 2, 3, 4})), loss;
  for (int step = 0; step < 100; step++) {
    loss = mean(square(layer(x)));
    space.zero_gradients();
    space.backward(loss);
    sgd.step();
  }
  std::printf("%s\n", loss.item() < 0.1 ? "learned" : "did not learn");
}
END
cd "$there"
PKG_CONFIG_PATH=$there/usr/lib/pkgconfig
export PKG_CONFIG_PATH
# shellcheck disable=SC2046
${CXX:-g++} -std=c++20 program.cpp $(pkg-config --cflags --libs tandem) -o program
[ "$(./program)" = learned ] || { echo "the program says: $(./program)"; exit 1; }

cd "$OLDPWD"
make -s --no-print-directory uninstall PREFIX="$there/usr"
left=$(find "$there/usr" ! -type d)
[ -z "$left" ] || { echo "make uninstall left $left"; exit 1; }
