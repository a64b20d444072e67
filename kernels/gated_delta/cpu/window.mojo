"""A row's tokens as one value head sees them: what both forms of the recurrence share."""

from std.math import fma, rsqrt, sqrt

from .vector import copy, dot, F32, into_l1, into_l1_to_write, load, P, store, Vector, W

comptime EPS = Float32(1e-6)


struct Window[work: DType, state: DType, ring: DType](TrivialRegisterPassable):
    """One row's tokens as one value head sees them."""

    var S: P[Self.state]
    var q: P[F32]  # [T, KD], packed
    var k: P[F32]
    var v: P[Self.work]
    var qkv_stride: Int
    var decay: P[Self.work]
    var beta: P[Self.work]
    var gate_stride: Int
    var kinv: P[F32]
    var qf: P[F32]
    var out: P[Self.work]
    var out_stride: Int
    var records: Bool  # into the ring; else the state is replaced
    var factors: P[Self.ring]  # the head's delta factors in the row's first record
    var record_stride: Int
    var T: Int
    var KD: Int
    var VD: Int
    var next: P[Self.state]  # the state that this chunk reads after this one

    @always_inline
    def __init__(
        out self,
        S: P[Self.state],
        q: P[F32],
        k: P[F32],
        v: P[Self.work],
        qkv_stride: Int,
        decay: P[Self.work],
        beta: P[Self.work],
        gate_stride: Int,
        kinv: P[F32],
        qf: P[F32],
        out_: P[Self.work],
        out_stride: Int,
        records: Bool,
        factors: P[Self.ring],
        record_stride: Int,
        T: Int,
        KD: Int,
        VD: Int,
        next: P[Self.state],
    ):
        self.S = S
        self.q = q
        self.k = k
        self.v = v
        self.qkv_stride = qkv_stride
        self.decay = decay
        self.beta = beta
        self.gate_stride = gate_stride
        self.kinv = kinv
        self.qf = qf
        self.out = out_
        self.out_stride = out_stride
        self.records = records
        self.factors = factors
        self.record_stride = record_stride
        self.T = T
        self.KD = KD
        self.VD = VD
        self.next = next


def pack[dtype: DType](source: P[dtype], stride: Int, T: Int, KD: Int, to: P[F32]):
    """Tokens of one key head side by side: as they come they share the sets of the L1 cache."""
    for t in range(T):
        copy(to + t * KD, source + t * stride, KD)


def norms(q: P[F32], k: P[F32], T: Int, KD: Int, kinv: P[F32], qf: P[F32]):
    """kinv = rsqrt(k.k + eps) and qf = rsqrt(q.q + eps) / sqrt(KD) of each token."""
    var root = sqrt(Float32(KD))
    for t in range(T):
        var kt = k + t * KD
        var qt = q + t * KD
        kinv[unsafe_offset=t] = rsqrt(dot(kt, kt, KD) + EPS)
        qf[unsafe_offset=t] = rsqrt(dot(qt, qt, KD) + EPS) / root


@always_inline
def expect[
    work: DType, state: DType, ring: DType, NV: Int
](w: Window[work, state, ring], t: Int, c: Int):
    """Prefetches the lines of token t: they lie a whole token apart, so each is a miss, and a pass
    is too long for the processor to see it coming."""
    if t < w.T:
        comptime for j in range(NV):
            into_l1(w.v + t * w.qkv_stride + c + j * W)
            into_l1_to_write(w.out + t * w.out_stride + c + j * W)
            if w.records:
                into_l1_to_write(w.factors + t * w.record_stride + c + j * W)
        into_l1(w.decay + t * w.gate_stride)
        into_l1(w.beta + t * w.gate_stride)


@always_inline
def delta_factors[
    work: DType, state: DType, ring: DType, NV: Int, partial: Bool
](w: Window[work, state, ring], t: Int, c: Int, n: Int, kv: Array[Vector, NV]) -> Array[Vector, NV]:
    """The delta factor beta * (v - kv * kinv) * kinv of token t on columns [c, c + n)."""
    var kinv = w.kinv[unsafe_offset=t]
    var beta = Float32(w.beta[unsafe_offset=t * w.gate_stride])
    var f = Array[Vector, NV](fill=Vector(0))
    comptime for j in range(NV):
        comptime tail = partial and j == NV - 1
        var v = load[partial=tail](w.v + t * w.qkv_stride + c + j * W, n - j * W)
        f[j] = (beta * fma(-kv[j], Vector(kinv), v)) * kinv
    if w.records:
        comptime for j in range(NV):
            store[partial=partial and j == NV - 1](
                w.factors + t * w.record_stride + c + j * W, f[j], n - j * W
            )
    return f^


@always_inline
def put_out[
    work: DType, state: DType, ring: DType, NV: Int, partial: Bool
](w: Window[work, state, ring], t: Int, c: Int, n: Int, sums: Array[Vector, NV]):
    var qf = w.qf[unsafe_offset=t]
    comptime for j in range(NV):
        store[partial=partial and j == NV - 1](
            w.out + t * w.out_stride + c + j * W, sums[j] * qf, n - j * W
        )
