"""MAX's Qwen3.5 architectures, on our ops.

Importing this module puts our ops in every graph the process builds from then on. MAX imports it
in the server process, where it reads ARCHITECTURES, and again in the model worker, because the
model classes that it is sent live here.

On a GPU nothing else of MAX's is changed. On a CPU a model is text only and its single-device
collectives are identities; MAX 26.7 asks for an accelerator to build them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Final
from unittest.mock import patch

from max.driver import Buffer
from max.engine import InferenceSession, Model
from max.graph import ops
from max.nn.comm import Allreduce, Signals
from max.nn.layer import Module
from max.pipelines.architectures.qwen3_5 import qwen3_5_arch, qwen3_5_text_arch
from max.pipelines.architectures.qwen3_5 import model as qwen3_5
from max.pipelines.architectures.qwen3_5.model_config import Qwen3_5Config
from max.pipelines.architectures.unified_mtp_qwen3_5 import model as unified_mtp
from max.pipelines.architectures.unified_mtp_qwen3_5 import unified_mtp_qwen3_5_arch
from max.pipelines.lib import SupportedArchitecture

from gdn_graph.library import overlay

_PROCESS: Final = ExitStack()
_PROCESS.enter_context(overlay())


@contextmanager
def identity_collectives() -> Iterator[None]:
    """Graphs built inside run on one device and pass no signal buffers.

    MAX's Qwen3.5 layers are written for tensor parallelism: at one device every collective gives
    back its input, but in 26.7 building one asks for an accelerator.
    """

    def no_signals(self: Signals, devices: object) -> None:
        self.devices = []

    def no_devices(self: Allreduce, num_accelerators: int) -> None:
        Module.__init__(self)

    with (
        patch.object(Signals, "__init__", no_signals),
        patch.object(Allreduce, "__init__", no_devices),
        patch.object(Allreduce, "__call__", lambda self, inputs, signals: list(inputs)),
        patch.object(ops, "distributed_broadcast", lambda input, signals: [input]),
        patch.object(ops, "allgather", lambda inputs, signals, axis=0: list(inputs)),
    ):
        yield


class Qwen3_5Model(qwen3_5.Qwen3_5Model):
    """MAX's Qwen3.5 model, which runs on a CPU too, for text."""

    @property
    def _on_cpu(self) -> bool:
        return all(device.is_host for device in self.devices)

    @cached_property
    def signal_buffers(self) -> list[Buffer]:
        return [] if self._on_cpu else super().signal_buffers

    def load_model(self, session: InferenceSession) -> Model:
        if not self._on_cpu:
            return super().load_model(session)
        with identity_collectives():
            return super().load_model(session)

    def _create_model_config(self, state_dict: dict[str, Any]) -> Qwen3_5Config:
        config = super()._create_model_config(state_dict)
        if self._on_cpu:
            config.vision_config = None
        return config


class UnifiedMTPQwen3_5Model(unified_mtp.UnifiedMTPQwen3_5Model):
    """MAX's Qwen3.5 model with its MTP draft head; MAX runs it on GPUs only."""


ARCHITECTURES: Final[list[SupportedArchitecture]] = [
    replace(qwen3_5_text_arch, pipeline_model=Qwen3_5Model),
    replace(qwen3_5_arch, pipeline_model=Qwen3_5Model),
    replace(unified_mtp_qwen3_5_arch, pipeline_model=UnifiedMTPQwen3_5Model),
]
