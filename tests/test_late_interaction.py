"""Late interaction: MaxSim of each pair, and queries that are kept from call to call."""

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxrunner.heads import late_interaction
from jaxrunner.heads.late_interaction import max_sim, query_of
from jaxrunner.pooling.late_interaction import LateInteractionParams
from jaxrunner.pooling.params import PoolingParams
from tests.support import pooling
from tests.support.pooling import PROMPTS

WIDTH = 20
TEXTS = "abc", "de", "f a", "fed cab"


def sim(query, document):
    """Returns the sum of each query token's best product, in float64."""
    return (query.astype(np.float64) @ document.astype(np.float64).T).max(1).sum()


@pytest.fixture(scope="module")
def colbert(tmp_path_factory):
    """Returns an LLM of a BERT with a product behind each token, and what makes a text's arrays."""
    folder = tmp_path_factory.mktemp("colbert")
    module, weight = pooling.save_colbert(folder, "BertModel", WIDTH)
    tokenizer = pooling.tokenizer()
    options = dict(skip_tokenizer_init=False, tokenizer=tokenizer)
    asked = dict(hf_overrides=dict(architectures=["HF_ColBERT"]))

    def arrays(text: str) -> np.ndarray:
        return pooling.unit(pooling.hidden(module, tokenizer.encode(text)) @ weight.T)

    with pooling.start(folder, **pooling.WHOLE | options | asked) as llm:
        yield llm, arrays


def test_late_interaction_is_the_sum_of_each_query_tokens_best_product(colbert):
    """The product is as wide as the checkpoint has it."""
    llm, arrays = colbert
    scores = [o.outputs.score for o in llm.score("abc", list(TEXTS[1:]))]
    query = arrays("abc")
    assert query.shape == (5, WIDTH)  # with two special tokens
    np.testing.assert_allclose(scores, [sim(query, arrays(t)) for t in TEXTS[1:]], atol=1e-5)
    two = [o.outputs.score for o in llm.score(["abc", "de"], ["f a", "fed cab"])]
    want = [sim(query, arrays("f a")), sim(arrays("de"), arrays("fed cab"))]
    np.testing.assert_allclose(two, want, atol=1e-5)


def keeps(key, uses=None):
    late = LateInteractionParams(mode="cache_query", query_key=key, query_uses=uses)
    return PoolingParams(late_interaction_params=late)


def scores(key):
    late = LateInteractionParams(mode="score_doc", query_key=key)
    return PoolingParams(late_interaction_params=late)


def test_a_query_is_kept_for_as_many_documents_as_it_names(colbert):
    llm, arrays = colbert
    both = llm.encode(["abc", "de"], [keeps("a", 3), scores("a")])
    assert both[0].outputs.data == 0 and np.shape(both[0].outputs.data) == ()
    np.testing.assert_allclose(both[1].outputs.data, sim(arrays("abc"), arrays("de")), atol=1e-5)
    llm.encode("f", keeps("b"))  # beside it
    told = llm.encode(["f a", "fed"], scores("a"))
    want = [sim(arrays("abc"), arrays(text)) for text in ("f a", "fed")]
    np.testing.assert_allclose([o.outputs.data for o in told], want, atol=1e-5)
    assert llm.queries.uses("a") == 0 and llm.queries.uses("b") == 1
    words = "query_key='a' is of no query that is kept, or its uses are spent: pool it with mode="
    with pytest.raises(ValueError, match=words):
        llm.encode("de", scores("a"))
    with pytest.raises(ValueError, match="query_key='b' is of no query that is kept, or its uses"):
        llm.encode(["de", "f"], scores("b"))  # two, and one use is left
    assert llm.queries.uses("b") == 1
    llm.encode("d", scores("b"))
    assert len(llm.queries) == 0


def test_documents_that_fail_have_used_their_query(colbert):
    llm, _ = colbert
    llm.encode("abc", keeps("a", 2))
    with pytest.raises(ValueError, match="prompt has"):
        llm.encode(["a" * 60, "b"], scores("a"))
    assert len(llm.queries) == 0


WRONG: Any = {"mode": "x"}


@pytest.mark.parametrize(
    "make, kind, words",
    [
        (lambda: keeps("a", 0), ValueError, "query_uses=0 is out of range"),
        (lambda: keeps(3), TypeError, "query_key must be a string, got 3"),
        (lambda: LateInteractionParams(mode="x", query_key="a"), ValueError, "mode must be"),
        (lambda: LateInteractionParams(mode="score_doc", query_key="a", query_uses=2), ValueError,
         "query_uses=2 is of mode='cache_query', this is a document: leave it out"),
        (lambda: PoolingParams(late_interaction_params=WRONG), TypeError,
         "late_interaction_params must be LateInteractionParams, got .*: make one"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_what_compares_no_tokens_keeps_no_query(colbert, tmp_path):
    llm, _ = colbert
    with pytest.raises(ValueError, match="late_interaction_params are of encode, and score compar"):
        llm.score("a", "b", pooling_params=keeps("a"))
    pooling.save(tmp_path, "BertModel")
    with (
        pooling.start(tmp_path, **pooling.WHOLE) as embedder,
        pytest.raises(ValueError, match="are of models for token_embed, this one is for embed: le"),
    ):
        embedder.encode(pooling.prompts(PROMPTS[:1]), keeps("a"))


@pytest.mark.parametrize("most", [64, 3])
def test_pairs_of_any_lengths_are_compared_in_batches(monkeypatch, most):
    """Padding, and pairs that fit no launch together, change nothing."""
    monkeypatch.setattr(late_interaction, "MOST_PAIRS", most)
    monkeypatch.setattr(late_interaction, "MOST_SCORES", 16 * 64 * 2)
    draw = np.random.default_rng(0)
    sizes = [(1, 1), (40, 7), (16, 100), (17, 3), (5, 33), (5, 64), (3, 1), (16, 16), (2, 9)]
    pairs = [(draw.normal(size=(q, 8)), draw.normal(size=(d, 8))) for q, d in sizes]
    got = max_sim([query_of(q) for q, _ in pairs], [d for _, d in pairs])
    np.testing.assert_allclose(got, [sim(q, d) for q, d in pairs], rtol=1e-5, atol=1e-5)
    assert max_sim([], []) == []


@pytest.mark.parametrize(
    ("name", "base", "files"),
    [
        ("HF_ColBERT", "ModernBertModel", "a product"),
        ("ColBERTModernBertModel", "ModernBertModel", "modules"),
        ("HF_ColBERT", "RobertaModel", "a product"),
        pytest.param("HF_ColBERT", "XLMRobertaModel", "a product", marks=pytest.mark.slow),
    ],
)
def test_a_colbert_may_be_another_encoder(tmp_path, name, base, files):
    """Its product is a tensor of its own, or a Dense layer that modules.json names."""
    module, weight = pooling.save_colbert(tmp_path, base, WIDTH)
    if files == "modules":
        module.save_pretrained(tmp_path)  # without the tensor
        (tmp_path / "1_Dense").mkdir()
        dense = dict(in_features=36, out_features=WIDTH, bias=False,
                     activation_function="torch.nn.modules.linear.Identity")  # fmt: skip
        (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(dense))
        named = dict(Transformer="", Dense="1_Dense")
        modules = [dict(path=at, type=f"pylate.models.{kind}") for kind, at in named.items()]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        safetensors.numpy.save_file(
            {"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors"
        )
    asked = dict(hf_overrides=dict(architectures=[name]))
    with pooling.start(tmp_path, **pooling.WHOLE | asked) as llm:
        outputs = llm.encode(pooling.prompts(PROMPTS))
        assert llm.get_supported_tasks() == ("token_embed",)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        want = pooling.unit(pooling.hidden(module, ids) @ weight.T)
        np.testing.assert_allclose(output.outputs.data, want, atol=1e-5)
