"""Tokens a second on a CPU, against transformers with PyTorch on the same weights.

    python benchmarks/transformers_cpu.py --out benchmarks/transformers-cpu.json

float32, greedy; the two take turns, and the median of the runs counts. Decoding: the embedded
model, prompts of 32 tokens, 64 new ones. Prefill: random weights of SmolLM2-135M's shape and all
defaults, prompts of 1,024 tokens, one new one.
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import platform
import shutil
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
import torch
import transformers

from jaxrunner import LLM, SamplingParams, embedded

PROMPT, NEW, RUNS, BATCHES = 32, 64, 5, (1, 16)
PREFILL, PREFILL_RUNS = 1024, 11
SMOLLM2_135M: dict[str, Any] = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
    tie_word_embeddings=True, rms_norm_eps=1e-5,
)  # fmt: skip


def main() -> None:
    """Measures decode and prefill; prints the figures as JSON, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = decode() | prefill(Path(folder))
    result = {
        "tokens_per_second": figures,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def cpu_name() -> str:
    """Returns the processor's name; on Linux its family and model too, by which EPYCs differ."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    told = {name.strip(): value.strip() for name, _, value in lines}
    names = ("model name", "cpu family", "model")
    return ", ".join(f"{name} {told[name]}" for name in names if name in told)


def decode() -> dict[str, Any]:
    """Measures the tokens that decoding writes."""
    reference = load_reference(embedded.PATH)
    llm = LLM(
        str(embedded.PATH), dtype="float32", max_model_len=256, max_num_seqs=16,
        max_num_batched_tokens=512, decode_buckets=BATCHES, token_buckets=(32, 512),
        enable_prefix_caching=False, use_tqdm=False,
    )  # fmt: skip
    rng, figures = np.random.default_rng(0), {}
    for batch in BATCHES:
        ids = rng.integers(1, 4096, (batch, PROMPT))
        figures[f"decode, batch {batch}"] = compare(llm, reference, [ids], NEW, batch * NEW, RUNS)
    return figures


def prefill(folder: Path) -> dict[str, Any]:
    """Measures the prompt tokens that are read; each run has a prompt of its own."""
    config = transformers.LlamaConfig(**SMOLLM2_135M)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(embedded.PATH) / name, folder)
    llm, reference = LLM(str(folder), use_tqdm=False), load_reference(folder)
    prompts = np.random.default_rng(0).integers(1, 49152, (PREFILL_RUNS + 1, 1, PREFILL))
    figures = compare(llm, reference, list(prompts), 1, PREFILL, PREFILL_RUNS)
    return {f"prefill, {PREFILL:,} tokens": figures}


def load_reference(folder: Any) -> Any:
    """Returns the model of transformers in a folder, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def compare(
    llm: LLM, reference: Any, prompts: list[np.ndarray], new: int, count: int, runs: int
) -> dict[str, Any]:
    """Returns the tokens a second of both: `count` in a run of the next of `prompts`, [B, T]."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)

    def ours(ids: np.ndarray) -> list[list[int]]:
        asked = [{"prompt_token_ids": row.tolist()} for row in ids]
        return [
            output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)
        ]

    def theirs(ids: np.ndarray) -> list[list[int]]:
        out = reference.generate(
            torch.tensor(ids), attention_mask=torch.ones_like(torch.tensor(ids)), do_sample=False,
            min_new_tokens=new, max_new_tokens=new, top_p=None, temperature=None,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    both: dict[str, Callable[[np.ndarray], list[list[int]]]] = dict(
        jaxrunner=ours, transformers=theirs
    )
    same = ours(prompts[0]) == theirs(prompts[0])
    times: dict[str, list[float]] = {name: [] for name in both}
    for i in range(runs):
        for name, run in both.items():
            start = time.perf_counter()
            run(prompts[(i + 1) % len(prompts)])
            times[name].append(time.perf_counter() - start)
    rates = {name: count / statistics.median(t) for name, t in times.items()}
    ratio = rates["jaxrunner"] / rates["transformers"]
    return rates | {"ratio": ratio, "same tokens": same}


if __name__ == "__main__":
    main()
