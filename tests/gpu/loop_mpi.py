"""Ranks that share a GPU (mpi4py and CuPy): each turns words on the device, and all add up what they have, each round."""
import cupy
import numpy
from mpi4py import MPI
from loop import rounds, want

world = MPI.COMM_WORLD
rank = world.rank
there = cupy.arange(1 << 16, dtype=cupy.uint64) + rank
here = [numpy.arange(1 << 16, dtype=numpy.uint64) + r for r in range(world.size)]
number = 0
steps = rounds() if rank == 0 else None
while True:
    number += 1
    on = world.bcast(next(steps, None) is not None if rank == 0 else None)
    if not on:
        break
    there = there * cupy.uint64(6364136223846793005) + cupy.uint64(1442695040888963407)
    here = [h * numpy.uint64(6364136223846793005) + numpy.uint64(1442695040888963407) for h in here]
    if number % 8 == 0:
        total = numpy.empty(1 << 16, dtype=numpy.uint64)
        world.Allreduce(cupy.asnumpy(there), total, op=MPI.SUM)
        want(bool((total == sum(here[1:], here[0])).all()), "sum over all ranks")
if rank == 0:
    print("PASS mpi")
