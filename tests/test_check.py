"""`python -m jaxrunner.check` names the first layer that differs, or why it cannot compare."""

import builtins
import json
import re

import pytest

from jaxrunner.check.compare import DIFFERENT, EQUAL, NOT_COMPARED, main
from tests.support import dense_families, pooling
from tests.support.every_family import CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma")
    dense_families.save("gemma 2", path)
    return path


def test_a_family_is_equal(folder, capsys):
    assert main([str(folder), "--lengths", "3", "30"]) == EQUAL
    shown = capsys.readouterr().out
    assert "equal: all within 0.0001 of transformers" in shown and "layer 1" in shown


# The first variant of each architecture; a model with states is checked in the usual suite.
FIRST = {case.architecture: name for name, case in [*CASES.items()][::-1]}
del FIRST["MiMoForCausalLM"]  # which transformers does not have


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[pytest.mark.slow] * (v != "qwen 3.5")) for v in FIRST.values()],
    ids=FIRST.keys(),
)
def test_every_family_is_equal(variant, tmp_path, capsys):
    CASES[variant].save(tmp_path)
    assert main([str(tmp_path), "--lengths", "5", "40"]) == EQUAL
    assert "layer 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # Token 8 sees itself and the 8 before it, of which a shorter window hides the first.
        (dict(sliding_window=8), "layer 0 is the first that is apart, .* from token 8 of prompt 0"),
        (dict(layer_types=["sliding_attention"] * 2), "layer 1 is the first that is apart"),
        (dict(final_logit_softcapping=4.0), "the logits is the first .*: the final norm, the head"),
    ],
    ids=["window", "kind of the second layer", "cap"],
)
def test_the_first_stage_that_differs_is_named(folder, changes, words, capsys):
    argv = [str(folder), "--lengths", "30", "--hf-overrides", json.dumps(changes)]
    assert main(argv) == DIFFERENT
    assert re.search(words, capsys.readouterr().out)


POOLING: dict[str, tuple[str, dict]] = {
    "BERT": ("BertModel", {}),
    "XLM-R with classes": ("XLMRobertaForSequenceClassification", dict(num_labels=3)),
    "ModernBERT of tokens": ("ModernBertForTokenClassification", dict(num_labels=3)),
    "EmbeddingGemma": ("Gemma3TextModel", {}),
    "a decoder": ("Qwen3Model", {}),
    "a decoder with classes": ("Qwen3ForSequenceClassification", dict(num_labels=3)),
}


@pytest.mark.parametrize(("name", "changes"), POOLING.values(), ids=POOLING.keys())
def test_a_model_that_pools_is_equal(name, changes, tmp_path, capsys):
    pooling.save(tmp_path, name, **changes)
    assert main([str(tmp_path), "--lengths", "1", "30"]) == EQUAL
    shown = capsys.readouterr().out
    assert re.search(r"layer 1 .*\n(layer 2 .*\n)?the pooled array \d", shown)


def test_what_a_decoder_pools_is_compared_by_its_runner(folder, capsys):
    assert main([str(folder), "--lengths", "3", "--runner", "pooling"]) == EQUAL
    assert "the pooled array" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(layer_norm_eps=0.3), "the embedding is the first that is apart"),
        (dict(hidden_act="relu"), "layer 0 is the first that is apart, .* of prompt 0"),
    ],
    ids=["norms", "activation"],
)
def test_the_first_layer_of_an_encoder_that_differs_is_named(tmp_path, changes, words, capsys):
    pooling.save(tmp_path, "BertModel")
    argv = [str(tmp_path), "--lengths", "30", "--hf-overrides", json.dumps(changes)]
    assert main(argv) == DIFFERENT
    assert re.search(words, capsys.readouterr().out)


def test_a_pooling_that_differs_is_named(tmp_path, capsys):
    pooling.save(tmp_path, "ModernBertForSequenceClassification")
    changes = json.dumps(dict(classifier_activation="tanh"))
    assert main([str(tmp_path), "--lengths", "9", "--hf-overrides", changes]) == DIFFERENT
    words = "different: the pooled array is the first .* from prompt 0, which has 9: the final norm"
    assert re.search(words, capsys.readouterr().out)


def test_what_is_not_compared_is_told(folder, capsys, monkeypatch):
    assert main([str(folder), "--hf-overrides", '{"hidden_activation": "mish"}']) == NOT_COMPARED
    assert main([str(folder / "none")]) == NOT_COMPARED
    assert capsys.readouterr().err.count("not compared: ") == 2
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main([str(folder)]) == NOT_COMPARED
    assert "install them, or jaxrunner[hf]" in capsys.readouterr().err


def test_the_command_line_says_what_it_takes(capsys):
    for argv, words in ([["--help"], "exit status: 0 equal"], [["x", "--lengths", "0"], "over 0"]):
        with pytest.raises(SystemExit):
            main(argv)
        told = capsys.readouterr()
        assert words in told.out + told.err
