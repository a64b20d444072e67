"""How a block lies on one value head.

The state [KEY_HEAD_DIM, VALUE_HEAD_DIM] of a (row, value head) is cut along the value dimension: a
warp owns COLUMNS columns and all rows of them, so warps never exchange sums and the bits do not
depend on how many warps share a block. Inside a warp, lane = key group * COLUMN_GROUPS + column
group; a lane holds four columns of ROWS rows, in quads: its quad j is rows
(j * KEY_GROUPS + key group) * 4 .. + 3, so that a warp reads a key as conflict-free 16-byte words.
At 128 x 128 that is 8 key groups x 4 column groups and 64 state elements a lane, which is what
balances the work paid per element against the work paid per warp.

A block has NARROW or WIDE warps, and a head SPLITS blocks. Narrow blocks spread a small batch over
the GPU (4 blocks a head at 128 x 128); wide ones stage each token once for the whole head. Both
give the same bits, and the launch chooses by the size of the grid.

Dimensions that do not fill the mapping are padded: rows with zeros, columns by lanes that store
nothing.
"""

from std.collections import Array
from std.math import ceildiv
from std.sys import is_nvidia_gpu, llvm_intrinsic
from max.gpu import block_dim, block_idx, grid_dim, lane_id
from max.gpu.primitives import warp
from .common import F32, GlobalPtr, SharedPtr, load_shared, load_state, opaque, store_state

comptime Vec = SIMD[F32, 4]  # one value for each column of a lane


def key_groups(key_dim: Int, value_dim: Int) -> Int:
    """Lanes along the key dimension: at most 16 rows a lane, and no wider than the head."""
    var groups = 2
    while key_dim > 16 * groups or (groups < 8 and 128 // groups > value_dim):
        groups *= 2
    return groups


@always_inline
def xor_add[width: Int](x: SIMD[F32, width], offset: UInt32) -> SIMD[F32, width]:
    var other = SIMD[F32, width]()
    comptime for i in range(width):
        other[i] = warp.shuffle_xor(x[i], offset)
    return x + other


@always_inline
def halve[width: Int](x: SIMD[F32, width], up: Bool, offset: UInt32) -> SIMD[F32, width // 2]:
    """Adds the lane at `offset`; this lane keeps the upper half of the sums if `up`, which must
    differ between the two, else the lower half."""
    comptime half = width // 2
    var keep = SIMD[F32, half]()
    var other = SIMD[F32, half]()
    comptime for i in range(half):
        keep[i] = x[half + i] if up else x[i]
        other[i] = warp.shuffle_xor(x[i] if up else x[half + i], offset)
    return keep + other


@always_inline
def shuffle_within[low: Int](x: Float32, source: Int) -> Float32:
    """The x of lane `source` + (this lane modulo `low`); source is a multiple of low, low of two.
    """
    comptime if is_nvidia_gpu():
        # The segment mask in the upper byte keeps the lane's low bits: no arithmetic on lanes.
        return llvm_intrinsic["llvm.nvvm.shfl.sync.idx.f32", Float32](
            Int32(-1), x, Int32(source), Int32((low - 1) << 8 | 31)
        )
    else:
        # A wave of 64 lanes is two warps here.
        var half = UInt32(lane_id()) // 32 * 32
        return warp.shuffle_idx(x, half + UInt32(source) + UInt32(lane_id()) % UInt32(low))


struct Head[KEY_HEAD_DIM: Int, VALUE_HEAD_DIM: Int](TrivialRegisterPassable):
    """A thread's place on the head; the constants are the mapping described above."""

    comptime KEY_GROUPS = key_groups(Self.KEY_HEAD_DIM, Self.VALUE_HEAD_DIM)
    comptime COLUMN_GROUPS = 32 // Self.KEY_GROUPS
    comptime COLUMNS = 4 * Self.COLUMN_GROUPS
    comptime QUADS = ceildiv(Self.KEY_HEAD_DIM, 4 * Self.KEY_GROUPS)
    comptime ROWS = 4 * Self.QUADS
    comptime PADDED_KEY_DIM = Self.ROWS * Self.KEY_GROUPS
    comptime WARPS = ceildiv(Self.VALUE_HEAD_DIM, Self.COLUMNS)
    comptime WIDE = ceildiv(Self.WARPS, ceildiv(Self.WARPS, 8))
    comptime NARROW = min(2, Self.WIDE)
    comptime WIDE_SPLITS = ceildiv(Self.WARPS, Self.WIDE)
    comptime NARROW_SPLITS = ceildiv(Self.WARPS, Self.NARROW)
    # Only the first extent of a grid may pass 65,535, which rows * splits does for a large head.
    # Else the group goes first, so that blocks of one key head are neighbours.
    comptime ROWS_FIRST = Self.WIDE_SPLITS > 1
    comptime WIDE_COLUMNS = Self.WIDE * Self.COLUMNS
    comptime ALL_COLUMNS = Self.VALUE_HEAD_DIM % Self.WIDE_COLUMNS == 0 and (
        Self.WARPS % Self.NARROW == 0
    )
    comptime THREADS = 32 * Self.WIDE
    comptime MIN_BLOCKS = 65536 // (128 * Self.THREADS)  # so that a thread gets 128 registers

    # After a reduction a lane holds RESULTS sums of its own columns: of the first operand in lanes
    # 0..15, of the second in lanes 16..31. SHARE lanes of each half hold the same columns' sums.
    comptime RESULTS = max(8 // Self.KEY_GROUPS, 1)
    comptime SHARE = max(Self.KEY_GROUPS // 8, 1)
    comptime Results = SIMD[F32, Self.RESULTS]
    comptime State = Array[Vec, Self.ROWS]

    # Shared memory of a token, in words: q, k, v of the block's columns, gates.
    comptime K = Self.PADDED_KEY_DIM
    comptime V = 2 * Self.PADDED_KEY_DIM
    comptime GATES = Self.V + Self.WIDE_COLUMNS

    var tid: UInt32
    var lane: UInt32
    var second: Bool  # whether the lane gets sums of a reduction's second operand
    var warp: UInt32
    var warps: UInt32
    var slice: UInt32  # which of the head's blocks
    var splits: UInt32
    var batch_row: UInt32
    var group_head: UInt32
    var group: UInt32
    var key_head: UInt32
    var value_head: UInt32
    var row: UInt32  # first row of the lane's first quad
    var column: UInt32  # first column of the lane, in the block
    var result: UInt32  # first column whose sums the lane gets, in the block

    @always_inline
    def __init__(out self, tid: UInt32):
        """Places a thread, in the grid that `launch_grid` gives."""
        self.tid = tid
        self.lane = self.tid % 32
        self.second = (self.tid & 16) != 0
        self.warp = self.tid // 32
        comptime if is_nvidia_gpu():
            self.warp = warp.broadcast(self.warp)  # else ptxas does not know it is uniform
        comptime if Self.ROWS_FIRST:
            self.slice = UInt32(block_idx.x)
            self.group_head = UInt32(block_idx.z)
            self.group = UInt32(grid_dim.z)
        else:
            self.slice = UInt32(block_idx.z)
            self.group_head = UInt32(block_idx.x)
            self.group = UInt32(grid_dim.x)
        self.warps = UInt32(Self.WIDE)
        self.splits = UInt32(Self.WIDE_SPLITS)
        self.batch_row = self.slice // UInt32(Self.WIDE_SPLITS)
        comptime if Self.NARROW != Self.WIDE:
            if block_dim.x == 32 * Self.NARROW:
                self.warps = UInt32(Self.NARROW)
                self.splits = UInt32(Self.NARROW_SPLITS)
                self.batch_row = self.slice // UInt32(Self.NARROW_SPLITS)
        self.slice -= self.batch_row * self.splits
        self.key_head = UInt32(block_idx.y)
        self.value_head = self.key_head * self.group + self.group_head
        comptime groups = UInt32(Self.COLUMN_GROUPS)
        self.row = self.lane // groups * 4
        self.column = self.warp * UInt32(Self.COLUMNS) + self.lane % groups * 4
        self.result = self.column + self.lane % 16 // (groups * UInt32(Self.SHARE)) * UInt32(
            Self.RESULTS
        )

    @staticmethod
    def launch_grid(
        rows: Int, num_key_heads: Int, num_value_heads: Int, wide: Bool
    ) -> Tuple[Int, Int, Int]:
        """Blocks of a launch with WIDE or NARROW warps: a block for each group head, key head, row
        and slice of a head."""
        var slices = rows * (Self.WIDE_SPLITS if wide else Self.NARROW_SPLITS)
        var group = num_value_heads // num_key_heads
        comptime if Self.ROWS_FIRST:
            return (slices, num_key_heads, group)
        else:
            return (group, num_key_heads, slices)

    @always_inline
    def again(self) -> Self:
        """The same place, computed anew."""
        return Self(opaque(self.tid))

    @always_inline
    def owns_result(self) -> Bool:
        """Whether the lane is the one that stores its results."""
        var owns = True
        comptime if Self.SHARE > 1:
            owns = self.lane // UInt32(Self.COLUMN_GROUPS) % UInt32(Self.SHARE) == 0
        comptime if not Self.ALL_COLUMNS:
            owns = owns and self.result + self.block_column() < UInt32(Self.VALUE_HEAD_DIM)
        return owns

    @always_inline
    def block_column(self) -> UInt32:
        """First column of the block."""
        return self.slice * self.warps * UInt32(Self.COLUMNS)

    @always_inline
    def columns(self) -> UInt32:
        """Columns of the block."""
        var n = self.warps * UInt32(Self.COLUMNS)
        comptime if not Self.ALL_COLUMNS:
            n = min(n, UInt32(Self.VALUE_HEAD_DIM) - self.block_column())
        return n

    @always_inline
    def values(self, token: SharedPtr) -> Self.Results:
        """Loads v of the lane's result columns, from the token's words."""
        var at = self.result
        comptime if not Self.ALL_COLUMNS:  # stay inside what was copied
            at = min(at, UInt32(Self.VALUE_HEAD_DIM - Self.RESULTS) - self.block_column())
        return load_shared[Self.RESULTS](token + Self.V + at)

    @always_inline
    def load[dtype: DType](self, tile: GlobalPtr[dtype]) -> Self.State:
        """The lane's part of a head's state."""
        var s = Self.State(fill=0)
        var p = tile + (self.row * UInt32(Self.VALUE_HEAD_DIM) + self.block_column() + self.column)
        comptime for j in range(Self.QUADS):
            if self.holds[j]():
                comptime for i in range(4):
                    s[j * 4 + i] = load_state[4](
                        p + (j * 4 * Self.KEY_GROUPS + i) * Self.VALUE_HEAD_DIM
                    )
        return s^

    @always_inline
    def store[dtype: DType](self, tile: GlobalPtr[dtype], s: Self.State):
        var p = tile + (self.row * UInt32(Self.VALUE_HEAD_DIM) + self.block_column() + self.column)
        comptime for j in range(Self.QUADS):
            if self.holds[j]():
                comptime for i in range(4):
                    store_state[4](
                        p + (j * 4 * Self.KEY_GROUPS + i) * Self.VALUE_HEAD_DIM, s[j * 4 + i]
                    )

    @always_inline
    def holds[quad: Int](self) -> Bool:
        """Whether the lane's quad and columns lie inside the head."""
        var inside = True
        comptime if (quad + 1) * 4 * Self.KEY_GROUPS > Self.KEY_HEAD_DIM:
            inside = self.row + UInt32(quad * 4 * Self.KEY_GROUPS) < UInt32(Self.KEY_HEAD_DIM)
        comptime if not Self.ALL_COLUMNS:
            inside = inside and self.column + self.block_column() < UInt32(Self.VALUE_HEAD_DIM)
        return inside

    @always_inline
    def sum_two(self, first: Vec, second: Vec) -> Self.Results:
        """Column sums of both over the key groups, in a fixed order."""
        return self.sum_columns[4, 8](rebind[Vec](halve[8](first.join(second), self.second, 16)))

    @always_inline
    def sum_one(self, x: Vec) -> Self.Results:
        """As `sum_two`, when the other is not needed: both halves of the warp get the sums."""
        return self.sum_columns[4, 8](xor_add[4](x, 16))

    @always_inline
    def sum_columns[width: Int, offset: Int](self, x: SIMD[F32, width]) -> Self.Results:
        comptime if offset < Self.COLUMN_GROUPS:
            return rebind[Self.Results](x)
        elif width > 1:
            return self.sum_columns[width // 2, offset // 2](
                halve[width](x, (self.lane & UInt32(offset)) != 0, UInt32(offset))
            )
        else:
            return self.sum_columns[width, offset // 2](xor_add[width](x, UInt32(offset)))

    @always_inline
    def spread(self, x: Self.Results) -> Vec:
        """The first operand's results for the lane's own four columns."""
        comptime stride = Self.COLUMN_GROUPS * Self.SHARE
        var f = Vec()
        comptime for c in range(4):
            f[c] = shuffle_within[Self.COLUMN_GROUPS](
                x[c % Self.RESULTS], c // Self.RESULTS * stride
            )
        return f

    @always_inline
    def clear_padding[words: Int, tokens: Int](self, at: SharedPtr):
        """Zeros the key rows that do not exist; visible after the next barrier."""
        comptime padding = Self.PADDED_KEY_DIM - Self.KEY_HEAD_DIM
        comptime if padding > 0:
            var i = self.tid
            while i < UInt32(tokens * 2 * padding):
                var part = i // UInt32(padding)
                var word = part // 2 * UInt32(words) + part % 2 * UInt32(Self.PADDED_KEY_DIM)
                at[unsafe_offset=word + UInt32(Self.KEY_HEAD_DIM) + i % UInt32(padding)] = 0
                i += self.warps * 32
