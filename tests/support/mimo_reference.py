"""MiMo and its layer that drafts in NumPy and float64, of the tensors of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

H, K, D, F, E, V, Y = 6, 2, 8, 44, 48, 61, 2
THETA, EPS = 500.0, 1e-4
SETTINGS: dict[str, Any] = dict(
    architectures=["MiMoForCausalLM"], model_type="mimo", hidden_size=E, intermediate_size=F,
    num_hidden_layers=Y, num_attention_heads=H, num_key_value_heads=K, vocab_size=V,
    max_position_embeddings=64, rms_norm_eps=EPS, rope_theta=THETA, attention_bias=True,
    num_nextn_predict_layers=1, tie_word_embeddings=False, use_mrope=False, dtype="float32",
    use_sliding_window=False, sliding_window=None, max_window_layers=Y,
)  # fmt: skip
MTP = "model.mtp_layers.0."


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tensors of a checkpoint, as its makers name them."""
    attn = dict(q_proj=(H * D, E), k_proj=(K * D, E), v_proj=(K * D, E), o_proj=(E, H * D))
    mlp = dict(gate_proj=(F, E), up_proj=(F, E), down_proj=(E, F))
    names = ("model.embed_tokens", (V, E)), ("lm_head", (V, E)), ("model.norm", (E,))
    shapes = {f"{name}.weight": shape for name, shape in names}
    for layer in (*(f"model.layers.{i}." for i in range(Y)), MTP):
        norms = "input_layernorm", "post_attention_layernorm"
        shapes |= {f"{layer}{name}.weight": (E,) for name in norms}
        shapes |= {f"{layer}self_attn.{name}.weight": shape for name, shape in attn.items()}
        shapes |= {f"{layer}self_attn.{name}.bias": attn[name][:1] for name in list(attn)[:3]}
        shapes |= {f"{layer}mlp.{name}.weight": shape for name, shape in mlp.items()}
    own = "token_layernorm", "hidden_layernorm", "final_layernorm"
    shapes |= {f"{MTP}{name}.weight": (E,) for name in own}
    shapes |= {f"{MTP}input_proj.weight": (E, 2 * E)}
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s, scale=0.4).astype(np.float32) for n, s in shapes.items()}


def save(folder: Path, w: dict[str, np.ndarray], **changes: Any) -> Path:
    """Writes a checkpoint folder, with `changes` of its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(w, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SETTINGS | changes), encoding="utf-8")
    return folder


def drafts(w: dict[str, np.ndarray], ids: list[int], count: int) -> list[int]:
    """Returns the likeliest drafts behind `ids`, of which the model has run all but the last."""
    w = {name: tensor.astype(np.float64) for name, tensor in w.items()}
    state, found = states(w, ids[:-1]), []
    for _ in range(count):
        following = w["model.embed_tokens.weight"][[*ids[1:], *found]]
        pair = (
            norm(state, w[f"{MTP}hidden_layernorm.weight"]),
            norm(following, w[f"{MTP}token_layernorm.weight"]),
        )
        x = np.concatenate(pair, -1) @ w[f"{MTP}input_proj.weight"].T
        out = norm(layer(w, MTP, x), w[f"{MTP}final_layernorm.weight"])
        found.append(int((w["lm_head.weight"] @ out[-1]).argmax()))
        state = np.concatenate([state, out[-1:]])  # which the layer reads at the next position
    return found


def states(w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Returns the sum behind the model's layers, [T, E], which its final norm reads."""
    x = w["model.embed_tokens.weight"][ids]
    for i in range(Y):
        x = layer(w, f"model.layers.{i}.", x)
    return x


def layer(w: dict[str, np.ndarray], prefix: str, x: np.ndarray) -> np.ndarray:
    """Runs a decoder layer on a sequence, [T, E], from position 0."""
    T, place = len(x), np.arange(len(x))
    half = np.exp(-np.log(THETA) * np.arange(D // 2) / (D // 2))
    turn = np.exp(1j * place[:, None] * half)[:, None]  # a pair of numbers is a complex one

    def heads(part: str, h: np.ndarray) -> np.ndarray:
        name = f"{prefix}self_attn.{part}_proj"
        h = (h @ w[f"{name}.weight"].T + w[f"{name}.bias"]).reshape(T, -1, D)
        if part == "v":
            return h
        turned = (h[..., : D // 2] + 1j * h[..., D // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    h = norm(x, w[f"{prefix}input_layernorm.weight"])
    q, k, v = (heads(part, h) for part in "qkv")
    out = np.zeros((T, H, D))
    for t in range(T):
        for i in range(H):
            scores = k[: t + 1, i * K // H] @ q[t, i] / np.sqrt(D)
            share = np.exp(scores - scores.max())
            out[t, i] = share / share.sum() @ v[: t + 1, i * K // H]
    x = x + out.reshape(T, -1) @ w[f"{prefix}self_attn.o_proj.weight"].T
    h = norm(x, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (h @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the root-mean-square norm over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
