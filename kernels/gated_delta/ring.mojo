"""The ring record: what a verify leaves behind for one token of one key head.

    [0, KD)                               the raw key
    [KD + g*VD, KD + (g + 1)*VD)          the delta factors of group head g
    [KD + group*VD + g]                   the decay of group head g

A group head is the place of a value head among those that share its key head. A ring is dense,
[ring rows, key heads, ring length, record stride]; elements past the record are padding and are
never written. gdn_graph/geometry.py says the same in Python, and a test holds the two together.
"""


def gated_delta_ring_record_elements[KD: Int, VD: Int](group: Int) -> Int:
    """Elements of one record, without padding.

    Parameters:
        KD: Key head dim.
        VD: Value head dim.

    Args:
        group: Value heads per key head.

    Returns:
        KD + group * (VD + 1).
    """
    return RecordLayout(KD, VD, group).elements()


struct RecordLayout(TrivialRegisterPassable):
    """Offsets into one record, in elements."""

    var key_head_dim: Int
    var value_head_dim: Int
    var group: Int

    @always_inline
    def __init__(out self, key_head_dim: Int, value_head_dim: Int, group: Int):
        self.key_head_dim = key_head_dim
        self.value_head_dim = value_head_dim
        self.group = group

    @always_inline
    def delta_factor(self, group_head: Int) -> Int:
        return self.key_head_dim + group_head * self.value_head_dim

    @always_inline
    def decay(self, group_head: Int) -> Int:
        return self.delta_factor(self.group) + group_head

    @always_inline
    def elements(self) -> Int:
        return self.decay(self.group)


@always_inline
def is_folded(num_accepted: UInt32, ring_len: Int) -> Bool:
    """Whether a commit moves a row on. One with more tokens than a ring holds has done so itself.
    """
    return num_accepted - 1 < UInt32(ring_len)  # 0 wraps around
