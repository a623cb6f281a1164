"""Layers behind a pooling that adapters have in place of the model's: `score`, `classifier`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LoRARequest, PoolingParams
from tests.support import lora, pooling
from tests.support.pooling import PROMPTS

CONFIG = dict(
    peft_type="LORA",
    r=3,
    lora_alpha=6,
    task_type="SEQ_CLS",
    modules_to_save=["classifier", "score"],
)  # as PEFT writes of any classifier
PLAIN = CONFIG | dict(modules_to_save=None)
SIZES: dict[str, Any] = dict(enable_lora=True, max_loras=2, max_lora_rank=8)
RAW = PoolingParams(use_activation=False)
HEADS = ("score", "classifier", "classifier.dense", "classifier.out_proj", "pooler.dense",
         "head.dense")  # fmt: skip
QWEN, BERT = "Qwen3ForSequenceClassification", "BertForSequenceClassification"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "last token": (QWEN, {}),
    "mean of chunks": (QWEN, dict(pooler_config=dict(pooling_type="MEAN"))),
    "behind a pooler": (BERT, pooling.WHOLE),
    "two layers": ("RobertaForSequenceClassification", pooling.WHOLE),
    "each token": ("BertForTokenClassification", pooling.WHOLE),
    "behind a norm": ("ModernBertForSequenceClassification", pooling.WHOLE),
}
SLOW = KINDS.keys() - {"last token", "behind a pooler"}


def tensors_of(module: Any, seed: int, *, own: bool = True) -> dict[str, np.ndarray]:
    """Returns an adapter of all products of layers and, if `own`, of the last module."""
    rng, tensors = np.random.default_rng(seed), lora.of_module(module, seed, without=HEADS)
    for name, weight in module.named_parameters():
        if own and name.startswith(("score.", "classifier.")):
            values = rng.normal(size=tuple(weight.shape), scale=0.3)
            tensors[lora.PREFIX + name] = values.astype(np.float32)
    return tensors


def request(i: int, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> LoRARequest:
    return LoRARequest(f"{i}", i, lora_tensors=tensors, lora_config=config or CONFIG)


def of_merged(module: Any, tensors: dict[str, Any], score: Callable[[Any], Any]) -> Any:
    """Returns what `score` makes of a module with an adapter in it, which then leaves."""
    import torch

    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    lora.merge_into(module, tensors, CONFIG)
    for name, weight in module.named_parameters():
        if (own := tensors.get(lora.PREFIX + name)) is not None:
            weight.data = torch.tensor(own)
    told = score(module)
    for name, weight in module.named_parameters():
        weight.data = before[name]
    return told


def scores_of(kind: str, prompts: list[list[int]]) -> Callable[[Any], list[np.ndarray]]:
    def of_mean(module: Any) -> list[np.ndarray]:
        weight = module.score.weight.detach().numpy()
        return [pooling.hidden(module.model, ids).mean(0) @ weight.T for ids in prompts]

    if kind == "mean of chunks":
        return of_mean
    return lambda module: [pooling.scores(module, ids) for ids in prompts]


def data(outputs: list[Any]) -> list[np.ndarray]:
    return [np.asarray(output.outputs.data) for output in outputs]


def assert_near(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in KINDS]
)
def test_scores_are_those_of_merged_models(tmp_path, kind):
    """An adapter with a head of its own, one without and none share steps, as one does alone."""
    name, sizes = KINDS[kind]
    module = pooling.save(tmp_path, name, num_labels=3)
    own, none = tensors_of(module, 1), tensors_of(module, 2, own=False)
    first, second = request(1, own), request(2, none, PLAIN)
    texts, score = pooling.prompts(PROMPTS), scores_of(kind, PROMPTS)
    with pooling.start(tmp_path, **SIZES, **sizes) as llm:
        mixed = data(llm.reward(texts, lora_request=[first, second, None, first, second]))
        alone = data(llm.encode(texts, RAW, lora_request=first))
        llm.merge_lora(1)
        merged = data(llm.encode(texts, RAW))
        llm.unmerge_lora()
        before = data(llm.encode(texts, RAW))
    base, of_first, of_second = (of_merged(module, of, score) for of in ({}, own, none))
    want = [of[i] for i, of in enumerate([of_first, of_second, base, of_first, of_second])]
    assert_near(mixed, want)
    assert_near(alone, of_first)
    assert_near(merged, of_first)
    assert_near(before, base)
    low = {name: x for name, x in own.items() if ".lora_" in name}
    other_head = of_merged(module, low, score)
    assert all(np.abs(x - y).max() > 0.01 for x, y in zip(of_first, other_head, strict=True))


def test_scores_of_pairs_and_classes_are_those_of_merged_models(tmp_path):
    module = pooling.save(tmp_path, BERT, num_labels=1)  # skips where PyTorch is not there
    import torch

    tensors, tokenizer = tensors_of(module, 1), pooling.tokenizer()
    sizes = dict(skip_tokenizer_init=False, tokenizer=tokenizer)
    with pooling.start(tmp_path, **pooling.WHOLE, **SIZES, **sizes) as llm:
        adapter = request(1, tensors)
        pairs = llm.score("abc", ["de", "f a"], pooling_params=RAW, lora_request=[adapter, None])
        (class_,) = llm.classify(pooling.prompts(PROMPTS[:1]), lora_request=adapter)

    def score(module: Any, text: str) -> np.ndarray:
        found = tokenizer.inner.encode("abc", text)
        return pooling.scores(module, found.ids, token_type_ids=torch.tensor([found.type_ids]))

    want = of_merged(module, tensors, lambda module: score(module, "de"))
    np.testing.assert_allclose(pairs[0].outputs.score, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pairs[1].outputs.score, score(module, "f a"), rtol=1e-5, atol=1e-5)
    raw = of_merged(module, tensors, lambda module: pooling.scores(module, PROMPTS[0]))
    np.testing.assert_allclose(class_.outputs.probs, 1 / (1 + np.exp(-raw)), atol=1e-5)


def test_adapters_of_a_trainer_change_between_steps_and_nothing_is_compiled(tmp_path):
    """More adapters than places, from a folder and from arrays on a device, and a sleep."""
    folder = tmp_path / "model"
    module = pooling.save(folder, QWEN, num_labels=3)
    made = [tensors_of(module, i) for i in range(4)]
    written = lora.write(tmp_path / "adapter", made[3], CONFIG)
    score = scores_of("last token", PROMPTS)
    texts, sizes = pooling.prompts(PROMPTS), SIZES | dict(warm_up=True)
    with pooling.start(folder, **sizes) as llm:
        llm.engine.runner.programs.strict = True  # nothing is compiled any more
        told = [data(llm.encode(texts, RAW, lora_request=request(1, made[0])))]
        on_device = jax.tree.map(jax.numpy.asarray, made[1])
        assert not llm.add_lora(request(1, on_device))
        told.append(data(llm.encode(texts, RAW, lora_request=request(1, on_device))))
        told.append(data(llm.encode(texts, RAW, lora_request=request(2, made[2]))))
        from_folder = LoRARequest("3", 3, written)
        told.append(data(llm.encode(texts, RAW, lora_request=from_folder)))
        llm.sleep()
        llm.wake_up()
        told.append(data(llm.encode(texts, RAW, lora_request=from_folder)))
        # The place of one with a head is that of one without.
        none = {name: x for name, x in made[0].items() if ".lora_" in name}
        for i in (4, 5):
            told.append(data(llm.encode(texts, RAW, lora_request=request(i, none, PLAIN))))
        base = data(llm.encode(texts, RAW))
    for of, got in zip([*made, made[3], none, none], told, strict=True):
        assert_near(got, of_merged(module, of, score))
    assert_near(base, score(module))


def test_an_embedding_of_its_own_goes_with_a_head(tmp_path):
    module = pooling.save(tmp_path, QWEN, num_labels=3)
    table = np.random.default_rng(0).normal(size=(62, 36), scale=0.3).astype(np.float32)
    tensors = tensors_of(module, 1) | {f"{lora.PREFIX}model.embed_tokens.weight": table}
    config = CONFIG | dict(modules_to_save=["classifier", "score", "embed_tokens"])
    sizes, score = SIZES | dict(lora_modules_to_save=["embed_tokens"]), scores_of("", PROMPTS)
    adapter, texts = request(1, tensors, config), pooling.prompts(PROMPTS)
    with pooling.start(tmp_path, **sizes) as llm:
        told = data(llm.encode(texts, RAW, lora_request=[adapter, None] * 2 + [adapter]))
        llm.merge_lora(1)
        merged = data(llm.encode(texts, RAW))
    want, base = of_merged(module, tensors, score), score(module)
    assert_near(told, [base[i] if i % 2 else want[i] for i in range(5)])
    assert_near(merged, want)
    with pytest.raises(ValueError, match=r"which are \['embed_tokens'\] in this model: name these"):
        pooling.start(tmp_path, **SIZES, lora_modules_to_save=["lm_head"])


@pytest.fixture(scope="module")
def refusing(tmp_path_factory) -> Any:
    """An `LLM` whose adapters are refused, and the tensors of one that would not be."""
    folder: Path = tmp_path_factory.mktemp("bert")
    module = pooling.save(folder, BERT, num_labels=3)
    with pooling.start(folder, **pooling.WHOLE, **SIZES) as llm:
        yield llm, tensors_of(module, 1)


def named(module: str, *shape: int) -> dict[str, np.ndarray]:
    return {lora.PREFIX + module: np.full(shape, 0.1, np.float32)}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "labels": (named("classifier.weight", 5, 36) | named("classifier.bias", 5), {},
               r"classifier.weight of adapter '1' must be \[3, 36\] as the model's is, got "
               r"\[5, 36\]: take an adapter of this model and its num_labels=3"),
    "a bias of other labels": (named("classifier.bias", 5), {},
                               r"classifier.bias of adapter '1' must be \[3\] as .* got \[5\]"),
    "NaN": ({f"{lora.PREFIX}classifier.bias": np.full(3, np.nan, np.float32)}, {},
            "classifier.bias of adapter '1' holds values that are NaN or infinite: correct it"),
    "integers": ({f"{lora.PREFIX}classifier.bias": np.ones(3, np.int32)}, {},
                 "assifier.bias', which holds no floats, got int32"),
    "no bias": ({f"{lora.PREFIX}classifier.bias": None}, {},
                "has a classifier of its own without classifier.bias: save the adapter again"),
    "none": (dict.fromkeys([f"{lora.PREFIX}classifier.{x}" for x in ("weight", "bias")]), {},
             "has no tensor of classifier, which modules_to_save names: save the adapter again"),
    "another module": ({}, dict(modules_to_save=["classifier", "score", "LayerNorm"]),
                       r"'modules_to_save'=\['LayerNorm'\] is not supported"),
    "low ranks": (named("classifier.lora_A.weight", 3, 36)
                  | named("classifier.lora_B.weight", 3, 3), {},
                  "changes .*classifier.* no products of a layer"),
    "low ranks of a pooler": (named("bert.pooler.dense.lora_A.weight", 3, 36)
                              | named("bert.pooler.dense.lora_B.weight", 36, 3), {},
                              "changes .*bert.pooler.dense.* no products of a layer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_is_not_the_models_is_refused_by_name(refusing, name):
    llm, tensors = refusing
    changes, config, match = REFUSED[name]
    changed = {key: x for key, x in (tensors | changes).items() if x is not None}
    with pytest.raises(ValueError, match=match):
        llm.add_lora(request(1, changed, CONFIG | config))
    assert not llm.list_loras()


@pytest.mark.parametrize("changes", [
    dict(runner="generate"), dict(runner="pooling"),
    dict(hf_overrides=dict(architectures=[QWEN], classifier_from_token=[5, 7])),
], ids=["generates", "embeds", "scores by tokens"])  # fmt: skip
def test_a_model_without_a_head_of_classes_refuses_one(tmp_path, changes):
    """Whether the config names it or a tensor alone is there."""
    module = pooling.save(tmp_path, "Qwen3ForCausalLM")
    tensors = tensors_of(module, 1) | named("score.weight", 1, 36)
    with pooling.start(tmp_path, **SIZES, **changes) as llm:
        with pytest.raises(ValueError, match=r"modules_to_save.*score.* is not supported"):
            llm.add_lora(request(1, tensors))
        match = "has the tensor '.*score.weight', which is no lora_A or lora_B of a product"
        with pytest.raises(ValueError, match=match):
            llm.add_lora(request(1, tensors, PLAIN))
