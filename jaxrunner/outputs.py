"""The outputs of requests, where vLLM has them."""

from jaxrunner.api.logprobs import Logprob
from jaxrunner.api.outputs import CompletionOutput, Interrupted, RequestOutput, RequestOutputs

__all__ = ["CompletionOutput", "Interrupted", "Logprob", "RequestOutput", "RequestOutputs"]
