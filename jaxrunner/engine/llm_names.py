"""Methods of `LLM` besides answering prompts: weights, sleep, settings, metrics, vLLM's names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
import functools
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from jaxrunner.api.arguments import checked, forwarded
from jaxrunner.api.not_here import NotHere
from jaxrunner.api.outputs import RequestOutput
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.validation import shown
from jaxrunner.config import ModelConfig
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.metrics import Metric, read_metrics
from jaxrunner.engine.replicas import Replicas, engines_of
from jaxrunner.loading.loader import LoadConfig
from jaxrunner.operation import Chosen
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.text.tokenizer import Tokenizer
from jaxrunner.worker.lifecycle import Lifecycle
from jaxrunner.worker.lifecycle_arguments import (
    IN_FOLDER,
    SLEEP,
    check_changeable,
    read_overrides,
)

P = ParamSpec("P")
T = TypeVar("T")
CHANGEABLE = ("async_depth", "num_decode_steps")


def _between_steps(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Returns a method that calls the worker's, which writes in place, between steps."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.completions.lock:
            return method(self.engine.worker, *args, **kwargs)

    return call


class LLMNames(NotHere):
    """The part of `LLM` without prompts: its worker's methods, and vLLM's names."""

    engine: Any  # `Engine`, or `Replicas` of it
    completions: Completions
    tokenizer: Tokenizer | None
    _defaults: SamplingParams

    update_params = forwarded("engine.worker", Lifecycle.update_params)
    start_weight_update = forwarded("engine.worker", Lifecycle.start_weight_update)
    update_weights = forwarded("engine.worker", Lifecycle.update_weights)
    finish_weight_update = forwarded("engine.worker", Lifecycle.finish_weight_update)
    reload_weights = forwarded("engine.worker", Lifecycle.reload_weights)
    save_params = forwarded("engine.worker", Lifecycle.save_params)
    load_params = forwarded("engine.worker", Lifecycle.load_params)
    save_sharded_state = forwarded("engine.worker", Lifecycle.save_sharded_state)
    wake_up = forwarded("engine.worker", Lifecycle.wake_up)
    is_sleeping = forwarded("engine.worker", Lifecycle.is_sleeping)
    start_profile = forwarded("engine.worker", Lifecycle.start_profile)
    stop_profile = forwarded("engine.worker", Lifecycle.stop_profile)
    profile = forwarded("engine.worker", Lifecycle.profile)
    check_health = forwarded("engine.worker", Lifecycle.check_health)
    add_lora = _between_steps(Lifecycle.add_lora)
    remove_lora = _between_steps(Lifecycle.remove_lora)
    list_loras = _between_steps(Lifecycle.list_loras)
    pin_lora = _between_steps(Lifecycle.pin_lora)
    merge_lora = _between_steps(Lifecycle.merge_lora)
    unmerge_lora = _between_steps(Lifecycle.unmerge_lora)
    get_supported_tasks = forwarded("engine.worker", Lifecycle.get_supported_tasks)

    @property
    def runner(self) -> ModelRunner:
        """The runner, which holds weights and caches; of replicas the first live one."""
        return self.engine.runner

    @property
    def params(self) -> Any:
        """The weights; None while they sleep."""
        return self.engine.runner.params

    @property
    def weights_version(self) -> int:
        """How often the weights have changed."""
        return self.engine.weights_version

    @property
    def load_config(self) -> LoadConfig:
        """The checkpoint that `reload_weights` reads; `update_config` may change it."""
        return self.engine.worker.load_config

    def operations(self) -> dict[str, list[Chosen]]:
        """Returns what runs each operation of the largest decode step and of the largest other one.

        By the names of the steps' programs; each choice has the reasons of the implementations that
        refused before it. The programs are traced, which takes seconds.
        """
        runner, found = self.engine.runner, dict[str, list[Chosen]]()
        for decodes in (True, False):
            key = Key("step", max(b for b in runner.buckets if bool(b.query_len) == decodes))
            found[str(key)] = operations(runner.program, runner.params_spec, key)
        return found

    @checked(SLEEP)
    @functools.wraps(Lifecycle.sleep)
    def sleep(self, level: int = 1) -> None:
        with self.completions.lock:
            if self.engine.has_unfinished:
                raise RuntimeError("requests are at work: finish or abort them, then sleep")
            self.engine.drain()
            while self.engine.step():
                pass  # reads steps of requests that have ended
            self.engine.worker.sleep(level)

    def update_config(self, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        """Changes settings that are not compiled in; see `Lifecycle.update_config`.

        "engine_config" may have `async_depth`, and `num_decode_steps`: 1 or its first value.

        Raises:
          TypeError: the overrides are no dicts of dicts.
          ValueError: a field cannot change, or not to this value; names it.
        """
        load = read_overrides(overrides)
        mine = load.pop("engine_config", {})
        check_changeable("engine_config", mine, CHANGEABLE)
        config = replace(self.engine.config, **mine)
        first = self.runner.program.engine.num_decode_steps
        if config.num_decode_steps not in (1, first):
            raise ValueError(
                f"num_decode_steps={config.num_decode_steps} was not compiled, 1 and {first} can "
                "be set: build a new one with it"
            )
        self.engine.worker.update_config(load)
        self.engine.config = config

    def close(self) -> None:
        """Aborts all requests and frees the device memory; no request can follow.

        May be called twice. In a forked process it does nothing.
        """
        if not self.engine.status.is_foreign:  # a fork may have copied a held lock
            self.completions.close()

    shutdown = close  # vLLM's name

    @checked(IN_FOLDER)
    def save_state(self, folder: str | Path) -> None:
        """Writes all unfinished requests, with KV blocks, to a new folder; they can continue."""
        self.completions.save(folder)

    @checked(IN_FOLDER)
    def restore_state(self, folder: str | Path) -> Iterator[RequestOutput]:
        """Restores requests that `save_state` wrote, and yields their outputs as `stream` does.

        The LLM must have the model and sizes of the one that saved, and no unfinished request.
        Raises as `snapshot.restore_engine`; nothing changes then.
        """
        return self.completions.stream(self.completions.restore(folder))

    @property
    def llm_engine(self) -> Engine | Replicas:
        """The engine, by vLLM's name."""
        return self.engine

    @property
    def model_config(self) -> ModelConfig:
        """The config of the model."""
        return self.engine.model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns a copy of the parameters of requests without any; its fields may be set."""
        return self._defaults.clone()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
          ValueError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: leave skip_tokenizer_init out")
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Returns metrics under vLLM's names: requests, tokens, use of the KV cache."""
        of_each = [
            (engine.scheduler, engine.pools, not engine.status.ended)
            for engine in engines_of(self.engine)
        ]
        return read_metrics(of_each, self.completions.totals)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets cached prefixes. Returns False, and changes nothing, while a request runs.

        reset_running_requests: computes running requests again, with the same tokens.

        Raises:
          TypeError: the flag is neither True nor False.
          RuntimeError: the engine has ended, or this is a fork of its process.
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
        """Calls a method by its name, or a function with this LLM. Returns its result in a list.

        There is one process, and an LLM has the methods of its worker. timeout: has no effect.

        Raises:
          AttributeError: there is no such method.
          TypeError: it is neither a name nor a function, or the arguments are no list or dict.
        """
        if not (isinstance(method, str) or callable(method)):
            raise TypeError(f"method must be a name or a function, got {shown(method)}")
        if not isinstance(args, list | tuple):
            raise TypeError(f"args must be a list or a tuple, got {shown(args)}")
        named = {} if kwargs is None else kwargs
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named):
            raise TypeError(f"kwargs must be a dict by names of arguments, got {shown(kwargs)}")
        if isinstance(method, str):
            return [getattr(self, method)(*args, **named)]
        return [method(self, *args, **named)]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls a function with the weights, a tree of arrays. Returns its result in a list.

        With `data_parallel_size` it is called with the weights of each replica.

        Raises:
          TypeError: `func` is no function.
        """
        if not callable(func):
            raise TypeError(f"func must be a function of the weights, got {shown(func)}")
        return [func(runner.params) for runner in self.engine.worker.runners]
