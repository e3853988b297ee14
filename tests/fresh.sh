#!/bin/sh
# tests/fresh.sh FOLDER [RELEASE] [STEP…]: the first hour of somebody with a fresh Debian that has git and make: `make demo`, training on
# two ranks, `make test`, each with its time. By hand, as root; FOLDER must be new, needs 4 GB, and is kept.
#
#   system   debootstrap's smallest Debian of this RELEASE (bookworm, trixie; else this machine's), from the mirror of this machine;
#            git, make; a copy of this tree
#   demo     make demo, in an empty build folder
#   ranks    what the README shows next: build/tandem-run -n 2 build/fashion_mnist
#   course   make course, as it is handed out and with the solutions
#   test     make test
# Without a STEP all of them. TANDEM_DATA, where it is set, is lent to the fresh system; otherwise `make demo` downloads.
set -eu
[ $# -gt 0 ] || { sed -n '2,11s/^# //p' "$0" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo "fresh.sh: only root can enter another system" >&2; exit 77; }
root=$(realpath -m "$1")
shift
tree=$(cd "$(dirname "$0")/.." && pwd)
. /etc/os-release
release=$VERSION_CODENAME
case ${1:-} in bookworm | trixie)
  release=$1
  shift
  ;;
esac

# inside COMMAND: in the new system, in the tree, with mounts and processes that end with it.
inside() {
  unshare --mount --pid --fork --kill-child sh -eu -c '
    root=$1 data=$2
    mount -t proc proc "$root/proc"
    mount -t sysfs sys "$root/sys"
    mount --rbind /dev "$root/dev"
    [ ! -d "$data" ] || mount --bind -o ro "$data" "$root/data"
    exec chroot "$root" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
      ${data:+TANDEM_DATA=/data} sh -c "cd /root/tandem && $3"' inside "$root" "${TANDEM_DATA:-}" "$1" </dev/null
}
timed() {  # timed NAME COMMAND
  begun=$(date +%s)
  inside "$2" && status=0 || status=$?
  echo "fresh.sh: $1: exit status $status after $(($(date +%s) - begun)) s"
  [ $status -eq 0 ] || exit 1
}

system() {
  [ ! -e "$root" ] || { echo "fresh.sh: $root is there already" >&2; exit 2; }
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
    awk -v release="$VERSION_CODENAME" '$2 == release { sub(/\/$/, "", $1); print $1; exit }')
  debootstrap --variant=minbase --include=git,make,ca-certificates "$release" "$root" "$mirror"
  # apt as this machine has it: addresses, keys, proxies. Sources of another origin would only want keys of their own.
  rm -f "$root/etc/apt/sources.list"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/* /etc/apt/apt.conf /etc/apt/apt.conf.d/*; do
    case $file in
      *sources.list*) grep -qs "$mirror" "$file" || continue ;;
      *) grep -qs Acquire "$file" || continue ;;
    esac
    cp "$file" "$root$file"
  done
  if [ "$release" != "$VERSION_CODENAME" ]; then  # that address, of the other release
    rm -rf "$root"/etc/apt/sources.list.d/*
    echo "deb $mirror $release main" >"$root/etc/apt/sources.list"
  fi
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
  mkdir -p "$root/data" "$root/root/tandem"
  (cd "$tree" && git ls-files -z | tar -c --null -T -) | tar -x -C "$root/root/tandem"
}
for step in "${@:-all}"; do
  case $step in
    all) "$0" "$root" "$release" system demo ranks course test; exit ;;
    system) system ;;
    demo) timed "make demo" "rm -rf build && make demo" ;;
    ranks) timed "two ranks" "build/tandem-run -n 2 build/fashion_mnist --epochs 1" ;;
    course)
      inside "make course | tail -n 9" || true
      timed "make course SOLUTIONS=1" "make course SOLUTIONS=1" ;;
    test) timed "make test" "make test" ;;
    *) echo "fresh.sh: $step: choose system, demo, ranks or test" >&2; exit 2 ;;
  esac
done
