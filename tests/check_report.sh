#!/bin/sh
# The page about runs (examples/report.py): report_test.py reads the pages that it makes.
command -v python3 >/dev/null || { echo 'no python3: apt-get install python3'; exit 77; }
BUILD=${BUILD:-build} exec python3 -B tests/report_test.py
