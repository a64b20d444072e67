"""Our architectures, writing the logits of every step of `max generate`.

The file is named by GDN_GRAPH_TEST_LOGITS: float32 [steps, vocab], last token of one request.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
from max.pipelines.lib import ModelInputs, ModelOutputs

from gdn_graph.serve import architectures


class RecordingModel(architectures.Qwen3_5Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: list[np.ndarray] = []

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        outputs = super().execute(model_inputs)
        self.rows.append(outputs.logits.to_numpy().copy())
        np.save(os.environ["GDN_GRAPH_TEST_LOGITS"], np.concatenate(self.rows))
        return outputs


ARCHITECTURES = [
    replace(architecture, pipeline_model=RecordingModel)
    for architecture in architectures.ARCHITECTURES
    if architecture.pipeline_model is architectures.Qwen3_5Model
]
