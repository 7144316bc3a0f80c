"""multiprocessing: pool, queue, shared memory, manager; semaphores between processes."""
import multiprocessing as mp
from multiprocessing import shared_memory

from belay_rounds import check, finish, nap, running, rounds


def square(x):
    return x * x


def echo(inbox, outbox, lock, value):
    while (m := inbox.get()) is not None:
        with lock:
            value.value += 1
        outbox.put((m, m * 3))


if __name__ == "__main__":
    ctx = mp.get_context("fork")
    inbox, outbox, lock, value = ctx.Queue(), ctx.Queue(), ctx.Lock(), ctx.Value("l", 0, lock=False)
    kids = [ctx.Process(target=echo, args=(inbox, outbox, lock, value)) for _ in range(3)]
    for k in kids:
        k.start()
    shm = shared_memory.SharedMemory(create=True, size=1 << 16)
    pool = ctx.Pool(3)
    sent = 0
    while running():
        n = rounds()
        check(pool.map(square, range(n, n + 20)) == [x * x for x in range(n, n + 20)], "pool.map")
        for i in range(6):
            inbox.put(n * 6 + i)
            sent += 1
        got = sorted(outbox.get(timeout=20) for _ in range(6))
        check(got == [(n * 6 + i, (n * 6 + i) * 3) for i in range(6)], "queue answers")
        check(value.value == sent, f"counter {value.value}, expected {sent}")
        shm.buf[n % 60000] = n % 251
        check(shm.buf[n % 60000] == n % 251, "shared memory")
        check(all(k.is_alive() for k in kids), "a child died")
        nap(2)
    for _ in kids:
        inbox.put(None)
    for k in kids:
        k.join(20)
        check(k.exitcode == 0, f"exit code {k.exitcode}")
    pool.close()
    pool.join()
    shm.close()
    shm.unlink()
    finish()
