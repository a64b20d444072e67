from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from harness import DTYPES, Ops
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession

# CI services set these; the command line then colours and animates what the tests read.
for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(variable, None)


@pytest.fixture(scope="session")
def session() -> InferenceSession:
    return InferenceSession(devices=[CPU()])


@pytest.fixture(scope="session")
def ops_of(session: InferenceSession) -> Callable[..., Ops]:
    """The compiled ops of a pool dtype (and a ring dtype), each made once."""
    made: dict[tuple[DType, DType], Ops] = {}

    def get(dtype: DType | str = DType.float32, ring_dtype: DType = DType.float32) -> Ops:
        key = (DTYPES[dtype] if isinstance(dtype, str) else dtype, ring_dtype)
        return made.setdefault(key, Ops(session, *key))

    return get
