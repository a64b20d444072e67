"""How work is spread over MAX's thread pool.

Work is a line of items with a known cost, in multiply-adds; a chunk is a run of consecutive items.
Measured on two cores: a dispatch inside a graph costs 5 to 15 us and 0.1 us per chunk, so a chunk
holds 20 us of work at least; four chunks per worker keep one busy core from holding up the rest.
"""

from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level

comptime CHUNKS_PER_WORKER = 4
# About 20 us of one core at 12 multiply-adds a nanosecond.
comptime MIN_CHUNK_COST = 250_000


def chunk_count(cost: Int, items: Int) -> Int:
    """Chunks for work of this total cost that can be cut into so many items."""
    return max(
        1, min(items, min(cost // MIN_CHUNK_COST, parallelism_level(None) * CHUNKS_PER_WORKER))
    )


def parts_per_item(items: Int, max_parts: Int) -> Int:
    """Into how many column parts an item is cut so that every worker has something to do."""
    var wanted = parallelism_level(None) * 2
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
