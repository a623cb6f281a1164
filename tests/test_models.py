"""Logits of `models.llama` and its like: those of transformers, stored and computed."""

from pathlib import Path

import numpy as np
import pytest

from tests.support import families, tiny

GOLDEN = np.load(Path(__file__).parent / "data" / "golden.npz")


@pytest.mark.parametrize("variant", families.VARIANTS)
def test_logits_match_stored_ones(variant):
    _, config, params = families.model_and_params(variant)
    want = GOLDEN[variant]
    got = tiny.dense_logits(config, params, families.ids(40))[-len(want) :]
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.fixture(scope="module")
def huggingface():
    pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
    pytest.importorskip("transformers", reason="the reference needs transformers")
    from tests.support import huggingface

    return huggingface


@pytest.mark.parametrize("variant", families.VARIANTS)
def test_logits_match_transformers(variant, huggingface):
    _, config, params = families.model_and_params(variant)
    ids = families.ids(64, seed=1)  # more than the lengths from which scaled angles change
    reference = huggingface.model(variant)
    got, want = tiny.dense_logits(config, params, ids), huggingface.logits(reference, ids)
    np.testing.assert_allclose(got, want, atol=1e-4)
