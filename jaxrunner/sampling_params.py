"""The classes of sampling parameters, where vLLM has them."""

from jaxrunner.api.repetition import RepetitionDetectionParams
from jaxrunner.api.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.engine.beam import BeamSearchParams

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
