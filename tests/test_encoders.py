"""Encoders against transformers: hidden states and classes of texts, whatever is beside them."""

import numpy as np
import pytest

from tests.support import pooling
from tests.support.pooling import PROMPTS

EVERY = {"pooling_type": "ALL", "use_activation": False}


@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        pytest.param("RobertaModel", marks=pytest.mark.slow),
        "XLMRobertaModel",
        "ModernBertModel",
        "Gemma3TextModel",
    ],
)
def test_every_token_sees_its_whole_text_and_no_other(tmp_path, name):
    module = pooling.save(tmp_path, name)
    with pooling.start(tmp_path, **pooling.WHOLE, pooler_config=EVERY) as llm:
        outputs = llm.encode(pooling.prompts(PROMPTS))
    for ids, output in zip(PROMPTS, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, pooling.hidden(module, ids), rtol=1e-5, atol=1e-5)
