"""Every peer by name, in the order of the tables."""

from __future__ import annotations

import numpy as np

from gdn_graph import reference

from .peer import Array, Peer
from .peers_c import CBlk, CFold, CFoldPaced, CRec, CRecPaced, CVerify, Limits
from .peers_libraries import LIBRARIES
from .peers_ours import OURS
from .problems import Problem, Recurrence


class Specification(Peer):
    """The NumPy specification. Far too slow to be in a table; the tests use it."""

    name = "specification"
    about = "the NumPy specification in float32"

    def load(self, problem: Problem, copies: int) -> None:
        assert isinstance(problem, Recurrence)
        self.problem = problem
        self.pools = [problem.state.copy() for _ in range(copies)]

    def call(self, copy: int) -> None:
        p = self.problem
        n = p.shape.batch * p.shape.tokens
        slots = np.arange(p.shape.batch, dtype=np.uint32)
        gates = p.qkv, p.decay.reshape(n, -1), p.beta.reshape(n, -1)
        self.out = reference.gated_delta_recurrence_fwd(
            *gates, self.pools[copy], slots, p.offsets, dtype=np.float32
        )

    def results(self) -> dict[str, Array]:
        return {"out": self.out, "state": self.pools[0]}


class Wrong(Specification):
    """The control: one output of the last token is off by a thousandth of the largest."""

    name = "wrong"
    about = "the control: the specification with one output off, which must come out red"

    def call(self, copy: int) -> None:
        super().call(copy)
        self.out[-1, -1] += 1e-3 * np.abs(self.out).max()


C: dict[str, type[Peer]] = {
    peer.name: peer for peer in (CRec, CRecPaced, CBlk, CVerify, CFold, CFoldPaced)
}
PEERS: dict[str, type[Peer]] = {**OURS, **C, **LIBRARIES}
HIDDEN: dict[str, type[Peer]] = {peer.name: peer for peer in (Specification, Wrong)}
"""Left out unless named in full."""
KINDS: dict[str, type[Peer]] = {**PEERS, **HIDDEN, Limits.name: Limits}
"""Everything that a worker can be."""
