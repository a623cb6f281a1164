"""Checkpoint folders in each format of quantised weights, and the float ones they stand for."""

from dataclasses import replace
import functools
import json
from pathlib import Path
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxrunner.hf_config import Settings
from jaxrunner.model import Model, Source
from jaxrunner.operation import unnoted
from jaxrunner.ops.backends import dense
from jaxrunner.ops.experts import experts as run_experts
from jaxrunner.types import Inputs
from tests.outside import checkpoint
from tests.support.quantized_formats import FORMATS, SEEDED, Writer

SETTINGS: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16, vocab_size=61, dtype="float32",
    max_position_embeddings=64, tie_word_embeddings=False, rms_norm_eps=1e-5,
)  # fmt: skip


def modules(settings: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the shape of each product's module, by name."""
    E, F, D = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    H, K = (settings[f"num_{kind}_heads"] * D for kind in ("attention", "key_value"))
    attn = dict(q_proj=(H, E), k_proj=(K, E), v_proj=(K, E), o_proj=(E, H))
    mlp = dict(gate_proj=(F, E), up_proj=(F, E), down_proj=(E, F))
    experts = range(settings.get("num_experts", 0))
    if experts:
        mlp = {f"experts.{i}.{name}": shape for i in experts for name, shape in mlp.items()}
    layers = range(settings["num_hidden_layers"])
    return {
        f"model.layers.{i}.{part}.{name}": shape
        for i in layers
        for part, names in dict(self_attn=attn, mlp=mlp).items()
        for name, shape in names.items()
    }


def written(
    format_: str, settings: dict[str, Any] = SETTINGS, *, head: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns config.json, the tensors of a checkpoint, and the float ones that they stand for.

    head: whether it is written in the format too.
    """
    config, writer = FORMATS[format_]
    E, V = settings["hidden_size"], settings["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (V, E), "model.norm": (E,)}
    few = modules(settings) | ({"lm_head": (V, E)} if head else {})
    if not settings["tie_word_embeddings"] and not head:
        shapes["lm_head"] = V, E
    for i in range(settings["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{norm}"] = (E,)
        if "num_experts" in settings:
            shapes[f"model.layers.{i}.mlp.gate"] = settings["num_experts"], E
            shapes |= {
                f"model.layers.{i}.self_attn.{x}_norm": (settings["head_dim"],) for x in "qk"
            }
    floats = {f"{name}.weight": checkpoint.weight(name, shape) for name, shape in shapes.items()}
    return settings | dict(quantization_config=config), *with_few(floats, few, writer)


def written_by_sources(
    format_: str, model: Model, settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns what `written` does of any family, whose modules of products are named "…proj"."""
    config, writer = FORMATS[format_]
    sources = model.sources(model.read(Settings(settings)))
    pairs = [
        (name.removesuffix(".weight"), shape)
        for source in jax.tree.leaves(sources, is_leaf=lambda node: isinstance(node, Source))
        for name, shape in zip(source.names, source.shapes, strict=True)
    ]
    few = {name: shape for name, shape in pairs if "proj" in name.rpartition(".")[2]}
    floats = {
        name if "bias" in name else f"{name}.weight": checkpoint.weight(name, shape)
        for name, shape in pairs
        if name not in few
    }
    return settings | dict(quantization_config=config), *with_few(floats, few, writer)


def with_few(
    floats: dict[str, np.ndarray], few: dict[str, tuple[int, int]], writer: Writer
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns tensors with those of modules, and floats with what these stand for."""
    tensors, floats = dict(floats), dict(floats)
    for name, (N, K) in few.items():
        readers = f"{name.rpartition('.')[0]} of {K}"  # modules that read the same inputs
        seed = dict(seed=crc(readers)) if getattr(writer, "func", writer) in SEEDED else {}
        made, weight = writer(np.random.default_rng(crc(name)), N, K, **seed)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in made.items()}
        floats[f"{name}.weight"] = weight
    return tensors, floats


def crc(text: str) -> int:
    return zlib.crc32(text.encode())


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits(model: Model, config: Any, params: Any, ids: jax.Array) -> jax.Array:
    """Returns the logits of one sequence, [T, V]."""
    inputs = Inputs(ids, jnp.arange(ids.size), jnp.full(ids.size, ids.size))
    none = (None,) * config.num_hidden_layers
    run = functools.partial(run_experts, note=unnoted)  # as in serving, not as in training
    hidden, _ = model.forward(config, params, none, inputs, replace(dense(1), experts=run))
    return model.logits(config, params, hidden)


def save(folder: Path, settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Writes a checkpoint folder."""
    folder.mkdir(exist_ok=True)
    tensors = {name: np.asarray(tensor) for name, tensor in tensors.items()}  # scalars too
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
