"""What every op demands of its operands, and the messages when it does not get it.

Everything here runs before the first write, so an op that raises has changed nothing. Shapes are
checked on every target; offsets and ids are read, and so checked, only where the kernels run on the
host. gdn_graph/ops.py asks the same of static dims when the graph is built.
"""

from std.utils import IndexList

from .cpu.vector import P
from .ring import is_folded, RecordLayout

# Names a row that takes no part: -1 as uint32.
comptime PADDING = UInt32(0xFFFFFFFF)
comptime MIN_CONV_WIDTH = 2
comptime MAX_CONV_WIDTH = 8

comptime Ids = P[DType.uint32]


struct HeadGeometry(TrivialRegisterPassable):
    """Head counts and head dims of a recurrence, checked to agree with each other."""

    var num_key_heads: Int
    var num_value_heads: Int
    var key_head_dim: Int
    var value_head_dim: Int

    @always_inline
    def __init__(
        out self,
        num_key_heads: Int,
        num_value_heads: Int,
        key_head_dim: Int,
        value_head_dim: Int,
    ):
        self.num_key_heads = num_key_heads
        self.num_value_heads = num_value_heads
        self.key_head_dim = key_head_dim
        self.value_head_dim = value_head_dim

    @always_inline
    def group(self) -> Int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @always_inline
    def conv_dim(self) -> Int:
        return (
            2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim
        )

    @always_inline
    def record_elements(self) -> Int:
        return RecordLayout(self.key_head_dim, self.value_head_dim, self.group()).elements()


def fail(op: StaticString, argument: StaticString, got: String, need: String) raises:
    raise Error(op, ": ", argument, " ", got, "; need ", need)


def require_shape[
    rank: Int
](
    op: StaticString,
    argument: StaticString,
    got: IndexList[rank],
    need: IndexList[rank],
    symbols: StaticString,
) raises:
    if got != need:
        fail(op, argument, String("has shape ", got), String(need, ", which is ", symbols))


def check_conv(
    op: StaticString,
    output: IndexList[2],
    qkv: IndexList[2],
    weight: IndexList[2],
    state: IndexList[3],
    slot_idx: IndexList[1],
    offsets: IndexList[1],
) raises:
    var width = weight[1]
    if width < MIN_CONV_WIDTH or width > MAX_CONV_WIDTH:
        fail(op, "conv_weight", String("has width ", width), "a conv width of 2 to 8 as dim 1")
    require_shape(op, "conv_weight", weight, [qkv[1], width], "[conv_dim, conv width]")
    require_shape(
        op, "conv_state", state, [state[0], qkv[1], width - 1], "[slots, conv_dim, width - 1]"
    )
    require_shape(op, "conv_output_ragged", output, qkv, "[tokens, conv_dim]")
    check_offsets_length(op, slot_idx[0], offsets)


def check_recurrence(
    op: StaticString,
    output: IndexList[2],
    qkv: IndexList[2],
    decay: IndexList[2],
    beta: IndexList[2],
    state: IndexList[4],
    slot_idx: IndexList[1],
    offsets: IndexList[1],
) raises -> HeadGeometry:
    var nv = state[1]
    var KD = state[2]
    var VD = state[3]
    if nv < 1 or KD < 1 or VD < 1:
        fail(
            op,
            "recurrent_state",
            String("has shape ", state),
            "[slots, value heads, key head dim, value head dim] with every head dim at least 1",
        )
    var key_channels = qkv[1] - nv * VD
    var nk = key_channels // (2 * KD)
    if nk < 1 or nk * 2 * KD != key_channels:
        fail(
            op,
            "qkv_conv_output",
            String("has ", qkv[1], " channels"),
            String(
                "2 * key heads * ",
                KD,
                " + ",
                nv,
                " * ",
                VD,
                " for a whole number of key heads, ",
                "as recurrent_state ",
                state,
                " has it",
            ),
        )
    if nv % nk != 0:
        fail(
            op,
            "recurrent_state",
            String("has ", nv, " value heads for the ", nk, " key heads of qkv_conv_output"),
            "a multiple of the key heads",
        )
    require_shape(op, "decay_per_token", decay, [qkv[0], nv], "[tokens, value heads]")
    require_shape(op, "beta_per_token", beta, [qkv[0], nv], "[tokens, value heads]")
    require_shape(
        op, "recurrence_output", output, [qkv[0], nv * VD], "[tokens, value heads * value head dim]"
    )
    check_offsets_length(op, slot_idx[0], offsets)
    return HeadGeometry(nk, nv, KD, VD)


def check_ring(
    op: StaticString, geometry: HeadGeometry, ring: IndexList[4], verify_width: Int
) raises:
    """Asks that the ring fits the heads and holds a window of verify_width drafts."""
    require_shape(
        op,
        "ring",
        ring,
        [ring[0], geometry.num_key_heads, ring[2], ring[3]],
        "[ring rows, key heads, ring length, record stride]",
    )
    if verify_width + 1 > ring[2]:
        fail(
            op,
            "ring",
            String("has length ", ring[2]),
            String("at least verify_width + 1 = ", verify_width + 1),
        )
    if ring[3] < geometry.record_elements():
        fail(
            op,
            "ring",
            String("has record stride ", ring[3]),
            String(
                "at least ",
                geometry.record_elements(),
                " = key head dim + group * (value head dim + 1)",
            ),
        )


def check_ring_rows(op: StaticString, slot_idx: IndexList[1], ring_slot_idx: IndexList[1]) raises:
    require_shape(op, "ring_slot_idx", ring_slot_idx, slot_idx, "[rows], as slot_idx has it")


def check_fold(
    op: StaticString,
    state: IndexList[4],
    ring: IndexList[4],
    row_ids: IndexList[2],
    ring_row_ids: IndexList[2],
    num_accepted: IndexList[1],
    verify_width: Int,
) raises -> HeadGeometry:
    var nv = state[1]
    var nk = ring[1]
    if nv < 1 or state[2] < 1 or state[3] < 1:
        fail(
            op,
            "recurrent_state",
            String("has shape ", state),
            "[rows, value heads, key head dim, value head dim] with every head dim at least 1",
        )
    if nk < 1 or nv % nk != 0:
        fail(
            op,
            "ring",
            String("has ", nk, " key heads for the ", nv, " value heads of recurrent_state"),
            "a number of key heads that divides the value heads",
        )
    var geometry = HeadGeometry(nk, nv, state[2], state[3])
    check_ring(op, geometry, ring, verify_width)
    check_tables(op, row_ids, ring_row_ids, num_accepted)
    return geometry


def check_offsets_length(op: StaticString, rows: Int, offsets: IndexList[1]) raises:
    if offsets[0] != rows + 1:
        fail(
            op,
            "input_row_offsets",
            String("has length ", offsets[0]),
            String("one more than the ", rows, " rows of slot_idx"),
        )


def check_offsets(op: StaticString, offsets: Ids, rows: Int, tokens: Int) raises:
    """Asks for offsets that never decrease and end at most at the last token."""
    for b in range(rows):
        var begin = offsets[unsafe_offset=b]
        var end = offsets[unsafe_offset=b + 1]
        if end < begin:
            fail(
                op,
                "input_row_offsets",
                String("goes from ", begin, " to ", end, " at row ", b),
                "offsets that never decrease",
            )
    if Int(offsets[unsafe_offset=rows]) > tokens:
        fail(
            op,
            "input_row_offsets",
            String("ends at ", offsets[unsafe_offset=rows]),
            String("at most the ", tokens, " tokens of the input"),
        )


def check_row_ids(
    op: StaticString, argument: StaticString, ids: Ids, offsets: Ids, rows: Int, pool_rows: Int
) raises:
    """Asks that the id of each row with tokens lies in its pool or is PADDING."""
    for b in range(rows):
        if offsets[unsafe_offset=b] != offsets[unsafe_offset=b + 1]:
            check_id(op, argument, ids[unsafe_offset=b], b, pool_rows)


def check_fold_ids(
    op: StaticString,
    argument: StaticString,
    ids: Ids,
    num_accepted: Ids,
    layers: Int,
    rows: Int,
    pool_rows: Int,
    ring_len: Int,
) raises:
    """Asks that the id of each row that folds lies in its pool or is PADDING, in every layer."""
    for b in range(rows):
        if not is_folded(num_accepted[unsafe_offset=b], ring_len):
            continue
        for layer in range(layers):
            check_id(op, argument, ids[unsafe_offset=layer * rows + b], b, pool_rows)


@always_inline
def check_id(op: StaticString, argument: StaticString, id: UInt32, row: Int, pool_rows: Int) raises:
    if id != PADDING and Int(id) >= pool_rows:
        fail(
            op,
            argument,
            String("names row ", id, " at row ", row, " of the batch"),
            String("an id below ", pool_rows, ", the rows there are, or 0xFFFFFFFF for padding"),
        )


def check_conv_ring(
    op: StaticString, conv_ring: IndexList[3], conv_dim: Int, verify_width: Int
) raises:
    """Asks that the conv ring has these channels and holds a window of verify_width drafts."""
    require_shape(
        op,
        "conv_ring",
        conv_ring,
        [conv_ring[0], conv_ring[1], conv_dim],
        "[ring rows, ring length, conv_dim]",
    )
    if verify_width + 1 > conv_ring[1]:
        fail(
            op,
            "conv_ring",
            String("has length ", conv_ring[1]),
            String("at least verify_width + 1 = ", verify_width + 1),
        )


def check_conv_fold(
    op: StaticString,
    state: IndexList[3],
    conv_ring: IndexList[3],
    row_ids: IndexList[2],
    ring_row_ids: IndexList[2],
    num_accepted: IndexList[1],
    verify_width: Int,
) raises:
    var width = state[2] + 1
    if width < MIN_CONV_WIDTH or width > MAX_CONV_WIDTH:
        fail(
            op,
            "conv_state",
            String("has shape ", state),
            "[rows, conv_dim, width - 1] for a conv width of 2 to 8",
        )
    check_conv_ring(op, conv_ring, state[1], verify_width)
    check_tables(op, row_ids, ring_row_ids, num_accepted)


def check_gates(
    op: StaticString,
    decay: IndexList[2],
    beta: IndexList[2],
    a: IndexList[2],
    b: IndexList[2],
    A_log: IndexList[1],
    dt_bias: IndexList[1],
) raises:
    require_shape(op, "b", b, a, "[tokens, value heads], as a has it")
    require_shape(op, "A_log", A_log, [a[1]], "[value heads], as a has them")
    require_shape(op, "dt_bias", dt_bias, [a[1]], "[value heads], as a has them")
    require_shape(op, "decay_per_token", decay, a, "[tokens, value heads]")
    require_shape(op, "beta_per_token", beta, a, "[tokens, value heads]")


def check_tables(
    op: StaticString,
    row_ids: IndexList[2],
    ring_row_ids: IndexList[2],
    num_accepted: IndexList[1],
) raises:
    require_shape(
        op, "row_ids", row_ids, [row_ids[0], num_accepted[0]], "[layers, rows of num_accepted]"
    )
    require_shape(op, "ring_row_ids", ring_row_ids, row_ids, "[layers, rows], as row_ids has it")
