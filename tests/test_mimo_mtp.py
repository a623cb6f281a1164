"""MiMo and its layer that drafts: against NumPy in float64, right drafts stand, others refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.api.speculative_config import SpeculativeConfig
from jaxrunner.engine.engine import Engine
from jaxrunner.loading.loader import load
from jaxrunner.loading.speculation import with_speculator
from tests.support import mimo_reference as reference
from tests.support import small_llm, tiny

K = 3  # the one layer is applied again for each draft behind the first
MTP = dict(method="mtp", num_speculative_tokens=K)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SIZES: dict[str, Any] = small_llm.SIZES | dict(skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a checkpoint of random weights."""
    return reference.save(tmp_path_factory.mktemp("mimo"), reference.tensors())


def drafting(folder: Path, **options: Any) -> Any:
    """Returns the model with its drafts, but for its weights."""
    return with_speculator(load(folder, dtype="float32", **options), SpeculativeConfig.read(MTP))


def test_drafts_are_those_of_the_layer_in_float64(folder: Path):
    loaded = drafting(folder)
    params = loaded.read_params(progress=False)
    e = Engine(loaded.model, loaded.config, tiny.engine_config(async_depth=1), params)
    greedy = SamplingParams(max_tokens=14, temperature=0.0)
    request, w, compared = e.add("a", PROMPT, greedy), reference.tensors(), 0
    while e.has_unfinished:
        e.step()
        if request.finish_reason is not None:
            break
        ids, requests = request.token_ids, e.runner.state.requests
        slot = e.runner.requests["a"]
        got = np.asarray(requests.token_ids)[slot, len(ids) : len(ids) + K].tolist()
        room = request.max_len - len(ids)
        assert got[:room] == reference.drafts(w, ids, K)[:room]
        head = w["lm_head.weight"].astype(np.float64)
        state = reference.states({n: a.astype(np.float64) for n, a in w.items()}, ids[:-1])
        assert (reference.norm(state[-1], w["model.norm.weight"]) @ head.T).argmax() == ids[-1]
        compared += 1
    assert compared > 5


def run(folder: Path, params: list[SamplingParams], drafts: dict[str, Any] | None) -> Any:
    with LLM(str(folder), speculative_config=drafts, **SIZES) as llm:
        return llm.generate([dict(prompt_token_ids=PROMPT)] * len(params), params)


@pytest.mark.slow
def test_tokens_are_those_without_drafts(folder: Path):
    params = [
        SamplingParams(max_tokens=20, temperature=t, seed=1, detokenize=False) for t in (0.0, 0.7)
    ]
    plain, drafted = run(folder, params, None), run(folder, params, MTP)
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in drafted]
    assert all(len(o.outputs[0].token_ids) == 20 for o in plain)
    assert all(o.metrics.num_drafts > 0 for o in drafted)


@pytest.mark.slow
def test_a_layer_that_is_right_has_all_its_drafts_accepted(tmp_path: Path):
    """Each token of this model follows from the one before alone, and so from its embedding."""
    w = reference.tensors()
    for name in w:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            w[name] = np.zeros_like(w[name])
    E, name = reference.E, reference.MTP
    w[f"{name}input_proj.weight"] = np.eye(E, 2 * E, E, np.float32)  # the second half
    w[f"{name}token_layernorm.weight"] = np.ones(E, np.float32)
    w[f"{name}final_layernorm.weight"] = w["model.norm.weight"]
    greedy = SamplingParams(max_tokens=21, temperature=0.0, detokenize=False)
    (output,) = run(reference.save(tmp_path, w), [greedy], MTP)
    metrics = output.metrics
    assert len(set(output.outputs[0].token_ids)) > 2
    assert metrics.num_drafts == 5 and metrics.num_accepted_tokens_per_pos == (5, 5, 5)


def test_random_weights_of_the_layer_are_as_good_as_any(folder: Path):
    params = drafting(folder, load_format="dummy").read_params(progress=False)
    read = drafting(folder).read_params(progress=False)
    assert params.drafter.layer.qkv.weight.shape == read.drafter.layer.qkv.weight.shape
    assert not np.array_equal(params.drafter.input_proj.weight, read.drafter.input_proj.weight)


def test_the_files_hold_the_model_and_the_layer_and_nothing_else(tmp_path: Path):
    w = reference.tensors()
    name = f"{reference.MTP}input_proj.weight"
    lacking = reference.save(tmp_path / "lacking", {n: a for n, a in w.items() if n != name})
    assert load(lacking, dtype="float32").config.num_hidden_layers == reference.Y
    with pytest.raises(ValueError, match=r"mtp_layers.0.input_proj.weight \[48, 96\] is missing"):
        drafting(lacking)
    for other in ("model.mtp_layers.0.self_attn.o_proj.bias", "model.norms.weight"):
        more = reference.save(tmp_path / "more", w | {other: w["model.norm.weight"]})
        with pytest.raises(ValueError, match=rf"{other} \[48\] in model.safetensors is not wanted"):
            drafting(more)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_nextn_predict_layers=0), "says num_nextn_predict_layers=0: take 'ngram' or"),
        (dict(num_nextn_predict_layers=2), "drafts with one layer, .*_predict_layers=2: take"),
        (dict(attention_bias=False), "attention_bias=False is not supported, only True"),
        (dict(use_sliding_window=True), "use_sliding_window=True is not supported, only False"),
    ],
)
def test_another_layout_is_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        drafting(reference.save(tmp_path, reference.tensors(), **changes))


def test_a_model_without_such_a_layer_is_refused(folder: Path):
    with pytest.raises(
        ValueError, match="'mtp' wants a checkpoint with layers that draft, as of M"
    ):
        with_speculator(tiny.loaded(), SpeculativeConfig.read(MTP))
    with pytest.raises(ValueError, match="model='m' has no effect on method 'mtp': leave it out"):
        LLM(str(folder), speculative_config=MTP | dict(model="m"), **SIZES)
