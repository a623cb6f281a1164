"""New weights for a model at work, and sleep."""

import functools
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.engine.engine import Engine
from jaxrunner.hf_config import read_json
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.llama import llama
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.block_tables import BlockTables
from jaxrunner.scheduling.request import Request
from jaxrunner.train.trainer import token_losses
from tests.support import tiny
from tests.support.scheduling import cache_group
from tests.support.small_llm import SIZES, live_bytes
from tests.support.tiny_engine import PROMPTS, drain, engine, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
CODE = ["def add(a, b):\n", "import os\nfor x in"]
Q = "model.layers.0.self_attn.q_proj.weight"


@functools.cache
def others() -> Any:
    """Other weights of the tiny decoder."""
    return tiny.random_params(tiny.model_and_params()[0], seed=1)


def fresh(params: Any, prompts=PROMPTS) -> list[list[int]]:
    """Returns the tokens of an engine that has never had other weights."""
    config, _ = tiny.model_and_params()
    e = Engine(llama, config, tiny.engine_config(enable_prefix_caching=False), params)
    return run(e, prompts, [GREEDY] * len(prompts))


def test_after_an_update_all_is_as_with_a_new_engine():
    e = engine()
    old = run(e, PROMPTS, [GREEDY] * 6)
    ledger = len(e.runner.programs.ledger)
    e.runner.programs.strict = True
    e.update_params(others())
    assert run(e, PROMPTS, [GREEDY] * 6) == fresh(others()) != old
    e.update_params(jax.tree.map(np.asarray, tiny.model_and_params()[1]))  # of the host
    assert run(e, PROMPTS, [GREEDY] * 6) == old
    assert (len(e.runner.programs.ledger), e.weights_version) == (ledger, 2)


@pytest.mark.parametrize("blocks", [60, 13], ids=["room for all", "preemption"])
def test_no_request_to_come_shares_what_running_ones_computed(blocks: int):
    """Their blocks hold keys of old weights, and later ones keys of new weights upon those."""
    e = engine(num_blocks=blocks, async_depth=1)
    prompt = PROMPTS[5]
    straddling = e.add("old", prompt, SamplingParams(temperature=0.0, max_tokens=20))
    for _ in range(4):
        e.step()
    before = list(straddling.output_token_ids)
    e.update_params(others())
    late = [e.add(f"new {i}", prompt, GREEDY) for i in range(3)]
    drain(e)
    assert len(straddling.output_token_ids) == 20 and before
    assert straddling.output_token_ids[: len(before)] == before
    [want] = fresh(others(), [prompt])
    assert [r.output_token_ids for r in late] == [want] * 3
    again = e.add("again", prompt + want, GREEDY)
    drain(e)
    assert again.output_token_ids == fresh(others(), [prompt + want])[0]


def test_weights_of_the_host_are_copied_once():
    config, params = tiny.model_and_params()
    e = Engine(llama, config, tiny.engine_config(), jax.tree.map(np.asarray, params))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(e.runner.params))
    assert run(e, PROMPTS[:2], [GREEDY] * 2) == fresh(params)[:2]


def test_a_request_that_waited_finds_nothing_of_old_weights():
    pool = BlockPool(20, 4)
    tables = BlockTables([cache_group(4, None)], [pool])
    first, second = (Request(name, list(range(13)), GREEDY, 0, 20) for name in "ab")
    tables.attach(first, tables.find(first))
    tables.extend(first, 13)
    tables.publish(first, 13)
    assert tables.find(second).num_tokens == 12
    tables.weights_version += 1
    assert tables.find(second).num_tokens == 0


def test_equal_weights_change_no_token_of_a_running_request():
    want = run(engine(), PROMPTS, [GREEDY] * 6)
    e = engine()
    requests = [e.add(str(i), p, GREEDY) for i, p in enumerate(PROMPTS)]
    while e.has_unfinished:
        e.step()
        e.update_params(jax.tree.map(jnp.copy, e.runner.params))
    assert [r.output_token_ids for r in requests] == want


def changed(path: str, change: Any) -> Any:
    """Returns the tiny weights with one leaf changed."""
    params = tiny.model_and_params()[1]
    return jax.tree.map_with_path(
        lambda at, x: change(x) if jax.tree_util.keystr(at) == path else x, params
    )


def deleted(x: Any) -> Any:
    (gone := jnp.copy(x)).delete()
    return gone


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        (lambda: {"embed": 1}, ValueError, r"params must have the leaves of those they replace"),
        (lambda: changed(".norm", list), ValueError, r"\['.norm'\] are missing"),
        (
            lambda: changed(".norm", lambda x: x[1:]),
            ValueError,
            r"norm must be float32 \[20\], got",
        ),
        (lambda: changed(".norm", lambda x: x.astype(jnp.bfloat16)), ValueError, "got bfloat16"),
        (lambda: changed(".norm", lambda x: 1.0), TypeError, "norm must be an array, got float"),
        (lambda: changed(".norm", deleted), ValueError, "norm was deleted: donate no array"),
        (
            lambda: changed(".norm", lambda x: jax.device_put(x, jax.local_devices()[1])),
            ValueError,
            "norm must be sharded as .* got .*: jax.device_put it there",
        ),
    ],
)
def test_other_weights_are_refused_and_nothing_changes(params, error, words):
    if "sharded" in words and jax.local_device_count() < 2:
        pytest.skip("there is one device")
    e = engine()
    with pytest.raises(error, match=words):
        e.update_params(params())
    assert e.weights_version == 0
    assert run(e, PROMPTS[:2], [GREEDY] * 2) == fresh(tiny.model_and_params()[1])[:2]


def test_a_trainer_rolls_out_between_its_steps():
    """Weights go from optax to the engine and back to optax without a copy."""
    config, params = tiny.model_and_params()
    optimizer, e = optax.sgd(1e-2, momentum=0.9), engine()
    state, window = optimizer.init(params), jnp.asarray(PROMPTS[5])

    @jax.jit
    def train(params, state):
        loss, grads = jax.value_and_grad(lambda p: token_losses(config, p, window).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses, rollouts = [], []
    for _ in range(3):
        params, state, loss = train(params, state)
        losses.append(float(loss))
        e.update_params(params)
        assert jax.tree.leaves(e.runner.params)[0] is jax.tree.leaves(params)[0]
        rollouts.append(run(e, PROMPTS[:2], [GREEDY] * 2))
        assert rollouts[-1] == fresh(params, PROMPTS[:2])
    assert losses == sorted(losses, reverse=True) and rollouts[0] != rollouts[-1]
    steps = [c for c in e.runner.programs.ledger if c.key.name == "step"]
    assert len(steps) == len({c.key for c in steps}) <= 2


@pytest.fixture(scope="module")
def llm(shallow):
    with LLM(shallow, **SIZES) as llm:
        yield llm


def told(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(CODE, GREEDY, use_tqdm=False)
    assert not [o.error for o in outputs if o.error]
    return [list(o.outputs[0].token_ids) for o in outputs]


def test_weights_come_from_a_checkpoint_and_in_parts(llm: LLM, tmp_path: Path):
    first, program, old = told(llm), llm.engine.runner.program, llm.params
    double = jax.tree.map_with_path(
        lambda at, x: x * 3 if jax.tree_util.keystr(at) == ".layers[0].qkv.weight" else x, old
    )
    config = read_json(embedded.PATH / "config.json")
    save_checkpoint(tmp_path, program.model, program.config, double, config)
    llm.reload_weights(tmp_path)
    second = told(llm)
    assert second != first
    jax.tree.map(np.testing.assert_array_equal, llm.params, double)
    llm.update_params(old)
    assert told(llm) == first
    names = [Q.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
    source = program.model.sources(program.config).layers[0].qkv.weight
    joined = np.asarray(double.layers[0].qkv.weight)
    parts = dict(zip(source.names, source.split(joined), strict=True))
    llm.start_weight_update()
    for name in names:
        llm.update_weights([(name, parts[name])])
        assert told(llm) == first  # until the end of the update
    llm.finish_weight_update()
    assert told(llm) == second
    llm.reload_weights(iter({name: part / 3 for name, part in parts.items()}.items()))
    assert told(llm) == first and llm.weights_version == 4


def test_updates_out_of_order_are_refused(llm: LLM):
    first, version = told(llm), llm.weights_version
    with pytest.raises(RuntimeError, match="no weight update has begun: call start_weight_update"):
        llm.update_weights({})
    with pytest.raises(RuntimeError, match="no weight update has begun"):
        llm.finish_weight_update()
    llm.start_weight_update()
    with pytest.raises(RuntimeError, match="a weight update has begun: call finish_weight_update"):
        llm.start_weight_update()
    with pytest.raises(ValueError, match="'what' is no tensor of this model, it has"):
        llm.update_weights({"what": np.zeros(3)})
    with pytest.raises(RuntimeError, match="no weight update has begun"):  # the bad one ended it
        llm.finish_weight_update()
    llm.start_weight_update()
    with pytest.raises(ValueError, match=r"q_proj.weight must be \[\d+, \d+\], got \[3\]"):
        llm.update_weights({Q: np.zeros(3)})
    assert told(llm) == first and llm.weights_version == version


def test_sleep_gives_memory_back_and_changes_no_token(shallow):
    with LLM(shallow, **SIZES) as llm:
        first, ledger = told(llm), len(llm.engine.runner.programs.ledger)
        runner = llm.engine.runner
        held = sum(x.nbytes for x in jax.tree.leaves((llm.params, runner.state)))
        with pytest.raises(ValueError, match="level must be 1 or 2, got 3"):
            llm.sleep(3)
        request = llm.engine.add("a", [1, 2, 3], GREEDY)
        with pytest.raises(RuntimeError, match="requests are at work: finish or abort them"):
            llm.sleep()
        llm.engine.abort([request.request_id])
        before = live_bytes()
        llm.sleep(level=2)
        assert llm.is_sleeping() and live_bytes() <= before - held
        with pytest.raises(RuntimeError, match="kv_cache and weights sleep: wake_up first"):
            llm.sleep()
        words = "kv_cache and weights sleep: call wake_up, and update_params or reload_weights"
        with pytest.raises(RuntimeError, match=words):
            llm.engine.add("b", [1, 2, 3], GREEDY)
        llm.start_weight_update()
        with pytest.raises(RuntimeError, match="the weights sleep: wake_up first, or give all"):
            llm.update_weights({Q: np.zeros(3)})
        with pytest.raises(ValueError, match=r"tags may name what sleeps, .* got \['all'\]"):
            llm.wake_up(["all"])
        llm.wake_up(["kv_cache"])
        llm.reload_weights(shallow)
        assert not llm.is_sleeping() and told(llm) == first
        llm.sleep(level=1)
        llm.wake_up(["weights"])
        with pytest.raises(RuntimeError, match="kv_cache sleep: call wake_up"):
            llm.engine.add("b", [1, 2, 3], GREEDY)
        llm.wake_up()
        assert told(llm) == first and len(runner.programs.ledger) == ledger
        llm.sleep(level=1)
        assert cast(Any, llm.params) is None
    assert llm.is_sleeping()  # and was closed all the same
