# What a link gives to plain TCP: every host sends BYTES to the next one while it receives as many from the one before (with
# --one-way: host 0 sends, host 1 receives). One rank on each host of dist/lab/hosts.sh; a line: payload bytes per second, the
# median of seven on the slowest host.
import os
import socket
import statistics
import sys
import threading
import time

one_way = "--one-way" in sys.argv
size = int(sys.argv[-1])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port = 29600


def connect(host):
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            time.sleep(0.05)


listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("", port))
listener.listen()
following = connect("host%d" % ((rank + 1) % ranks))
before = listener.accept()[0]
data, into = bytes(size), memoryview(bytearray(1 << 20))


def receive(n):
    while n > 0:
        got = before.recv_into(into, min(n, len(into)))
        if got == 0:
            sys.exit("the host before has gone")
        n -= got


def token(times):  # round the ring: nobody goes on before all have come
    for _ in range(times):
        if rank == 0:
            following.sendall(b"x")
            receive(1)
        else:
            receive(1)
            following.sendall(b"x")


seconds = []
for turn in range(-1, 7):
    token(2)
    begin = time.perf_counter()
    sender = threading.Thread(target=following.sendall, args=(data,))
    if not one_way or rank == 0:
        sender.start()
    if not one_way or rank == 1:
        receive(size)
    if not one_way or rank == 0:
        sender.join()
    token(1)
    if turn >= 0:
        seconds.append(time.perf_counter() - begin)
if rank == 0:
    print("%d %.9f" % (size, statistics.median(seconds)))
