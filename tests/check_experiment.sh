#!/bin/sh
# The search, the tables and the checks of dist/lab/experiment.py; that the committed results are read; one row of them again.
set -u
command -v python3 >/dev/null || { echo 'no python3: apt-get install python3'; exit 77; }
python3 -c 'import scipy' 2>/dev/null || { echo 'no scipy: apt-get install python3-scipy'; exit 77; }
limit=120 one_line=1
. tests/says.sh
experiment="python3 -B dist/lab/experiment.py"
says 0 'OK' python3 -B tests/experiment_test.py
for plan in examples/experiments/*.json; do says 0 'Each cell: ' $experiment "$plan" --table; done
says 0 '26 runs, 6 of 6 final' $experiment examples/experiments/small.json --status
says 2 'is not there: make builds it' env BUILD=nothing $experiment examples/experiments/small.json --table
cp examples/experiments/small.json "$there/new.json"
says 2 'there are no results' $experiment "$there/new.json" --table
says 2 '--check 0: expected' $experiment examples/experiments/small.json --check 0
says 2 '--jobs 0: expected' $experiment examples/experiments/small.json --jobs 0
says 2 "--jobs: invalid int value: 'x'" $experiment examples/experiments/small.json --jobs x
says 2 "$there/none.json: No such file" $experiment "$there/none.json"
says 2 "$there: Is a directory" $experiment "$there"
printf '\377' >"$there/bytes.json"
says 2 'bytes.json:1: ' $experiment "$there/bytes.json"
sed '5s/"momentum"/momentum/' examples/experiments/small.jsonl >"$there/new.jsonl"
says 2 'new.jsonl:5: is damaged' $experiment "$there/new.json" --table
rm "$there/new.jsonl" && mkdir "$there/new.jsonl"
says 2 'new.jsonl: Is a directory' $experiment "$there/new.json"
rmdir "$there/new.jsonl"
one_line=
says 2 'all of Fashion-MNIST is needed' env TANDEM_DATA="$there" $experiment "$there/new.json"
one_line=1
[ ! -e "$there/new.jsonl" ] || complain 'a run began without its data'
[ -z "${TANDEM_DATA:-}" ] || says 0 'agrees' $experiment examples/experiments/small.json --check 1,7
exit $wrong
