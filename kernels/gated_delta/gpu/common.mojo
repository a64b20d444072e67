"""What the GPU kernels share: memory access, asynchronous copies, the columns that stay zero."""

from std.memory import AddressSpace, bitcast
from std.sys import is_nvidia_gpu, size_of
from std.sys._assembly import inlined_assembly
from max.gpu.memory import async_copy, async_copy_wait_all

comptime F32 = DType.float32
comptime GlobalPtr[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
comptime SharedPtr = Pointer[Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED]


@always_inline
def copy_async[words: Int](src: GlobalPtr[F32], dst: SharedPtr):
    """Copies 1 or 4 words to shared memory; visible to this thread after `copies_wait`."""
    comptime if is_nvidia_gpu():
        async_copy[words * 4, bypass_L1_16B=True](
            src.unsafe_address_space_cast[AddressSpace.GLOBAL](), dst
        )
    else:
        dst.unsafe_store[alignment=words * 4](src.unsafe_load[width=words, alignment=words * 4]())


@always_inline
def copies_wait():
    """Waits for the copies that this thread started."""
    comptime if is_nvidia_gpu():
        async_copy_wait_all()


@always_inline
def load_shared[width: Int](p: SharedPtr) -> SIMD[F32, width]:
    return p.unsafe_load[width=width, alignment=width * 4]()


@always_inline
def load_state[width: Int, dtype: DType](p: GlobalPtr[dtype]) -> SIMD[F32, width]:
    """A vector of a pool as float32."""
    comptime if dtype == DType.bfloat16 and width > 1:
        # Shift and mask: one operation an element, where a cast also unpacks every pair.
        var pairs = bitcast[DType.uint32, width // 2](
            p.unsafe_load[width=width, alignment=width * 2]()
        )
        var low = bitcast[F32, width // 2](pairs << 16)
        var high = bitcast[F32, width // 2](pairs & 0xFFFF0000)
        return rebind[SIMD[F32, width]](low.interleave(high))
    else:
        return p.unsafe_load[width=width, alignment=width * size_of[Scalar[dtype]]()]().cast[F32]()


@always_inline
def store_state[width: Int, dtype: DType](p: GlobalPtr[dtype], x: SIMD[F32, width]):
    p.unsafe_store[alignment=width * size_of[Scalar[dtype]]()](x.cast[dtype]())


@always_inline
def opaque(x: UInt32) -> UInt32:
    """The same value, which the compiler cannot see through or compute before this point."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "mov.b32 $0, $1;", UInt32, constraints="=r,r", has_side_effect=True
        ](x)
    else:
        return x


@always_inline
def reread(p: SharedPtr) -> SharedPtr:
    """The same address, opaque: what is there is loaded again, where the compiler would have kept
    it in registers from one pass to the next, at the price of spills."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "mov.b32 $0, $1;", SharedPtr, constraints="=r,r", has_side_effect=True
        ](p)
    else:
        return p


@always_inline
def wide(a: UInt32, b: UInt32) -> UInt64:
    """The product; LLVM multiplies in 64 bits where it has lost sight of the operands' width."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "mul.wide.u32 $0, $1, $2;", UInt64, constraints="=l,r,r", has_side_effect=False
        ](a, b)
    else:
        return UInt64(a) * UInt64(b)


@always_inline
def remainder(a: UInt32, b: UInt32) -> UInt32:
    """Of a by b > 0, which Mojo's operator would check."""
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            "rem.u32 $0, $1, $2;", UInt32, constraints="=r,r,r", has_side_effect=False
        ](a, b)
    else:
        return a % b


@always_inline
def offset(p: GlobalPtr[F32], i: UInt32) -> GlobalPtr[F32]:
    """Moves p by i elements, by one multiplication instead of a widening and a shift."""
    return (p.unsafe_bitcast[UInt8]() + wide(i, 4)).unsafe_bitcast[Float32]()


def inverse_root(n: Int) -> Float32:
    """1 / sqrt(n) at compile time, where the library's sqrt is a GPU instruction."""
    var root = Float64(n)
    for _ in range(32):  # Newton's method
        root = (root + Float64(n) / root) / 2
    return Float32(1 / root)
