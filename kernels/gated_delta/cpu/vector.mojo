"""Vectors of float32 over pools of any dtype, and the sum of products that all norms share.

Every sum over key rows or channels is spelled here or as an explicit `fma`: the compiler may
contract a plain `a * b + c` in one caller and not in another, and the plain op, the verify and
the fold must give the same bits.
"""

from std.math import fma, iota
from std.memory import bitcast
from std.sys import CompilationTarget, simd_width_of, size_of
from std.sys.intrinsics import (
    llvm_intrinsic,
    masked_load,
    masked_store,
    prefetch,
    PrefetchOptions,
)

comptime F32 = DType.float32
comptime W = simd_width_of[F32]()
comptime Vector = SIMD[F32, W]
comptime P[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]

# Elements of a 64-byte cache line.
comptime LINE[dtype: DType] = 64 // size_of[Scalar[dtype]]()


@always_inline
def untracked[dtype: DType](p: Pointer[Scalar[dtype], _]) -> P[dtype]:
    """A tensor's pointer in the one pointer type that the kernels use."""
    return p.unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()


@always_inline
def into_l2[dtype: DType](p: P[dtype]):
    """Asks for the line at p. L1 holds the tile, so the state of the next head goes to L2."""
    prefetch[PrefetchOptions().for_read().medium_locality()](p)


@always_inline
def into_l1[dtype: DType](p: P[dtype]):
    """Asks for the line at p, read within the next pass over a state."""
    prefetch[PrefetchOptions().for_read().high_locality()](p)


@always_inline
def into_l1_to_write[dtype: DType](p: P[dtype]):
    """Asks for the line at p, written soon: stores retire in order, and one that has to wait for
    its line holds up all those of the pass behind it."""
    prefetch[PrefetchOptions().for_write().high_locality()](p)


@always_inline
def lanes_below(n: Int) -> SIMD[DType.bool, W]:
    return iota[DType.int32, W]().lt(SIMD[DType.int32, W](Int32(n)))


@always_inline
def load_raw[dtype: DType, //, partial: Bool](p: P[dtype], n: Int) -> SIMD[dtype, W]:
    """W values; with partial, lanes at and past n are not read and are zero."""
    comptime if partial:
        return masked_load[W](p, lanes_below(n), SIMD[dtype, W](0))
    else:
        return p.load[width=W, alignment=size_of[Scalar[dtype]]()]()


@always_inline
def store_raw[dtype: DType, //, partial: Bool](p: P[dtype], v: SIMD[dtype, W], n: Int):
    """Writes v; with partial, lanes at and past n are not written."""
    comptime if partial:
        masked_store[W](v, p, lanes_below(n))
    else:
        p.store[alignment=size_of[Scalar[dtype]]()](v)


@always_inline
def load[dtype: DType, partial: Bool](p: P[dtype], n: Int) -> Vector:
    """W values as float32, likewise."""
    return load_raw[partial=partial](p, n).cast[F32]()


@always_inline
def store[dtype: DType, partial: Bool](p: P[dtype], v: Vector, n: Int):
    """Rounds v to the dtype and writes it, likewise."""
    store_raw[partial=partial](p, v.cast[dtype](), n)


# Whether NV vectors of a row are read two at a time: a 32-bit word holds two bfloat16, and a shift
# and a mask make a vector of the even columns and one of the odd. Read singly, a vector takes two
# operations, on x86 both from pipes that multiply.
comptime PAIRED[dtype: DType, NV: Int, partial: Bool] = (
    dtype == DType.bfloat16 and NV % 2 == 0 and not partial
)


@always_inline
def load_row[dtype: DType, NV: Int, partial: Bool](p: P[dtype], n: Int) -> Array[Vector, NV]:
    """NV vectors of a row; if paired, each two hold the even and the odd columns of theirs."""
    var row = Array[Vector, NV](fill=Vector(0))
    comptime if PAIRED[dtype, NV, partial]:
        comptime for j in range(0, NV, 2):
            var words = p.bitcast[UInt32]().load[width=W, alignment=2](j * W // 2)
            row[j] = bitcast[F32, W](words << 16)
            row[j + 1] = bitcast[F32, W](words & 0xFFFF0000)
    else:
        comptime for j in range(NV):
            row[j] = load[partial=partial and j == NV - 1](p + j * W, n - j * W)
    return row^


@always_inline
def store_row[dtype: DType, NV: Int, partial: Bool](p: P[dtype], row: Array[Vector, NV], n: Int):
    """Rounds and writes a row in the order of load_row."""
    comptime if PAIRED[dtype, NV, partial]:
        comptime for j in range(0, NV, 2):
            var even = row[j].cast[dtype]()
            p.store[alignment=2](j * W, even.interleave(row[j + 1].cast[dtype]()))
    else:
        comptime for j in range(NV):
            store[partial=partial and j == NV - 1](p + j * W, row[j], n - j * W)


@always_inline
def to_row_order[dtype: DType, NV: Int, partial: Bool](mut columns: Array[Vector, NV]):
    """Turns columns that ascend into the order of load_row."""
    comptime if PAIRED[dtype, NV, partial]:
        comptime for j in range(0, NV, 2):
            var halves = columns[j].join(columns[j + 1]).deinterleave()
            columns[j] = rebind[Vector](halves[0])
            columns[j + 1] = rebind[Vector](halves[1])


@always_inline
def from_row_order[dtype: DType, NV: Int, partial: Bool](mut columns: Array[Vector, NV]):
    """Turns columns in the order of load_row into columns that ascend."""
    comptime if PAIRED[dtype, NV, partial]:
        comptime for j in range(0, NV, 2):
            var both = columns[j].interleave(columns[j + 1])
            columns[j] = both.slice[W]()
            columns[j + 1] = both.slice[W, offset=W]()


@always_inline
def stream[dtype: DType](p: P[dtype], v: Vector):
    """Stores v past the caches; p is aligned to a vector. stream_end must follow."""
    p.store[alignment=size_of[SIMD[dtype, W]](), non_temporal=True](v.cast[dtype]())


@always_inline
def stream_end():
    """Makes what this thread has streamed visible before what it does next: on x86 such stores are
    not in order with others, and no fence of the language is one for them."""
    comptime if CompilationTarget.is_x86():
        llvm_intrinsic["llvm.x86.sse.sfence", NoneType]()


@always_inline
def splat[dtype: DType](p: P[dtype], i: Int) -> Vector:
    return Vector(Float32(p[unsafe_offset=i]))


@always_inline
def dot[dtype: DType](a: P[dtype], b: P[dtype], n: Int) -> Float32:
    var sum = Vector(0)
    var i = 0
    while i + W <= n:
        sum = fma(load[partial=False](a + i, W), load[partial=False](b + i, W), sum)
        i += W
    if i < n:
        sum = fma(load[partial=True](a + i, n - i), load[partial=True](b + i, n - i), sum)
    return sum.reduce_add()


@always_inline
def copy[src: DType, dst: DType](to: P[dst], source: P[src], n: Int):
    """Copies n elements, rounded to the destination's dtype."""
    var i = 0
    while i + W <= n:
        store[partial=False](to + i, load[partial=False](source + i, W), W)
        i += W
    if i < n:
        store[partial=True](to + i, load[partial=True](source + i, n - i), n - i)


@always_inline
def fill_zero[dtype: DType](p: P[dtype], n: Int):
    for i in range(n):
        p[unsafe_offset=i] = Scalar[dtype](0)
