"""The Python API: prompts in, text out.

with LLM("path/to/checkpoint") as llm:
    for output in llm.generate(["def fib(n):"], SamplingParams(temperature=0.7)):
        print(output.outputs[0].text)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
import functools
from typing import Any

import jax

from jaxrunner import beam, pytree, scoring
from jaxrunner.bounds import Bound, plain, shown
from jaxrunner.chat import render_chat
from jaxrunner.completions import Asked, Completions
from jaxrunner.engine import Engine
from jaxrunner.engine_lifecycle import EngineLifecycle
from jaxrunner.grammar import GrammarCompiler
from jaxrunner.loader import Loaded, load
from jaxrunner.output_processor import RequestState
from jaxrunner.outputs import RequestOutput, RequestOutputs
from jaxrunner.params import RequestOutputKind, SamplingParams
from jaxrunner.program_cache import find_folder
from jaxrunner.prompts import parse_prompts
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import with_logits_fn
from jaxrunner.sampling.rule import Rule
from jaxrunner.tokenizer import Tokenizer
from jaxrunner.worker import plan_engine

WARM_UPS = {True: {}, "all": dict(rich=True), "background": dict(background=True)}


class LLM(EngineLifecycle):
    """A model that answers prompts, many at once.

    model: a folder with config.json, safetensors and tokenizer.json, or a name on the Hugging
        Face hub, whose safetensors, json and txt files are fetched.
    tokenizer: a folder or a `Tokenizer` in place of the model's; `skip_tokenizer_init` for none.
    dtype: of weights and activations, "auto" for the checkpoint's.
    load_format: "auto" reads weights, "dummy" makes random ones on the device, "sharded_state"
        reads what `save_sharded_state` wrote, from files named as `model_loader_extra_config` may
        say: {"pattern": ...}.
    hf_overrides: keys of config.json to replace; None removes one.
    generation_config: "auto" takes default sampling parameters from the checkpoint's file of that
        name, "vllm" ignores them.
    check_nan: whether weights are searched for NaN and infinity.
    logits_fn: `fn(logits [V], row) -> logits [V]`, compiled into the sampling of every request;
        see `jaxrunner.sampling.custom`, which also has the slow variant for arbitrary Python.
    cache_dir: a folder where compiled programs are kept, None for none; see `program_cache`.
    warm_up: True compiles the programs of usual requests now, "all" also those of logprobs,
        grammars and their like, else compiled when needed; "background" awaits the largest alone.
    The other sizes are those of `worker.plan_engine`; `memory_plan` says what they take.

    Raises:
      FileNotFoundError, ValueError, TypeError, MemoryError: a bad checkpoint or setting; names it.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        dtype: str = "auto",
        seed: int = 0,
        load_format: str = "auto",
        model_loader_extra_config: dict[str, Any] | None = None,
        hf_overrides: dict[str, Any] | None = None,
        generation_config: str = "auto",
        chat_template: str | None = None,
        check_nan: bool = False,
        logits_fn: Callable[..., Any] | Rule | None = None,
        warm_up: bool | str = True,
        cache_dir: str | None = "auto",
        use_tqdm: bool = True,
        **sizes: Any,
    ):
        rules = with_logits_fn(RULES, logits_fn)
        if warm_up not in (False, *WARM_UPS):
            raise ValueError(f"warm_up must be False or one of {[*WARM_UPS]}, got {warm_up!r}")
        loaded = load(
            model, revision=revision, dtype=dtype, seed=seed, load_format=load_format,
            tokenizer=None if skip_tokenizer_init else tokenizer or model, check_nan=check_nan,
            model_loader_extra_config=model_loader_extra_config, hf_overrides=hf_overrides,
            generation_config=generation_config,
        )  # fmt: skip
        self.tokenizer, self.load_config = loaded.tokenizer, loaded.load_config
        self._chat_template, self._defaults = chat_template, loaded.default_params
        at = dict(rules=rules, cache_dir=find_folder(cache_dir))
        config, self.memory_plan = plan_engine(loaded, seed=seed, **at, **sizes)
        with ExitStack() as undo:
            self.engine = Engine(
                loaded.model, loaded.config, config, loaded.params, **at,
                make_compiler=_compiler_maker(loaded),
            )  # fmt: skip
            undo.callback(self.engine.close)
            if warm_up:  # threads compile while the weights come
                self.engine.runner.prepare(**WARM_UPS[warm_up])
            params = loaded.read_params(progress=use_tqdm)
            undo.callback(pytree.delete, params)  # a kept traceback would keep the memory
            self.engine.runner.update_params(params)
            if warm_up:
                self.engine.warm_up(**WARM_UPS[warm_up], progress=use_tqdm)
                self.memory_plan = self.memory_plan.checked(self.engine.runner.programs.largest())
            self.completions = Completions(self.engine, self.tokenizer, loaded.eos_token_ids)
            undo.pop_all()

    def report(self) -> str:
        """Says what runs on which device, and why, one line each, and what memory it takes."""
        runner, n = self.engine.runner, self.engine.config.num_decode_steps
        alone = "; 1 while a request has a grammar or wants the logprobs of all tokens" * (n > 1)
        return (
            f"device: {jax.local_devices()[0].device_kind}\n"
            f"layers and sampling: {runner.choice.name}, because {runner.choice.reason}\n"
            f"decode steps of a launch: {n}{alone}\n"
            f"programs: {runner.programs.report()}\n"
            f"memory:\n{self.memory_plan}"
        )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        on_error: str = "return",
    ) -> RequestOutputs:
        """Answers prompts, in their order.

        prompts: a str, {"prompt": str}, {"prompt_token_ids": [int]}, or a list of them.
        sampling_params: one for all prompts, or one for each; the model's defaults where None.
        on_error: "return" gives a bad prompt an output with finish_reason="error" and its
            message, and answers the others; "raise" raises before any is answered.

        Raises:
          Interrupted: by Ctrl-C, a `KeyboardInterrupt` whose `outputs` have what there is so far.
        """
        asked = self._asked(prompts, sampling_params, priority, on_error, whole=True)
        return self.completions.answer(asked, on_error=on_error, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        on_error: str = "return",
    ) -> Iterator[RequestOutput]:
        """Answers prompts like `generate`, yielding what is new of each request as it comes.

        An output tells one completion as `output_kind` says: what is new since the last one (the
        default), all so far, or all completions of its prompt once, at their end. The last one of
        a prompt has `finished` set.
        """
        asked = self._asked(prompts, sampling_params, priority, on_error)
        groups: list[list[RequestState]] = []
        try:
            self.completions.queue(asked, into=groups, on_error=on_error)
            yield from self.completions.stream(groups)
        finally:
            self.completions.drop(state for group in groups for state in group)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> RequestOutputs:
        """Answers one conversation, a list of messages, or several, a list of such lists."""
        tokenizer = self.get_tokenizer()
        many = bool(messages) and not isinstance(messages[0], dict)
        prompts = []
        for conversation in messages if many else [messages]:
            text = render_chat(
                chat_template or self._chat_template or tokenizer.chat_template,
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                **chat_template_kwargs or {},
            )
            # The template has written the special tokens itself.
            prompts.append({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Any, params: beam.BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[beam.BeamSearchOutput]:
        """Returns the `beam_width` likeliest continuations that a beam search finds, best first."""
        return beam.search(self.completions, parse_prompts(prompts), params, use_tqdm=use_tqdm)

    def loglikelihood(
        self, pairs: Sequence[tuple[Any, Any]], *, use_tqdm: bool = True
    ) -> scoring.Loglikelihood:
        """Returns how likely each continuation is after its context, and whether greedy says it.

        pairs: (context, continuation), each a text or token ids. A text is split as lm-eval does:
            trailing spaces of the context belong to the continuation. An empty context is BOS.
        """
        return scoring.loglikelihood(self.completions, pairs, use_tqdm=use_tqdm)

    def score_tokens(
        self, prompts: Any, *, start: int = 1, use_tqdm: bool = True
    ) -> list[scoring.TokenScores]:
        """Returns the logprob of each token of prompts, from position `start` on, as arrays."""
        prompts = parse_prompts(prompts)
        return scoring.score(self.completions, prompts, [start] * len(prompts), use_tqdm=use_tqdm)

    def abort(self, request_id: str) -> None:
        """Ends a request at any phase; its output says so. Unknown ids are ignored."""
        self.completions.abort(request_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what requests without parameters get."""
        return self._defaults

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
          ValueError: there is none.
        """
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: leave skip_tokenizer_init out")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False, and no change, while a request runs."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Gives the device memory back, and aborts requests. May be called twice; none can follow.

        In a process that was forked off it does nothing.
        """
        if not self.engine.standing.is_foreign:
            self.completions.close()
            pytree.delete(self.engine.runner.params)

    def _asked(
        self, prompts, sampling_params, priority, on_error: str, *, whole: bool = False
    ) -> list[Asked]:
        """Returns each prompt with what belongs to it."""
        if on_error not in ("return", "raise"):
            raise ValueError(f"on_error must be 'return' or 'raise', got {shown(on_error)}")
        prompts = parse_prompts(prompts)
        sampling_params = self._defaults if sampling_params is None else sampling_params
        params = _one_each("sampling_params", sampling_params, len(prompts))
        for param in params:
            if not isinstance(param, SamplingParams):
                raise TypeError(
                    f"sampling_params must be a SamplingParams, got {type(param).__name__}: "
                    "pass SamplingParams(...), or a list of them"
                )
            if whole and param.output_kind == RequestOutputKind.DELTA:
                raise ValueError(
                    "output_kind=DELTA is for LLM.stream, and generate returns the whole: "
                    "leave it out"
                )
        ranks = _one_each("priority", 0 if priority is None else priority, len(prompts))
        bound = Bound(int, -(2**62), 2**62)
        priorities = [plain(f"priority[{i}]", rank, bound) for i, rank in enumerate(ranks)]
        return list(zip(prompts, params, priorities, strict=True))


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name} must be one, or one for each of {count} prompts, got {len(value)}"
        )
    return list(value)


def _compiler_maker(of: Loaded) -> Callable | None:
    if of.tokenizer is None:
        return None
    sizes = dict(vocab_size=of.config.vocab_size, eos_token_ids=of.eos_token_ids)
    return functools.partial(GrammarCompiler, of.tokenizer, **sizes)
