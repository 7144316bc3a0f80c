"""A history in Python: as the documents have it, with every kind of memory, and with wrong use. history.py DIRECTORY"""

import array
import ctypes
import errno
import gc
import os
import signal
import sys
import threading
import time

import belay


def raises(kind, number, call, *arguments):
    try:
        call(*arguments)
    except kind as e:
        assert number is None or e.errno == number, e
        assert str(e)
        return
    raise AssertionError(f"{call} raises nothing")


def reverse(dir):
    field = array.array("d", bytes(8 * 20000))
    number = bytearray(8)
    with belay.History("reverse", dir, host_bytes=4 << 20, keep=belay.UNTIL_READ) as history:
        history.region(0, field)
        history.region(1, number)
        history.hint(reversed(range(200)), [8 * 20000 + 8] * 200)
        for step in range(200):
            field[:] = array.array("d", [step + 1e-6 * i for i in range(20000)])
            number[:] = step.to_bytes(8, "little")
            if step % 2:
                history.put_async(step)
                history.put_wait(step)
            else:
                history.put(step)
        raises(FileExistsError, errno.EEXIST, history.put_async, 3)
        raises(OSError, errno.ENODATA, history.put_wait, 999)
        raises(BufferError, None, number.extend, b"more")
        for step in reversed(range(200)):
            history.get(step)
            assert int.from_bytes(number, "little") == step
            assert field == array.array("d", [step + 1e-6 * i for i in range(20000)]), step
        stats = history.stats()
        assert stats["puts"] == stats["gets"] == 200 and stats["versions"] == 0 and stats["up"] > 0, stats
        raises(OSError, errno.ESTALE, history.get, 7)
    raises(ValueError, None, history.put, 1)
    number.extend(b"more")


def lasting(dir):
    memory = bytearray(b"one")
    history = belay.History("lasting", dir, host_bytes=1 << 20)
    raises(OSError, errno.EBUSY, belay.History, "lasting", dir)
    raises(TypeError, None, history.region, 0, b"only to be read")
    history.region(0, memory)
    history.region(5, bytearray())
    history.put(2**64 - 1)
    raises(FileExistsError, errno.EEXIST, history.put, 2**64 - 1)
    history.region(5, None)
    raises(OSError, errno.EMSGSIZE, history.get, 2**64 - 1)
    memory[:] = b"two"
    history.put(2)
    history.hint_replace(0, [2])
    history.prefetch()
    history.wait(belay.DURABLE)
    assert history.is_at(belay.DURABLE) and history.is_at(belay.LOCAL) and history.is_at(belay.IN_HOST)
    raises(OSError, errno.EINVAL, history.is_at, 9)
    raises(OSError, errno.EINVAL, history.get, 2, 7)
    raises(ValueError, None, history.hint, [1, 2], [3])
    # What is forgotten is closed.
    del history
    gc.collect()
    with belay.History("lasting", dir) as history:
        assert history.versions() == [2, 2**64 - 1]
        assert history.regions(2**64 - 1) == [0, 5] and history.regions(2) == [0]
        assert (history.size(2**64 - 1, 0), history.size(2**64 - 1, 5)) == (3, 0)
        history.region(0, memory)
        history.region(5, bytearray())
        history.get(2**64 - 1, belay.DISCARD)
        assert memory == b"one"
        history.drop(2)
        assert history.versions() == []


def arrays(dir):
    try:
        import numpy
    except ImportError:
        print("no numpy here")
        return
    field = numpy.zeros((30, 40), dtype=numpy.float32)
    with belay.History("arrays", dir, keep=belay.UNTIL_READ) as history:
        history.region(0, field)
        raises(TypeError, None, history.region, 1, field[:, ::2])
        for step in range(5):
            field[:] = step
            history.put(step)
        history.get(3)
        assert (field == 3).all()


def threads(dir):
    # What one thread puts, another gives up or closes: its memory is there until the put has ended.
    for step in range(6):
        history = belay.History(f"threads{step}", dir, keep=belay.UNTIL_READ)
        history.region(0, bytearray(64 << 20))
        done = []
        thread = threading.Thread(target=lambda: done.append(history.put(1)))
        thread.start()
        time.sleep(0.002 * step)
        if step % 2:
            history.region(0, None)
        else:
            history.region(0, bytearray(10))
        # A forked child waits for no thread of its parent.
        child = os.fork()
        if child == 0:
            raises(OSError, errno.ECHILD, history.put, 2)
            raises(OSError, errno.ECHILD, history.region, 0, None)
            raises(OSError, errno.ECHILD, history.region, 0, bytearray(10))
            raises(OSError, errno.ECHILD, history.close)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        history.close()
        thread.join()
        assert done == [None] or step == 0, "the put has failed"


def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def namespaces(dir):
    # The first process of a namespace has a child with the same number, which waits for no call of its parent either.
    unshare, new_numbers, new_users = ctypes.CDLL(None, use_errno=True).unshare, 0x20000000, 0x10000000

    def outside():
        if unshare(new_numbers | (new_users if os.geteuid() else 0)) == 0:
            in_child(first)
        else:
            # Not every host lets users have namespaces.
            assert os.geteuid() and ctypes.get_errno() == errno.EPERM

    def first():
        history = belay.History("namespaces", dir)
        history._calls["of another thread"] = 0
        assert os.getpid() == 1 and unshare(new_numbers) == 0

        def second():
            assert os.getpid() == 1
            # The first of a namespace ignores signals that it does not handle.
            signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
            signal.alarm(20)
            raises(OSError, errno.ECHILD, history.close)

        in_child(second)
        history._calls.clear()
        history.close()

    in_child(outside)


def handled(dir):
    # Closed by the handler of a signal that comes while a call goes on: when that has ended.
    history = belay.History("handled", dir)
    history.region(0, bytearray(64 << 20))
    signal.signal(signal.SIGALRM, lambda *_: history.close())
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    try:
        for version in range(1000):
            history.put(version)
            history.drop(version)
    except ValueError:
        pass
    else:
        raise AssertionError("it was not closed")
    history.close()
    with belay.History("handled", dir) as again:
        assert len(again.versions()) <= 1


def refused(dir):
    # Numbers of which C would take the lower bits, names that it would cut, and references.
    for options in [{"keep": 2**32 + 1}, {"host_bytes": -1}, {"policy": 2**32}]:
        raises(OverflowError, None, lambda: belay.History("refused", dir, **options))
    raises(ValueError, None, belay.History, "refused\0more", dir)
    raises(ValueError, None, belay.History, "refused", dir + "\0/more")
    assert not os.path.exists(os.path.join(dir, "refused"))
    memory = bytearray(b"abc")
    with belay.History("refused", dir) as history:
        history.region(0, memory)
        raises(OverflowError, None, history.region, 2**32, bytearray(9))
        raises(OverflowError, None, history.region, -1, bytearray(9))
        for version in [-1, 2**64 + 3]:
            for call in history.put, history.put_async, history.put_wait, history.get, history.drop, history.regions:
                raises(OverflowError, None, call, version)
            raises(OverflowError, None, history.size, version, 0)
            raises(OverflowError, None, history.hint, [version])
        raises(OverflowError, None, history.get, 1, 2**32)
        raises(OverflowError, None, history.wait, 2**32)
        raises(TypeError, None, history.put, 1.5)
        raises(TypeError, None, history.region, 1, (ctypes.py_object * 2)())
        history.put(3)
        assert history.versions() == [3] and history.size(3, 0) == 3 and history.regions(3) == [0]


reverse(sys.argv[1])
refused(sys.argv[1])
handled(sys.argv[1])
threads(sys.argv[1])
namespaces(sys.argv[1])
lasting(sys.argv[1])
arrays(sys.argv[1])
