#!/bin/sh
# tests/run_check.sh LOGS SECONDS CHECK.sh: runs a script within so many seconds, and writes its output and its counts to LOGS.
# A script prints what is wrong and exits with 0 (passed), 77 (skipped: it prints why) or anything else (failed).
logs=$1 limit=$2 check=$3
said=$logs/$(basename "$check").log
timeout --foreground -k 10 "$limit" sh "$check" >"$said" 2>&1 </dev/null
status=$?
case $status in
  0) counts='1 0 0' && echo "  $check" ;;
  77) counts='0 0 1' && echo "  skipped $check: $(cat "$said")" ;;
  *) counts='0 1 0' && cat "$said" && echo "FAILED $check (exit status $status)" ;;
esac
echo "$counts" >"$said.counts"
