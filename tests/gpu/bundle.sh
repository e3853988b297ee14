#!/bin/sh
# tests/gpu/bundle.sh FOLDER: programs for a GPU of compute capability 9.0, built here without one, with what another machine needs
# beside a driver and pip's CUDA wheels: oneDNN and other shared libraries, Fashion-MNIST, and tests/gpu/run.sh, which runs there.
set -eu
folder=$1
build=${BUILD:-build-bundle}
programs='gpu_check airbench train'
# shellcheck disable=SC2046
make --no-print-directory -j"$(nproc)" CUDA=1 CUDA_ARCH=90 UCX=0 MARCH=x86-64-v3 BUILD="$build" $(for p in $programs; do echo "$build/$p"; done)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder" "$work/bin" "$work/lib" "$work/gpu"
for p in $programs; do strip -o "$work/bin/$p" "$build/$p"; done
for p in $programs; do ldd "$work/bin/$p"; done | awk '$3 ~ /^\// { print $3 }' | sort -u |
  grep -vE '/lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|cudart|cublas|cublasLt|cudnn)\.so' | while read -r library; do
  cp -L "$library" "$work/lib/"
  strip --strip-unneeded "$work/lib/$(basename "$library")"
done
cp tests/gpu/*.py tests/gpu/*.awk "$work/gpu/"
tar -C "$work" -cf - bin lib gpu | xz -6 --lzma2=dict=64MiB >"$folder/programs.tar.xz"
cp tests/gpu/run.sh "$folder/"
if [ -d "${TANDEM_DATA:-}/fashion-mnist" ]; then
  mkdir -p "$folder/data/fashion-mnist"
  cp -f "$TANDEM_DATA"/fashion-mnist/*.gz "$folder/data/fashion-mnist/"
fi
du -sh "$folder"
