"""vLLM's GPU model runner as compiled JAX. Start reading at `step.py`."""

from jaxrunner.llm import LLM
from jaxrunner.outputs import CompletionOutput, RequestOutput
from jaxrunner.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]
