"""Experts spread anew over devices while requests run: loads, moves, and the same tokens."""

import functools
import logging
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.mixtures.eplb_config import EplbConfig
from jaxrunner.mixtures.placement import imbalance, in_turn, place
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.worker.expert_balance import gather, move, placement_of
from tests.support.compilations import compilations

pytest.importorskip("torch", reason="the checkpoints need PyTorch: install the hf extra")
pytest.importorskip("transformers", reason="the checkpoints need transformers")

Y, X, R = 2, 6, 2  # layers, experts, further copies
PROMPTS = [np.random.default_rng(n).integers(1, 62, n).tolist() for n in (1, 5, 17, 40)]
SIZES: dict[str, Any] = dict(
    max_num_batched_tokens=64, max_num_seqs=8, max_model_len=128, block_size=8, num_blocks=200,
    token_buckets=(64,), decode_buckets=(8,), skip_tokenizer_init=True, warm_up=False,
    cache_dir=None, use_tqdm=False, enable_return_routed_experts=True,
)  # fmt: skip
TWO: dict[str, Any] = dict(tensor_parallel_size=2, enable_expert_parallel=True)
EPLB = dict(num_redundant_experts=R, window_size=3, step_interval=5, log_balancedness=True)
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Returns what saves a variant of `mixtures`, and tells its folder."""
    from tests.support import mixtures

    @functools.cache
    def save(variant):
        made = tmp_path_factory.mktemp("mixture")
        mixtures.save(variant, made)
        return str(made)

    return save


@pytest.fixture(scope="module")
def folder(folder_of):
    return folder_of("qwen3")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SIZES, **TWO, enable_eplb=True, eplb_config=EPLB) as made:
        yield made


def ask(llm):
    prompts = [dict(prompt_token_ids=p) for p in PROMPTS]
    return [out.outputs[0] for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.slow
@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("variant", "drafts"),
    [
        ("qwen3", {}),
        ("gpt-oss", {}),  # whose experts have biases
        ("deepseek v3", {}),  # whose first layer is dense; shared experts stay
        ("qwen3", dict(speculative_config=dict(method="ngram", num_speculative_tokens=2))),
    ],
    ids=lambda value: value if isinstance(value, str) else "drafts" if value else "no drafts",
)
def test_tokens_are_the_same_across_placements(variant, drafts, folder_of, caplog):
    """Four of them while 20 tokens come; nothing is compiled for it, and all tokens are counted."""
    with LLM(folder_of(variant), **SIZES) as other:
        want = ask(other)
        with pytest.raises(ValueError, match="no loads of experts are counted: set enable_eplb"):
            other.engine.balance.loads()
    balanced: dict[str, Any] = SIZES | TWO | dict(enable_eplb=True, eplb_config=EPLB) | drafts
    with LLM(folder_of(variant), **balanced) as llm, caplog.at_level(logging.WARNING):
        assert "experts: no token counted yet" in llm.report()
        got = ask(llm)
        assert llm.engine.balance.num_moves >= 3 and "of devices' loads" in caplog.text
        assert len(llm.runner.programs.ready()) == 3  # a prefill's, a decode's, an admission's
        assert (placement_of(llm.runner).expert != in_turn(Y, X, X + R).expert).any()
        loads, report = llm.engine.balance.loads(), llm.report()
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    routes: list[Any] = [out.routed_experts for out in got]
    every = np.concatenate(routes)
    # -1 in layers without experts, of which loads are all 0.
    counts = [np.bincount(1 + every[:, y].ravel(), minlength=1 + X)[1:] for y in range(Y)]
    assert (loads >= counts).all() and (loads > counts).any() == bool(drafts)  # rejected ones
    assert "times the mean load" in report


@pytest.mark.devices(2)
def test_skewed_traffic_is_balanced_from_the_first_placement_on(folder):
    """Of prompts of one token each; loads of devices that steps have counted, over their mean."""
    eplb = dict(num_redundant_experts=R, window_size=20, step_interval=20)
    sizes: dict[str, Any] = SIZES | TWO | dict(enable_prefix_caching=False)
    prompts = [dict(prompt_token_ids=[token] * 14) for token in (3, 3, 3, 5)]
    with LLM(folder, **sizes, enable_eplb=True, eplb_config=eplb) as llm:
        found, seen = [], np.zeros((Y, X), np.uint32)
        for _ in range(2):
            llm.generate(prompts, GREEDY, use_tqdm=False)  # in 20 steps
            loads = llm.engine.balance.loads()
            found.append(imbalance(loads - seen, placement_of(llm.runner), 2))
            seen = loads
        assert llm.engine.balance.num_moves == 1  # with the first step of the second window
    before, after = found
    assert (after < before).all() and after.max() < 1.1


@pytest.mark.devices(2)
def test_copies_are_the_experts_that_the_router_means(llm):
    """Wherever they move; a weight update finds them in the checkpoint's order."""
    first = jax.tree.map(np.asarray, llm.engine.worker._awake())
    loads = np.random.default_rng(0).integers(0, 99, (Y, X))
    new = place(loads, X + R, 2)
    move(llm.runner, new)
    assert placement_of(llm.runner).expert.tolist() == new.expert.tolist()
    for y, layer in enumerate(llm.params.layers):
        for name in ("gate_up", "down"):
            was = np.asarray(getattr(first.layers[y].experts, name))
            np.testing.assert_array_equal(getattr(layer.experts, name), was[new.expert[y]])
    back = jax.tree.map(np.asarray, llm.engine.worker._awake())
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(first)))


@pytest.mark.slow
@pytest.mark.devices(2)
def test_new_weights_come_after_moves(folder, llm):
    """Of one expert alone: all its copies change, and others stay."""
    before, name = ask(llm), "model.layers.0.mlp.experts.1.down_proj.weight"
    old = np.asarray(llm.engine.worker._awake().layers[0].experts.down)
    llm.reload_weights({name: np.zeros(old.shape[1:], np.float32)})
    own = placement_of(llm.runner).expert[0]
    down = np.asarray(llm.params.layers[0].experts.down)
    assert not down[own == 1].any() and np.abs(down[own != 1]).min(0).max() > 0
    llm.reload_weights()
    assert [out.token_ids for out in ask(llm)] == [out.token_ids for out in before]


@pytest.mark.devices(2)
def test_a_placement_compiles_nothing(folder):
    """Once the LLM is warm; not the first one, and not those behind it."""
    sizes: dict[str, Any] = SIZES | TWO | dict(warm_up=True, max_model_len=64, num_blocks=64)
    with LLM(folder, **sizes, enable_eplb=True, eplb_config=EPLB) as llm:
        with compilations() as compiled:
            ask(llm)
        assert llm.engine.balance.num_moves >= 3 and compiled == []


@pytest.mark.slow
@pytest.mark.devices(2)
def test_a_snapshot_is_taken_between_placements(llm, tmp_path):
    want = ask(llm)
    stream = llm.stream([dict(prompt_token_ids=PROMPTS[3])], GREEDY)
    for _ in range(7):
        next(stream)
    llm.save_state(tmp_path / "half")
    stream.close()
    rest = [out.outputs[0].token_ids for out in llm.restore_state(tmp_path / "half")]
    assert [token for ids in rest for token in ids] == want[3].token_ids[7:]


def test_one_device_counts_loads(folder):
    """Of experts that stay; while caches sleep there is nothing to tell."""
    with LLM(folder, **SIZES, enable_eplb=True, seed=1) as llm:
        assert "experts: no token counted yet" in llm.report()
        routes: list[Any] = [out.routed_experts for out in ask(llm)]
        every = np.concatenate(routes)
        counts = [np.bincount(every[:, y].ravel(), minlength=X) for y in range(Y)]
        np.testing.assert_array_equal(llm.engine.balance.loads(), counts)
        busiest = np.mean([max(c) / np.mean(c) for c in counts])
        words = f"experts: the busiest of a layer has {busiest:.2f} times the mean load, in all "
        assert f"{words}{every[:, 0].size} routes a layer\n" in llm.report()
        llm.sleep()
        llm.wake_up(["weights"])
        assert "experts:" not in llm.report()


@pytest.mark.slow
@pytest.mark.devices(2)
@pytest.mark.devices(4)
def test_stages_balance_the_experts_of_their_layers(folder, llm, tmp_path):
    """Tokens, routes and loads are those of one stage, which goes on from a snapshot of theirs."""
    want = ask(llm)  # in 8 slots, as many as two stages have of 4 requests a step
    sizes: dict[str, Any] = SIZES | TWO | dict(pipeline_parallel_size=2, max_num_seqs=4)
    with LLM(folder, **sizes, enable_eplb=True, eplb_config=EPLB) as other:
        got, loads = ask(other), other.engine.balance.loads()
        assert other.engine.balance.num_moves >= 3
        assert (placement_of(other.runner).expert != in_turn(Y, X, X + R).expert).any(1).all()
        other.save_state(tmp_path / "state")
    for one, own in zip(got, want, strict=True):
        assert one.token_ids == own.token_ids
        np.testing.assert_array_equal(one.routed_experts, own.routed_experts)
    every = np.concatenate([np.asarray(one.routed_experts) for one in got])
    counts = [np.bincount(every[:, y].ravel(), minlength=X) for y in range(Y)]
    np.testing.assert_array_equal(loads, counts)
    assert not [*llm.restore_state(tmp_path / "state")]
    np.testing.assert_array_equal(llm.engine.balance.loads(), counts)


@pytest.mark.devices(2)
def test_rows_are_gathered_from_all_devices():
    mesh = make_mesh(2)
    rows = np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float32)
    index = np.array([5, 0, 0, 3, 2, 5], np.int32)
    np.testing.assert_array_equal(gather(mesh)(rows, index), rows[index])
    np.testing.assert_array_equal(gather(None)(rows, index), rows[index])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(enable_expert_parallel=False), "enable_eplb=True spreads whole experts over several"),
        (
            dict(eplb_config=dict(num_redundant_experts=1)),
            "experts=1 makes 7 experts, which tensor_parallel_size=2 does not divide: take 0",
        ),
        (dict(eplb_config=dict(window=3)), r"eplb_config may have .*, got \['window'\]"),
        (dict(eplb_config=dict(window_size=0)), r"eplb_config.window_size=0 is out of range"),
        (dict(eplb_config=dict(step_interval=9)), r"window_size=1000 is over step_interval=9"),
        (
            dict(eplb_config=dict(use_async=True)),
            "=True is not supported: experts move between two",
        ),
        (dict(eplb_config=dict(policy="x")), "policy='x' is not supported: DeepSeek's is the one"),
        (
            dict(eplb_config=dict(log_balancedness_interval=9)),
            "log_balancedness_interval=9 is not supported: log_balancedness logs each placement",
        ),
        (
            dict(eplb_config=dict(communicator="nixl")),
            "'nixl' is not supported: a compiled program",
        ),
        (dict(tensor_parallel_size=1), "num_redundant_experts=2 are copies for other devices"),
        (dict(enable_eplb=False), "eplb_config is of enable_eplb=True: set it, or leave this out"),
    ],
)
def test_what_cannot_be_is_refused(folder, changes, words):
    asked: dict[str, Any] = SIZES | TWO | dict(enable_eplb=True, eplb_config=EPLB) | changes
    asked["enable_return_routed_experts"] = False
    with pytest.raises(ValueError, match=words):
        LLM(folder, **asked)


def test_what_is_built_in_may_be_asked_for():
    asked = dict(use_async=False, policy="default", log_balancedness_interval=1, communicator=None)
    assert EplbConfig.read(asked) == EplbConfig()


def test_a_dense_model_has_no_loads():
    words = "enable_eplb=True wants a mixture of experts, LlamaForCausalLM is none: leave it out"
    with pytest.raises(ValueError, match=words):
        LLM(str(embedded.PATH), enable_eplb=True)
