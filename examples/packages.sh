#!/usr/bin/env bash
# examples/packages.sh "WHAT FOR" PACKAGE…: prints which of these Debian packages are missing, their purpose and the
# command, and then installs them. Exit status 1: some are still missing, and it has printed how to install them.
set -uo pipefail
what=$1
shift
if ! command -v apt-get >/dev/null; then
  echo "There is no apt-get here. What is useful ($what), by its Debian names: $*"
  exit 1
fi
lacking() {
  local package
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || echo "$package"
  done
}
mapfile -t wanted < <(lacking "$@")
[ ${#wanted[@]} -gt 0 ] || exit 0
sudo=()
[ "$(id -u)" -eq 0 ] || sudo=(sudo)
printf '\nNot installed: %s\n(%s)\n' "${wanted[*]}" "$what"
if [ ${#sudo[@]} -gt 0 ] && ! command -v sudo >/dev/null; then
  echo "There is no sudo here. Run this as root to install them: apt-get install ${wanted[*]}"
  exit 1
fi
echo "+ ${sudo:+sudo }apt-get update && ${sudo:+sudo }apt-get install --no-install-recommends ${wanted[*]}"
# -n: never wait for a password that nobody may be there to type; with a terminal sudo may ask.
[ ${#sudo[@]} -eq 0 ] || [ -t 0 ] || sudo+=(-n)
apt() {
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive timeout 600 apt-get -y -qq -o DPkg::Lock::Timeout=180 \
    -o Acquire::Retries=3 -o Acquire::http::Timeout=30 "$@" >/dev/null
}
apt update || echo "apt-get update failed; trying with the lists that are there"
if ! apt install --no-install-recommends "${wanted[@]}"; then  # perhaps only one of them is unknown here
  for package in "${wanted[@]}"; do apt install --no-install-recommends "$package"; done
fi
mapfile -t wanted < <(lacking "$@")
[ ${#wanted[@]} -eq 0 ] && exit 0
echo "That did not work. To do it yourself: apt-get install ${wanted[*]}"
exit 1
