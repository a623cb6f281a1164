"""Mixtures of experts: a trainer's logits, devices, weights, and what is refused."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from jaxrunner import LLM, pytree
from jaxrunner.bench.presets import PRESETS
from jaxrunner.hf_config import Settings
from jaxrunner.loading.declared import abstract_params
from jaxrunner.loading.loader import LoadConfig, load
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.registry import read_model
from jaxrunner.ops.backends import dense
from jaxrunner.ops.routing import choose, load_balancing_loss
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.types import Inputs
from jaxrunner.worker.memory_plan import num_bytes
from tests.support.mixture_answers import PROMPTS, SIZES, greedy, logits_of, run, tokens, variants

torch = pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
pytest.importorskip("transformers", reason="the reference needs transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns what makes the model of a variant, and the folder that transformers saves it in."""
    from tests.support import mixtures

    @functools.cache
    def save(variant):
        model, folder = mixtures.model(variant), tmp_path_factory.mktemp("mixture")
        model.save_pretrained(folder)
        return SimpleNamespace(model=model, folder=folder)

    return save


# What is cut, beside the experts.
CUTS: dict[str, dict[str, Any]] = {
    "deepseek v3": dict(decode_context_parallel_size=2),
    "gpt-oss, one key": dict(decode_context_parallel_size=2),
    "llama 4, ragged chunks, two experts": dict(decode_context_parallel_size=2),
}


@pytest.mark.parametrize("variant", ["qwen3", "deepseek v3", "gpt-oss", "llama 4"])
def test_logits_equal_those_in_float64(variant, saved):
    """By the operations of a trainer, which have a gradient."""
    made, ids = saved(variant), PROMPTS[-1]
    loaded = load(made.folder)
    got = run(loaded.model, loaded.config, loaded.read_params(progress=False), jnp.asarray(ids))
    want = logits_of(made.model.double(), ids)
    made.model.float()
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("variant", ["qwen3", "deepseek v3", "gpt-oss"])
def test_gradients_are_those_of_pytorch(variant, saved, tmp_path):
    """Of weights by their names in checkpoints; with the auxiliary loss where transformers has it.

    DeepSeek-V3's has none, and a bias that no gradient reaches.
    """
    made, ids, coef = saved(variant), PROMPTS[-1], 0.0 if variant == "deepseek v3" else 0.5
    module, loaded = copy.deepcopy(made.model).double(), load(made.folder)
    module.router_aux_loss_coef = coef
    told, labels = dict(output_router_logits=True) if coef else {}, torch.tensor([ids])
    theirs = module(labels, labels=labels, **told).loss
    theirs.backward()
    for weight in module.parameters():
        weight.data.copy_(weight.grad)
    module.float().save_pretrained(tmp_path / "theirs")
    params = loaded.read_params(progress=False)
    both = jax.value_and_grad(functools.partial(loss, loaded, jnp.asarray(ids), coef))
    ours, grads = jax.jit(both)(params)
    assert float(ours) == pytest.approx(theirs.item(), abs=1e-4)
    save_checkpoint(tmp_path, loaded.model, loaded.config, grads, {})
    got, want = (load_file(f / "model.safetensors") for f in (tmp_path, tmp_path / "theirs"))
    for name, grad in want.items():
        expected = 0 * grad if "correction" in name else grad
        np.testing.assert_allclose(
            got[name], expected, atol=1e-4 * np.abs(grad).max(), err_msg=name
        )


def loss(loaded, ids, aux_loss_coef, params):
    """Returns the mean loss of the tokens behind the first, and the auxiliary one of all layers."""
    model, config = loaded.model, loaded.config
    inputs = Inputs(ids, jnp.arange(ids.size), jnp.full(ids.size, ids.size))
    x, none = model.embed(config, params, inputs), (None,) * config.num_hidden_layers
    extras = tuple(f"router_logits.{i}" for i, sparse in enumerate(config.sparse) if sparse)
    hidden, _, told = model.layers(config, params, x, none, inputs, dense(1), extras=extras)
    logits, routers = model.logits(config, params, hidden), jnp.concatenate([*told.values()])
    wrong = optax.softmax_cross_entropy_with_integer_labels(logits[:-1], ids[1:]).mean()
    return wrong + aux_loss_coef * load_balancing_loss(routers, choose(config.router, routers))


@pytest.mark.slow
@pytest.mark.devices(2)
@pytest.mark.parametrize("variant", CUTS)
def test_tokens_of_two_devices_are_those_of_one(variant, saved):
    """Every expert is cut; biases, shared experts and sinks count once."""
    made = saved(variant)
    with LLM(str(made.folder), tensor_parallel_size=2, **SIZES | CUTS[variant]) as llm:
        found = tokens(greedy(llm, PROMPTS[:8], 8))
    for prompt, output in zip(PROMPTS, found, strict=False):
        want = logits_of(made.model, prompt + output)[len(prompt) - 1 : -1].argmax(-1)
        assert output == want.tolist()


def test_saved_weights_are_those_that_were_read(saved, tmp_path):
    """Names, shapes and values, experts in one tensor each or all in one."""
    for variant in variants():
        made = saved(variant)
        loaded = load(made.folder)
        params = loaded.read_params(progress=False)
        save_checkpoint(tmp_path, loaded.model, loaded.config, params, {})
        files = [folder / "model.safetensors" for folder in (made.folder, tmp_path)]
        want, got = map(load_file, files)
        assert want.keys() - {"lm_head.weight"} == got.keys() - {"lm_head.weight"}
        assert all(np.array_equal(want[name], got[name]) for name in got)


GPT_OSS, GRANITE, GLM = (
    dict(architectures=[f"{name}ForCausalLM"], num_local_experts=6, n_routed_experts=6)
    for name in ("GptOss", "GraniteMoe", "Glm4Moe")
)
SETTINGS = dict(
    architectures=["Qwen3MoeForCausalLM"], hidden_size=36, num_hidden_layers=2, vocab_size=62,
    num_attention_heads=6, num_key_value_heads=2, head_dim=8, intermediate_size=44,
    max_position_embeddings=64, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(num_experts_per_tok=7),
            "num_experts_per_tok=7 experts must be of topk_group=1",
        ),
        (dict(num_experts=None), "has no 'num_experts': it is needed"),
        (dict(norm_topk_prob=2), "'norm_topk_prob' must be bool, got 2"),
        (dict(expert_choice=True), "1 unknown setting: expert_choice=True"),
        (GPT_OSS | dict(swiglu_limit=9.0), "swiglu_limit=9.0 is not supported, only 7.0"),
        (GPT_OSS | dict(layer_types=["full_attention"]), "layer_types must name full_attention or"),
        (GRANITE | dict(logits_scaling=-2), r"logits_scaling must be over 0, got -2\.0"),
        (GRANITE | dict(residual_multiplier=0), r"residual_multiplier must be over 0, got 0\.0"),
        (
            GLM | dict(topk_group=4, n_group=3),
            "topk_group=4 groups, of n_group=3 equal groups",
        ),
        (
            GLM | dict(partial_rotary_factor=1.5),
            "partial_rotary_factor=1.5 must be a share of head_dim",
        ),
    ],
    ids=lambda value: [*value][-1] if isinstance(value, dict) else None,
)
def test_what_routers_do_not_honour_is_refused(changes, words):
    settings = {k: v for k, v in (SETTINGS | changes).items() if v is not None}
    with pytest.raises(ValueError, match=words):
        read_model(Settings(settings))


def test_plans_count_experts():
    """Qwen3-30B-A3B has 30.5 billion weights; dummy ones have the shapes of those that are read."""
    model, config = read_model(Settings(PRESETS["qwen3_30b_a3b"].config))
    assert num_bytes(abstract_params(model, config, "bfloat16")) == 2 * 30_532_122_624
    model, config = read_model(Settings(SETTINGS))
    made = LoadConfig("none", load_format="dummy").read(model, config, dtype="float32")
    pytree.check(made, config.dims | dict(param="float32"))


@pytest.mark.devices(2)
def test_experts_are_cut_by_their_units():
    model, config = shard(*read_model(Settings(SETTINGS)), make_mesh(2))
    experts = abstract_params(model, config, "float32").layers[0].experts
    cut = [leaf.sharding.shard_shape(leaf.shape) for leaf in (experts.gate_up, experts.down)]
    assert cut == [(6, 2, 6, 36), (6, 36, 6)]


@pytest.mark.devices(2)
def test_experts_that_do_not_divide_are_refused():
    model, config = read_model(Settings(SETTINGS | dict(moe_intermediate_size=15)))
    words = "does not divide Qwen3Moe.*moe_intermediate_size=15"
    with pytest.raises(ValueError, match=words):
        shard(model, config, make_mesh(2))
