"""vLLM's GPU model runner as compiled JAX. Start reading at `step.py`."""

from jaxrunner.api.outputs import (
    CompletionOutput,
    Interrupted,
    Logprob,
    RequestOutput,
    RequestOutputs,
)
from jaxrunner.api.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.engine.beam import BeamSearchParams
from jaxrunner.llm import LLM
from jaxrunner.lora.lora_request import LoRARequest
from jaxrunner.models.registry import register_model
from jaxrunner.pooling.params import PoolerConfig, PoolingParams
from jaxrunner.version import __version__

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Interrupted",
    "LoRARequest",
    "Logprob",
    "PoolerConfig",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "RequestOutputs",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "register_model",
]
