"""Loss of the embedded model in each format of quantised weights, on files that it has not seen.

    python benchmarks/quantized_loss.py --out benchmarks/quantized-loss-cpu.json

Weights are rounded to the nearest number, without calibration: GPTQ, AWQ and llm-compressor, which
choose numbers and scales by data, lose less in the same format. The text is that of the held-out
files of the standard library of the Python that runs this, the first tokens of each. In float32.
"""

import argparse
from collections.abc import Callable
import json
from pathlib import Path
import shutil
import sysconfig
import tempfile
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxrunner import LLM, embedded
from jaxrunner.train.corpus import read_corpus

FIRST = 1024  # tokens of each file
Array = np.ndarray
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NAMES = "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"


def main() -> None:
    """Measures the embedded model in each format; prints the figures as JSON, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    weights = load_file(embedded.PATH / "model.safetensors")
    found = {"bfloat16": measure(embedded.PATH)}
    for name in ("fp8", "int8"):
        found[f"quantization={name!r}"] = measure(embedded.PATH, quantization=name)
    for name, (config, write) in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder), weights, config, write)
            found[name] = measure(Path(folder))
        print(name, found[name])
    text = json.dumps(found, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")


def measure(folder: Path, **settings: Any) -> dict[str, Any]:
    """Returns loss and perplexity a token, and bytes of all weights."""
    sizes = dict(
        max_model_len=FIRST + 1, num_blocks=80, max_num_seqs=4, max_num_batched_tokens=1024
    )
    quiet = dict(use_tqdm=False, warm_up=False, dtype="float32")
    with LLM(folder, max_num_batched_tokens=FIRST, **sizes, **quiet, **settings) as llm:
        prompts = []
        for file in read_corpus(Path(sysconfig.get_path("stdlib"))):
            if file.held_out:
                ids = llm.get_tokenizer().encode(file.text)[:FIRST]
                prompts.append({"prompt_token_ids": ids})
        scores = llm.score_tokens(prompts, use_tqdm=False)
        loss = -np.concatenate([score.logprobs for score in scores]).astype(np.float64)
        return dict(
            loss=round(float(loss.mean()), 4), perplexity=round(float(np.exp(loss.mean())), 3),
            tokens=loss.size, weight_bytes=llm.memory_plan.weights,
        )  # fmt: skip


def save(folder: Path, weights: dict[str, Array], config: dict[str, Any], write: Callable) -> None:
    """Writes the embedded model with its products in a format."""
    tensors: dict[str, Array] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        made = write(weight.astype(np.float32)) if module.endswith("proj") else {"weight": weight}
        tensors |= {f"{module}.{suffix}": np.ascontiguousarray(x) for suffix, x in made.items()}
    save_file(tensors, folder / "model.safetensors")
    for name in NAMES:
        shutil.copyfile(embedded.PATH / name, folder / name)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | dict(quantization_config=config)))


def blocks(weight: Array) -> dict[str, Array]:
    """Rounds to fp8 with a scale for 128 x 128 weights."""
    N, K = weight.shape
    tiles = weight.reshape(N // 128, 128, K // 128, 128)
    scale = np.abs(tiles).max((1, 3)) / np.float32(448)
    numbers = (tiles / scale[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": numbers.reshape(N, K), "weight_scale_inv": scale}


def tensor(weight: Array) -> dict[str, Array]:
    """Rounds to fp8 with one scale."""
    scale = np.abs(weight).max() / np.float32(448)
    return {"weight": (weight / scale).astype(ml_dtypes.float8_e4m3fn), "weight_scale": scale}


def channels(weight: Array) -> dict[str, Array]:
    """Rounds to 8 bits with a scale an output."""
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    return {"weight": np.round(weight / scale).astype(np.int8), "weight_scale": scale}


def packed(numbers: Array) -> Array:
    """Packs numbers of 4 bits, [n, m], along the last axis."""
    words = numbers.astype(np.uint32).reshape(len(numbers), -1, 8) << np.arange(
        0, 32, 4, dtype=np.uint32
    )
    return np.bitwise_or.reduce(words, -1).view(np.int32)


def groups(weight: Array, size: int) -> tuple[Array, Array]:
    """Rounds to 0 to 15, less 8, with a scale for `size` inputs."""
    runs = weight.reshape(len(weight), -1, size)
    scale = np.abs(runs).max(-1) / np.float32(7.5)
    numbers = np.clip(np.round(runs / scale[..., None]), -8, 7) + 8
    return numbers.reshape(weight.shape), scale


def words(weight: Array, size: int) -> dict[str, Array]:
    """Returns the tensors of compressed-tensors in 4 bits."""
    numbers, scale = groups(weight, size)
    shape = np.array(weight.shape)
    return {"weight_packed": packed(numbers), "weight_scale": scale, "weight_shape": shape}


def gptq(weight: Array) -> dict[str, Array]:
    """Returns the tensors of GPTQ, version 1."""
    numbers, scale = groups(weight, 128)
    return {
        "qweight": packed(numbers).T, "scales": scale.T.astype(np.float16),
        "qzeros": packed(np.full(scale.T.shape, 7)),
        "g_idx": (np.arange(weight.shape[1]) // 128).astype(np.int32),
    }  # fmt: skip


def awq(weight: Array) -> dict[str, Array]:
    """Returns the tensors of AWQ: the range of each group from 0 to 15."""
    runs = weight.reshape(len(weight), -1, 128)
    low, high = np.minimum(runs.min(-1), 0), np.maximum(runs.max(-1), 0)
    scale = ((high - low) / 15).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scale), 0, 15)
    numbers = np.clip(np.round(runs / scale[..., None]) + zeros[..., None], 0, 15)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(x: Array) -> Array:
        return packed(x.T.reshape(x.shape[1], -1, 8)[..., order].reshape(x.shape[1], -1))

    numbers = numbers.reshape(weight.shape)
    return {"qweight": mixed(numbers), "qzeros": mixed(zeros), "scales": scale.T.astype(np.float16)}


def mxfp4(weight: Array) -> dict[str, Array]:
    """Rounds to e2m1 with a power of two for 32 inputs."""
    runs = weight.reshape(len(weight), -1, 32)
    exponent = np.floor(np.log2(np.abs(runs).max(-1))) - 2
    small = runs / np.exp2(exponent)[..., None]
    nearest = np.abs(np.abs(small)[..., None] - E2M1).argmin(-1)
    codes = (nearest + 8 * (small < 0)).reshape(weight.shape).astype(np.uint8)
    scale = (exponent + 127).astype(np.uint8)
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale}


def compressed(layout: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns the settings of compressed-tensors."""
    usual = dict(symmetric=True, dynamic=False)
    group = dict(targets=["Linear"], weights=usual | weights) | more
    return dict(
        quant_method="compressed-tensors", format=layout, config_groups={"0": group},
        ignore=["lm_head"],
    )  # fmt: skip


TOKENS = dict(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)
CHANNELS = dict(num_bits=8, type="int", strategy="channel")
FP8 = dict(quant_method="fp8", fmt="e4m3")
GROUPS = dict(num_bits=4, type="int", strategy="group")
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Array], dict[str, Array]]]] = {
    "fp8, 128 x 128 blocks": (FP8 | dict(weight_block_size=[128, 128]), blocks),
    "fp8, 128 x 128 blocks, inputs by 128": (
        FP8 | dict(weight_block_size=[128, 128], activation_scheme="dynamic"), blocks,
    ),
    "fp8, one scale, inputs by token": (FP8 | dict(activation_scheme="dynamic"), tensor),
    "compressed-tensors W8A8 int8": (
        compressed("int-quantized", CHANNELS, input_activations=TOKENS), channels
    ),
    "compressed-tensors W4A16, groups of 128": (
        compressed("pack-quantized", GROUPS | dict(group_size=128)), lambda w: words(w, 128),
    ),
    "compressed-tensors W4A16, groups of 32": (
        compressed("pack-quantized", GROUPS | dict(group_size=32)), lambda w: words(w, 32),
    ),
    "AWQ, groups of 128, zero points": (
        dict(quant_method="awq", bits=4, group_size=128, zero_point=True), awq,
    ),
    "GPTQ, groups of 128": (
        dict(quant_method="gptq", bits=4, group_size=128, sym=True, desc_act=False), gptq,
    ),
    "compressed-tensors MXFP4": (
        compressed(
            "mxfp4-pack-quantized",
            dict(num_bits=4, type="float", strategy="group", group_size=32),
        ),
        mxfp4,
    ),
}  # fmt: skip


if __name__ == "__main__":
    main()
