#!/usr/bin/env bash
# From nothing to a trained classifier: `make demo` on a Debian 12 or Ubuntu that has git and make.
#
# Prints which packages are missing and why they are needed, installs them, builds, finds Fashion-MNIST ($TANDEM_DATA,
# data/, else the network), trains a small convolutional network and fails if that reaches less than 90 % on the test
# pictures. Without data or network it trains on the first 6,000 pictures, which are committed, and prints a note.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL=${MODEL:-smallcnn}
BUILD=${BUILD:-build}
METRICS=${METRICS:-$BUILD/demo.jsonl}

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

# ---- 1. What is needed -----------------------------------------------------------------------------------------------
# shellcheck disable=SC2046
bash examples/packages.sh "a compiler, libraries that make training fast, join processes or make options readable, and curl to fetch the pictures" \
  $(make -s --no-print-directory packages-demo) || true  # what is missing is left out of the build
compiler=${CXX:-g++}  # or two words: ccache g++
if ! command -v "${compiler%% *}" >/dev/null; then
  echo "A C++ compiler is needed and there is none: apt-get install g++" >&2
  exit 1
fi

# ---- 2. Build --------------------------------------------------------------------------------------------------------
say "Building"
seconds=$SECONDS
make --no-print-directory UNITED=1 "$BUILD/fashion_mnist" launcher
echo "Built in $((SECONDS - seconds)) s"

# ---- 3. Data ---------------------------------------------------------------------------------------------------------
data=
for place in ${TANDEM_DATA:+"$TANDEM_DATA"} data; do
  for form in .gz ""; do
    [ -n "$data" ] || [ ! -e "$place/fashion-mnist/train-images-idx3-ubyte$form" ] || data=$place
  done
done
if [ -z "$data" ]; then
  say "Fetching Fashion-MNIST (30 MB) into data/"
  if bash datasets/get-data.sh fashion-mnist data; then
    data=data
  else
    echo "It could not be fetched: training on its first 6,000 pictures instead."
  fi
fi
# A build without zlib cannot read .gz files.
if [ -n "$data" ] && grep -q '^  zlib off' "$BUILD/summary" &&
   [ ! -e "$data/fashion-mnist/train-images-idx3-ubyte" ]; then
  mkdir -p data/fashion-mnist
  for file in "$data"/fashion-mnist/*.gz; do gunzip -c "$file" >"data/fashion-mnist/$(basename "$file" .gz)"; done
  data=data
fi
if [ -n "$data" ]; then
  export TANDEM_DATA=$data
  EPOCHS=${EPOCHS:-5} GOAL=${GOAL:-90}  # per cent
elif grep -q '^  zlib off' "$BUILD/summary"; then
  echo "Without zlib the pictures cannot be read: apt-get install zlib1g-dev" >&2
  exit 1
else
  EPOCHS=${EPOCHS:-20} GOAL=${GOAL:-87}
fi

# ---- 4. Train --------------------------------------------------------------------------------------------------------
say "Training: $BUILD/fashion_mnist --model $MODEL --epochs $EPOCHS --metrics $METRICS"
rm -f "$METRICS"
"$BUILD/fashion_mnist" --model "$MODEL" --epochs "$EPOCHS" --metrics "$METRICS"

# The last test accuracy in the metrics, one JSON object a line, as a fraction.
accuracy=$(sed -n 's/.*"test_accuracy": *\([0-9.eE+-]*\).*/\1/p' "$METRICS" | tail -n 1)
if [ -z "$accuracy" ]; then
  echo "$METRICS holds no test_accuracy" >&2
  exit 1
fi
percent=$(awk -v a="$accuracy" 'BEGIN { printf "%.2f", 100 * a }')
say "Test accuracy $percent % after $EPOCHS epochs${data:+ (data: $data)}; every epoch is in $METRICS"
if awk -v p="$percent" -v goal="$GOAL" 'BEGIN { exit !(p < goal) }'; then
  echo "That is less than the $GOAL % expected here." >&2
  exit 1
fi
