#!/bin/sh
# tests/run_check.sh LOGS SECONDS CHECK.sh: runs a script within so many seconds, and writes what it says and its counts to LOGS.
# A script says what is wrong and exits with 0 (passed), 77 (skipped: it says why) or anything else (failed).
logs=$1 limit=$2 check=$3
said=$logs/$(basename "$check").log
timeout --foreground -k 10 "$limit" sh "$check" >"$said" 2>&1 </dev/null
status=$?
case $status in
  0) echo 1 0 0 && echo "  $check" >&3 ;;
  77) echo 0 0 1 && echo "  skipped $check: $(cat "$said")" >&3 ;;
  *) echo 0 1 0 && { cat "$said" && echo "FAILED $check (exit status $status)"; } >&3 ;;
esac 3>&1 >"$said.counts"
exit 0
