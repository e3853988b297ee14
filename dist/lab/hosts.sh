#!/bin/sh
# dist/lab/hosts.sh HOSTS RATE -- COMMAND…: emulates HOSTS hosts on this machine and runs COMMAND once on each, as one rank of a
# job. RATE limits each host's interface (1gbit, 200mbit, none). A host is a set of namespaces: its own name, its own network and
# its own shared memory. A bridge connects the hosts.
#
#   RANKS=2          number of ranks on each host (default 1)
#   COUNTERS=FILE    written at the end: a line for each host, with its name and the bytes that its interface sent and received
#   DELAY=10         delay of each packet in milliseconds, one way
#   CUT=1:3          after 3 seconds host 1 is cut off
#   LAUNCHER=1       COMMAND runs once, on host 0, and reaches the others by `$HOSTS_SSH host1 COMMAND` (for tandem-run -H
#                    host0:1,host1:1 --ssh "$HOSTS_SSH", or mpirun with plm_rsh_agent)
#
# Exits with the status of the first rank that fails. Needs root, ip and tc; without them it prints the reason and exits with 77.
set -u
[ $# -ge 4 ] && [ "$3" = -- ] || { echo "usage: $0 HOSTS RATE -- COMMAND…" >&2; exit 2; }
hosts=$1 rate=$2
shift 3
case $hosts in '' | *[!0-9]* | 0) echo "$0: $hosts hosts?" >&2; exit 2 ;; esac
for tool in ip tc unshare nsenter; do
  command -v $tool >/dev/null || { echo "no $tool: apt-get install iproute2 util-linux"; exit 77; }
done
unshare --net --uts --ipc --mount true 2>/dev/null || { echo 'no right to make namespaces: run as root'; exit 77; }

id=$$
every_host=$(seq 0 $((hosts - 1)))
there=$(mktemp -d)
bridge=tb$id
pids=
clean() {
  trap - EXIT INT TERM
  for p in $pids; do kill -KILL -- "-$p" 2>/dev/null || kill -KILL "$p" 2>/dev/null; done
  wait 2>/dev/null
  ip link del "$bridge" 2>/dev/null
  for i in $every_host; do ip link del "th$id-$i" 2>/dev/null; done
  rm -rf "$there"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

net=10.$((id / 250 % 250)).$((id % 250))
ip link add "$bridge" type bridge 2>"$there/why" && ip link set "$bridge" up 2>>"$there/why" ||
  { echo "no bridge can be made: $(cat "$there/why")"; exit 77; }
cat /etc/hosts >"$there/hosts"
for i in $every_host; do echo "$net.$((i + 1)) host$i" >>"$there/hosts"; done

# A sleeping process keeps the namespaces of each host.
for i in $every_host; do
  unshare --net --uts --ipc --mount sh -c "
    hostname host$i && mount -t tmpfs tmpfs /dev/shm && mount --bind '$there/hosts' /etc/hosts &&
    : >'$there/ready$i' && exec sleep 1000000" &
  pid=$!
  pids="$pids $pid"
  tries=0
  until [ -e "$there/ready$i" ]; do
    tries=$((tries + 1))
    [ $tries -lt 200 ] && kill -0 $pid 2>/dev/null || { echo "host $i cannot be made"; exit 77; }
    sleep 0.05
  done
  ip link add "th$id-$i" type veth peer name eth0 netns "$pid" && ip link set "th$id-$i" master "$bridge" up &&
    nsenter -t "$pid" -n sh -c "ip addr add $net.$((i + 1))/24 dev eth0 && ip link set eth0 up && ip link set lo up" ||
    { echo "host $i cannot be joined to the others"; exit 77; }
  if [ "${DELAY:-0}" != 0 ]; then
    nsenter -t "$pid" -n tc qdisc add dev eth0 root handle 1: netem delay "${DELAY}ms" limit 100000 2>"$there/why" ||
      { echo "no delay of $DELAY ms: $(cat "$there/why")"; exit 77; }
  fi
  if [ "$rate" != none ]; then
    place=root
    [ "${DELAY:-0}" = 0 ] || place='parent 1:'
    for side in "nsenter -t $pid -n tc qdisc add dev eth0 $place" "tc qdisc add dev th$id-$i root"; do
      $side tbf rate "$rate" burst 256kb latency 50ms 2>"$there/why" ||
        { echo "no limit of $rate: $(cat "$there/why")"; exit 77; }
    done
  fi
  echo "$pid" >"$there/host$i"
done

cat >"$there/ssh" <<END
#!/bin/sh
# HOST COMMAND: as ssh would run it.
while [ "\${1#-}" != "\$1" ]; do shift; done
host=\$1
shift
exec nsenter -t "\$(cat "$there/\$host")" -n -u -i -m sh -c "\$*"
END
chmod +x "$there/ssh"
export HOSTS_SSH="$there/ssh"
# The hosts share this machine's cores.
cores=$(($(nproc) / (hosts * ${RANKS:-1})))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 1 ? cores : 1))} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
if [ "${CUT:-}" ]; then
  (sleep "${CUT#*:}" && exec ip link set "th$id-${CUT%:*}" down) &
  pids="$pids $!"
fi

status=0
if [ "${LAUNCHER:-}" ]; then
  nsenter -t "$(cat "$there/host0")" -n -u -i -m --wd="$(pwd)" "$@"
  status=$?
else
  ranks=${RANKS:-1}
  token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  running=
  for r in $(seq 0 $((hosts * ranks - 1))); do
    RANK=$r WORLD_SIZE=$((hosts * ranks)) LOCAL_RANK=$((r % ranks)) LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=host0 \
      MASTER_PORT=${MASTER_PORT:-29500} TANDEM_TOKEN=${TANDEM_TOKEN:-$token} UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-fatal} \
      setsid nsenter -t "$(cat "$there/host$((r / ranks))")" -n -u -i -m --wd="$(pwd)" "$@" >"$there/out$r" 2>&1 &
    running="$running $!"
    pids="$pids $!"
  done
  # The exit status is that of the first failed rank, in the order of ranks.
  for one in $running; do
    wait "$one"
    got=$?
    [ $got -eq 0 ] || [ $status -ne 0 ] || status=$got
  done
  for r in $(seq 0 $((hosts * ranks - 1))); do sed "s/^/[$r@host$((r / ranks))] /" "$there/out$r"; done
fi
if [ "${COUNTERS:-}" ]; then
  for i in $every_host; do
    nsenter -t "$(cat "$there/host$i")" -n cat /proc/net/dev |
      awk -v h="host$i" '/eth0:/ { sub(/.*:/, ""); print h, $9, $1 }'
  done >"$COUNTERS"
fi
exit $status
