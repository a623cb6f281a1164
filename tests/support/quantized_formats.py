"""Tensors of quantised checkpoints, and the weights that they stand for by each definition.

Written apart from the package: numpy, and loops where these say most. A writer takes a generator
and the shape of a module, [N, K], and returns its tensors by suffix, and its weights in float32.
What modules have in common that read the same inputs is drawn by `seed`, where a writer takes it.
"""

from collections.abc import Callable
import functools
from typing import Any

import ml_dtypes
import numpy as np

Written = tuple[dict[str, np.ndarray], np.ndarray]
Writer = Callable[..., Written]
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # which column of eight lies where in a word


def fp8_numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) * 100).clip(-448, 448).astype(E4M3)


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.002, 0.006, shape).astype(np.float32)


def fp8_block(
    rng: np.random.Generator, N: int, K: int, *, rows: int, cols: int, name: str,
    inputs: str = "", seed: int = 0,
) -> Written:  # fmt: skip
    numbers, scale = fp8_numbers(rng, N, K), scales(rng, -(-N // rows), -(-K // cols))
    weight = numbers.astype(np.float32)
    for i in range(N):
        for j in range(K):
            weight[i, j] *= scale[i // rows, j // cols]
    static = {inputs: of_inputs(seed)} if inputs else {}
    return {"weight": numbers, name: scale} | static, weight


def of_inputs(seed: int, shape: Any = ()) -> np.ndarray:
    """Returns a scale of inputs."""
    return np.full(shape, np.random.default_rng(seed).uniform(0.005, 0.02), np.float32)


def fp8_tensor(
    rng: np.random.Generator, N: int, K: int, *, static: bool, shape: Any = (),
    names: tuple[str, str] = ("weight_scale", "input_scale"), seed: int = 0,
) -> Written:  # fmt: skip
    numbers, scale = fp8_numbers(rng, N, K), scales(rng)
    tensors = {"weight": numbers, names[0]: scale.reshape(shape)}
    if static:
        tensors[names[1]] = of_inputs(seed, shape)
    return tensors, numbers.astype(np.float32) * scale


def channel(rng: np.random.Generator, N: int, K: int, *, kind: Any) -> Written:
    numbers = (
        fp8_numbers(rng, N, K) if kind is E4M3 else rng.integers(-128, 128, (N, K)).astype(np.int8)
    )
    scale = scales(rng, N, 1).astype(ml_dtypes.bfloat16)
    weight = numbers.astype(np.float32) * scale.astype(np.float32)
    return {"weight": numbers, "weight_scale": scale}, weight


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs numbers, [.., n], into int32 words, [.., n * bits / 32], the first in the low bits."""
    per_word = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word)))
    words = np.zeros((len(padded), padded.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        words |= padded[:, i::per_word].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def groups(K: int, size: int, seed: int, *, ordered: bool) -> np.ndarray:
    """Returns the group of each input."""
    ids = np.arange(K) // size
    return np.random.default_rng(seed).permutation(ids) if ordered else ids


def compressed(
    rng: np.random.Generator, N: int, K: int, *, bits: int, size: int, zero: bool, ordered: bool,
    seed: int = 0,
) -> Written:  # fmt: skip
    size = size or K
    half, g = 1 << bits - 1, groups(K, size, seed, ordered=ordered)
    numbers, scale = rng.integers(-half, half, (N, K)), scales(rng, N, -(-K // size))
    zeros = rng.integers(-half, half, scale.shape) if zero else np.zeros(scale.shape, int)
    weight = (numbers - zeros[:, g]).astype(np.float32) * scale[:, g]
    tensors = {
        "weight_packed": packed(numbers + half, bits), "weight_scale": scale,
        "weight_shape": np.array([N, K]),
    }  # fmt: skip
    if zero:  # along the outputs
        tensors["weight_zero_point"] = np.ascontiguousarray(packed((zeros + half).T, bits).T)
    if ordered:
        tensors["weight_g_idx"] = g.astype(np.int32)
    return tensors, weight


def stored_groups(rng: np.random.Generator, N: int, K: int, *, size: int, seed: int = 0) -> Written:
    numbers = rng.integers(-128, 128, (N, K)).astype(np.int8)
    scale, g = scales(rng, N, K // size), groups(K, size, seed, ordered=True)
    weight = numbers.astype(np.float32) * scale[:, g]
    tensors = {"weight": numbers, "weight_scale": scale, "weight_g_idx": g.astype(np.int64)}
    return tensors, weight


def mxfp4(rng: np.random.Generator, N: int, K: int) -> Written:
    codes, exponents = rng.integers(0, 16, (N, K)), rng.integers(116, 123, (N, K // 32))
    weight = np.array(E2M1, np.float32)[codes]
    weight *= np.repeat(2.0 ** (exponents - 127), 32, axis=1).astype(np.float32)
    halves = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return {"weight_packed": halves, "weight_scale": exponents.astype(np.uint8)}, weight


def awq(rng: np.random.Generator, N: int, K: int, *, size: int, zero: bool = True) -> Written:
    numbers, scale = rng.integers(0, 16, (K, N)), scales(rng, K // size, N).astype(np.float16)
    zeros = rng.integers(0, 16, scale.shape) if zero else np.full(scale.shape, 8)
    g = np.arange(K) // size
    weight = (numbers - zeros[g]).astype(np.float32) * scale.astype(np.float32)[g]

    def words(values: np.ndarray) -> np.ndarray:
        made = np.zeros((len(values), N // 8), np.uint32)
        for place, column in enumerate(AWQ_COLUMNS):
            made |= values[:, column::8].astype(np.uint32) << np.uint32(4 * place)
        return made.view(np.int32)

    tensors = {"qweight": words(numbers), "scales": scale}
    return tensors | ({"qzeros": words(zeros)} if zero else {}), np.ascontiguousarray(weight.T)


def gptq(
    rng: np.random.Generator, N: int, K: int, *, bits: int, size: int, sym: bool, v1: bool,
    ordered: bool = False, seed: int = 0,
) -> Written:  # fmt: skip
    half, g = 1 << bits - 1, groups(K, size, seed, ordered=ordered)
    numbers = rng.integers(0, 2 * half, (K, N))
    scale = scales(rng, -(-K // size), N).astype(np.float16)
    zeros = np.full(scale.shape, half) if sym else rng.integers(1, 2 * half, scale.shape)
    weight = (numbers - zeros[g]).astype(np.float32) * scale.astype(np.float32)[g]
    tensors = {
        "qweight": np.ascontiguousarray(packed(numbers.T, bits).T),
        "qzeros": packed(zeros - v1, bits), "scales": scale, "g_idx": g.astype(np.int32),
    }  # fmt: skip
    return tensors, np.ascontiguousarray(weight.T)


def _compressed(layout: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = dict(targets=["Linear"], weights=weights) | more
    return dict(
        quant_method="compressed-tensors", format=layout, config_groups=dict(group_0=group),
        ignore=["lm_head"], kv_cache_scheme=None, quantization_status="compressed",
    )  # fmt: skip


def _weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    asked = dict(num_bits=bits, type=kind, strategy=strategy, symmetric=True, dynamic=False)
    return (
        asked | dict(group_size=None, actorder=None, block_structure=None, observer="minmax") | more
    )


def _tokens(kind: str, **more: Any) -> dict[str, Any]:
    return (
        dict(num_bits=8, type=kind, strategy="token", dynamic=True, symmetric=True, observer=None)
        | more
    )


def _gptq(**settings: Any) -> dict[str, Any]:
    usual = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True)
    return usual | dict(damp_percent=0.01, lm_head=False) | settings


def _block(rows: int, cols: int, scheme: str | None) -> dict[str, Any]:
    return dict(
        quant_method="fp8", fmt="e4m3", weight_block_size=[rows, cols], activation_scheme=scheme
    )


of = functools.partial
SEEDED = fp8_block, fp8_tensor, compressed, gptq, stored_groups  # take `seed`
# By name: quantization_config, and the writer of a module.
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8 blocks": (
        _block(16, 32, "dynamic"), of(fp8_block, rows=16, cols=32, name="weight_scale_inv"),
    ),
    "fp8 blocks across heads, ragged": (
        _block(24, 40, "none"), of(fp8_block, rows=24, cols=40, name="weight_scale_inv"),
    ),
    "fp8 blocks, static": (
        _block(16, 32, "static"),
        of(fp8_block, rows=16, cols=32, name="weight_scale_inv", inputs="activation_scale"),
    ),
    "fp8 tensor, dynamic": (
        dict(quant_method="fp8", activation_scheme="dynamic"), of(fp8_tensor, static=False),
    ),
    "fp8 tensor, static": (
        dict(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"]),
        of(fp8_tensor, static=True),
    ),
    "fp8 tensor of transformers, static": (
        dict(quant_method="fp8", activation_scheme="static", weight_block_size=None),
        of(
            fp8_tensor, static=True, shape=(1, 1), names=("weight_scale_inv", "activation_scale")
        ),
    ),
    "compressed fp8 tensor, static": (
        _compressed(
            "float-quantized", _weights(8, "float", "tensor"),
            input_activations=_tokens("float", strategy="tensor", dynamic=False),
        ),
        of(fp8_tensor, static=True, shape=(1,)),
    ),
    "compressed fp8 channels, by token": (
        _compressed(
            "float-quantized", _weights(8, "float", "channel"), input_activations=_tokens("float")
        ),
        of(channel, kind=E4M3),
    ),
    "compressed fp8 blocks, by group": (
        _compressed(
            "float-quantized", _weights(8, "float", "block", block_structure=[16, 32]),
            input_activations=_tokens("float", strategy="group", group_size=32),
        ),
        of(fp8_block, rows=16, cols=32, name="weight_scale"),
    ),
    "compressed int8 channels": (
        _compressed("int-quantized", _weights(8, "int", "channel")), of(channel, kind=np.int8),
    ),
    "compressed int8 channels, by token": (
        _compressed(
            "int-quantized", _weights(8, "int", "channel"), input_activations=_tokens("int")
        ),
        of(channel, kind=np.int8),
    ),
    "compressed int8 groups, order": (
        _compressed(
            "int-quantized", _weights(8, "int", "group", group_size=32, actorder="group")
        ),
        of(stored_groups, size=32),
    ),
    "compressed packed 8 bits": (
        _compressed("pack-quantized", _weights(8, "int", "channel")),
        of(compressed, bits=8, size=0, zero=False, ordered=False),
    ),
    "compressed packed 8 bits, zero points": (
        _compressed("pack-quantized", _weights(8, "int", "channel", symmetric=False)),
        of(compressed, bits=8, size=0, zero=True, ordered=False),
    ),
    "compressed packed 4 bits": (
        _compressed("pack-quantized", _weights(4, "int", "group", group_size=32)),
        of(compressed, bits=4, size=32, zero=False, ordered=False),
    ),
    "compressed packed 4 bits, zero points, runs by weight": (
        _compressed(
            "pack-quantized",
            _weights(4, "int", "group", group_size=32, symmetric=False, actorder="weight"),
        ),
        of(compressed, bits=4, size=32, zero=True, ordered=False),
    ),
    "compressed packed 4 bits, zero points, order": (
        _compressed(
            "pack-quantized",
            _weights(4, "int", "group", group_size=32, symmetric=False, actorder="group"),
        ),
        of(compressed, bits=4, size=32, zero=True, ordered=True),
    ),
    "compressed mxfp4": (
        _compressed("mxfp4-pack-quantized", _weights(4, "float", "group", group_size=32)), mxfp4,
    ),
    "awq": (dict(quant_method="awq", bits=4, group_size=32, zero_point=True), of(awq, size=32)),
    "awq, groups across heads": (
        dict(quant_method="awq", w_bit=4, q_group_size=8, zero_point=False, version="gemm"),
        of(awq, size=8, zero=False),
    ),
    "gptq v1": (_gptq(), of(gptq, bits=4, size=32, sym=True, v1=True)),
    "gptq v2, zero points": (
        _gptq(sym=False, checkpoint_format="gptq_v2"),
        of(gptq, bits=4, size=32, sym=False, v1=False),
    ),
    "gptq v2 by format alone": (
        _gptq(sym=False, format="gptq_v2"), of(gptq, bits=4, size=32, sym=False, v1=False),
    ),
    "gptq, desc_act": (
        _gptq(sym=False, desc_act=True, group_size=24),
        of(gptq, bits=4, size=24, sym=False, v1=True, ordered=True),
    ),
    "gptq, desc_act, whole groups": (
        _gptq(desc_act=True), of(gptq, bits=4, size=32, sym=True, v1=True, ordered=True),
    ),
    "gptq 8 bits": (_gptq(bits=8), of(gptq, bits=8, size=32, sym=True, v1=True)),
}  # fmt: skip
