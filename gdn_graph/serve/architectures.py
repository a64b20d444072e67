"""MAX's Qwen3.5 architectures, on our ops.

Importing this module puts our ops in every graph the process builds from then on. MAX imports it
in the server process, where it reads ARCHITECTURES, and again in the model worker, because the
model classes that are sent there live here.

On a GPU nothing else of MAX's is changed. On a CPU, where MAX 26.7 does not run these models, a
model runs in float32, takes text only, and its single-device collectives are identities.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any, Final
from unittest.mock import patch

from max.driver import Buffer
from max.engine import InferenceSession, Model
from max.graph import ops
from max.nn.comm import Allreduce, Signals
from max.nn.layer import Module
from max.pipelines.architectures import qwen3_5, unified_mtp_qwen3_5
from max.pipelines.architectures.qwen3_5 import tokenizer as qwen3_5_tokenizer
from max.pipelines.architectures.qwen3vl_moe.context import Qwen3VLTextAndVisionContext
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import (
    MAXModelConfig,
    ModelInputs,
    ModelOutputs,
    PipelineConfig,
    SupportedArchitecture,
)
from max.pipelines.modeling.types import TextGenerationRequest

from gdn_graph.library import overlay
from gdn_graph.timers import around_execute

_PROCESS: Final = ExitStack()
_PROCESS.enter_context(overlay())


def _on_cpu(pipeline_config: PipelineConfig) -> bool:
    return all(spec.device_type == "cpu" for spec in pipeline_config.model.device_specs)


def _as_served_on_cpu(huggingface_config: Any) -> Any:
    """A copy of a checkpoint's config: its text model alone, in float32.

    MAX takes the dtype of activations and state pools from the checkpoint, whatever encoding is
    asked for, and has no bfloat16 on a CPU. It has no CPU kernels for the vision tower.
    """
    config = deepcopy(huggingface_config)
    getattr(config, "text_config", config).dtype = "float32"
    config.vision_config = None
    return config


@contextmanager
def _identity_collectives() -> Iterator[None]:
    """The graphs built inside run on one device and take no signal buffers.

    MAX's Qwen3.5 layers are written for tensor parallelism. At one device every collective gives
    back its input, yet in 26.7 building one asks for an accelerator.
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


class Qwen3_5Config(qwen3_5.Qwen3_5Config):
    """MAX's Qwen3.5 config, which on a CPU plans for the text model in float32."""

    @classmethod
    def initialize_from_config(
        cls,
        pipeline_config: PipelineConfig,
        huggingface_config: Any,
        model_config: MAXModelConfig | None = None,
        *,
        max_seq_len: int,
    ) -> "Qwen3_5Config":
        if _on_cpu(pipeline_config):
            huggingface_config = _as_served_on_cpu(huggingface_config)
        config: Qwen3_5Config = super().initialize_from_config(
            pipeline_config, huggingface_config, model_config, max_seq_len=max_seq_len
        )
        return config


class Qwen3_5Tokenizer(qwen3_5_tokenizer.Qwen3_5Tokenizer):
    """MAX's Qwen3.5 tokenizer, which on a CPU refuses requests with images or video."""

    def __init__(self, model_path: str, pipeline_config: PipelineConfig, **options: Any) -> None:
        super().__init__(model_path, pipeline_config, **options)
        self._text_only = _on_cpu(pipeline_config)

    async def new_context(self, request: TextGenerationRequest) -> Qwen3VLTextAndVisionContext:
        if self._text_only and (request.number_of_images or request.number_of_videos):
            raise InputError("on a CPU gdn-graph serves text only: send no images and no video")
        return await super().new_context(request)


class Qwen3_5Model(qwen3_5.Qwen3_5Model):
    """MAX's Qwen3.5 model, which runs on a CPU too."""

    model_config_cls = Qwen3_5Config

    @property
    def huggingface_config(self) -> Any:
        config = super().huggingface_config
        return _as_served_on_cpu(config) if _on_cpu(self.pipeline_config) else config

    @cached_property
    def signal_buffers(self) -> list[Buffer]:
        return [] if _on_cpu(self.pipeline_config) else super().signal_buffers

    def load_model(self, session: InferenceSession) -> Model:
        if not _on_cpu(self.pipeline_config):
            return super().load_model(session)
        with _identity_collectives():
            return super().load_model(session)

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        with around_execute():
            return super().execute(model_inputs)


class UnifiedMTPQwen3_5Model(unified_mtp_qwen3_5.UnifiedMTPQwen3_5Model):
    """MAX's Qwen3.5 model with its MTP draft head, which MAX runs on GPUs only.

    Nothing is changed; the class lives here so that the model worker imports this module.
    """


def _text_and_vision(architecture: SupportedArchitecture) -> SupportedArchitecture:
    return replace(
        architecture,
        pipeline_model=Qwen3_5Model,
        config=Qwen3_5Config,
        tokenizer=Qwen3_5Tokenizer,
    )


ARCHITECTURES: Final[list[SupportedArchitecture]] = [
    _text_and_vision(qwen3_5.qwen3_5_text_arch),
    _text_and_vision(qwen3_5.qwen3_5_arch),
    replace(unified_mtp_qwen3_5.unified_mtp_qwen3_5_arch, pipeline_model=UnifiedMTPQwen3_5Model),
]
