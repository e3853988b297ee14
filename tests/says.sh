# What the checks of programs share; sourced. `there` is a folder that goes with the script, `wrong` its verdict.
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
wrong=0
complain() { echo "$*"; wrong=1; }

# says STATUS TEXT COMMAND…: it ends with that status within $limit seconds, and prints the text; where one_line is set, a
# refusal (2) is one line.
says() {
  status=$1 text=$2
  shift 2
  timeout --foreground "$limit" "$@" >"$there/out" 2>&1
  got=$?
  [ $got -eq "$status" ] || complain "$*: exit status $got, expected $status: $(cat "$there/out")"
  grep -qF -- "$text" "$there/out" || complain "$*: does not say '$text' but: $(cat "$there/out")"
  [ "$status" -ne 2 ] || [ -z "${one_line:-}" ] || [ "$(wc -l <"$there/out")" -eq 1 ] ||
    complain "$*: more than one line: $(cat "$there/out")"
}
