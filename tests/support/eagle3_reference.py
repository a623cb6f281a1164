"""An EAGLE-3 head in NumPy and float64, of the tensors of a checkpoint, and checkpoints for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support import tiny

H, K, D, F, E, V, DRAFT_V = 4, 2, 6, 28, 20, 61, 13
THETA, EPS = 500.0, 1e-4
TARGET = tiny.config(num_hidden_layers=7, tie_word_embeddings=True)  # E and V are its own
LAYER: dict[str, Any] = dict(
    hidden_size=E, intermediate_size=F, num_hidden_layers=1, num_attention_heads=H,
    num_key_value_heads=K, head_dim=D, vocab_size=V, max_position_embeddings=64,
    rms_norm_eps=EPS, rope_theta=THETA,
)  # fmt: skip
SPECFORGE = dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT_V) | LAYER
SPECULATORS = dict(
    architectures=["Eagle3DraftModel"], speculators_model_type="eagle3", draft_vocab_size=DRAFT_V,
    speculators_config={"algorithm": "eagle3"}, speculators_version="0.5.0",
    has_no_defaults_at_init=False, embed_requires_grad=True, target_hidden_size=None,
    tie_word_embeddings=False, norm_before_residual=True, norm_before_fc=True,
    eagle_aux_hidden_state_layer_ids=[1, 4, 6],
    transformer_layer_config=LAYER | dict(attention_bias=True, mlp_bias=True, model_type="llama"),
)  # fmt: skip
NORMED = dict(fc_norm=True, norm_output=True) | LAYER | dict(architectures=["Eagle3Speculator"])
AUX = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}}


def tensors(settings: dict[str, Any], *also: str, num_aux: int = 3) -> dict[str, np.ndarray]:
    """Returns random tensors of a head as its makers name them; also: optional ones."""
    layer = "layers.0." if "transformer_layer_config" in settings else "midlayer."
    sizes = settings.get("transformer_layer_config", settings)
    attn, mlp = f"{layer}self_attn.", f"{layer}mlp."
    shapes = {"fc.weight": (E, num_aux * E), "norm.weight": (E,)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"{layer}{name}.weight": (E,) for name in norms}
    outputs = {f"{attn}q_proj": (H * D, 2 * E), f"{attn}k_proj": (K * D, 2 * E)}
    outputs |= {f"{attn}v_proj": (K * D, 2 * E), f"{attn}o_proj": (E, H * D)}
    shapes |= {f"{name}.weight": shape for name, shape in outputs.items()}
    mlps = {f"{mlp}gate_proj": (F, E), f"{mlp}up_proj": (F, E), f"{mlp}down_proj": (E, F)}
    shapes |= {f"{name}.weight": shape for name, shape in mlps.items()}
    for names, flag in ((outputs, "attention_bias"), (mlps, "mlp_bias")):
        if sizes.get(flag):
            shapes |= {f"{name}.bias": shape[:1] for name, shape in names.items()}
    if settings.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_aux * E,)
    if settings.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (E,) for i in range(num_aux)}
    optional = {
        "lm_head.weight": (settings.get("draft_vocab_size", V), E), "embed_tokens.weight": (V, E),
        f"{attn}q_norm.weight": (D,), f"{attn}k_norm.weight": (D,),
    }  # fmt: skip
    shapes |= {name: shape for name, shape in optional.items() if name.endswith(also)}
    rng = np.random.default_rng(len(shapes))
    made = {n: rng.normal(size=s, scale=0.4).astype(np.float32) for n, s in shapes.items()}
    if "d2t" in also:
        ids = np.sort(rng.permutation(V)[:DRAFT_V])
        made |= {"d2t": ids - np.arange(DRAFT_V), "t2d": np.isin(np.arange(V), ids)}
    return made


def save(folder: Path, settings: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    """Writes a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def feature(settings: dict[str, Any], w: dict[str, np.ndarray], aux: list[np.ndarray]):
    """Returns the projection, [T, E], of states, [T, E] each."""
    if settings.get("fc_norm"):
        aux = [norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(aux)]
    x = np.concatenate(aux, -1)
    x = norm(x, w["input_norm.weight"]) if settings.get("norm_before_fc") else x
    return x @ w["fc.weight"].T


def forward(settings: dict[str, Any], w: dict[str, np.ndarray], embeddings, hidden):
    """Runs a sequence, [T, E] both, from position 0. Returns the normed output, and what is fed
    back, [T, E] both.
    """
    w = {n.removeprefix("midlayer.").removeprefix("layers.0."): a for n, a in w.items()}
    T, place = len(hidden), np.arange(len(hidden))

    def product(name: str, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def heads(part: str, x):
        x = product(f"self_attn.{part}_proj", x).reshape(T, -1, D)
        weight = w.get(f"self_attn.{part}_norm.weight")
        x = x if weight is None else norm(x, weight)
        angle = (place[:, None] * THETA ** -(np.arange(0, D, 2) / D))[:, None]
        a, b = np.split(x, 2, -1)
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        return x if part == "v" else np.concatenate(turned, -1)

    normed = norm(hidden, w["hidden_norm.weight"])
    x = np.concatenate([norm(embeddings, w["input_layernorm.weight"]), normed], -1)
    q, k, v = (heads(part, x) for part in "qkv")
    k, v = np.repeat(k, H // K, 1), np.repeat(v, H // K, 1)
    scores = np.exp(np.einsum("thd,shd->hts", q, k) * D**-0.5) * (place[:, None] >= place)
    out = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)
    hidden = normed if settings.get("norm_before_residual") else hidden
    hidden = hidden + product("self_attn.o_proj", out.reshape(T, -1))
    h = norm(hidden, w["post_attention_layernorm.weight"])
    gate = product("mlp.gate_proj", h)
    hidden = hidden + product(
        "mlp.down_proj", gate / (1 + np.exp(-gate)) * product("mlp.up_proj", h)
    )
    h = norm(hidden, w["norm.weight"])
    return h, h if settings.get("norm_output") else hidden


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
