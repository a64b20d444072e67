"""What a row leaves behind: records in the ring, delta factors and outputs."""

from std.sys import size_of
from .common import F32, GlobalPtr, SharedPtr, opaque, wide
from .head import Head
from ..ring import RecordLayout


@fieldwise_init
struct Ring[KD: Int, VD: Int, ring_dtype: DType, RING_LEN: Int](TrivialRegisterPassable):
    """The ring of a launch; RING_LEN 0 is none."""

    var tiles: GlobalPtr[Self.ring_dtype]
    var slot_idx: GlobalPtr[DType.uint32]
    var num_rows: UInt32
    var num_key_heads: UInt32
    var record_stride: UInt32

    @always_inline
    def has_place(self, batch_row: UInt32) -> Bool:
        """Whether there is no ring, or the row names a ring row that exists."""
        comptime if Self.RING_LEN == 0:
            return True
        else:
            return self.slot_idx[unsafe_offset=batch_row] < self.num_rows

    @always_inline
    def records(
        self, head: Head[Self.KD, Self.VD], length: UInt32
    ) -> Records[Self.KD, Self.VD, Self.ring_dtype]:
        """The records of the head's row, of so many tokens, and key head."""
        comptime if Self.RING_LEN == 0:
            return Records[Self.KD, Self.VD, Self.ring_dtype](self.tiles, 0, False)
        else:
            var row = self.slot_idx[unsafe_offset=head.batch_row]
            return Records[Self.KD, Self.VD, Self.ring_dtype](
                self.tiles
                + wide(
                    row * self.num_key_heads + head.key_head,
                    UInt32(Self.RING_LEN) * self.record_stride,
                ),
                self.record_stride,
                length <= UInt32(Self.RING_LEN),
            )


@fieldwise_init
struct Records[KD: Int, VD: Int, ring_dtype: DType](TrivialRegisterPassable):
    """The records of a (row, key head); `active` when this row leaves any."""

    comptime H = Head[Self.KD, Self.VD]
    var first: GlobalPtr[Self.ring_dtype]
    var stride: UInt32
    var active: Bool

    @always_inline
    def key_and_decay(self, head: Self.H, t: UInt32, token: SharedPtr):
        """Writes the raw key (the group's first head, each block its part) and the decay."""
        var record = self.first + wide(t, self.stride)
        if head.group_head == 0:
            var e = head.slice * 32 + head.lane
            var more = True
            comptime if Self.H.NARROW_SPLITS * 32 <= Self.KD:  # every lane has a first element
                self.key(record, token, e)
                e += head.splits * 32
                more = head.splits * 32 < UInt32(Self.KD)
            if more:
                e = opaque(e)
                while e < UInt32(Self.KD):
                    self.key(record, token, e)
                    e += head.splits * 32
        if (head.slice == 0) & (head.lane == 16):  # which copied it
            var layout = RecordLayout(Self.KD, Self.VD, Int(opaque(head.group)))
            record[unsafe_offset=UInt32(layout.decay(Int(head.group_head)))] = (
                token + Self.H.GATES
            )[unsafe_offset=3].cast[Self.ring_dtype]()

    @always_inline
    def sink(self, head: Self.H) -> Sink[Self.ring_dtype]:
        """Of the lane's delta factors, from the first record."""
        var layout = RecordLayout(Self.KD, Self.VD, Int(head.group))
        var factor = UInt32(layout.delta_factor(Int(head.group_head)))
        return Sink[Self.ring_dtype](
            (self.first + (factor + head.block_column() + head.result)).unsafe_bitcast[UInt8](),
            UInt64(self.stride) * UInt64(size_of[Scalar[Self.ring_dtype]]()),
            1,
        )

    @always_inline
    def key(self, record: GlobalPtr[Self.ring_dtype], token: SharedPtr, e: UInt32):
        record[unsafe_offset=e] = (token + Self.H.K)[unsafe_offset=e].cast[Self.ring_dtype]()


@fieldwise_init
struct Sink[ring_dtype: DType](TrivialRegisterPassable):
    """Where a lane's results of one token go, and those of the next."""

    var at: GlobalPtr[DType.uint8]
    var step: UInt64  # bytes
    var apart: UInt32  # elements between results

    @always_inline
    def put(self, x: SIMD[F32, _], is_output: Bool):
        comptime for i in range(x.length):
            var away = UInt32(i) * self.apart
            comptime if Self.ring_dtype == F32:  # one store for both
                self.at.unsafe_bitcast[Float32]()[unsafe_offset=away] = x[i]
            else:
                if is_output:
                    self.at.unsafe_bitcast[Float32]()[unsafe_offset=away] = x[i]
                else:
                    self.at.unsafe_bitcast[Scalar[Self.ring_dtype]]()[unsafe_offset=away] = x[
                        i
                    ].cast[Self.ring_dtype]()

    @always_inline
    def advance(mut self):
        self.at += self.step


@fieldwise_init
struct Outputs(TrivialRegisterPassable):
    """Where outputs go."""

    var tiles: GlobalPtr[F32]
    var token_stride: UInt32
    var value_stride: UInt32

    @always_inline
    def zero[KD: Int, VD: Int](self, head: Head[KD, VD], first: UInt32, last: UInt32):
        """Zeros the block's columns of tokens [first, last), which no state sees."""
        var channel = opaque(head.value_head) * UInt32(VD) + head.block_column()
        var t = first
        while t < last:
            var c = head.tid
            while c < head.columns():
                self.tiles[
                    unsafe_offset=wide(t, self.token_stride) + wide(channel + c, self.value_stride)
                ] = 0
                c += head.warps * 32
            t += 1

    @always_inline
    def sink[
        ring_dtype: DType, KD: Int, VD: Int
    ](self, head: Head[KD, VD], first: UInt32) -> Sink[ring_dtype]:
        """Of the lane's columns, from token `first`."""
        var column = head.value_head * UInt32(VD) + head.block_column() + head.result
        return Sink[ring_dtype](
            (
                self.tiles + (wide(first, self.token_stride) + wide(column, self.value_stride))
            ).unsafe_bitcast[UInt8](),
            UInt64(self.token_stride) * 4,
            self.value_stride,
        )
