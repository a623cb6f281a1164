"""Without compilation: the same tokens, operation by operation."""

import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.models.llama import llama
from jaxrunner.ops import backends
from tests.support import tiny


@pytest.mark.slow
def test_python_sees_values_and_the_tokens_are_the_same(monkeypatch):
    """What makes it a debugger: the model's Python runs in every step, on arrays and no tracers."""
    seen = []

    def layers(config, params, x, kv, inputs, ops):
        seen.append(inputs.token_ids.tolist())
        return llama.layers(config, params, x, kv, inputs, ops)

    filtered = SamplingParams(temperature=1.3, top_k=9, top_p=0.8, min_p=0.01)
    request = tiny.new_request("a", [5, 6, 7], blocks=range(9), params=filtered)
    want = tiny.generate(tiny.runner(), request, 3)
    monkeypatch.setattr(tiny, "llama", llama._replace(layers=layers))
    # As many tokens in each step: JAX compiles each operation once for a shape.
    runner = tiny.runner(enforce_eager=True, max_num_batched_tokens=5, token_buckets=(5,))
    runner.warm_up()
    runner.programs.strict = True
    assert tiny.generate(runner, request, 3) == want
    assert seen[-3][:3] == [5, 6, 7]
    assert all(type(token) is int for ids in seen for token in ids)
    assert not runner.programs.ledger
    assert runner.programs.report().startswith("none: each operation runs by itself")


def test_kernels_are_no_choice_where_nothing_is_compiled():
    config, eager = tiny.config(), tiny.engine_config(enforce_eager=True)
    assert backends.choose_ops(config, eager).reason == (
        "mosaic_gpu is compiled, and enforce_eager compiles nothing"
    )
    with pytest.raises(ValueError, match="attention_backend='mosaic_gpu' is compiled, and enforce"):
        backends.choose_ops(
            config, tiny.engine_config(enforce_eager=True, attention_backend="mosaic_gpu")
        )
    with pytest.raises(ValueError, match="disable_custom_all_reduce must be True or False, got 1"):
        tiny.engine_config(disable_custom_all_reduce=1)
    with pytest.raises(ValueError, match="batch_invariant must be True or False, got 'yes'"):
        tiny.engine_config(batch_invariant="yes")
    with pytest.raises(ValueError, match="enable_prefix_caching must be True or False, got 'no'"):
        tiny.engine_config(enable_prefix_caching="no")
    with pytest.raises(ValueError, match="enforce_eager must be True or False, got 1"):
        tiny.engine_config(enforce_eager=1)
