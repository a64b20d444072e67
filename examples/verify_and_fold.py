"""Verify three drafts, accept one, fold: the state is that of the accepted tokens alone.

    python examples/verify_and_fold.py

One Gated DeltaNet layer of 2 key heads and 4 value heads, with random queries, keys and values.
"""

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType

from gdn_graph import GatedDeltaGeometry, ops

geometry = GatedDeltaGeometry(2, 4, 16, 24, ring_len=4)
cpu = DeviceRef.CPU()
f32, u32 = DType.float32, DType.uint32

with Graph(
    "verify_and_fold",
    input_types=[
        TensorType(f32, ["tokens", geometry.conv_dim], cpu),  # queries, keys, values
        TensorType(f32, ["tokens", geometry.num_value_heads], cpu),  # decay
        TensorType(f32, ["tokens", geometry.num_value_heads], cpu),  # beta
        BufferType(f32, geometry.recurrent_state_shape(1), cpu),
        BufferType(f32, geometry.ring_shape(1), cpu),
        TensorType(u32, ["rows_plus_1"], cpu),  # where each row of tokens begins
        TensorType(u32, ["rows"], cpu),  # tokens of each row to keep
        TensorType(DType.int64, ["drafts"], cpu),  # only its length is read
    ],
) as graph:
    qkv, decay, beta = (value.tensor for value in graph.inputs[:3])
    state, ring = (value.buffer for value in graph.inputs[3:5])
    offsets, num_accepted, width = (value.tensor for value in graph.inputs[5:])
    slots = num_accepted * 0  # every row is request 0: there is one
    out = ops.gated_delta_recurrence_verify_ring_fwd(
        qkv, decay, beta, state, ring, slots, slots, offsets, width
    )
    table = slots.reshape([1, "rows"])  # [layers, rows]
    ops.gated_delta_state_fold(state, ring, table, table, num_accepted, width)
    graph.output(out)

model = InferenceSession(devices=[CPU()]).load(graph)

rng = np.random.default_rng(0)
tokens = 4  # the last settled token and three drafts
qkv_values = rng.standard_normal((tokens, geometry.conv_dim), np.float32)
decay_values = rng.uniform(0.8, 1, (tokens, geometry.num_value_heads)).astype(np.float32)
beta_values = rng.uniform(0, 1, (tokens, geometry.num_value_heads)).astype(np.float32)


def run(count: int, accepted: int, drafts: int) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of the first count tokens, and the state after the fold."""
    state = np.zeros(geometry.recurrent_state_shape(1), np.float32)
    (out,) = model.execute(
        qkv_values[:count],
        decay_values[:count],
        beta_values[:count],
        state,
        np.zeros(geometry.ring_shape(1), np.float32),
        np.array([0, count], np.uint32),
        np.array([accepted], np.uint32),
        np.zeros(drafts, np.int64),
    )
    return out.to_numpy(), state


verified, folded = run(count=4, accepted=2, drafts=3)
plain, decoded = run(count=2, accepted=2, drafts=0)  # without drafts: the plain recurrence
print("outputs of the accepted tokens equal:", np.array_equal(verified[:2], plain))
print("state after the fold equal:          ", np.array_equal(folded, decoded))
assert np.array_equal(verified[:2], plain) and np.array_equal(folded, decoded)
