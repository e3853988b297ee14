#!/bin/sh
# Three hundred of `make strangers`.
exec sh tests/strangers.sh 300
