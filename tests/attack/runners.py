"""`ModelRunner`: scheduler outputs that lie, and grammars of requests that are not there."""

from collections.abc import Iterator
import copy
from dataclasses import fields, replace
import random
from typing import Any

import numpy as np

from jaxrunner import SamplingParams
from jaxrunner.scheduling.request import GrammarOutput, NewRequest, SchedulerOutput
from tests.attack import models, values
from tests.attack.harness import Case, Entry, in_words
from tests.attack.kinds import Kind, draw, empty, integer, nothing, several
from tests.attack.llm_methods import WRONG
from tests.support import tiny

BLOCKS = list(range(20, 25))  # of the liar's request; the canary has others
ID = integer(0, 60)


def _ids(value: Any) -> bool | None:
    return None if isinstance(value, set | frozenset | list | tuple) else False


NEW: dict[str, Kind] = dict(
    request_id=Kind(lambda v: None if isinstance(v, str) else False, (3, None, ("a",), b"x", [])),
    token_ids=Kind(lambda v: several(ID, least=8).good(v) and None,
                   ([], [61] * 8, [-1] * 8, [1] * 49, [1.5] * 8, None, [2**40] * 8, [True] * 8)),
    prompt_len=Kind(lambda v: integer(1, 8).good(v), (0, -1, 9, 48, 2**31, 2**40, True, 8.0, None)),
    params=Kind(lambda v: type(v) is SamplingParams and v not in WRONG, (None, {}, *WRONG)),
    seed=Kind(integer(0, 2**64 - 1).good, (-1, 2**64, 1.5, "a", None, True)),
    max_len=Kind(lambda v: integer(9, 48).good(v), (0, -1, 49, 2**31, 2**40, 8.5, None, True)),
    stop_ids=Kind(lambda v: False if not isinstance(v, frozenset | set | list | tuple) else None,
                  ({-1}, {2**31}, {2**40}, {"a"}, {1.5}, {None}, None, 3, frozenset(range(999)))),
    eos_token_ids=Kind(lambda v: None if isinstance(v, tuple | list | set | frozenset) else False,
                       ((-1,), (2**31,), (2**40,), ("a",), (1.5,), (None,), None, 3)),
    block_ids=Kind(
        nothing().good,
        ((), ([],), (BLOCKS[:1],), ([-1, *BLOCKS],), ([60, *BLOCKS],), ([2**40],), (BLOCKS, BLOCKS),
         None, BLOCKS, ([20, 20],), (["a"],), ([None] * 2,), ([20.0, 21],), (BLOCKS * 9,),
         ([True, 20],), ([2**31, 3],))),
    num_computed=Kind(lambda v: integer(0, 7).good(v) and None,
                      (-1, 8, 1_000_000, 2**31, 2**40, 1.0, "1", None, True)),
    prompt_logprobs_start=Kind(lambda v: integer(0, 2**30).good(v),
                               (-1, 2**31, 2**40, 1.5, None, "a")),
    copies=Kind(empty,
                (((20, 60),), ((-1, 20),), ((20,),), 3, None, ((0, 2**40),), (("a", "b"),), "ab")),
    cache_salt=Kind(lambda v: None if isinstance(v, bytes) else False, ("a", None, 3, [])),
    lora_id=Kind(integer(0, 0).good, (1, -1, 2**31, None, "a", True, 0.0)),
    data_rank=Kind(integer(0, 0).good, (1, -1, 2**31, None, "a", True, 0.0)),
    lora_place=Kind(integer(0, 2**31 - 1).good, (-1, 2**31, None, "a", True, 1.5)),
)  # fmt: skip
COUNT = Kind(
    lambda v: integer(1, 8).good(v) and None, (0, -1, 9, 99, 2**31, 2**40, "1", 1.5, None, True)
)
OUTPUT: dict[str, Kind] = dict(
    scheduled_new_reqs=Kind(empty, (None, 3, [3], [None], "x", {})),
    new_block_ids=Kind(
        empty,
        ({"x": ([60],)}, {"x": ([-1],)}, {"x": ([2**40],)}, {"none": ([30],)}, {"x": ([30] * 99,)},
         {"x": [30]}, {"x": None}, {"x": ()}, {"x": ([30], [30])}, {3: ([30],)}, None, [], 3,
         {"canary": ([60],)}, {"canary": ([-1],)}, {"x": (["a"],)}, {"x": ([1.5],)})),
    num_scheduled_tokens=Kind(
        empty,
        ({"none": 1}, {"x": 0}, {"x": -1}, {"x": 9}, {"x": 99}, {"x": 2**40}, {"x": "1"},
         {"x": 1.5}, {"x": None}, {"x": True}, None, [], ["x"], {3: 1}, {"canary": 33},
         {"canary": -1})),
    finished_req_ids=Kind(_ids, (None, "x", 3, {"none"}, [["x"]], {3}, {None: 1}, b"x")),
    preempted_req_ids=Kind(_ids, (None, "x", 3, {"none"}, [["x"]], {3}, {None: 1})),
    num_steps=Kind(lambda v: integer(1, 1).good(v), (0, -1, 2, 99, 2**40, 1.5, None, "1", True)),
)  # fmt: skip
assert NEW.keys() == {field.name for field in fields(NewRequest)}


class Runner(Entry):
    """`step`, `execute_model` and `sample_tokens` of a runner that also serves a canary."""

    def __init__(self) -> None:
        self.runner = tiny.runner()

    def case(self, rng: random.Random) -> Case:
        what = rng.choice(
            (self._new, self._new, self._output, self._output, self._grammar, self._any)
        )
        return what(rng)

    def _new(self, rng: random.Random) -> Case:
        names = rng.sample([*NEW], rng.choice((1, 1, 1, 2)))
        given = {name: draw(rng, NEW[name], values.draw) for name in names}
        told = [NEW[name].good(value) for name, value in given.items()]
        new = replace(_truth(), **given)
        try:
            output = tiny.scheduled({new.request_id: 8 - _sane(new.num_computed)}, [new])
        except BaseException:
            output = tiny.scheduled({"x": 8}, [new])
        return self._case(rng, output, (*names, *ALSO), told, in_words("NewRequest", given))

    def _output(self, rng: random.Random) -> Case:
        """Lies of an output, the request being new or at work."""
        names = rng.sample([*OUTPUT], rng.choice((1, 1, 1, 2)))
        given = {name: draw(rng, OUTPUT[name], values.draw) for name in names}
        told = [OUTPUT[name].good(value) for name, value in given.items()]
        told = [False, *told] if _twice(rng, given) else told
        admitted = rng.random() < 0.5
        output = tiny.scheduled({"x": 1}) if admitted else tiny.scheduled({"x": 8}, [_truth()])
        output = replace(output, **given)
        words = in_words("SchedulerOutput", given) + (" of one at work" if admitted else "")
        return self._case(rng, output, (*names, *ALSO), told, words, admitted=admitted)

    def _any(self, rng: random.Random) -> Case:
        value = values.draw(rng)
        told = in_words("step", dict(scheduler_output=value))
        return self._case(rng, value, ("scheduler_output", "SchedulerOutput"), [False], told)

    def _grammar(self, rng: random.Random) -> Case:
        good = np.full((1, 2), -1, np.int32)
        masks = (good[:, :1], good.astype(np.int64), good.astype(float), good[0], None,
                 good.tolist(), np.full((1, 3), -1, np.int32), np.full((2, 2), -1, np.int32),
                 values.draw(rng), np.zeros((0, 2), np.int32), good)  # fmt: skip
        ids: Any = rng.choice(
            (("x",), ("none",), ("x", "x"), (3,), (), "x", None, 3, (None,), ["x"], ("",))
        )
        mask: Any = rng.choice(masks)
        grammar: Any = GrammarOutput(ids, mask)
        if rng.random() < 0.2:
            grammar = values.draw(rng)
        good_one = ids in (("x",), ["x"]) and mask is good and type(grammar) is GrammarOutput
        bad = None if good_one or grammar is None or isinstance(ids, list | str) else False
        bad = None if ids == () and isinstance(mask, np.ndarray) and not len(mask) else bad
        bad = None if isinstance(mask, np.ndarray) and bad is False and ids == ("x",) else bad

        self.runner.execute_model(tiny.scheduled({"x": 8}, [_truth()]))

        def call() -> None:
            self.runner.sample_tokens(grammar).get()

        names = ("grammar_output", "GrammarOutput", "req_ids", "bitmask", "grammar", "request")
        told = in_words("sample_tokens", dict(grammar=grammar))
        return Case(call, names, bad, told)

    def _case(
        self, rng: random.Random, output: Any, names: tuple[str, ...], told: list[bool | None],
        words: str, *, admitted: bool = False,
    ) -> Case:  # fmt: skip
        good = False if False in told else None
        two, runner = rng.random() < 0.3, self.runner
        if admitted:  # by a truthful step, before the lie
            runner.step(tiny.scheduled({"x": 8}, [_truth()])).get()

        def call() -> None:
            if two:
                runner.execute_model(output)
                runner.sample_tokens().get()
            else:
                runner.step(output).get()

        return Case(call, names, good, words + (" in two" if two else ""))

    def status(self) -> Any:
        kept = {k: copy.deepcopy(v) for k, v in vars(self.runner.requests).items() if _plain(v)}
        return kept

    def mend(self) -> None:
        runner = self.runner
        if runner._forwarded is not None:
            runner.sample_tokens().get()
        left = set(runner.requests._slots) - {"canary"}
        if left:
            runner.step(tiny.scheduled({}, finished_req_ids=left)).get()

    def canary(self) -> Iterator[Any]:
        prompt = list(models.PROMPT)
        new = tiny.new_request("canary", prompt, blocks=range(8), params=models.PARAMS)
        tokens = list(self._step(tiny.scheduled({"canary": len(prompt)}, [new])))
        for _ in range(8):
            yield None
            tokens += self._step(tiny.scheduled({"canary": 1}))
        self._step(tiny.scheduled({}, finished_req_ids={"canary"}))
        yield tokens

    def _step(self, output: SchedulerOutput) -> list[int]:
        told = self.runner.step(output).get()
        return told.sampled_token_ids[0] if told.sampled_token_ids else []

    def close(self) -> None:
        self.runner.close()


ALSO = (
    "num_scheduled_tokens",
    "prompt_len",
    "request 'x'",
    "block_ids",
    "request_id",
    "token_ids",
    "blocks",
)


def _truth() -> NewRequest:
    return tiny.new_request("x", range(8), blocks=BLOCKS, max_tokens=12)


def _sane(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 8 else 0


def _plain(value: Any) -> bool:
    return isinstance(value, dict | list | set)


def _twice(rng: random.Random, given: dict[str, Any]) -> bool:
    """Makes a lie of one that is true by itself: a request twice, or more than there is room."""
    if rng.random() > 0.1:
        return False
    given["scheduled_new_reqs"] = rng.choice(
        ([_truth(), _truth()], [replace(_truth(), request_id=f"x{i}") for i in range(9)])
    )
    given["num_scheduled_tokens"] = {n.request_id: 8 for n in given["scheduled_new_reqs"]}
    return True
