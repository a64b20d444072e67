"""The causal conv1d over ragged rows on the CPU, with or without its SiLU.

    out[t, c] = sum over j of w[c, j] * x[t - (width - 1) + j, c],  j ascending, in float32

where x before a row is the row's window in conv_state, oldest first. Channels are independent and
every sum has one order, so the bits depend on no vector width, split or other row.

A unit is a block of channels of a segment of one row, and goes down the row in tiles of a few
tokens: for each vector of channels the tile's inputs are read once, and the weights,
[channel, width] in memory, are turned in registers. The first tile of a row has its window before
it, which is turned, moved on and turned back while it is there; any other has the row's own earlier
inputs.

Memory is the limit, so a block is long: a few lines of memory are followed at a time, each for
kilobytes. An output that is too large to be in a cache still when it is read is stored past the
caches, which spares reading what is about to be overwritten: 1.4 times as fast on two cores.
"""

from std.math import fma
from std.sys import size_of

from ..activation import silu
from ..checks import MAX_CONV_WIDTH, MIN_CONV_WIDTH, PADDING
from .schedule import chunk_count, run_chunks
from .turn import Lanes, shift_in, turn_in, turn_out
from .vector import F32, fill_zero, load, P, store, stream, stream_end, Vector, W

# Channels of a block: 8 KB of a token.
comptime BLOCK = 2048
# Tokens of a segment: long rows are cut so that every worker has something to do.
comptime SEGMENT = 64
# Tokens of a tile: more than a window holds, so that only the first tile of a row reaches into it.
comptime TILE = MAX_CONV_WIDTH
# Outputs of so many bytes are stored past the caches.
comptime STREAM_BYTES = 8 << 20


struct Stretch[work: DType, state: DType, WIDTH: Int, activated: Bool](TrivialRegisterPassable):
    """One row on one block of channels: every pointer is at the block's first channel."""

    comptime HISTORY = Self.WIDTH - 1

    var x: P[Self.work]  # the row's first token
    var out_: P[Self.work]
    var stride: Int
    var length: Int  # of the row, in tokens
    var weight: P[Self.work]  # [channels, WIDTH]
    var window: P[Self.state]  # [channels, HISTORY]
    var write_state: Bool
    var streams: Bool

    @always_inline
    def __init__(
        out self,
        x: P[Self.work],
        out_: P[Self.work],
        stride: Int,
        length: Int,
        weight: P[Self.work],
        window: P[Self.state],
        write_state: Bool,
        streams: Bool,
    ):
        self.x = x
        self.out_ = out_
        self.stride = stride
        self.length = length
        self.weight = weight
        self.window = window
        self.write_state = write_state
        self.streams = streams

    def run(self, begin: Int, end: Int, channels: Int):
        """Outputs of tokens [begin, end), and with the first of them the window."""
        var t = begin
        if t == 0:
            self.tile[first=True, streams=False](0, min(TILE, end), channels)
            t = TILE
        while t < end:
            if self.streams and t + TILE <= end:
                self.tile[first=False, streams=True](t, t + TILE, channels)
            else:
                self.tile[first=False, streams=False](t, min(t + TILE, end), channels)
            t += TILE

    @always_inline
    def tile[*, first: Bool, streams: Bool](self, begin: Int, end: Int, channels: Int):
        var c = 0
        while c + W <= channels:
            self.vector[first, streams, partial=False](begin, end, c, W)
            c += W
        if c < channels:
            self.vector[first, streams, partial=True](begin, end, c, channels - c)

    @always_inline
    def vector[
        first: Bool, streams: Bool, partial: Bool
    ](self, begin: Int, end: Int, c: Int, n: Int):
        """Tokens [begin, end) of a tile on channels [c, c + n)."""
        var w = turn_in[Self.WIDTH, partial](self.weight + c * Self.WIDTH, n)
        var window = Lanes[Self.state, Self.HISTORY](fill=0)
        var past = Lanes[F32, Self.HISTORY](fill=0)
        comptime if first:
            window = turn_in[Self.HISTORY, partial](self.window + c * Self.HISTORY, n)
        comptime for j in range(Self.HISTORY):
            comptime if first:
                past[j] = window[j].cast[F32]()
            else:
                var t = begin - Self.HISTORY + j
                past[j] = load[partial=partial](self.x + t * self.stride + c, n)
        if end - begin == TILE:
            self.tokens[TILE, streams, partial](w, past, begin, c, n)
        else:
            for t in range(begin, end):
                self.tokens[1, False, partial](w, past, t, c, n)
        comptime if first:
            if self.write_state:
                shift_in[partial=partial](window, self.x + c, self.stride, self.length, n)
                turn_out[Self.HISTORY, partial](self.window + c * Self.HISTORY, window, n)

    @always_inline
    def tokens[
        COUNT: Int, streams: Bool, partial: Bool
    ](
        self,
        w: Lanes[Self.work, Self.WIDTH],
        mut past: Lanes[F32, Self.HISTORY],
        t: Int,
        c: Int,
        n: Int,
    ):
        """Outputs of COUNT tokens from t, whose past they move on."""
        # All inputs before the first output: the compiler must assume that they may overlap.
        var x = Array[Vector, Self.HISTORY + COUNT](fill=0)
        comptime for j in range(Self.HISTORY):
            x[j] = past[j]
        comptime for i in range(COUNT):
            x[Self.HISTORY + i] = load[partial=partial](self.x + (t + i) * self.stride + c, n)
        comptime for i in range(COUNT):
            var y = Vector(0)
            comptime for j in range(Self.WIDTH):
                y = fma(w[j].cast[F32](), x[i + j], y)
            comptime if Self.activated:
                y = silu(y)
            var to = self.out_ + (t + i) * self.stride + c
            comptime if streams and not partial:
                stream(to, y)
            else:
                store[partial=partial](to, y, n)
        comptime for j in range(Self.HISTORY):
            past[j] = x[COUNT + j]


def conv1d[
    work: DType, state: DType, //, activated: Bool = False
](
    out_: P[work],
    qkv: P[work],
    weight: P[work],
    conv_state: P[state],
    slot_idx: P[DType.uint32],
    offsets: P[DType.uint32],
    batch_size: Int,
    num_tokens: Int,
    conv_dim: Int,
    width: Int,
    write_state: Bool,
):
    """Convolves every row; with write_state a row leaves its last width - 1 inputs in its window.

    The operands are as contract and checks.mojo have them, checked already. With activated the
    outputs have been through silu, and those of no row are zero still.
    """
    var blocks = (conv_dim + BLOCK - 1) // BLOCK

    @always_inline
    def units_of(b: Int) {imm} -> Int:
        if slot_idx[unsafe_offset=b] == PADDING:
            return 0
        var T = Int(offsets[unsafe_offset=b + 1]) - Int(offsets[unsafe_offset=b])
        return (T + SEGMENT - 1) // SEGMENT * blocks

    var units = 0
    var rows = 0
    var covered = 0
    for b in range(batch_size):
        var start = Int(offsets[unsafe_offset=b])
        var end = Int(offsets[unsafe_offset=b + 1])
        if start > covered:
            fill_zero(out_ + covered * conv_dim, (start - covered) * conv_dim)
        covered = end
        if slot_idx[unsafe_offset=b] == PADDING:
            fill_zero(out_ + start * conv_dim, (end - start) * conv_dim)
        elif end > start:
            units += units_of(b)
            rows += 1
    fill_zero(out_ + covered * conv_dim, (num_tokens - covered) * conv_dim)
    if units == 0:
        return

    # Bytes: inputs and outputs, and for each row the window, read and written, and the weights.
    comptime WORK = size_of[Scalar[work]]()
    var row_bytes = 2 * (width - 1) * size_of[Scalar[state]]() + width * WORK
    var bytes = conv_dim * (num_tokens * 2 * WORK + rows * row_bytes)
    # A core moves some 20 bytes in the time of 12 multiply-adds; activated, it computes as long.
    var chunks = chunk_count(bytes * (2 if activated else 1) // 2, units)
    var streams = (
        num_tokens * conv_dim * WORK >= STREAM_BYTES
        and conv_dim % W == 0
        and Int(out_) % size_of[SIMD[work, W]]() == 0
    )

    def chunk[WIDTH: Int](i: Int) {imm} -> None:
        var first = units * i // chunks
        var last = units * (i + 1) // chunks
        var unit = 0
        for b in range(batch_size):
            var of_row = units_of(b)
            var start = Int(offsets[unsafe_offset=b])
            var T = Int(offsets[unsafe_offset=b + 1]) - start
            for u in range(max(first - unit, 0), min(last - unit, of_row)):
                var begin = u // blocks * SEGMENT
                var c = u % blocks * BLOCK
                var place = start * conv_dim + c
                var channel = Int(slot_idx[unsafe_offset=b]) * conv_dim + c
                Stretch[work, state, WIDTH, activated](
                    qkv + place,
                    out_ + place,
                    conv_dim,
                    T,
                    weight + c * WIDTH,
                    conv_state + channel * (WIDTH - 1),
                    write_state,
                    streams,
                ).run(begin, min(begin + SEGMENT, T), min(BLOCK, conv_dim - c))
            unit += of_row
        if streams:
            stream_end()

    comptime for WIDTH in range(MIN_CONV_WIDTH, MAX_CONV_WIDTH + 1):
        if width == WIDTH:

            def of_width(i: Int) {imm} -> None:
                chunk[WIDTH](i)

            run_chunks(of_width, chunks)
