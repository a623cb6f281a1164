"""Logprobs as a user reads them, where vLLM has them."""

from jaxrunner.api.logprobs import FlatLogprobs, Logprob

__all__ = ["FlatLogprobs", "Logprob"]
