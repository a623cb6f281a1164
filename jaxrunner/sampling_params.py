"""What `SamplingParams` and its like are, where vLLM has them."""

from jaxrunner.beam import BeamSearchParams
from jaxrunner.params import RequestOutputKind, SamplingParams
from jaxrunner.repetition import RepetitionDetectionParams
from jaxrunner.structured_outputs import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
