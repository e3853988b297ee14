#!/bin/sh
# The book: the files that README.md lists as a reading order exist, are at most 40, and have at most 6,000 lines of code, where blank
# lines and comments are not counted.
set -u
book=$(sed -n '/reading order$/,/^## How fast/p' README.md | grep -oE '[a-z_]+/[a-z_./]+\.(h|cpp)' | sort -u)
wrong=0 files=0 lines=0
for file in $book; do
  [ -f "$file" ] || { echo "README.md, reading order: there is no $file"; wrong=1; continue; }
  files=$((files + 1))
  lines=$((lines + $(grep -cvE '^[[:space:]]*(//.*)?$' "$file")))
done
[ "$files" -gt 20 ] || { echo "README.md names only $files files in its reading order"; wrong=1; }
[ "$files" -le 40 ] || { echo "the reading order has $files files, more than 40"; wrong=1; }
[ "$lines" -le 6000 ] || { echo "the reading order has $lines lines of code, more than 6000"; wrong=1; }
exit $wrong
