"""What programs written for vLLM ask of its `LLM` besides text: its engine, settings, figures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.validation import shown
from jaxrunner.config import ModelConfig
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.metrics import Metric, read_metrics
from jaxrunner.engine.saved_requests import EngineLifecycle
from jaxrunner.text.tokenizer import Tokenizer


class LLMNames(EngineLifecycle):
    """vLLM's names for what is there; `NotHere` has words for what is not."""

    tokenizer: Tokenizer | None
    _defaults: SamplingParams

    @property
    def llm_engine(self) -> Engine:
        """The engine, by vLLM's name."""
        return self.engine

    @property
    def model_config(self) -> ModelConfig:
        """What the model is."""
        return self.engine.model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what requests without parameters get, a copy, whose fields may be set."""
        return self._defaults.clone()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
          ValueError: there is none.
        """
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: leave skip_tokenizer_init out")
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Returns what is counted, as vLLM names it: requests, tokens, the use of the cache."""
        engine = self.engine
        return read_metrics(engine.scheduler, engine.pools, self.completions.totals)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets cached prefixes; False, and no change, while a request runs.

        reset_running_requests: those that run are computed again, with the same tokens.
        """
        if type(reset_running_requests) is not bool:
            raise TypeError(
                f"reset_running_requests must be True or False, got {shown(reset_running_requests)}"
            )
        return self.completions.reset_prefix_cache(running=reset_running_requests)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method by its name, or a function with this, and returns its result in a list.

        There is one process, whose worker is the LLM itself: the methods of `Lifecycle`, which
        `Worker` has too. timeout: has no effect, nothing is waited for.

        Raises:
          AttributeError: there is no such method.
          TypeError: it is neither a name nor a function.
        """
        if isinstance(method, str):
            return [getattr(self, method)(*args, **kwargs or {})]
        if not callable(method):
            raise TypeError(f"method must be a name or a function, got {shown(method)}")
        return [method(self, *args, **kwargs or {})]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls a function with the weights, a tree of arrays, and returns its result in a list.

        Raises:
          TypeError: it is no function.
        """
        if not callable(func):
            raise TypeError(f"func must be a function of the weights, got {shown(func)}")
        return [func(self.params)]
