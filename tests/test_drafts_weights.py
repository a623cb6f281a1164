"""New weights of a model that drafts, or of its drafter, and sleep: as a fresh engine with them."""

import functools
from pathlib import Path
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrunner import LLM, SamplingParams
from jaxrunner.speculators.drafter import Drafted
from tests.support.small_checkpoint import SIZES, save_model

PROMPTS = [dict(prompt_token_ids=[3, 1, 4, 1, 5]), dict(prompt_token_ids=[9, 2])]
PARAMS = [SamplingParams(max_tokens=24, seed=i, temperature=t) for i, t in enumerate((0.0, 0.7))]
K = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Returns checkpoints of one config, with other weights each."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save_model(folder / name, seed) for seed, name in enumerate("ab")}


def start(target: Path, drafter: Path, **changes: Any) -> LLM:
    config = dict(method="draft_model", model=str(drafter), num_speculative_tokens=K)
    return LLM(str(target), speculative_config=config, **SIZES | changes)


def told(llm: LLM) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Returns tokens, and what became of the drafts of each request."""
    outputs = llm.generate(PROMPTS, PARAMS)
    assert not [o.error for o in outputs if o.error]
    metrics = [o.metrics for o in outputs if o.metrics is not None]
    counts = [(m.num_drafts, *m.num_accepted_tokens_per_pos) for m in metrics]
    return [list(o.outputs[0].token_ids) for o in outputs], counts


@pytest.fixture(scope="module")
def fresh(folders):
    """Returns what an engine tells that never had other weights than those it is asked for."""

    @functools.cache
    def tell(target: str, drafter: str) -> Any:
        with start(folders[target], folders[drafter]) as llm:
            return told(llm)

    return tell


@pytest.fixture(scope="module")
def llm(folders):
    with start(folders["a"], folders["a"]) as llm:
        yield llm


def by_name(llm: LLM, folders, target: str | None, drafter: str | None) -> None:
    """Gives tensors of checkpoints, the drafter's under names of its own."""
    llm.start_weight_update()
    if target is not None:
        llm.update_weights(load_file(folders[target] / "model.safetensors"))
    if drafter is not None:
        tensors = load_file(folders[drafter] / "model.safetensors")
        llm.update_weights({f"drafter.{name}": tensor for name, tensor in tensors.items()})
    llm.finish_weight_update()


def as_trees(llm: LLM, folders, target: str | None, drafter: str | None) -> None:
    """Gives trees of arrays, of the host where they are new."""
    new, old = {}, llm.params
    for name in {target, drafter} - {None}:
        with start(folders[name], folders[name]) as other:
            new[name] = jax.tree.map(np.array, other.params)
    first = new[target].target if target else old.target
    llm.update_params(Drafted(first, new[drafter].drafter if drafter else old.drafter))


@pytest.mark.slow
@pytest.mark.parametrize("give", [by_name, as_trees])
def test_after_an_update_of_either_all_is_as_with_a_fresh_engine(llm, folders, fresh, give):
    assert told(llm) == fresh("a", "a")
    compiled = len(llm.runner.programs.ledger)
    give(llm, folders, "b", None)
    assert told(llm) == fresh("b", "a")
    give(llm, folders, None, "b")
    assert told(llm) == fresh("b", "b")
    give(llm, folders, "a", "a")
    assert told(llm) == fresh("a", "a")
    assert len(llm.runner.programs.ledger) == compiled
    # Tokens are the model's whoever drafts, and a model that drafts for itself is always right.
    (of_a, right), (of_b, wrong), (same, _) = fresh("a", "a"), fresh("b", "a"), fresh("b", "b")
    assert of_a != of_b == same
    assert all(count[0] >= count[K] > 0.7 * count[0] for count in right)
    assert all(count[K] < 0.3 * count[0] for count in wrong)


def test_sleep_changes_neither_tokens_nor_drafts(llm, folders, fresh):
    by_name(llm, folders, None, "b")
    llm.sleep(level=1)
    llm.wake_up()
    assert told(llm) == fresh("a", "b")
    llm.sleep(level=2)
    llm.wake_up()
    llm.reload_weights()  # of both checkpoints
    assert told(llm) == fresh("a", "a")
    llm.reload_weights(folders["b"])
    assert told(llm) == fresh("b", "a")
    llm.reload_weights(folders["a"])


def test_saved_weights_of_both_come_back(llm, folders, fresh, tmp_path):
    by_name(llm, folders, "b", "b")
    llm.save_params(tmp_path / "both")
    by_name(llm, folders, "a", "a")
    llm.load_params(tmp_path / "both")
    assert told(llm) == fresh("b", "b")
    llm.reload_weights()


def test_shards_are_the_model_s_and_the_drafter_keeps_its_checkpoint(llm, folders, fresh, tmp_path):
    llm.save_sharded_state(tmp_path)
    shutil.copy(folders["a"] / "config.json", tmp_path)
    with start(tmp_path, folders["b"], load_format="sharded_state") as other:
        assert told(other) == fresh("a", "b")
