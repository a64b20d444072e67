"""The exact form: token by token.

Tokens pass through shared memory a chunk at a time: the copies of a chunk start as soon as the
chunk before it is published, one chunk ahead of its use, and there is one barrier a chunk. The
output of a token and the key product of the next are taken in one pass over the state and reduced
together, so that a token costs one dependent reduction.
"""

from std.math import ceildiv, fma, rsqrt
from max.gpu.sync import barrier, syncwarp
from .common import F32, SharedPtr, copies_wait, inverse_root, load_shared, opaque, reread
from .head import Head, Vec, halve, xor_add
from .records import Records, Ring, Sink
from .tokens import CHUNK, Source


struct Step[KD: Int, VD: Int]:
    """One token of one value head, on a block's columns. The plain recurrence and the verify share
    it, and the order of its sums is fixed, so that they agree to the bit.

    1. kinv = rsqrt(sum k^2 + 1e-6), qf = rsqrt(sum q^2 + 1e-6) / sqrt(KD)
    2. S <- S * decay; kv = sum_k S[k, :] k[k]
    3. f = beta (v - kv kinv) kinv
    4. S <- fma(k, f, S); out = qf sum_k S[k, :] q[k]
    """

    comptime H = Head[Self.KD, Self.VD]
    comptime WORDS = Self.H.GATES + 4  # of a token: q, k, v, {-kinv, beta * kinv, qf, decay}
    # Shared memory: a chunk in use, with the last token of the one before; the next; one coming.
    comptime TOKENS = 3 * CHUNK

    @staticmethod
    @always_inline
    def norms(head: Self.H, token: SharedPtr):
        """Turns {_, beta, _, decay} of a token that this warp copied into its gates."""
        var q = Float32(0)
        var k = Float32(0)
        comptime for j in range(ceildiv(Self.KD, 128)):
            if Self.KD % 128 == 0 or head.lane < UInt32(Self.KD // 4 - 32 * j):
                var at = token + (head.lane * 4 + UInt32(128 * j))
                var x = load_shared[4](at)
                var y = load_shared[4](at + Self.H.K)
                comptime for c in range(4):
                    q = x[c] * x[c] if c + j == 0 else fma(x[c], x[c], q)
                    k = y[c] * y[c] if c + j == 0 else fma(y[c], y[c], k)
        var sum = halve[2](k.join(q), head.second, 16)[0]
        comptime for i in range(4):
            sum = xor_add[1](sum, UInt32(8 >> i))
        if head.lane % 16 == 0:  # lane 0: k and beta; lane 16: q and decay
            var gates = token + UInt32(Self.H.GATES) + head.lane // 8
            var inverse = rsqrt(sum + 1e-6)
            var gate = gates[unsafe_offset=1]
            comptime scale = inverse_root(Self.KD)
            var first = inverse * scale if head.second else -inverse
            var second = gate if head.second else gate * inverse
            gates.unsafe_store[alignment=8](SIMD[F32, 2](first, second))

    @staticmethod
    @always_inline
    def decay_and_read(head: Self.H, mut s: Self.H.State, token: SharedPtr, decay: Float32) -> Vec:
        """Step 2: S <- S * decay; the lane's part of kv."""
        var kv = Vec()
        comptime for j in range(Self.H.QUADS):
            var k = load_shared[4](token + Self.H.K + head.row + j * 4 * Self.H.KEY_GROUPS)
            comptime for i in range(4):
                comptime r = j * 4 + i
                s[r] = s[r] * decay
                kv = s[r] * k[i] if r == 0 else fma(s[r], Vec(k[i]), kv)
        return kv

    @staticmethod
    @always_inline
    def update_and_read(head: Self.H, mut s: Self.H.State, token: SharedPtr, f: Vec) -> Vec:
        """Step 4: S <- fma(k, f, S); the lane's part of the output."""
        var out = Vec()
        comptime for j in range(Self.H.QUADS):
            var q = load_shared[4](token + head.row + j * 4 * Self.H.KEY_GROUPS)
            var k = load_shared[4](token + Self.H.K + head.row + j * 4 * Self.H.KEY_GROUPS)
            comptime for i in range(4):
                comptime r = j * 4 + i
                s[r] = fma(Vec(k[i]), f, s[r])
                out = s[r] * q[i] if r == 0 else fma(s[r], Vec(q[i]), out)
        return out

    @staticmethod
    @always_inline
    def update_read_decay_read(
        head: Self.H,
        mut s: Self.H.State,
        token: SharedPtr,
        f: Vec,
        next: SharedPtr,
        next_decay: Float32,
    ) -> Self.H.Results:
        """Step 4 of a token and step 2 of the next, in one pass: the same operations on the same
        values. Lanes of the first operand get kv of `next`, the others the output of `token`."""
        var kv = Vec()
        var out = Vec()
        comptime for j in range(Self.H.QUADS):
            var q = load_shared[4](token + head.row + j * 4 * Self.H.KEY_GROUPS)
            var k = load_shared[4](token + Self.H.K + head.row + j * 4 * Self.H.KEY_GROUPS)
            var n = load_shared[4](next + Self.H.K + head.row + j * 4 * Self.H.KEY_GROUPS)
            comptime for i in range(4):
                comptime r = j * 4 + i
                var x = fma(Vec(k[i]), f, s[r])
                out = x * q[i] if r == 0 else fma(x, Vec(q[i]), out)
                x = x * next_decay
                kv = x * n[i] if r == 0 else fma(x, Vec(n[i]), kv)
                s[r] = x
        return head.sum_two(kv, out)

    @staticmethod
    @always_inline
    def factors(head: Self.H, kv: Self.H.Results, token: SharedPtr, gates: Vec) -> Self.H.Results:
        """Step 3, in the lanes of the first operand."""
        return fma(kv, Self.H.Results(gates[0]), head.values(token)) * gates[1]

    @staticmethod
    @always_inline
    def publish[
        ring_dtype: DType
    ](
        head: Self.H,
        records: Records[Self.KD, Self.VD, ring_dtype],
        start: UInt32,
        count: UInt32,
        chunk: SharedPtr,
    ):
        """Norms and records of the tokens that this warp copied, then the block's barrier. The
        chunk is `count` tokens, from the row's token `start`."""
        copies_wait()
        if records.active:
            syncwarp()  # a key is recorded by other lanes than copied it
        comptime for n in range(ceildiv(CHUNK, Self.H.NARROW)):
            var i = head.warp + UInt32(n) * head.warps
            if i < count:
                var token = chunk + (opaque(i) if n > 0 else i) * UInt32(Self.WORDS)
                if records.active:
                    records.key_and_decay(head, start + i, token)
                Self.norms(head, token)
        barrier()

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
        Self.publish(head, records, 0, min(length, UInt32(CHUNK)), shared)
        if length > UInt32(CHUNK):
            source.fetch[Self.WORDS](
                head.again(),
                opaque(first) + UInt32(CHUNK),
                min(length - UInt32(CHUNK), UInt32(CHUNK)),
                shared + CHUNK * Self.WORDS,
            )

        var token = shared
        var gates = load_shared[4](token + Self.H.GATES)
        var kv = head.sum_one(Self.decay_and_read(head, s, token, gates[3]))
        var f = Self.factors(head, kv, token, gates)
        comptime if RING_LEN > 0:
            if not head.second:
                if writes:
                    sink.put(f, False)
                sink.advance()
        var t = UInt32(1)
        while t < length:
            var next = token + Self.WORDS
            if t % UInt32(CHUNK) == 0:
                # Once in four tokens: all is found anew rather than kept in registers.
                var start = opaque(t)
                var left = length - start
                var again = head.again()
                var part = start // UInt32(CHUNK) % 3
                next = shared + part * UInt32(CHUNK * Self.WORDS)
                var more = records
                comptime if RING_LEN > CHUNK:
                    more = ring.records(again, length)
                else:  # a row of more than one chunk leaves no records
                    more.active = False
                Self.publish(again, more, start, min(left, UInt32(CHUNK)), next)
                if left > UInt32(CHUNK):
                    part = 0 if part == 2 else part + 1
                    source.fetch[Self.WORDS](
                        again,
                        first + start + UInt32(CHUNK),
                        min(left - UInt32(CHUNK), UInt32(CHUNK)),
                        shared + part * UInt32(CHUNK * Self.WORDS),
                    )
            var next_decay = (next + Self.H.GATES)[unsafe_offset=3]
            var sums = Self.update_read_decay_read(
                head, s, reread(token), head.spread(f), next, next_decay
            )
            var next_gates = load_shared[4](reread(next) + Self.H.GATES)
            f = Self.factors(head, sums, next, next_gates)
            var mine = sums * gates[2]
            comptime for i in range(Self.H.RESULTS):
                mine[i] = mine[i] if head.second else f[i]
            if writes:
                sink.put(mine, head.second)
            sink.advance()
            gates = next_gates
            token = next
            t += 1
        var sums = head.sum_one(Self.update_and_read(head, s, reread(token), head.spread(f)))
        if writes and head.second:
            sink.put(sums * gates[2], True)
