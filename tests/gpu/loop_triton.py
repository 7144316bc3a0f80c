"""Triton: whole numbers by a kernel compiled while the program runs, beside the same on the processor."""
import numpy
import torch
import triton
import triton.language as tl
from loop import rounds, want


@triton.jit
def turn(at, words, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(at + i, mask=i < words)
    tl.store(at + i, w * 1664525 + 1013904223, mask=i < words)


WORDS = 1 << 18
here = numpy.arange(WORDS, dtype=numpy.int32)
there = torch.arange(WORDS, dtype=torch.int32, device="cuda")
for number in rounds():
    turn[(WORDS // 1024,)](there, WORDS, BLOCK=1024)
    with numpy.errstate(over="ignore"):
        here = here * numpy.int32(1664525) + numpy.int32(1013904223)
    if number % 16 == 0:
        want(bool((there.cpu().numpy() == here).all()), "words")
want(bool((there.cpu().numpy() == here).all()), "words, at the end")
print("PASS triton")
