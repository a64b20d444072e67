"""The state fold: S <- fma(key_r, f_r, S * decay_r) for the accepted records r of a window.

Grid (num_layers * batch_size, group * PARTS, num_key_heads), block THREADS (`Fold`, below). At
128 x 128: one block of 256 threads a (layer, row, value head). The first extent is the one that may
pass 65,535, and the other two give the head without a division.

A thread owns COLUMNS consecutive columns (16 bytes of the pool) of ROWS consecutive rows: 64 state
elements at 128 x 128. It loads all of them before it stores any, so that the whole tile is in
flight at once; the update is elementwise, so nothing is exchanged. A block of more than MAX_THREADS
would leave a thread too few registers, so a large head is cut along its rows into PARTS blocks.

Records pass through shared memory in batches of at most STAGED, one 4-byte asynchronous copy a
thread and record, so that any record stride will do. The loop over the records is the only one:
there is no branch per record and tile.
"""

from std.collections import Array
from std.math import ceildiv, fma
from std.memory import AddressSpace, stack_allocation
from std.sys import size_of
from layout import TensorEngine, TensorLayout, TileTensor
from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.sync import barrier
from .common import (
    F32,
    GlobalPtr,
    SharedPtr,
    copies_wait,
    copy_async,
    load_shared,
    load_state,
    opaque,
    remainder,
    store_state,
    wide,
)

from ..ring import is_folded, RecordLayout


def rows_per_thread(key_dim: Int, column_groups: Int, most: Int) -> Int:
    """As many as leave the block 128 threads, and whole quads."""
    var rows = most
    while rows > 4 and ceildiv(key_dim, rows) * column_groups < 128:
        rows //= 2
    return rows


struct Fold[state_dtype: DType, KD: Int, VD: Int]:
    """How threads lie on a head."""

    comptime MAX_THREADS = 256
    comptime COLUMNS = 16 // size_of[Scalar[Self.state_dtype]]()
    comptime COLUMN_GROUPS = Self.VD // Self.COLUMNS
    comptime ROWS = rows_per_thread(Self.KD, Self.COLUMN_GROUPS, 64 // Self.COLUMNS)
    comptime ROW_GROUPS = ceildiv(Self.KD, Self.ROWS)
    comptime PARTS = ceildiv(Self.ROW_GROUPS, Self.MAX_THREADS // Self.COLUMN_GROUPS)
    comptime PART_ROWS = ceildiv(Self.ROW_GROUPS, Self.PARTS) * Self.ROWS
    comptime USED = Self.PART_ROWS // Self.ROWS * Self.COLUMN_GROUPS
    comptime THREADS = ceildiv(Self.USED, 32) * 32
    # Shared memory of a record: the part's keys, the factors.
    comptime WORDS = Self.PART_ROWS + Self.VD
    comptime STAGED = 8


@always_inline
def stage[
    ring_dtype: DType
](
    source: GlobalPtr[ring_dtype],
    stride: UInt32,
    target: SharedPtr,
    words: Int,
    count: UInt32,
    exists: Bool,
):
    """Copies one element of each of `count` records; zeros where there is no such element."""
    var src = source
    var dst = target
    var left = count
    while left > 0:
        if not exists:
            dst[unsafe_offset=0] = 0
        else:
            comptime if ring_dtype == F32:
                copy_async[1](src.unsafe_bitcast[Float32](), dst)
            else:
                dst[unsafe_offset=0] = src[unsafe_offset=0].cast[F32]()
        src += stride
        dst += words
        left -= 1


def gated_delta_state_fold_gpu[
    state_dtype: DType,
    ring_dtype: DType,
    KEY_HEAD_DIM: Int,
    VALUE_HEAD_DIM: Int,
    RING_LEN: Int,
    recurrent_state_LT: TensorLayout,
    row_ids_LT: TensorLayout,
    ring_LT: TensorLayout,
    ring_row_ids_LT: TensorLayout,
    num_accepted_LT: TensorLayout,
    Engine: TensorEngine,
    KEY_DIM_TILE: Int = Int(8),
](
    batch_size: Int32,
    num_layers: Int32,
    num_value_heads: Int32,
    num_key_heads: Int32,
    recurrent_state: TileTensor[state_dtype, recurrent_state_LT, MutUntrackedOrigin, Engine=Engine],
    row_ids: TileTensor[DType.uint32, row_ids_LT, MutUntrackedOrigin, Engine=Engine],
    ring: TileTensor[ring_dtype, ring_LT, MutUntrackedOrigin, Engine=Engine],
    ring_row_ids: TileTensor[DType.uint32, ring_row_ids_LT, MutUntrackedOrigin, Engine=Engine],
    ring_record_stride: Int32,
    num_accepted: TileTensor[DType.uint32, num_accepted_LT, MutUntrackedOrigin, Engine=Engine],
):
    """Folds num_accepted[b] records of ring row ring_row_ids[l, b] into pool row row_ids[l, b], for
    every layer l and row b. A count of 0 or above RING_LEN, or an id outside its pool, leaves the
    row alone.

    KEY_DIM_TILE must divide KEY_HEAD_DIM. It does not bound what a thread holds: that follows from
    the head's dimensions, above.
    """
    comptime assert (
        KEY_DIM_TILE > 0 and KEY_HEAD_DIM % KEY_DIM_TILE == 0
    ), "KEY_DIM_TILE must divide KEY_HEAD_DIM"
    comptime KD = KEY_HEAD_DIM
    comptime VD = VALUE_HEAD_DIM
    comptime F = Fold[state_dtype, KD, VD]
    comptime W = F.COLUMNS
    comptime R = F.ROWS
    comptime STAGED = min(RING_LEN, F.STAGED)
    comptime whole = F.PARTS * F.PART_ROWS == KD and F.USED == F.THREADS
    var tid = UInt32(thread_idx.x)
    var at = UInt32(block_idx.x)
    var b = remainder(at, UInt32(batch_size))
    var group = UInt32(grid_dim.y) // UInt32(F.PARTS)
    var group_head = UInt32(block_idx.y) // UInt32(F.PARTS)
    var part_row = UInt32(block_idx.y) % UInt32(F.PARTS) * UInt32(F.PART_ROWS)
    var key_head = UInt32(block_idx.z)
    var h = key_head * group + group_head
    var accepted = num_accepted.ptr[unsafe_offset=b]
    var row = row_ids.ptr[unsafe_offset=at]
    var ring_row = ring_row_ids.ptr[unsafe_offset=at]
    if (
        (not is_folded(accepted, RING_LEN))
        | (row >= UInt32(recurrent_state.layout.shape[0]().value()))
        | (ring_row >= UInt32(ring.layout.shape[0]().value()))
    ):
        return
    var stride = UInt32(ring_record_stride)

    var column_group = tid % UInt32(F.COLUMN_GROUPS)
    var first_row = tid // UInt32(F.COLUMN_GROUPS) * UInt32(R)  # in the part
    var owns = True
    comptime if F.USED != F.THREADS:  # the others only stage
        owns = tid < UInt32(F.USED)
        first_row = first_row if owns else 0
    var tile = recurrent_state.ptr + (wide(row, UInt32(num_value_heads)) + UInt64(h)) * UInt64(
        KD * VD
    )
    tile += (part_row + first_row) * UInt32(VD) + column_group * UInt32(W)
    var s = Array[SIMD[F32, W], R](fill=0)
    comptime for i in range(R):
        if whole or owns and part_row + first_row + UInt32(i) < UInt32(KD):
            s[i] = load_state[W](tile + i * VD)

    # A thread's eight columns lie in two planes of four: 16-byte loads without bank conflicts.
    var records = stack_allocation[
        STAGED * F.WORDS, F32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var decays = stack_allocation[STAGED, F32, address_space=AddressSpace.SHARED]()
    var source = ring.ptr + wide(
        ring_row * UInt32(num_key_heads) + key_head, UInt32(RING_LEN) * stride
    )
    var layout = RecordLayout(KD, VD, Int(group))
    var start = UInt32(0)
    while True:
        var count = accepted - start
        comptime if RING_LEN > STAGED:
            count = min(count, UInt32(STAGED))
        comptime for e in range(ceildiv(F.WORDS, F.THREADS)):
            var word = tid + UInt32(e * F.THREADS)
            var is_key = word < UInt32(F.PART_ROWS)
            var column = word - UInt32(F.PART_ROWS)
            var element = part_row + word
            var place = word
            if not is_key:
                element = UInt32(layout.delta_factor(Int(group_head))) + column
                comptime if W == 8:
                    place = (
                        UInt32(F.PART_ROWS)
                        + (column & 4) * UInt32(VD // 8)
                        + column // 8 * 4
                        + (column & 3)
                    )
            if e < F.WORDS // F.THREADS or word < UInt32(F.WORDS):
                var exists = True
                comptime if not whole:
                    exists = element < UInt32(KD) or not is_key
                stage[ring_dtype](source + element, stride, records + place, F.WORDS, count, exists)
        if tid < count:
            var r = opaque(tid)  # so that only this branch prepares for it
            var decay = source + (r * stride + UInt32(layout.decay(Int(group_head))))
            stage[ring_dtype](decay, stride, decays + r, 0, 1, True)
        copies_wait()
        barrier()
        var keys = records + first_row
        var factors = records + UInt32(F.PART_ROWS) + column_group * 4
        var decay = decays
        var left = count
        while left > 0:
            var d = decay[unsafe_offset=0]
            var f = SIMD[F32, W](0)
            comptime for c in range(0, W, 4):
                f = f.insert[offset=c](load_shared[4](factors + c // 4 * (VD // 2)))
            comptime for i in range(0, R, 4):
                var k = load_shared[4](keys + i)
                comptime for j in range(4):
                    s[i + j] = fma(SIMD[F32, W](k[j]), f, s[i + j] * d)
            keys += F.WORDS
            factors += F.WORDS
            decay += 1
            left -= 1
        comptime if RING_LEN <= STAGED:
            break
        else:
            start += count
            source += UInt64(count) * UInt64(stride)
            if start >= accepted:
                break
            barrier()
    comptime for i in range(R):
        if whole or owns and part_row + first_row + UInt32(i) < UInt32(KD):
            store_state[W](tile + i * VD, s[i])
