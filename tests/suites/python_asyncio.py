"""asyncio over TCP: a server and many clients in one process, and clients in a second process."""
import asyncio
import os

from belay_rounds import beat, check, finish, running, rounds


async def serve(reader, writer):
    while line := await reader.readline():
        writer.write(b"%d\n" % (int(line) * 2))
        await writer.drain()
    writer.close()


async def client(port, count, k):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    n = 0
    while count is None or n < count:
        writer.write(b"%d\n" % (n * 10 + k))
        await writer.drain()
        answer = await asyncio.wait_for(reader.readline(), 30)
        if not answer:
            return
        check(answer == b"%d\n" % ((n * 10 + k) * 2), f"client {k} got {answer!r}")
        n += 1
        await asyncio.sleep(0.001)
    writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pid = os.fork()
    if pid == 0:
        asyncio.set_event_loop(asyncio.new_event_loop())
        os.execvp("python3", ["python3", "-c", CLIENT, str(port)])
    keep = [asyncio.create_task(client(port, None, k)) for k in range(8)]
    while running():
        await asyncio.gather(*(client(port, 5, 100 + i) for i in range(4)))
        for t in keep:
            check(not t.done(), f"a client ended: {t.done() and t.exception()}")
        check(os.waitpid(pid, os.WNOHANG) == (0, 0), "the other process ended")
        await asyncio.sleep(0.002)
    for t in keep:
        t.cancel()
    os.kill(pid, 15)
    check(os.waitpid(pid, 0)[1] == 15, "the other process's status")
    server.close()


CLIENT = """
import socket, sys, os
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
f = s.makefile("rwb")
n = 0
while True:
    f.write(b"%d\\n" % n)
    f.flush()
    a = f.readline()
    if a != b"%d\\n" % (n * 2):
        print("FAIL outer client got", a, flush=True)
        sys.exit(1)
    n += 1
"""
asyncio.run(main())
finish()
