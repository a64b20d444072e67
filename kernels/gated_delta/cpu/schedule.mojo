"""How work is spread over MAX's thread pool.

Work is a line of items with a known cost, in multiply-adds; a chunk is a run of consecutive items.
Measured on two cores: a dispatch inside a graph costs 5 to 15 us and 0.1 us per chunk, and the first
state of a chunk comes from memory without a prefetch. So a chunk holds 20 us of work at least; beyond
one chunk a worker it holds 100 us, and at four a worker one busy core no longer holds up the rest.
"""

from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level

comptime CHUNKS_PER_WORKER = 4
# About 20 us of one core at 12 multiply-adds a nanosecond.
comptime MIN_CHUNK_COST = 250_000
# A chunk where there are more chunks than workers.
comptime SHARED_CHUNK_COST = 5 * MIN_CHUNK_COST


@always_inline
def workers() -> Int:
    """Threads that run chunks."""
    return parallelism_level(None)


def chunk_count(cost: Int, items: Int) -> Int:
    """Chunks for work of this total cost that can be cut into so many items."""
    var threads = workers()
    var chunks = min(cost // MIN_CHUNK_COST, threads)
    chunks = max(chunks, min(cost // SHARED_CHUNK_COST, threads * CHUNKS_PER_WORKER))
    return max(1, min(items, chunks))


def parts_per_item(items: Int, max_parts: Int) -> Int:
    """Into how many column parts an item is cut so that every worker has something to do."""
    var wanted = workers() * 2
    if items == 0 or items >= wanted:
        return 1
    return min(max_parts, (wanted + items - 1) // items)


@always_inline
def run_chunks[Body: def(Int) -> None](body: Body, chunks: Int):
    """Runs body(i) for each chunk; one chunk runs here, without a dispatch."""
    if chunks == 1:
        body(0)
    else:
        sync_parallelize(body, chunks)
