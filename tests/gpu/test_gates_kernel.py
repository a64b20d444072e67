"""The GPU kernel of the gates, in the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from emit_ptx import Build
from harness import DTYPES, Pool
from ptxsim import Kernel
from simulated import UNWRITTEN, vector

from gdn_graph import reference

BUILD = Build(kernels=("gates",))
THREADS = 256


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (7, 37), (64, 8)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gates(tokens, heads, dtype):
    """Blocks that end in a row, the last one partial, against the specification."""
    rng = np.random.default_rng([tokens, heads])
    logits = rng.uniform(-100, 100, (tokens, heads)).astype(np.float32)
    logits[0, 0] = 0.5  # where the decay is neither 0 nor 1
    a = Pool.of(DTYPES[dtype], logits)
    b = rng.uniform(-80, 80, (tokens, heads)).astype(np.float32)
    A_log, dt_bias = (rng.uniform(-3, 1, heads).astype(np.float32) for _ in range(2))
    decay, beta = (np.full(b.shape, UNWRITTEN) for _ in range(2))
    args = [
        b.size,
        heads,
        vector(decay, "decay", readonly=False),
        vector(beta, "beta", readonly=False),
        vector(a.bits, "a"),
        vector(b, "b"),
        vector(A_log, "A_log"),
        vector(dt_bias, "dt_bias"),
    ]
    kernel = Kernel.from_ptx((BUILD.folder() / f"gates_{dtype}.ptx").read_text())
    kernel.launch((-(-b.size // THREADS), 1, 1), THREADS, args, races=True)
    true_decay, true_beta = reference.gated_delta_gates(a.values, b, A_log, dt_bias)
    np.testing.assert_allclose(decay, true_decay, rtol=1e-4, atol=1e-36)
    np.testing.assert_allclose(beta, true_beta, rtol=1e-6, atol=0)
    off, _ = reference.gated_delta_gates(a.values, b, A_log, dt_bias + 0.01)
    assert not np.allclose(decay, off, rtol=1e-4, atol=1e-36), "the control: a bias that is off"
