#!/bin/sh
# Six of `make drill`'s accidents.
exec sh tests/drill.sh 6 "${DRILL_SEED:-1}"
