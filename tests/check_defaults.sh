#!/bin/sh
# Strategies learn at their default constants: those of dist/lab/DEFAULTS.md that take a few seconds and are far above its bound.
# Deterministic: otherwise the choice of convolution algorithms decides whether local-sgd:8 diverges (DEFAULTS.md).
[ -x "${BUILD:-build}/tandem-run" ] || { echo 'no tandem-run: built without UCX'; exit 77; }
[ -d "${TANDEM_DATA:-}/fashion-mnist" ] || { echo 'no Fashion-MNIST in $TANDEM_DATA'; exit 77; }
OPTIONS=--deterministic exec sh dist/lab/defaults.sh local-sgd:8 outer:H=20 outer+delayed-nesterov daso ddc-asgd
