"""CuPy: whole numbers on the GPU beside the same on the processor; a Fourier transform there and back."""
import cupy
import numpy
from loop import rounds, want

there = cupy.arange(1 << 18, dtype=cupy.uint32)
here = numpy.arange(1 << 18, dtype=numpy.uint32)
wave = cupy.random.default_rng(3).random(1 << 16)
for number in rounds():
    there = there * cupy.uint32(1664525) + cupy.uint32(1013904223)
    here = here * numpy.uint32(1664525) + numpy.uint32(1013904223)
    if number % 16 == 0:
        want(bool((cupy.asnumpy(there) == here).all()), "words")
        want(bool(cupy.allclose(cupy.fft.ifft(cupy.fft.fft(wave)).real, wave)), "transform")
want(bool((cupy.asnumpy(there) == here).all()), "words, at the end")
print("PASS cupy")
