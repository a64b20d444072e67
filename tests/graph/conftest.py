from __future__ import annotations

import pytest
from max.driver import CPU
from max.engine import InferenceSession


@pytest.fixture(scope="session")
def session() -> InferenceSession:
    return InferenceSession(devices=[CPU()])
