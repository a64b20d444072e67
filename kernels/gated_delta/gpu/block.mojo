"""The block form: up to four tokens against the state as it was before them.

With D_i the decay from the block's start to token i, D_ij that from token j to token i, and S the
state before the block:

    m_i = D_i (S^T k_i) + sum_{j < i} D_ij (k_j . k_i) f_j
    f_i = beta_i (v_i - m_i kinv_i) kinv_i
    out_i = qf_i (D_i (S^T q_i) + sum_{j <= i} D_ij (k_j . q_i) f_j)

S^T k and S^T q cost one pass over the state a token and no update; the sums are a triangular solve
of one column a lane. The state is updated after the block, token by token as the fold does it, and
only when someone needs it. The blocks start with the row, so that a verify, its fold and the plain
recurrence over the same tokens agree to the bit; but two launches of a row split elsewhere do not,
unlike in the exact form (step.mojo).
"""

from std.collections import Array
from std.math import ceildiv, fma, rsqrt
from max.gpu.primitives import warp
from max.gpu.sync import barrier, syncwarp
from .common import F32, SharedPtr, copies_wait, inverse_root, load_shared, opaque
from .head import Head, Vec, halve, xor_add
from .records import Records, Ring, Sink
from .tokens import CHUNK, Source


struct Block[KD: Int, VD: Int]:
    """A chunk of tokens of one value head, on a block's columns."""

    comptime H = Head[Self.KD, Self.VD]
    # Words of a token after q, k, v: {_, beta, _, decay}, then what `products` makes of it:
    # D_ij (k_j . k_i) for j < i, D_ij (k_j . q_i) for j <= i, {-kinv, beta * kinv, qf, D_i}.
    comptime KEYS = Self.H.GATES + 4
    comptime QUERIES = Self.KEYS + CHUNK
    comptime SCALES = Self.QUERIES + CHUNK
    comptime WORDS = Self.SCALES + 4
    comptime TOKENS = 2 * CHUNK  # shared memory: a chunk in use, the next

    @staticmethod
    @always_inline
    def products[i: Int](head: Self.H, chunk: SharedPtr):
        """The coefficients of token i, by one warp: a lane sums its quads, then lanes 4j .. of each
        half of the warp end with the product of k_j and k_i (first half) or q_i (second)."""
        comptime assert CHUNK == 4, "the reduction below is for four tokens"
        var token = chunk + i * Self.WORDS
        var x = SIMD[F32, 8](0)
        var qq = Float32(0)
        comptime for part in range(ceildiv(Self.KD, 128)):
            if Self.KD % 128 == 0 or head.lane < UInt32(Self.KD // 4 - 32 * part):
                var at = head.lane * 4 + UInt32(128 * part)
                var q = load_shared[4](token + at)
                var k = load_shared[4](token + Self.H.K + at)
                comptime for c in range(4):
                    qq = fma(q[c], q[c], qq)
                comptime for j in range(i + 1):
                    var kj = load_shared[4](chunk + (j * Self.WORDS + Self.H.K) + at)
                    comptime for c in range(4):
                        x[j] = fma(k[c], kj[c], x[j])
                        x[4 + j] = fma(q[c], kj[c], x[4 + j])
        comptime for o in range(5):
            qq = xor_add[1](qq, UInt32(16 >> o))
        var four = rebind[SIMD[F32, 4]](halve[8](x, head.second, 16))
        var two = rebind[SIMD[F32, 2]](halve[4](four, (head.lane & 8) != 0, 8))
        var sum = halve[2](two, (head.lane & 4) != 0, 4)[0]
        sum = xor_add[1](xor_add[1](sum, 2), 1)
        var j = head.lane // 4 % 4
        var since = Float32(1)  # D_ij
        var all = Float32(1)  # D_i
        comptime for m in range(i + 1):
            var decay = (chunk + m * Self.WORDS + Self.H.GATES)[unsafe_offset=3]
            all = decay if m == 0 else all * decay
            comptime if m > 0:
                since = since * decay if UInt32(m) > j else since
        if head.lane % 4 == 0:  # zero for j > i
            (token + Self.KEYS)[unsafe_offset=head.lane // 4] = sum * since
            if j == UInt32(i):
                # k_i . k_i, in the place that no key product has, is the norm.
                comptime scale = inverse_root(Self.KD)
                var inverse = rsqrt((qq if head.second else sum) + 1e-6)
                var beta = (token + Self.H.GATES)[unsafe_offset=1]
                var first = inverse * scale if head.second else -inverse
                var second = all if head.second else beta * inverse
                var to = token + Self.SCALES + (UInt32(2) if head.second else UInt32(0))
                to.unsafe_store[alignment=8](SIMD[F32, 2](first, second))

    @staticmethod
    @always_inline
    def read(head: Self.H, s: Self.H.State, token: SharedPtr) -> Self.H.Results:
        """S^T k (lanes of the first operand) and S^T q of a token."""
        var kv = Vec()
        var qv = Vec()
        comptime for j in range(Self.H.QUADS):
            var q = load_shared[4](token + head.row + j * 4 * Self.H.KEY_GROUPS)
            var k = load_shared[4](token + Self.H.K + head.row + j * 4 * Self.H.KEY_GROUPS)
            comptime for i in range(4):
                comptime r = j * 4 + i
                kv = s[r] * k[i] if r == 0 else fma(s[r], Vec(k[i]), kv)
                qv = s[r] * q[i] if r == 0 else fma(s[r], Vec(q[i]), qv)
        return head.sum_two(kv, qv)

    @staticmethod
    @always_inline
    def solve[
        i: Int, ring_dtype: DType
    ](
        head: Self.H,
        s: Self.H.State,
        chunk: SharedPtr,
        count: UInt32,
        writes: Bool,
        mut sink: Sink[ring_dtype],
        mut f: Array[Self.H.Results, CHUNK],
        mut g: Array[Self.H.Results, CHUNK],
    ):
        """Tokens i and after, of `count`: f are the delta factors in the lanes of the first
        operand, g the same in those of the second."""
        comptime if i < CHUNK:
            if UInt32(i) < count:
                var token = chunk + i * Self.WORDS
                var scales = load_shared[4](token + Self.SCALES)
                var x = Self.read(head, s, token) * scales[3]
                var m = x
                var keys = load_shared[4](token + Self.KEYS)
                comptime for j in range(i):
                    m = fma(Self.H.Results(keys[j]), f[j], m)
                f[i] = fma(m, Self.H.Results(scales[0]), head.values(token)) * scales[1]
                comptime for e in range(Self.H.RESULTS):
                    g[i][e] = warp.shuffle_xor(f[i][e], 16)
                var queries = load_shared[4](token + Self.QUERIES)
                comptime for j in range(i + 1):
                    x = fma(Self.H.Results(queries[j]), g[j], x)
                x = x * scales[2]
                comptime for e in range(Self.H.RESULTS):
                    x[e] = x[e] if head.second else f[i][e]
                if writes:
                    sink.put(x, head.second)
                sink.advance()
                Self.solve[i + 1](head, s, chunk, count, writes, sink, f, g)

    @staticmethod
    @always_inline
    def update(
        head: Self.H,
        mut s: Self.H.State,
        chunk: SharedPtr,
        count: UInt32,
        f: Array[Self.H.Results, CHUNK],
    ):
        """S <- fma(k, f, S * decay), token by token."""
        var token = chunk
        var i = UInt32(0)
        while i < count:
            var mine = f[0]
            comptime for j in range(1, CHUNK):
                comptime for e in range(Self.H.RESULTS):
                    mine[e] = f[j][e] if i == UInt32(j) else mine[e]
            var factors = head.spread(mine)
            var decay = (token + Self.H.GATES)[unsafe_offset=3]
            comptime for j in range(Self.H.QUADS):
                var k = load_shared[4](token + Self.H.K + head.row + j * 4 * Self.H.KEY_GROUPS)
                comptime for r in range(4):
                    s[j * 4 + r] = fma(Vec(k[r]), factors, s[j * 4 + r] * decay)
            token += Self.WORDS
            i += 1

    @staticmethod
    @always_inline
    def run[
        ring_dtype: DType, RING_LEN: Int
    ](
        head: Self.H,
        source: Source[Self.KD, Self.VD],
        ring: Ring[Self.KD, Self.VD, ring_dtype, RING_LEN],
        records: Records[Self.KD, Self.VD, ring_dtype],
        results: Sink[ring_dtype],
        writes: Bool,
        first: UInt32,
        length: UInt32,
        shared: SharedPtr,
        mut s: Self.H.State,
    ):
        """All tokens of a row, from `first`, whose first chunk is on its way to `shared`."""
        var sink = results
        var chunk = shared
        var start = UInt32(0)
        while True:
            var left = length - start
            var count = min(left, UInt32(CHUNK))
            copies_wait()
            if records.active:
                syncwarp()  # a key is recorded by other lanes than copied it
                comptime for n in range(ceildiv(CHUNK, Self.H.NARROW)):
                    var i = head.warp + UInt32(n) * head.warps
                    if i < count:
                        i = opaque(i)
                        records.key_and_decay(head, start + i, chunk + i * UInt32(Self.WORDS))
            barrier()
            comptime for i in range(CHUNK):
                var owner = UInt32(i % Self.H.WIDE)
                if head.warps == UInt32(Self.H.NARROW):
                    owner = UInt32(i % Self.H.NARROW)
                if (UInt32(i) < count) & (owner == head.warp):
                    Self.products[i](head, chunk)
            barrier()
            var other = shared
            if chunk == shared:
                other = shared + CHUNK * Self.WORDS
            if left > UInt32(CHUNK):
                source.fetch[Self.WORDS](
                    head.again(),
                    first + start + UInt32(CHUNK),
                    min(left - UInt32(CHUNK), UInt32(CHUNK)),
                    other,
                )
            var f = Array[Self.H.Results, CHUNK](fill=0)
            var g = Array[Self.H.Results, CHUNK](fill=0)
            Self.solve[0](head, s, chunk, count, writes, sink, f, g)
            if left > UInt32(CHUNK) or not records.active:
                Self.update(head, s, chunk, count, f)
            if left <= UInt32(CHUNK):
                break
            start += UInt32(CHUNK)
            chunk = other
