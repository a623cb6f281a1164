"""`Engine.add` and what else an engine is told, by a host of its own."""

from collections.abc import Iterator
import random
from typing import Any

from jaxrunner import LoRARequest, SamplingParams
from jaxrunner.scheduling.request import Request
from tests.attack import calls, models
from tests.attack.calls import Target
from tests.attack.harness import Case, Entry, Hang, Harm
from tests.attack.kinds import Kind, integer, several, text
from tests.attack.llm_methods import ONE, WRONG
from tests.support import features

ID = integer(0, 60)
GRAMMAR = SamplingParams(max_tokens=3, seed=1, structured_outputs=features.GRAMMAR)
MOST_STEPS = 300  # that a few short requests can take
ADD: dict[str, Kind] = dict(
    request_id=text()._replace(near=("canary", 3, None, b"a", ("a",))),
    prompt_token_ids=Kind(
        lambda v: None if several(ID, least=1).good(v) is not False else False,
        ([], [61], [-1], [True], [1.0], "ab", [None], [2**31], [2**40], [1] * 48, 3, None)),
    params=Kind(lambda v: type(v) is SamplingParams and v not in WRONG,
                (None, {}, *WRONG, SamplingParams, [ONE])),
    eos_token_ids=Kind(lambda v: v is not None and several(integer(0, 2**31 - 1)).good(v),
                       ([2**31], [-1], [2**40], [1.5], ["a"], [None], [True], 3, None, "ab")),
    priority=integer(-(2**62), 2**62), prompt_logprobs_start=integer(0, 2**30, None),
    prefix_from=Kind(lambda v: v is None, ("canary", 3, True, Request, {})), cache_salt=text(None),
    routed_experts=Kind(lambda v: v is None, (3, [], [[1]], "a", ())),
    lora_request=Kind(lambda v: v is None, ("good", 1, {}, True, LoRARequest("none", 3))),
)  # fmt: skip


class _Engine(Entry):
    def __init__(self) -> None:
        self.engine = models.engine()
        self.seen = 0

    def status(self) -> Any:
        engine = self.engine
        return (
            set(engine.unfinished), engine.status.ended, engine.scheduler.num_waiting,
            engine.scheduler.num_running, engine.grammars.num_waiting,
        )  # fmt: skip

    def mend(self) -> None:
        left = set(self.engine.unfinished) - {"canary"}
        if left:
            self.engine.abort(left)

    def canary(self) -> Iterator[Any]:
        return models.neighbour(self.engine)

    def close(self) -> None:
        self.engine.close()

    def finish(self, requests: list[Request]) -> None:
        """Steps until these have ended, or for ever."""
        for _ in range(MOST_STEPS):
            if all(request.finish_reason is not None for request in requests):
                return
            self.engine.step()
        raise Hang


class Add(_Engine):
    """`Engine.add` with one bad argument or several."""

    def case(self, rng: random.Random) -> Case:
        name = f"r{rng.random()}"
        needed = dict(request_id=name, prompt_token_ids=[3, 1, 4], params=ONE)
        target = Target("Engine.add", self._add, ADD, lambda: needed)
        made = calls.case(rng, (target,))
        return made._replace(fields=(*made.fields, *ALSO))

    def _add(self, **fields: Any) -> None:
        if isinstance(fields.get("prefix_from"), str):
            # One that runs, with another prompt.
            fields["prefix_from"] = self.engine.scheduler.requests.get("canary", 3)
        request = self.engine.add(**fields)
        self.finish([request])
        if request.error:
            raise ValueError(request.error)


# What good parameters are refused by, of a model that does not go with them.
ALSO = (
    "prompt", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "logprobs",
    "prompt_logprobs", "logprob_token_ids", "extra_args", "structured_outputs", "start", "request",
    "adapters",
)  # fmt: skip


class Told(_Engine):
    """`abort`, `finish` and the like; and many adds, ends and steps in any order."""

    def case(self, rng: random.Random) -> Case:
        if rng.random() < 0.5:
            return self._sequence(rng)
        ids = several(text())
        ids = ids._replace(near=("canaries", b"ab", [3], [None], 3, None, [["a"]], {"a": 1}))
        reason = Kind(lambda v: None if isinstance(v, str) else False, (3, None, b"a", "", ["a"]))
        needed = dict(request_ids=["none"], reason="abort")
        engine = self.engine
        targets = (
            Target("abort", engine.abort, dict(request_ids=ids), lambda: dict(request_ids=[])),
            Target("finish", engine.finish, dict(request_ids=ids, reason=reason), lambda: needed),
            Target("update_params", engine.update_params,
                   dict(params=Kind(lambda v: False)), dict),
        )  # fmt: skip
        made = calls.case(rng, targets)
        return made._replace(fields=(*made.fields, "request_id"))

    def _sequence(self, rng: random.Random) -> Case:
        """Returns what a careless host might do with three ids: some of it is refused."""
        state = rng.random()

        def call() -> None:
            dice, requests = random.Random(state), list[Request]()
            refused: Exception | None = None
            for _ in range(dice.randrange(2, 9)):
                before = self.status()
                try:
                    self._one(dice, requests)
                except (ValueError, TypeError) as error:
                    refused = error
                    if self.status() != before:
                        raise Harm(f"half applied: {error}") from error
            self.finish(requests)
            self.engine.step()
            if refused is not None:
                raise refused

        return Case(
            call,
            ("request", "prefix_from", "prompt", "id"),
            None,
            f"sequence({state})",
            stands=False,
        )

    def _one(self, dice: random.Random, requests: list[Request]) -> None:
        name, what = dice.choice("abc"), dice.randrange(8)
        if what == 0:
            self.engine.abort([name])
        elif what == 1:
            self.engine.step()
        else:
            first = dice.choice([None, None, *requests])
            prompt = [3, 1, 4] if dice.random() < 0.8 else [5, 6]
            params = dice.choice((ONE, GRAMMAR, GRAMMAR, models.PARAMS))
            requests.append(self.engine.add(name, prompt, params, prefix_from=first))
