"""Starts from what portable.c has left: rows 6 to 20 of the array, with ghosts around them."""

import struct

import belay

NX, NY, FIRST, LAST = 60, 48, 6, 20
rows = LAST - FIRST
memory = memoryview(bytearray(b"\xff" * (8 * (NX + 2) * (rows + 2))))
field = memory.cast("Q", (rows + 2, NX + 2))
dataset = belay.Dataset("field", field)
try:
    dataset.part([NY, NX], [FIRST - 1, -1])
    raise AssertionError("own elements outside")
except OSError:
    pass
for wrong in [([NY], [0]), ([NY, -1], [0, 0]), ([NY, NX], [0, 0], [1, 1])]:
    try:
        dataset.part(*wrong)
        raise AssertionError(wrong)
    except ValueError:
        pass
dataset.part([NY, NX], [FIRST - 1, -1], [1, 1], [rows + 1, NX + 1])
belay.point(b"anything")
left = belay.fastforward(40)
if left is None:
    print("nothing")
else:
    (step,) = struct.unpack("Q", left[:8])
    for y in range(FIRST - 1, LAST + 1):
        for x in range(-1, NX + 1):
            expected = step * 1000003 + y * NX + x if 0 <= x < NX else 2**64 - 1
            assert field[y - FIRST + 1, x + 1] == expected, (x, y)
    print("started: step", step)
