"""JAX: whole numbers by a compiled function on the GPU beside the same on the processor."""
import jax
import numpy
from loop import rounds, want

want(jax.devices()[0].platform == "gpu", "no GPU")
step = jax.jit(lambda x: x * numpy.uint32(1664525) + numpy.uint32(1013904223))
there = jax.numpy.arange(1 << 18, dtype=numpy.uint32)
here = numpy.arange(1 << 18, dtype=numpy.uint32)
for number in rounds():
    there = step(there)
    here = here * numpy.uint32(1664525) + numpy.uint32(1013904223)
    if number % 16 == 0:
        want(bool((numpy.asarray(there) == here).all()), "words")
want(bool((numpy.asarray(there) == here).all()), "words, at the end")
print("PASS jax")
