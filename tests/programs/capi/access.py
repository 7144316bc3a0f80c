"""A solver in Python: two arrays, each computed from the other, and what is declared of them. access.py [FORMS]"""

import ctypes
import os
import sys
import time

import belay

BYTES = 4 << 20
NEXT = bytes((7 * i + 3) % 256 for i in range(256))


def beat(round):
    if name := os.environ.get("BELAY_TEST_BEAT"):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        assert os.pwrite(fd, b"%019d\n" % round, 0) == 20
        os.close(fd)


class Strided:
    """As numpy has it: every second row of a matrix of 4-byte numbers."""

    def __init__(self, memory, read_only=False):
        view = memoryview(memory)
        at = belay.ctypes.addressof(belay.ctypes.c_char.from_buffer(view))
        self.__array_interface__ = {"data": (at, read_only), "shape": (8, 16), "strides": (128, 4), "typestr": "<i4"}


class Objects(Strided):
    """The same, of references."""

    def __init__(self, memory):
        super().__init__(memory)
        self.__array_interface__["typestr"] = "|O"


def let_go():
    """A dataset that nobody has any more is none; one that was declared anew is what it is now."""
    moves = []
    forget, belay._library.belay_dataset_forget = belay._library.belay_dataset_forget, moves.append
    try:
        number = belay.Dataset("gone", bytearray(64))._number
        assert moves == [number], moves
        first = belay.Dataset("again", bytearray(64))
        second = belay.Dataset("again", bytearray(64))
        del first
        assert moves == [number], moves
        number = second._number
        del second
        assert moves[1:] == [number], moves
    finally:
        belay._library.belay_dataset_forget = forget


def forms():
    """Every form of array, parts, and wrong use."""
    memory = bytearray(8 * 128)
    strided = belay.Dataset("strided", Strided(memory))
    grid = belay.Dataset("grid", memoryview(bytearray(6 * 8 * 4)).cast("i", (6, 8)))
    with belay.Site("forms").loop(belay.overwrites(strided), belay.changes(grid, (1, 2), (5, 8))):
        for row in range(8):
            memory[row * 128 : row * 128 + 64] = bytes([row]) * 64
    other = bytearray(8 * 128)
    strided.move(Strided(other))
    strided.live()
    strided.forget()
    for kind, call in [
        (ValueError, lambda: grid.move(bytearray(8))),
        (ValueError, lambda: strided.move(bytearray(6 * 8 * 4))),
        (BufferError, lambda: belay.Dataset("read-only", Strided(memory, True))),
        (TypeError, lambda: belay.Dataset("bytes", b"read-only")),
        (ValueError, lambda: belay.reads(grid, (1, 2))),
        (ValueError, lambda: belay.reads(grid, (0, 0), (-1, 8))),
        (ValueError, lambda: belay.changes(grid, (-1, 0), (6, 8))),
        (ValueError, lambda: belay.overwrites(grid, (0, 3), (6, 2))),
        (ValueError, lambda: belay.Site("more").loop(belay.reads(grid, (1,), (2,)))),
        (OverflowError, lambda: belay.Site("more").loop(belay.overwrites(grid, (0, 0), (2**64 + 1, 8)))),
        (OverflowError, lambda: grid.part([2**64 + 6, 8], [0, 0])),
        (OverflowError, lambda: grid.part([6, 8], [2**64, 0])),
        (OverflowError, lambda: belay.fastforward(-1)),
        (TypeError, lambda: belay.point(10)),
        (TypeError, lambda: belay.Dataset("objects", (ctypes.py_object * 2)())),
        (TypeError, lambda: belay.Dataset("objects", Objects(bytearray(64)))),
        (ValueError, lambda: belay.Dataset("a\0b", bytearray(8))),
        (ValueError, lambda: belay.Site("a\0b")),
        (OSError, lambda: belay.Dataset("", bytearray(8))),
        (OSError, lambda: belay.Dataset("six", memoryview(bytearray(64)).cast("B", [2] * 6))),
    ]:
        try:
            call()
        except kind as e:
            assert str(e)
        else:
            raise AssertionError(f"no {kind}")


def main():
    state, scratch = bytearray(BYTES), bytearray(BYTES)
    datasets = belay.Dataset("state", state), belay.Dataset("scratch", scratch)
    there = belay.Site("there").loop(belay.reads(datasets[0]), belay.overwrites(datasets[1]))
    back = belay.Site("back").loop(belay.overwrites(datasets[0]), belay.reads(datasets[1]))
    round, byte, end = 0, 0, os.environ.get("BELAY_TEST_GO")
    began = time.monotonic()
    while not os.path.exists(end) if end else time.monotonic() - began < 0.5:
        with there:
            scratch[:] = state.translate(NEXT)
        with back:
            state[:] = scratch
        byte = NEXT[byte]
        round += 1
        beat(round)
        if round % 8 == 0:
            assert state == bytes([byte]) * BYTES, f"round {round}"
    beat(round + 1)
    print("PASS access.py", flush=True)


if len(sys.argv) > 1:
    forms()
    let_go()
else:
    main()
