"""redis-server under load. redis_load.py [MORE OPTIONS OF redis-server...]; with AOF the server's data is read back at the end."""
import socket
import subprocess
import sys
import time

from belay_rounds import check, finish, running, rounds

sock = "./redis.sock"
server = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", sock, "--save", "", "--daemonize", "no", "--logfile", "redis.log", *sys.argv[1:]])


class Client:
    def __init__(self):
        self.s = socket.socket(socket.AF_UNIX)
        for _ in range(2000):
            try:
                self.s.connect(sock)
                break
            except OSError:
                time.sleep(0.005)
        self.f = self.s.makefile("rb")

    def send(self, *args):
        out = b"*%d\r\n" % len(args)
        for a in args:
            a = str(a).encode()
            out += b"$%d\r\n%s\r\n" % (len(a), a)
        self.s.sendall(out)

    def answer(self):
        line = self.f.readline()
        check(line.endswith(b"\r\n"), f"redis closed the connection: {line!r}")
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            n = int(rest)
            if n < 0:
                return None
            v = self.f.read(n + 2)[:-2]
            return v.decode()
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self.answer() for _ in range(int(rest))]
        check(kind != b"-", f"redis error {rest!r}")
        return rest.decode()

    def __call__(self, *args):
        self.send(*args)
        return self.answer()


clients = [Client() for _ in range(6)]
sub = Client()
sub("SUBSCRIBE", "news")
total = 0
while running():
    n = rounds()
    check(server.poll() is None, "redis-server died")
    for i, c in enumerate(clients):  # pipelined: six commands in flight on each connection
        for k in range(6):
            c.send("INCRBY", f"count{i}", k)
        c.send("SET", f"key{i}:{n % 200}", f"value {n} {i}")
        c.send("LPUSH", f"list{i}", n)
        c.send("LTRIM", f"list{i}", 0, 49)
    total += 15
    for i, c in enumerate(clients):
        got = [c.answer() for _ in range(6)]
        check(got[-1] == total, f"counter {got[-1]}, expected {total}")
        check(c.answer() == "OK", "SET")
        check(c.answer() == min(n, 51 if n > 50 else n), "LPUSH")
        check(c.answer() == "OK", "LTRIM")
        check(c("GET", f"key{i}:{n % 200}") == f"value {n} {i}", "GET")
    check(clients[0]("PUBLISH", "news", n) == 1, "PUBLISH")
    check(sub.answer() == ["message", "news", str(n)], "the subscriber's message")
if "--appendonly" in sys.argv:
    clients[0].send("SHUTDOWN")
    check(server.wait(30) == 0, "redis-server's exit status")
    server = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", sock, "--save", "", "--logfile", "redis.log", *sys.argv[1:]])
    c = Client()
    while "loading:1" in c("INFO", "persistence"):
        time.sleep(0.01)
    v = c("GET", "count0")
    check(int(v) == total, f"after reading the AOF back the counter is {v}, expected {total}")
server.terminate()
check(server.wait(30) == 0, "redis-server's exit status")
finish()
