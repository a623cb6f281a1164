"""No request is given keys that are lost or of other weights: after sleep, updates, a restore."""

from typing import Any

import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.models.llama import llama
from tests.support import tiny
from tests.support.tiny_engine import PROMPTS, drain, engine, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
PROMPT = PROMPTS[5]  # fills five blocks of four tokens


def others(seed: int = 1) -> Any:
    """Returns other weights of the tiny decoder."""
    return tiny.random_params(tiny.model_and_params()[0], seed)


def fresh(prompt: list[int], params: Any = None) -> list[int]:
    """Returns the tokens of an engine that shares nothing."""
    config, own = tiny.model_and_params()
    e = Engine(llama, config, tiny.engine_config(enable_prefix_caching=False), params or own)
    return run(e, [prompt], [GREEDY])[0]


def ask(e: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """Returns the tokens of a prompt, and how many of its own were found in the cache."""
    request = e.add("a", prompt, GREEDY)
    drain(e)
    return request.output_token_ids, request.num_cached_tokens


@pytest.mark.parametrize("level", [1, 2])
def test_what_slept_is_no_longer_found(level):
    e = engine()
    worker, weights = e.worker, e.worker.params
    want, _ = ask(e, PROMPT)
    assert ask(e, PROMPT) == (want, 20)
    worker.sleep(level)
    worker.wake_up()
    if level == 2:
        worker.update_params(tiny.random_params(tiny.model_and_params()[0]))
    assert ask(e, PROMPT) == (want, 0)
    assert ask(e, PROMPT) == (want, 20)  # of what was computed since
    assert weights is not worker.params


def test_what_other_weights_computed_is_no_longer_found():
    e, new = engine(), others()
    old = e.worker.params
    want, _ = ask(e, PROMPT)
    assert ask(e, PROMPT) == (want, 20)
    for weights, told in ((new, fresh(PROMPT, new)), (old, want)):
        e.worker.update_params(weights)
        assert ask(e, PROMPT) == (told, 0)
        assert ask(e, PROMPT) == (told, 20)
    assert fresh(PROMPT, new) != want


def test_no_one_goes_on_from_a_request_that_two_weights_computed():
    """Its later blocks follow tokens that others compute anew, upon keys that these have not."""
    e, new = engine(async_depth=1), others()
    straddling = e.add("old", PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
    for _ in range(2):
        e.step()
    assert straddling.num_tokens < 24  # its sixth block is filled with both
    e.update_params(new)
    told, _ = ask(e, PROMPT)
    assert straddling.finish_reason is not None and told == fresh(PROMPT, new)
    both = [*straddling.token_ids, 7]
    want = fresh(both, new)
    tokens, cached = ask(e, both)
    assert tokens == want
    assert len(PROMPT) // 4 * 4 <= cached < len(PROMPT) + 4


def test_a_restored_engine_goes_on_from_the_start_of_a_block(tmp_path):
    first, second = engine(), engine()
    tokens, _ = ask(first, PROMPT[:14])
    known = PROMPT[:14] + tokens  # the last of which is not computed
    assert len(known) == 23
    save_engine(first, tmp_path / "saved")
    restore_engine(second, tmp_path / "saved")
    longer = [*known[:22], 9, 9]
    want = fresh(longer)
    for e in (second, first):
        assert ask(e, longer) == (want, 22)
