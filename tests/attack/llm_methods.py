"""The methods of an `LLM` that answer: prompts, parameters and flags that have no meaning."""

from collections.abc import Callable, Iterator
import random
from typing import Any

import numpy as np

from jaxrunner import BeamSearchParams, SamplingParams
from tests.attack import calls, models, params, values
from tests.attack.calls import Target
from tests.attack.harness import Case, Entry, Refused
from tests.attack.kinds import Kind, flag, instance, integer, text

ONE = SamplingParams(temperature=0, max_tokens=1)
# Ids that no token has are left out, and one may stand by itself.
SOME = Kind(lambda v: False if v is None or isinstance(v, float | bytes) else None, ("ab", 1.5))
PROMPTS = Kind(
    lambda v: None if isinstance(v, str | dict | list | tuple) else False if is_plain(v) else None,
    ({"prompt_token_ids": [61]}, {"prompt_token_ids": [-1]}, {"prompt_token_ids": []}, [1, 2], "",
     {"prompt": 3}, {"prompt_token_ids": [1] * 48}, {"prompt_token_ids": [True]}, "\ud800", b"a",
     {"prompt_token_ids": [2**40]}, {"promt": "a"}, ["a", 3], [None], {"prompt_token_ids": [1.5]}),
)  # fmt: skip
# Good by themselves, and not for this model.
_FIELDS: tuple[dict[str, Any], ...] = (
    dict(stop_token_ids=[61]), dict(logit_bias={2**29: 1.0}), dict(allowed_token_ids=[3, 99]),
    dict(bad_words=[[61]]), dict(logprobs=62), dict(prompt_logprobs=2**30),
    dict(logprob_token_ids=[70]), dict(extra_args={"heat": 1.0}), dict(bad_words=["\0"]),
)  # fmt: skip
WRONG = tuple(SamplingParams(**fields) for fields in _FIELDS)
PARAMS = Kind(
    lambda v: type(v) is SamplingParams or v is None or (None if isinstance(v, list | tuple) else
                                                          False),
    ({}, dict(max_tokens=1), [ONE], [ONE, None], SamplingParams, "greedy", *WRONG, *WRONG),
)  # fmt: skip
RANKS = Kind(
    lambda v: v is None or (None if isinstance(v, list | tuple | int | np.generic) else False),
    ("a", [None], [1.5], [True], [values.NAN], [2**63], [1, 2], [[]], "1"),
)
ON_ERROR = Kind(lambda v: v == "return" or v == "raise" if type(v) is str else False, ("Raise", 3))
MESSAGES = [{"role": "user", "content": "AB"}]
TALK = dict(
    messages=Kind(
        lambda v: False if is_plain(v) or isinstance(v, str | dict) else None,
        ([], [[]], [{}], [{"role": 3}], [{"role": "user"}], [{"content": "a"}], "hello", [None],
         [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "image"}]}],
         [{"role": "", "content": None}], [MESSAGES, {}], [MESSAGES, None]),
    ),
    chat_template=Kind(
        text(None).good,
        ("{{", "{% for %}", "{{ x.y.z }}", "{{ messages.__class__ }}", "{{ ''.__class__ }}", 3,
         "{% include 'a' %}", "{{ range(10**12)|list }}", "{{ 'a' * 10**12 }}", "{{ 1/0 }}",
         "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ raise_exception('no') }}", ""),
    ),
    add_generation_prompt=flag(), continue_final_message=flag(),
    tools=Kind(lambda v: True if v is None else None if isinstance(v, list | tuple) else False,
               (3, "a", {}, [3], True)),
    chat_template_kwargs=Kind(lambda v: True if v is None else None if isinstance(v, dict) else
                              False, (3, "ab", [1], {"messages": 1}, {3: 4}, {"self": 1})),
)  # fmt: skip


def is_plain(value: Any) -> bool:
    """Whether a value is surely no list."""
    return type(value) in (int, float, complex, bool, bytes, bytearray, type(None), object, type)


def told(outputs: Any) -> None:
    """Raises what outputs tell of prompts that were refused."""
    errors = [output.error for output in outputs if getattr(output, "error", None)]
    if errors:
        raise Refused(errors[0])


class Methods(Entry):
    """An LLM's methods; the canary is a stream of the same LLM."""

    def __init__(self) -> None:
        self.llm = models.llm()
        self.targets = self.made(self.llm)

    def made(self, llm: Any) -> tuple[Target, ...]:
        """Returns the methods, and what their fields may hold."""
        raise NotImplementedError

    def case(self, rng: random.Random) -> Case:
        made = calls.case(rng, self.targets)
        return made._replace(fields=(*made.fields, *ALSO))

    def status(self) -> Any:
        status = self.llm.engine.status
        return len(self.llm.completions._states), status.ended, status.asleep

    def canary(self) -> Iterator[Any]:
        return models.streamed(self.llm)

    def close(self) -> None:
        self.llm.close()


# What a prompt's or a parameter's own refusal names, whichever method it came by.
ALSO = (
    "prompt", "prompts", "prompt_token_ids", "stop_token_ids", "logit_bias", "allowed_token_ids",
    "bad_words", "logprobs", "prompt_logprobs", "logprob_token_ids", "extra_args", "text",
    "structured_outputs", "stop", "chat template", "truncate_prompt_tokens", "cache_salt",
    "continue_final_message",
)  # fmt: skip


def fixed(function: Callable[..., Any], **always: Any) -> Callable[..., None]:
    """Returns a function that raises what its outputs tell."""

    def call(**fields: Any) -> None:
        told(function(**always | fields))

    return call


class Generate(Methods):
    """`generate`."""

    def made(self, llm: Any) -> tuple[Target, ...]:
        kinds = dict(prompts=PROMPTS, sampling_params=PARAMS, priority=RANKS, on_error=ON_ERROR)
        needed = dict(prompts="AB", sampling_params=ONE, use_tqdm=False)
        return (Target("generate", fixed(llm.generate), kinds | dict(use_tqdm=flag()),
                       lambda: needed),)  # fmt: skip


class Stream(Methods):
    """`stream`, read to its end."""

    def made(self, llm: Any) -> tuple[Target, ...]:
        kinds = dict(prompts=PROMPTS, sampling_params=PARAMS, priority=RANKS, on_error=ON_ERROR)
        needed = dict(prompts="AB", sampling_params=ONE)
        return (Target("stream", fixed(llm.stream), kinds, lambda: needed),)


class Chat(Methods):
    """`chat`."""

    def made(self, llm: Any) -> tuple[Target, ...]:
        kinds = TALK | dict(sampling_params=PARAMS, use_tqdm=flag())
        needed = dict(messages=MESSAGES, sampling_params=ONE, use_tqdm=False)
        return (Target("chat", fixed(llm.chat), kinds, lambda: needed),)


class BeamSearch(Methods):
    """`beam_search`."""

    def made(self, llm: Any) -> tuple[Target, ...]:
        good = BeamSearchParams(beam_width=2, max_tokens=2)
        wide = BeamSearchParams(beam_width=1024, max_tokens=2**30)
        kinds = dict(prompts=PROMPTS, params=instance(BeamSearchParams), use_tqdm=flag())
        kinds["params"] = kinds["params"]._replace(near=(None, {}, ONE, wide, BeamSearchParams))
        needed = dict(prompts="AB", params=good, use_tqdm=False)
        return (Target("beam_search", fixed(llm.beam_search), kinds, lambda: needed),)


class Scores(Methods):
    """`loglikelihood` and `score_tokens`."""

    def made(self, llm: Any) -> tuple[Target, ...]:
        pair = Kind(
            lambda v: False if is_plain(v) else None,
            ([("a",)], [("a", 3)], [3], ["ab"], [("a", "")], [([61], [1])], "ab", {1: 2}),
        )
        pairs = Target("loglikelihood", fixed(llm.loglikelihood), dict(pairs=pair, use_tqdm=flag()),
                       lambda: dict(pairs=[("A", "B")], use_tqdm=False))  # fmt: skip
        routes = Kind(
            lambda v: v is None or (False if is_plain(v) or isinstance(v, str | dict) else None),
            (3, "ab", [], [None], [3, 4], [[[1]]]),
        )
        kinds = dict(
            prompts=PROMPTS, start=integer(0, 2**30), use_tqdm=flag(), routed_experts=routes
        )  # fmt: skip
        needed = dict(prompts="AB", use_tqdm=False)
        return pairs, Target("score_tokens", fixed(llm.score_tokens), kinds, lambda: needed)

    def case(self, rng: random.Random) -> Case:
        made = super().case(rng)
        return made._replace(fields=(*made.fields, r"pair \d+"))


FUNCTION = Kind(lambda v: False, (None, "no_such", "", b"close", ["close"], {}, 1.5))
LIST = Kind(lambda v: None if isinstance(v, list | tuple) else False, (3, None, "ab", {1: 2}))
MAP = Kind(lambda v: v is None or (None if isinstance(v, dict) else False), (3, [1], {1: 2}, "ab"))


class Small(Methods):
    """What is said and asked between requests."""

    def made(self, llm: Any) -> tuple[Target, ...]:
        def tokens(**fields: Any) -> None:
            llm.get_tokenizer().encode(**fields)

        def decoded(**fields: Any) -> None:
            llm.get_tokenizer().decode(**fields)

        def called(**fields: Any) -> None:
            try:
                llm.collective_rpc(**fields)
            except AttributeError as error:
                raise ValueError(f"method: {error}") from error

        return (
            Target("abort", lambda **f: llm.abort(**f), dict(request_id=text()),
                   lambda: dict(request_id="none")),
            Target("encode", tokens, dict(text=text(), add_special_tokens=flag()),
                   lambda: dict(text="AB")),
            Target("decode", decoded, dict(ids=SOME, skip_special_tokens=flag()),
                   lambda: dict(ids=[1])),
            Target("check_health", llm.check_health, dict(timeout_s=params.real(1e-3, 1e6))),
            Target("collective_rpc", called, dict(method=FUNCTION, args=LIST, kwargs=MAP),
                   lambda: dict(method=lambda llm, *args, **kwargs: None), unknown=False),
            Target("apply_model", llm.apply_model, dict(func=FUNCTION), unknown=False),
            Target("reset_prefix_cache", llm.reset_prefix_cache,
                   dict(reset_running_requests=flag()), unknown=False),
            Target("scale_elastic_ep", llm.scale_elastic_ep,
                   dict.fromkeys(
                       ("new_tensor_parallel_size", "new_data_parallel_size"), integer(0, -1)
                   )),
        )  # fmt: skip
