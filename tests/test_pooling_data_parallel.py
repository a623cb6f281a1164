"""Models that pool on several devices: each text is pooled by one engine, as by one alone."""

from typing import Any

import numpy as np
import pytest

from tests.support import pooling
from tests.support.pooling import PROMPTS

pytestmark = pytest.mark.devices(2)
TEXTS = pooling.prompts(PROMPTS)


def arrays(outputs: list[Any]) -> list[np.ndarray]:
    return [np.asarray(output.outputs.data) for output in outputs]


@pytest.mark.parametrize(
    "name, changes",
    [
        ("BertModel", pooling.WHOLE),
        ("LlamaForSequenceClassification", {}),
        pytest.param("Qwen3Model", {}, marks=pytest.mark.slow),
    ],
)
def test_arrays_are_those_of_one_engine(tmp_path, name, changes):
    pooling.save(tmp_path, name)
    with pooling.start(tmp_path, **changes) as llm:
        want = arrays(llm.encode(TEXTS))
    with pooling.start(tmp_path, **changes, data_parallel_size=2) as llm:
        got = arrays(llm.encode(TEXTS))
        assert all(engine.runner.traffic for engine in llm.engine.engines)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
