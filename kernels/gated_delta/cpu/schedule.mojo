"""How work is spread over MAX's thread pool.

Work is a line of items with a known cost, in multiply-adds; a chunk is a run of consecutive items.
As many bodies as there are workers are dispatched, and each claims chunks until none is left: a
worker that wakes late, or shares its core, takes fewer. Measured on two cores, a dispatch inside a
graph costs 5 to 15 us, but a worker that has gone to sleep may come 150 us late.

A worker claims its next chunk before it runs the one it has, so that a chunk can prefetch what its
worker reads after it.
"""

from std.atomic import Atomic
from std.memory import alloc
from std.utils.numerics import FlushDenormals

from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level

from .vector import P, F32

comptime CHUNKS_PER_WORKER = 16
# About 10 us of one core at 12 multiply-adds a nanosecond.
comptime MIN_CHUNK_COST = 125_000


def chunk_count(cost: Int, items: Int) -> Int:
    """Chunks for work of this total cost that can be cut into so many items."""
    var most = parallelism_level(None) * CHUNKS_PER_WORKER
    return max(1, min(items, min(cost // MIN_CHUNK_COST, most)))


def parts_per_item(items: Int, max_parts: Int) -> Int:
    """Into how many column parts an item is cut so that every worker has something to do."""
    var wanted = parallelism_level(None) * 2
    if items >= wanted:
        return 1
    return min(max_parts, (wanted + items - 1) // items)


@always_inline
def run_chunks[Body: def(Int, Int, P[F32]) -> None](body: Body, chunks: Int, scratch_elements: Int):
    """Runs body(chunk, next, scratch) for each chunk.

    Next is the chunk that the same worker runs after this one; chunks or more if none is known.
    Scratch is the worker's own, aligned to a cache line. One chunk runs here, without a dispatch.

    Subnormal numbers are taken for zero. MAX's workers do so, the thread that dispatches does not,
    and bits must not depend on who runs a chunk.
    """
    var claimed = Atomic[Int64](0)
    var threads = min(chunks, parallelism_level(None))

    def worker(
        _i: Int,
    ) {imm body, imm chunks, imm threads, imm scratch_elements, mut claimed} -> None:
        var scratch = alloc[Float32](scratch_elements, alignment=64)
        var chunk = Int(claimed.fetch_add(1))
        with FlushDenormals():
            while chunk < chunks:
                # Only while there are chunks for the others too.
                var next = chunks
                if chunk + threads < chunks:
                    next = Int(claimed.fetch_add(1))
                body(chunk, next, scratch)
                chunk = next if next < chunks else Int(claimed.fetch_add(1))
        scratch.unsafe_free()

    if chunks == 1:
        worker(0)
    else:
        sync_parallelize(worker, threads)


@always_inline
def run_chunks[Body: def(Int) -> None](body: Body, chunks: Int):
    """Runs body(chunk) for each chunk, for work that needs neither."""

    def chunk(i: Int, _next: Int, _scratch: P[F32]) {imm body} -> None:
        body(i)

    run_chunks(chunk, chunks, 0)
