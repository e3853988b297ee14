#!/bin/sh
# What dist/lab/rehearse.py predicts, names and writes, on pretended hosts; check_hosts.sh runs it on hosts of this machine.
command -v python3 >/dev/null || { echo 'no python3: apt-get install python3'; exit 77; }
exec python3 -B tests/rehearse_test.py
