"""Llama in numpy, float64, a whole sequence at a time: shares no line with the package."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Between = Callable[[np.ndarray, int], np.ndarray]  # (x [T, E], layer behind it) -> x


def unchanged(x: np.ndarray, layer: int) -> np.ndarray:
    return x


def logits(
    tensors: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    ids: list[int],
    before_layer: Between = unchanged,
) -> np.ndarray:
    """Returns the logits of each position, [T, V]."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    eps = settings["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][ids]
    for i in range(settings["num_hidden_layers"]):
        layer = {n.removeprefix(p): t for p in [f"model.layers.{i}."] for n, t in w.items()}
        x = before_layer(x, i)
        h = _norm(x, layer["input_layernorm.weight"], eps)
        x = x + _attention(layer, settings, h)
        h = _norm(x, layer["post_attention_layernorm.weight"], eps)
        gate, up = (h @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return _norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def greedy(of: Callable[[list[int]], np.ndarray], prompt: list[int], count: int) -> list[int]:
    """Returns the likeliest tokens, one by one. of: ids -> logits of each position."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(of(ids)[-1].argmax()))
    return ids[len(prompt) :]


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _attention(
    layer: Mapping[str, np.ndarray], settings: Mapping[str, Any], h: np.ndarray
) -> np.ndarray:
    T, D = len(h), settings["head_dim"]
    H, K = settings["num_attention_heads"], settings["num_key_value_heads"]
    q, k, v = (h @ layer[f"self_attn.{n}_proj.weight"].T for n in "qkv")
    q, k, v = _turn(q.reshape(T, H, D)), _turn(k.reshape(T, K, D)), v.reshape(T, K, D)
    k, v = k.repeat(H // K, 1), v.repeat(H // K, 1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(D)
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.einsum("hts,shd->thd", shares, v).reshape(T, H * D)
    return out @ layer["self_attn.o_proj.weight"].T


def _turn(x: np.ndarray) -> np.ndarray:
    T, _, D = x.shape
    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
