#!/bin/sh
# tests/run.sh BINARY [CHECK.sh…]: runs the GoogleTest binary in several processes side by side, then the scripts.
# Shows each suite as it ends, everything a failing test said, and the names of skipped tests; the last line counts.
# A process that crashes or hangs loses the tests it had not run yet: they count as failed.
#
#   TEST_SHARDS   processes (default: one per core, at most 4: the tests themselves use threads)
#   TEST_TIMEOUT  seconds for each process and each script (default 900)
#   GTEST_FILTER  as GoogleTest has it
set -u
binary=$1
shift
cores=$(nproc)
shards=${TEST_SHARDS:-$((cores < 4 ? cores : 4))}
limit=${TEST_TIMEOUT:-900}
logs=$(dirname "$binary")/test-logs
rm -rf "$logs"
mkdir -p "$logs"
# ThreadSanitizer: libraries compiled without it (oneDNN) are not judged.
export TSAN_OPTIONS="${TSAN_OPTIONS:-ignore_noninstrumented_modules=1}"

# --foreground keeps the tests in the caller's process group, so that ^C and an outer timeout reach them.
run_shard() {
  {
    GTEST_COLOR=no GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$1 \
      timeout --foreground -k 10 "$limit" "$binary" 2>&1 </dev/null
    echo "[  STATUS  ] $?"
  } | tee "$logs/shard-$1.log" | awk -v counts="$logs/shard-$1.counts" -v limit="$limit" '
    function name(line) { sub(/^.*\] /, "", line); sub(/ \([0-9]+ ms\)$/, "", line); return line }
    function last_word(line) { sub(/^.*\] /, "", line); return line }
    /^\[==========\] Running / { planned = $3; next }
    /^\[ RUN      \] /         { running = name($0); said = ""; next }
    running && /\[       OK \] / && said !~ /WARNING: ThreadSanitizer/ { passed++; running = ""; next }
    running && /\[       OK \] /  { sub(/\[       OK/, "[  FAILED ") }  # it ran to its end, but raced
    running && /\[  SKIPPED \] /  {
      skipped++; gsub(/\n/, " ", said); print "  skipped " running ": " said; running = ""; next
    }
    running && /\[  FAILED  \] /  { failed++; printf "%sFAILED %s\n", said, name($0); running = ""; fflush(); next }
    /^\[  STATUS  \] /         { status = last_word($0); next }
    running                    { if ($0 !~ /: Skipped$/) said = said $0 "\n"; next }
    /^\[----------\] .* ms total\)$/ { sub(/^\[----------\] /, ""); print "  " $0; fflush(); next }
    /^\[/ || /^$/ || /^Note: / || / FAILED TESTS?$/ || /^  YOU HAVE / || /^Running main/ { next }
    { print; fflush() }
    END {
      if (running) { failed++; printf "%sFAILED %s: it did not finish (exit status %s)\n", said, running, status }
      if (status == 124 || status == 137) print "the tests were stopped after " limit " s"
      lost = planned - passed - failed - skipped
      if (lost > 0) { failed += lost; print "FAILED " lost " more tests: the process ended before their turn" }
      if (status != 0 && !failed) { failed = 1; print "FAILED: the test program ended with exit status " status }
      print passed + 0, failed + 0, skipped + 0 > counts
    }'
}

for shard in $(seq 0 $((shards - 1))); do run_shard "$shard" & done
wait

# Two scripts at a time: they wait more than they compute.
printf '%s\n' "$@" | xargs -r -P 2 -n 1 sh "$(dirname "$0")/run_check.sh" "$logs" "$limit" || {
  echo 'FAILED: not every script was run to its end'
  echo 0 1 0 >"$logs/scripts.counts"
}

cat "$logs"/*.counts | awk '
  { passed += $1; failed += $2; skipped += $3 }
  END {
    if (skipped) print skipped " skipped"
    print passed + 0 " passed, " failed + 0 " failed"
    exit failed > 0 || passed == 0
  }'
