"""How a row's tokens reach a block: staged in shared memory, a chunk of CHUNK tokens at a time."""

from std.math import ceildiv
from max.gpu.sync import syncwarp
from .common import F32, GlobalPtr, SharedPtr, copies_wait, copy_async, offset, opaque, wide
from .head import Head

comptime CHUNK = 4


@fieldwise_init
struct Source[KD: Int, VD: Int](TrivialRegisterPassable):
    """A row's tokens in global memory. Warp w stages tokens w, w + warps, .. of a chunk."""

    comptime H = Head[Self.KD, Self.VD]
    var qkv: GlobalPtr[F32]
    var decay: GlobalPtr[F32]
    var beta: GlobalPtr[F32]
    var key_dim: UInt32
    var token_stride: UInt32
    var channel_stride: UInt32
    var gate_token_stride: UInt32
    var gate_head_stride: UInt32

    @always_inline
    def fetch[words: Int](self, head: Self.H, first: UInt32, count: UInt32, chunk: SharedPtr):
        """Starts the copies of `count` tokens from `first`."""
        var unaligned = (UInt32(Int(self.qkv)) | self.token_stride * 4) % 16
        if unaligned | (self.channel_stride ^ 1) == 0:
            if head.warp < count:
                self.copy_quads[words](head, head.warp, first, chunk)
            comptime for n in range(1, ceildiv(CHUNK, Self.H.NARROW)):
                var i = head.warp + UInt32(n) * head.warps
                if i < count:
                    self.copy_quads[words](head, opaque(i), first, chunk)
        else:
            self.copy_words[words](head, first, count, chunk)

    @always_inline
    def copy_quads[words: Int](self, head: Self.H, i: UInt32, first: UInt32, chunk: SharedPtr):
        """One token, whose channels are contiguous and 16-byte aligned."""
        var line = self.qkv + wide(first + i, self.token_stride)
        var token = chunk + i * UInt32(words)
        var q = head.key_head * UInt32(Self.KD)
        comptime for j in range(ceildiv(Self.KD, 128)):
            var c = head.lane * 4 + UInt32(128 * j)
            if Self.KD % 128 == 0 or c < UInt32(Self.KD):
                var at = offset(line, q + c)
                copy_async[4](at, token + c)
                copy_async[4](offset(at, self.key_dim), token + Self.H.K + c)
        var v = self.key_dim * 2 + head.value_head * UInt32(Self.VD) + head.block_column()
        comptime for j in range(ceildiv(Self.H.WIDE_COLUMNS, 128)):
            var c = head.lane * 4 + UInt32(128 * j)
            if c < head.columns():
                copy_async[4](offset(line, v + c), token + Self.H.V + c)
        self.copy_gates(head, first + i, token)

    @always_inline
    def copy_gates(self, head: Self.H, t: UInt32, token: SharedPtr):
        if head.lane % 16 == 0:
            var gate = self.decay if head.second else self.beta
            copy_async[1](
                gate + (t * self.gate_token_stride + head.value_head * self.gate_head_stride),
                token + UInt32(Self.H.GATES + 1) + head.lane // 8,
            )

    @always_inline
    def copy_words[words: Int](self, head: Self.H, first: UInt32, count: UInt32, chunk: SharedPtr):
        """Tokens anywhere. All is derived from opaque values: else addresses of this path are
        computed, and kept, on the other."""
        var stride = opaque(self.channel_stride)
        var i = opaque(head.warp)
        while i < count:
            var line = self.qkv + wide(first + i, self.token_stride)
            var token = chunk + i * UInt32(words)
            var lane = opaque(head.lane)
            var q = head.key_head * UInt32(Self.KD)
            var c = lane
            while c < UInt32(Self.KD):
                copy_async[1](line + wide(q + c, stride), token + c)
                copy_async[1](line + wide(q + self.key_dim + c, stride), token + Self.H.K + c)
                c += 32
            var v = self.key_dim * 2 + head.value_head * UInt32(Self.VD) + head.block_column()
            c = lane
            while c < head.columns():
                copy_async[1](line + wide(v + c, stride), token + Self.H.V + c)
                c += 32
            self.copy_gates(head, first + i, token)
            i += opaque(head.warps)
        copies_wait()  # other lanes will read what this one copied
        syncwarp()
