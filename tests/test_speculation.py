"""From `LLM(speculative_config=...)` to a model that drafts; what is no drafter is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrunner import LLM
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.speculative_config import SpeculativeConfig
from jaxrunner.loading.loader import load
from jaxrunner.loading.speculation import with_speculator
from jaxrunner.models.llama import llama
from jaxrunner.speculators.draft_model import draft_model
from jaxrunner.speculators.eagle import eagle
from jaxrunner.speculators.eagle3 import eagle3
from tests.outside.lookup import lookup
from tests.support import eagle3_reference as reference
from tests.support import tiny
from tests.support.small_checkpoint import SIZES, save_model

HEAD = tiny.SETTINGS | dict(num_hidden_layers=1)
EAGLE3 = reference.SPECFORGE | dict(eagle_aux_hidden_state_layer_ids=[0, 1, 1])


def eagle_tensors(E: int = 20, F: int = 28, heads: tuple[int, int] = (48, 16)) -> dict[str, Any]:
    """Returns random tensors of an EAGLE head, as its authors name them."""
    (Q, KV), layer = heads, "layers.0."
    shapes = {
        "fc.weight": (E, 2 * E), f"{layer}post_attention_layernorm.weight": (E,),
        f"{layer}self_attn.q_proj.weight": (Q, E), f"{layer}self_attn.k_proj.weight": (KV, E),
        f"{layer}self_attn.v_proj.weight": (KV, E), f"{layer}self_attn.o_proj.weight": (E, Q),
        f"{layer}mlp.gate_proj.weight": (F, E), f"{layer}mlp.up_proj.weight": (F, E),
        f"{layer}mlp.down_proj.weight": (E, F),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=s, scale=0.4).astype(np.float32) for n, s in shapes.items()}


def save_head(folder: Path, settings: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Writes the checkpoint of a head."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings | dict(dtype="float32")))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Returns the folder of a model to draft for."""
    return save_model(tmp_path_factory.mktemp("models") / "target")


def drafting(target: Path, **config: Any) -> Any:
    """Returns the target with what drafts for it, but for its weights."""
    config = dict(num_speculative_tokens=3) | config
    return with_speculator(load(target, dtype="float32"), SpeculativeConfig.read(config))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(method="medusa"), r"speculative_config.method must be one of ngram, .* got 'medusa'"),
        (dict(method="eagle"), r"speculative_config.model is missing, 'eagle' drafts with a check"),
        (dict(method="ngram", num_tokens=3), r"speculative_config has no key 'num_tokens'"),
    ],
    ids=["unknown", "no model", "unknown key"],
)
def test_what_is_not_there_is_refused_by_name(target: Path, given: dict, message: str):
    given = dict(num_speculative_tokens=3) | given
    with pytest.raises(ValueError, match=message):
        LLM(str(target), speculative_config=given, **SIZES)


def test_a_method_that_is_no_speculator_of_ours_is_refused(target: Path):
    class Lookalike:
        name, num_drafts, propose = "lookalike", 3, print

    with pytest.raises(TypeError, match=r"must be a name, a jaxrunner.* got Lookalike"):
        LLM(str(target), speculative_config=dict(method=Lookalike()), **SIZES)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_folder_that_holds_no_drafter_is_named(target: Path, tmp_path: Path, method: str):
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    for folder, message in (
        (missing, r"speculative_config.model=.*missing' is no folder"),
        (empty, r"config.json"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            drafting(target, method=method, model=str(folder))
    (empty / "config.json").write_text(json.dumps(HEAD if method != "eagle3" else EAGLE3))
    with pytest.raises(FileNotFoundError, match="empty"):
        drafting(target, method=method, model=str(empty))


def test_a_draft_model_of_another_vocabulary_is_refused(target: Path, tmp_path: Path):
    other = save_model(tmp_path / "other", vocab_size=59)
    message = r"config.json: vocab_size of a draft model must be the target's, 61, got 59: take a"
    with pytest.raises(ValueError, match=message):
        drafting(target, method="draft_model", model=other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=24), "hidden_size of an EAGLE head for this model must be 20, got 24"),
        (dict(vocab_size=59), "vocab_size of an EAGLE head for this model must be 61, got 59"),
        (dict(num_hidden_layers=2), "num_hidden_layers of an EAGLE head .* must be 1, got 2"),
    ],
)
def test_an_eagle_head_of_another_model_is_refused(target, tmp_path, changes, message):
    folder = save_head(tmp_path / "head", HEAD | changes, eagle_tensors())
    with pytest.raises(ValueError, match=f"config.json: {message}: take a head that was trained"):
        drafting(target, method="eagle", model=folder)


def test_tensors_of_an_eagle_head_are_checked_before_they_are_read(target, tmp_path):
    tensors = eagle_tensors()
    fc = tensors.pop("fc.weight")
    lacking = save_head(tmp_path / "lacking", HEAD, tensors)
    with pytest.raises(ValueError, match=r"fc.weight \[20, 40\] is missing"):
        drafting(target, method="eagle", model=lacking)
    wide = save_head(tmp_path / "wide", HEAD, tensors | {"fc.weight": fc[:, :-1].copy()})
    with pytest.raises(ValueError, match=r"fc.weight"):
        drafting(target, method="eagle", model=wide)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=59), "vocab_size=59 must be the target's, 61"),
        (dict(num_hidden_layers=2), "num_hidden_layers of an EAGLE-3 head must be 1, got 2"),
        (dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "layers 0 to 1: get its own head"),
    ],
)
def test_an_eagle3_head_of_another_model_is_refused(target, tmp_path, changes, message):
    tensors = reference.tensors(EAGLE3, "lm_head.weight", "d2t")
    folder = save_head(tmp_path / "head", EAGLE3 | changes, tensors)
    with pytest.raises(ValueError, match=message):
        drafting(target, method="eagle3", model=folder)


def test_a_checkpoint_of_another_kind_is_no_drafter(target, tmp_path):
    head = save_head(tmp_path / "head", EAGLE3, reference.tensors(EAGLE3, "lm_head.weight", "d2t"))
    with pytest.raises(ValueError, match="LlamaForCausalLMEagle3"):
        drafting(target, method="draft_model", model=head)
    with pytest.raises(ValueError, match="architectures of an EAGLE-3 head must be one of"):
        drafting(target, method="eagle3", model=target)


@pytest.mark.parametrize(
    "config",
    [dict(method="ngram", prompt_lookup_max=3), dict(method="suffix"), dict(method=lookup)],
    ids=["ngram", "suffix", "own"],
)
def test_a_speculator_without_weights_adds_none(target, config):
    loaded = drafting(target, **config)
    assert loaded.model.speculator.num_drafts == 3 and loaded.load_config.drafter is None
    assert loaded.config == load(target, dtype="float32").config


@pytest.mark.parametrize(
    ("family", "settings"), [(eagle, HEAD), (eagle3, EAGLE3)], ids=["eagle", "eagle3"]
)
def test_a_drafter_is_named_or_given(target, tmp_path, family, settings):
    tensors = eagle_tensors()
    if family is eagle3:
        tensors = reference.tensors(EAGLE3, "lm_head.weight", "d2t")
    folder = str(save_head(tmp_path / "head", settings, tensors))
    named, given = (drafting(target, method=m, model=folder) for m in (family.name, family))
    assert named == given


def test_a_drafter_that_reads_no_config_is_refused(target):
    other = draft_model(llama)
    with pytest.raises(
        ValueError,
        match=r"draft_model has no read, which makes its config of .*: give the Drafter one",
    ):
        drafting(target, method=other, model=str(target))


def drafters(folder: Path) -> dict[str, Path]:
    """Writes a drafter of each method."""
    eagle3 = reference.tensors(EAGLE3, "lm_head.weight", "d2t")
    return dict(
        draft_model=save_model(folder / "small", 5, num_hidden_layers=1, num_key_value_heads=1),
        eagle=save_head(folder / "eagle", HEAD, eagle_tensors()),
        eagle3=save_head(folder / "eagle3", EAGLE3, eagle3),
    )


PROMPTS: list[Any] = [dict(prompt_token_ids=ids) for ids in ([3, 1, 4, 1, 5], [9, 2])]


def said(target: Path, drafts: Any, logprobs: int | None = None) -> list[tuple[Any, ...]]:
    """Returns tokens and reasons of answers to `PROMPTS`."""
    params = SamplingParams(max_tokens=9, seed=3, logprobs=logprobs, detokenize=False)
    with LLM(str(target), speculative_config=drafts, **SIZES) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def undrafted(target: Path) -> list[tuple[Any, ...]]:
    return said(target, None)


@pytest.mark.parametrize(
    "method",
    ["eagle3", *(pytest.param(m, marks=pytest.mark.slow) for m in ("draft_model", "eagle"))],
)
def test_an_llm_with_a_checkpoint_that_drafts_says_what_it_would_say(
    target, tmp_path, undrafted, method
):
    logprobs = 1 if method == "eagle" else None  # in two launches, or in one
    config = dict(method=method, model=str(drafters(tmp_path)[method]), num_speculative_tokens=2)
    assert said(target, config, logprobs) == undrafted
