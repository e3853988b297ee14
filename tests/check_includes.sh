#!/bin/sh
# Includes run one way: core ← autograd ← layers ← dist, core ← cuda, core ← datasets ← layers; only tests include tests.
# Read from what the compiler wrote down (DEPENDENCIES: the .d files), so an include that arrives through other headers
# counts too. Prints file:line of the include at fault.
set -u

offences() {  # the .d files as arguments, sources below the current folder
  awk '
    function room(path) { sub(/\/.*/, "", path); return path }
    function plain(path) {  # a/b/../c → a/c, so that a detour hides nothing
      sub(/^(\.\/)+/, "", path)
      while (sub(/[^\/]+\/\.\.\//, "", path)) {}
      return path
    }
    function may(from, to) {
      if (to == "cuda/launch.h" || to == "cuda/check.h") return 1  # the one seam: kernels include it, through core/launch.h, under nvcc
      return index(allowed[room(from)], " " room(to) " ")
    }
    # Reports where, among the files `list` of one object, one that may not see `to` includes it.
    function locate(list, count, to,    i, line, number, found, file) {
      for (i = 1; i <= count; i++) {
        file = list[i]
        if (may(file, to)) continue
        number = 0
        while ((getline line < file) > 0) {
          number++
          if (line ~ /^[ \t]*#[ \t]*include/ && index(line, base(to))) {
            report(file ":" number ": " line "   (" room(file) "/ may include:" allowed[room(file)] ")")
            found = 1
          }
        }
        close(file)
      }
      return found
    }
    function base(path) { sub(/.*\//, "", path); return path }
    function report(text) { if (!(text in told)) { told[text] = 1; print text } }
    function finish(    i, found, last) {
      for (i = 2; i <= count; i++) if (!may(list[1], list[i])) { last = list[i]; found += locate(list, count, last) }
      if (last && !found) report(list[1] ": depends on " last)
      count = 0
    }
    BEGIN {
      allowed["core"] = " core "
      allowed["autograd"] = " core autograd "
      allowed["datasets"] = " core datasets "
      allowed["layers"] = " core autograd datasets layers "
      allowed["cuda"] = " core cuda "
      allowed["dist"] = " core autograd datasets layers cuda dist "
      allowed["examples"] = " core autograd datasets layers cuda dist examples "
      allowed["tests"] = " core autograd datasets layers cuda dist examples tests "
    }
    FNR == 1 { finish(); rule = 0 }
    /^[^ \t].*:/ && !rule { rule = 1; sub(/^[^:]*:/, "") }  # the first rule; those after it come from -MP
    rule == 1 {
      more = sub(/\\$/, "")
      for (i = 1; i <= NF; i++) { path = plain($i); if (room(path) in allowed) list[++count] = path }
      if (!more) rule = 2
    }
    END { finish() }
  ' "$@"
}

# First the check is checked: a small tree with one fault, reached through an innocent header, must be found.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/core" "$tree/autograd"
printf '#pragma once\n#include "autograd/b.h"\n' >"$tree/core/a.h"
printf '#include "core/a.h"\n' >"$tree/core/a.cpp"
touch "$tree/autograd/b.h"
printf 'build/obj/core/a.o: core/a.cpp core/a.h \\\n ./core/../autograd/b.h\ncore/a.h:\n' >"$tree/a.d"
case $(cd "$tree" && offences a.d) in
  'core/a.h:2: #include "autograd/b.h"'*) ;;
  *) echo "check_includes.sh does not find the fault it is tried on"; exit 1 ;;
esac

files=
for d in ${DEPENDENCIES:-$(find "${BUILD:-build}" -name '*.d')}; do
  [ -f "$d" ] && files="$files $d"
done
[ -n "$files" ] || { echo "no dependency files: build first"; exit 1; }
found=$(offences $files)
[ -z "$found" ] || { echo "$found"; exit 1; }
