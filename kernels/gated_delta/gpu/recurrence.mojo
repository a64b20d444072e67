"""The plain recurrence and the verify: one token step for both, so that they agree bit for bit.

Grid (splits * group, num_key_heads, batch_size), block 32 * NARROW or 32 * WIDE threads, with
splits = NARROW_SPLITS or WIDE_SPLITS to match (head.mojo says what these are, and why). At
128 x 128: 64 threads and 4 blocks a head, or 256 threads and 1 block. Blocks of one key head are
neighbours, so that its q and k come from the cache.

A block loads its columns of the state into registers and stages tokens through shared memory four
at a time: the copies of a chunk start as soon as the chunk before it is published, one chunk ahead
of its use. There is one barrier for four tokens. The output of a token and the key product of the
next are taken in one pass over the state and reduced together.
"""

from std.math import ceildiv, fma, rsqrt
from std.memory import AddressSpace, stack_allocation
from std.sys import size_of
from std.utils.index import StaticTuple
from layout import TensorEngine, TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.sync import barrier, syncwarp
from .common import (
    F32,
    GlobalPtr,
    SharedPtr,
    copies_wait,
    inverse_root,
    load_shared,
    opaque,
    reread,
    wide,
)
from .head import CHUNK, Head, Source, Vec, Zeros, halve, xor_add


struct Step[KD: Int, VD: Int]:
    """One token of one value head, on a block's columns.

    1. kinv = rsqrt(sum k^2 + 1e-6), qf = rsqrt(sum q^2 + 1e-6) / sqrt(KD)
    2. S <- S * decay; kv = sum_k S[k, :] k[k]
    3. f = beta (v - kv kinv) kinv
    4. S <- fma(k, f, S); out = qf sum_k S[k, :] q[k]
    """

    comptime H = Head[Self.KD, Self.VD]
    comptime WORDS = Self.H.GATES + 4  # of a token: q, k, v, {-kinv, beta * kinv, qf, decay}

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
            comptime if Self.H.NARROW_SPLITS * 32 <= Self.KD:
                self.key(record, token, e)
                e += head.splits * 32
            if head.splits * 32 < UInt32(Self.KD):
                e = opaque(e)
                while e < UInt32(Self.KD):
                    self.key(record, token, e)
                    e += head.splits * 32
        if (head.slice == 0) & (head.lane == 16):  # which copied it
            var decays = UInt32(Self.KD) + opaque(head.group) * UInt32(Self.VD)
            record[unsafe_offset=decays + head.group_head] = (token + Self.H.GATES)[
                unsafe_offset=3
            ].cast[Self.ring_dtype]()

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
                self.at.bitcast[Float32]()[unsafe_offset=away] = x[i]
            else:
                if is_output:
                    self.at.bitcast[Float32]()[unsafe_offset=away] = x[i]
                else:
                    self.at.bitcast[Scalar[Self.ring_dtype]]()[unsafe_offset=away] = x[i].cast[
                        Self.ring_dtype
                    ]()

    @always_inline
    def advance(mut self):
        self.at += self.step


@always_inline
def publish[
    KD: Int, VD: Int, ring_dtype: DType
](
    head: Head[KD, VD],
    records: Records[KD, VD, ring_dtype],
    start: UInt32,
    count: UInt32,
    chunk: SharedPtr,
):
    """Norms and records of the tokens of a chunk that this warp copied, then the block's barrier.
    The chunk is `count` tokens, from the row's token `start`."""
    copies_wait()
    if records.active:
        syncwarp()  # a key is recorded by other lanes than copied it
    comptime for n in range(ceildiv(CHUNK, Head[KD, VD].NARROW)):
        var i = head.warp + UInt32(n) * head.warps
        if i < count:
            var token = chunk + (opaque(i) if n > 0 else i) * UInt32(Step[KD, VD].WORDS)
            if records.active:
                records.key_and_decay(head, start + i, token)
            Step[KD, VD].norms(head, token)
    barrier()


@always_inline
def recurrence[
    state_dtype: DType, ring_dtype: DType, KD: Int, VD: Int, VERIFY: Bool, RING_LEN: Int
](
    batch_size: UInt32,
    num_value_heads: UInt32,
    num_key_heads: UInt32,
    key_dim: UInt32,
    num_tokens: UInt32,
    num_slots: UInt32,
    num_ring_rows: UInt32,
    outputs: GlobalPtr[F32],
    state: GlobalPtr[state_dtype],
    slot_idx: GlobalPtr[DType.uint32],
    qkv: GlobalPtr[F32],
    decay: GlobalPtr[F32],
    beta: GlobalPtr[F32],
    row_offsets: GlobalPtr[DType.uint32],
    ring: GlobalPtr[ring_dtype],
    ring_slot_idx: GlobalPtr[DType.uint32],
    record_stride: UInt32,
    token_stride: UInt32,
    channel_stride: UInt32,
    gate_token_stride: UInt32,
    gate_head_stride: UInt32,
    output_token_stride: UInt32,
    output_value_stride: UInt32,
):
    """Both kernels: the verify of a row that fits the ring records and leaves the state alone."""
    comptime S = Step[KD, VD]
    comptime H = S.H
    comptime SLOTS = 3 * CHUNK  # a chunk in use, and the last token before it; the next; one coming
    var shared = stack_allocation[
        SLOTS * S.WORDS, F32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var head = H(UInt32(thread_idx.x))
    var row = head.batch_row
    var first = row_offsets[unsafe_offset=row]
    var last = min(row_offsets[unsafe_offset=row + 1], num_tokens)
    var length = last - first
    var slot = slot_idx[unsafe_offset=row]
    var known = slot < num_slots
    var ring_row = UInt32(0)
    comptime if VERIFY:
        ring_row = ring_slot_idx[unsafe_offset=row]
        known &= (ring_row < num_ring_rows) | (length > UInt32(RING_LEN))  # which needs no ring
    # Tokens before the first row and after the last belong to none.
    var none_until = first if row == 0 else 0
    var none_from = last if row == batch_size - 1 else num_tokens
    if first >= last or not known or none_until > 0 or none_from < num_tokens:
        var zeros = Zeros(outputs, output_token_stride, output_value_stride)
        zeros.store(head, 0, none_until)
        zeros.store(head, none_from, num_tokens)
        if first >= last:
            return
        if not known:
            zeros.store(head, first, last)
            return

    var source = Source[KD, VD](
        qkv,
        decay,
        beta,
        key_dim,
        token_stride,
        channel_stride,
        gate_token_stride,
        gate_head_stride,
    )
    source.fetch[S.WORDS](head, first, min(length, UInt32(CHUNK)), shared)
    head.clear_padding[S.WORDS, SLOTS](shared)
    var tile = state + (wide(slot, num_value_heads) + UInt64(head.value_head)) * UInt64(KD * VD)
    var s = head.load(tile)

    var records = Records[KD, VD, ring_dtype](
        ring + wide(ring_row * num_key_heads + head.key_head, UInt32(RING_LEN) * record_stride),
        record_stride,
        VERIFY and length <= UInt32(RING_LEN),
    )
    # Lanes of a reduction's first operand write delta factors, those of the second outputs.
    var writes = head.owns_result()
    var sink = Sink[ring_dtype](
        (
            outputs
            + (
                wide(first, output_token_stride)
                + wide(
                    head.value_head * UInt32(VD) + head.block_column() + head.result,
                    output_value_stride,
                )
            )
        ).bitcast[UInt8](),
        UInt64(output_token_stride) * 4,
        output_value_stride,
    )
    if not head.second:
        writes = writes and records.active
        comptime if VERIFY:
            sink = Sink[ring_dtype](
                (
                    records.first
                    + (
                        UInt32(KD)
                        + head.group_head * UInt32(VD)
                        + head.block_column()
                        + head.result
                    )
                ).bitcast[UInt8](),
                UInt64(record_stride) * UInt64(size_of[Scalar[ring_dtype]]()),
                1,
            )
    publish(head, records, 0, min(length, UInt32(CHUNK)), shared)
    if length > UInt32(CHUNK):
        source.fetch[S.WORDS](
            head.again(),
            opaque(first) + UInt32(CHUNK),
            min(length - UInt32(CHUNK), UInt32(CHUNK)),
            shared + CHUNK * S.WORDS,
        )

    var token = shared
    var gates = load_shared[4](token + H.GATES)
    var kv = head.sum_one(S.decay_and_read(head, s, token, gates[3]))
    var f = S.factors(head, kv, token, gates)
    comptime if VERIFY:
        if not head.second:
            if writes:
                sink.put(f, False)
            sink.advance()
    var t = UInt32(1)
    while t < length:
        var next = token + S.WORDS
        if t % UInt32(CHUNK) == 0:
            # Once in four tokens: all is found anew rather than kept in registers.
            var start = opaque(t)
            var left = length - start
            var again = head.again()
            var part = start // UInt32(CHUNK) % 3
            next = shared + part * UInt32(CHUNK * S.WORDS)
            var more = records
            comptime if VERIFY and RING_LEN > CHUNK:
                ring_row = ring_slot_idx[unsafe_offset=again.batch_row]
                more.first = ring + wide(
                    ring_row * num_key_heads + again.key_head, UInt32(RING_LEN) * record_stride
                )
            else:  # a row of more than one chunk leaves no records
                more.active = False
            publish(again, more, start, min(left, UInt32(CHUNK)), next)
            if left > UInt32(CHUNK):
                part = 0 if part == 2 else part + 1
                source.fetch[S.WORDS](
                    again,
                    first + start + UInt32(CHUNK),
                    min(left - UInt32(CHUNK), UInt32(CHUNK)),
                    shared + part * UInt32(CHUNK * S.WORDS),
                )
        var next_decay = (next + H.GATES)[unsafe_offset=3]
        var sums = S.update_read_decay_read(
            head, s, reread(token), head.spread(f), next, next_decay
        )
        var next_gates = load_shared[4](reread(next) + H.GATES)
        f = S.factors(head, sums, next, next_gates)
        var mine = sums * gates[2]
        comptime for i in range(H.RESULTS):
            mine[i] = mine[i] if head.second else f[i]
        if writes:
            sink.put(mine, head.second)
        sink.advance()
        gates = next_gates
        token = next
        t += 1
    var sums = head.sum_one(S.update_and_read(head, s, reread(token), head.spread(f)))
    if writes and head.second:
        sink.put(sums * gates[2], True)
    if not records.active:
        comptime if VERIFY:  # rare, so the address is not kept
            var again = head.again()
            slot = slot_idx[unsafe_offset=opaque(again.batch_row)]
            tile = state + (wide(slot, num_value_heads) + UInt64(head.value_head)) * UInt64(KD * VD)
            again.store(tile, s)
        else:
            head.store(tile, s)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].THREADS)
    ),
    `nvvm.minctasm`=SIMDLength(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].MIN_BLOCKS),
)
def gated_delta_recurrence_fwd_gpu[
    work_dtype: DType,
    state_dtype: DType,
    KEY_HEAD_DIM: Int,
    VALUE_HEAD_DIM: Int,
    recurrence_output_LT: TensorLayout,
    qkv_conv_output_LT: TensorLayout,
    decay_per_token_LT: TensorLayout,
    beta_per_token_LT: TensorLayout,
    recurrent_state_LT: TensorLayout,
    slot_idx_LT: TensorLayout,
    input_row_offsets_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    num_value_heads: Int32,
    num_key_heads: Int32,
    key_dim: Int32,
    recurrence_output: TileTensor[
        work_dtype, recurrence_output_LT, MutUntrackedOrigin, Engine=Engine
    ],
    recurrent_state: TileTensor[state_dtype, recurrent_state_LT, MutUntrackedOrigin, Engine=Engine],
    slot_idx: TileTensor[DType.uint32, slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    qkv_conv_output: TileTensor[work_dtype, qkv_conv_output_LT, MutUntrackedOrigin, Engine=Engine],
    decay_per_token: TileTensor[work_dtype, decay_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    beta_per_token: TileTensor[work_dtype, beta_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    input_row_offsets: TileTensor[
        DType.uint32, input_row_offsets_LT, MutUntrackedOrigin, Engine=Engine
    ],
    qkv_conv_output_seqlen_stride: UInt32,
    qkv_conv_output_channel_stride: UInt32,
    per_token_seqlen_stride: UInt32,
    per_token_head_stride: UInt32,
    recurrence_output_seqlen_stride: UInt32,
    recurrence_output_valuedim_stride: UInt32,
):
    """The plain recurrence of every (row, value head); writes the final state to the row's slot."""
    comptime assert work_dtype == F32, "the work dtype is float32"
    recurrence[state_dtype, F32, KEY_HEAD_DIM, VALUE_HEAD_DIM, False, 0](
        UInt32(batch_size),
        UInt32(num_value_heads),
        UInt32(num_key_heads),
        UInt32(key_dim),
        UInt32(recurrence_output.layout.shape[0]().value()),
        UInt32(recurrent_state.layout.shape[0]().value()),
        0,
        recurrence_output.ptr.bitcast[Float32](),
        recurrent_state.ptr,
        slot_idx.ptr,
        qkv_conv_output.ptr.bitcast[Float32](),
        decay_per_token.ptr.bitcast[Float32](),
        beta_per_token.ptr.bitcast[Float32](),
        input_row_offsets.ptr,
        recurrence_output.ptr.bitcast[Float32](),
        slot_idx.ptr,
        0,
        qkv_conv_output_seqlen_stride,
        qkv_conv_output_channel_stride,
        per_token_seqlen_stride,
        per_token_head_stride,
        recurrence_output_seqlen_stride,
        recurrence_output_valuedim_stride,
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].THREADS)
    ),
    `nvvm.minctasm`=SIMDLength(Head[KEY_HEAD_DIM, VALUE_HEAD_DIM].MIN_BLOCKS),
)
def gated_delta_recurrence_verify_ring_gpu[
    work_dtype: DType,
    state_dtype: DType,
    ring_dtype: DType,
    KEY_HEAD_DIM: Int,
    VALUE_HEAD_DIM: Int,
    RING_LEN: Int,
    recurrence_output_LT: TensorLayout,
    qkv_conv_output_LT: TensorLayout,
    decay_per_token_LT: TensorLayout,
    beta_per_token_LT: TensorLayout,
    recurrent_state_LT: TensorLayout,
    slot_idx_LT: TensorLayout,
    input_row_offsets_LT: TensorLayout,
    ring_LT: TensorLayout,
    ring_slot_idx_LT: TensorLayout,
    Engine: TensorEngine,
](
    batch_size: Int32,
    num_value_heads: Int32,
    num_key_heads: Int32,
    key_dim: Int32,
    recurrence_output: TileTensor[
        work_dtype, recurrence_output_LT, MutUntrackedOrigin, Engine=Engine
    ],
    recurrent_state: TileTensor[state_dtype, recurrent_state_LT, MutUntrackedOrigin, Engine=Engine],
    slot_idx: TileTensor[DType.uint32, slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    qkv_conv_output: TileTensor[work_dtype, qkv_conv_output_LT, MutUntrackedOrigin, Engine=Engine],
    decay_per_token: TileTensor[work_dtype, decay_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    beta_per_token: TileTensor[work_dtype, beta_per_token_LT, MutUntrackedOrigin, Engine=Engine],
    input_row_offsets: TileTensor[
        DType.uint32, input_row_offsets_LT, MutUntrackedOrigin, Engine=Engine
    ],
    ring: TileTensor[ring_dtype, ring_LT, MutUntrackedOrigin, Engine=Engine],
    ring_slot_idx: TileTensor[DType.uint32, ring_slot_idx_LT, MutUntrackedOrigin, Engine=Engine],
    ring_record_stride: Int32,
    qkv_conv_output_seqlen_stride: UInt32,
    qkv_conv_output_channel_stride: UInt32,
    per_token_seqlen_stride: UInt32,
    per_token_head_stride: UInt32,
    recurrence_output_seqlen_stride: UInt32,
    recurrence_output_valuedim_stride: UInt32,
):
    """As the plain recurrence, but a row of at most RING_LEN tokens writes one record per token to
    its ring row and leaves its state alone; a longer one writes its state and no records."""
    comptime assert work_dtype == F32, "the work dtype is float32"
    recurrence[state_dtype, ring_dtype, KEY_HEAD_DIM, VALUE_HEAD_DIM, True, RING_LEN](
        UInt32(batch_size),
        UInt32(num_value_heads),
        UInt32(num_key_heads),
        UInt32(key_dim),
        UInt32(recurrence_output.layout.shape[0]().value()),
        UInt32(recurrent_state.layout.shape[0]().value()),
        UInt32(ring.layout.shape[0]().value()),
        recurrence_output.ptr.bitcast[Float32](),
        recurrent_state.ptr,
        slot_idx.ptr,
        qkv_conv_output.ptr.bitcast[Float32](),
        decay_per_token.ptr.bitcast[Float32](),
        beta_per_token.ptr.bitcast[Float32](),
        input_row_offsets.ptr,
        ring.ptr,
        ring_slot_idx.ptr,
        UInt32(ring_record_stride),
        qkv_conv_output_seqlen_stride,
        qkv_conv_output_channel_stride,
        per_token_seqlen_stride,
        per_token_head_stride,
        recurrence_output_seqlen_stride,
        recurrence_output_valuedim_stride,
    )
