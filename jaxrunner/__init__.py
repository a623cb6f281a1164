"""vLLM's GPU model runner as compiled JAX. Start reading at `step.py`."""

from jaxrunner.beam import BeamSearchParams
from jaxrunner.llm import LLM
from jaxrunner.outputs import (
    CompletionOutput,
    Interrupted,
    Logprob,
    RequestOutput,
    RequestOutputs,
)
from jaxrunner.params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from jaxrunner.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Interrupted",
    "Logprob",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "RequestOutputs",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]
