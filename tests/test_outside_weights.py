"""A kind of weights that is no part of the package: 8 bits and scales, of a float checkpoint."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams, register_model
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.loading import weights
from jaxrunner.models.llama import llama
from jaxrunner.pytree import host_value
from jaxrunner.worker.memory_plan import num_bytes
from tests.outside import checkpoint, float64_llama
from tests.outside.int8_linear import Int8Linear, int8_llama, quantized

NAME = "Int8LlamaForCausalLM"
SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=[NAME])
V = SETTINGS["vocab_size"]
CONFIG = int8_llama.read(Settings(SETTINGS))
UP = "model.layers.1.mlp.up_proj.weight"


def rounded(tensors):
    """Returns the tensors that the numbers of 8 bits stand for, in float64."""

    def one(name: str, tensor: np.ndarray) -> np.ndarray:
        if "proj" not in name and "lm_head" not in name:
            return tensor
        whole, scale = quantized(tensor, 1)
        return whole.astype(np.float64) * scale[:, None]

    return {name: one(name, tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint, and its tensors."""
    register_model(NAME, int8_llama)
    folder = tmp_path_factory.mktemp("int8")
    return folder, checkpoint.write(folder, int8_llama, SETTINGS)


def test_logits_are_those_of_what_the_numbers_stand_for(saved):
    folder, tensors = saved
    prompts = checkpoint.prompts(5, 18, 9, 3)
    of = functools.partial(float64_llama.logits, rounded(tensors), SETTINGS)
    want = [float64_llama.greedy(of, prompt, 8) for prompt in prompts]
    plain = functools.partial(float64_llama.logits, tensors, SETTINGS)
    with checkpoint.start(folder, logprobs_mode="raw_logits") as llm:
        assert checkpoint.answers(llm, prompts, checkpoint.greedy(8)) == want
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, detokenize=False)
        [output] = llm.generate({"prompt_token_ids": prompts[1]}, params, use_tqdm=False)
        entry = next(iter(output.outputs[0].logprobs or ()))
        got = np.array([entry[t].logprob for t in range(V)])
        np.testing.assert_allclose(got, of(prompts[1])[-1], rtol=1e-4, atol=1e-4)
        assert abs(got - plain(prompts[1])[-1]).max() > 1e-2
        # All tensors of a weight make it anew; a part of them cannot.
        with pytest.raises(ValueError, match=r"gate_up.weight does not hold the tensors that it"):
            llm.reload_weights({UP: tensors[UP]})
        pair = {name: 2 * tensors[name] for name in (UP, UP.replace("up_", "gate_"))}
        llm.reload_weights(pair)
        of = functools.partial(float64_llama.logits, rounded(tensors | pair), SETTINGS)
        want = [float64_llama.greedy(of, prompt, 8) for prompt in prompts]
        assert checkpoint.answers(llm, prompts, checkpoint.greedy(8)) == want


def test_each_weight_has_its_own_dtype_and_bytes(saved):
    sizes = dict(H=6, K=2, P=5, D=8, E=20, F=28)
    products = 2 * (2 * 5 * 8 * 20 + 20 * 6 * 8 + 2 * 28 * 20 + 20 * 28) + V * 20
    scales = 2 * (2 * 5 * 8 + 20 + 2 * 28 + 20) + V
    assert sizes.items() <= CONFIG.dims.items()
    with checkpoint.start(saved[0], dtype="bfloat16") as llm:
        kinds = [leaf.dtype.name for leaf in jax.tree.leaves(llm.params)]
        assert {*kinds} == {"int8", "float32", "bfloat16"} and kinds.count("int8") == 9
        want = products + 4 * scales + 2 * (V * 20 + 20 + 4 * 20)
        assert llm.memory_plan.weights == num_bytes(llm.params) == want
        head = llm.params.head
        assert isinstance(head, Int8Linear)
        whole, scale = quantized(saved[1]["lm_head.weight"], 1)
        np.testing.assert_array_equal(np.asarray(head.weight), whole)
        np.testing.assert_array_equal(np.asarray(head.scale), scale)
        [tokens] = checkpoint.answers(llm, [[1, 2, 3]], checkpoint.greedy(4))
        assert len(tokens) == 4


def test_they_are_made_at_random_too_and_saved_as_they_are(saved, tmp_path):
    params = weights.random_params(int8_llama, CONFIG, "bfloat16", 3)
    head = params.head
    assert head.weight.dtype == jnp.int8 and len(np.unique(head.weight)) > 200
    with checkpoint.start(saved[0]) as llm:
        want = checkpoint.answers(llm, [[1, 2, 3]], checkpoint.greedy(9))
        llm.save_sharded_state(tmp_path)
    (tmp_path / "config.json").write_text((saved[0] / "config.json").read_text())
    with checkpoint.start(tmp_path, load_format="sharded_state") as llm:
        assert checkpoint.answers(llm, [[1, 2, 3]], checkpoint.greedy(9)) == want


def load(folder, change):
    """Reads a checkpoint with other sources of the head."""

    def sources(config):
        tree = int8_llama.sources(config)
        head = tree.head
        return host_value(type(tree), **vars(tree) | dict(head=change(head)))

    return checkpoint_params(folder, int8_llama._replace(sources=sources))


def checkpoint_params(folder, model):
    return weights.load_params(folder, model, CONFIG, dtype="float32", progress=False)


def test_a_source_of_another_dtype_or_shape_is_refused_by_name(saved):
    def as_stored(head):
        weight = head.weight._replace(join=lambda arrays: arrays[0])
        return host_value(Int8Linear, weight=weight, scale=head.scale, bias=None)

    def flat(head):
        scale = head.scale._replace(join=lambda arrays: np.ones((1, V), np.float32))
        return host_value(Int8Linear, weight=head.weight, scale=scale, bias=None)

    with pytest.raises(
        ValueError, match=r"params.head.weight is declared int8\[61, 20\], its Source makes float32"
    ):
        load(saved[0], as_stored)
    with pytest.raises(ValueError, match=r"float32\[61\], its Source makes float32\[1, 61\] of"):
        load(saved[0], flat)


def test_sources_that_are_no_tree_like_the_weights_are_refused(saved):
    def bare(head):
        return host_value(Linear, weight=head.weight, bias=None)

    with pytest.raises(ValueError, match="sources of Int8LlamaForCausalLM must be a tree like its"):
        load(saved[0], bare)
    with pytest.raises(ValueError, match="give each weight one Source"):
        checkpoint_params(saved[0], int8_llama._replace(sources=llama.sources))
