#!/bin/sh
# tests/wheels.sh SITE FOLDER: makes of FOLDER what CUDA_HOME should be, of links to pip's wheels below SITE, a Python's
# site-packages: nvidia/*/include, lib and bin, of one folder for each library (CUDA 12) or of one for most (CUDA 13).
set -u
site=$1/nvidia
home=$2
rm -rf "$home"
mkdir -p "$home/include" "$home/lib64" "$home/bin"
link() { [ -e "$1" ] && ln -sfn "$1" "$2"; }
for f in "$site"/*/include/*; do link "$f" "$home/include/$(basename "$f")"; done
for f in "$site"/*/lib/*.so* "$site"/*/lib/*.a; do
  link "$f" "$home/lib64/$(basename "$f")" || continue
  plain=$(basename "$f" | sed 's/\.so\..*/.so/')  # a wheel has libcudart.so.13 without libcudart.so
  [ -e "$home/lib64/$plain" ] || link "$f" "$home/lib64/$plain"
done
# nvcc looks for its parts beside itself, where the headers of the other wheels are not.
for nvcc in "$site"/*/bin/nvcc "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" "$(command -v nvcc)"; do
  [ -x "$nvcc" ] || continue
  printf '#!/bin/sh\nexec "%s" "-I%s/include" -isystem "%s/include/cccl" "$@"\n' "$nvcc" "$home" "$home" >"$home/bin/nvcc"
  chmod +x "$home/bin/nvcc"
  for tool in "$(dirname "$nvcc")"/*; do [ "$tool" = "$nvcc" ] || link "$tool" "$home/bin/$(basename "$tool")"; done
  exit 0
done
echo "there is no nvcc: install the CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas nvidia-cudnn-cu13" >&2
exit 1
