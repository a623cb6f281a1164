"""Generated tokens a second on a CPU, against transformers with PyTorch on the same weights.

    python benchmarks/transformers_cpu.py --out benchmarks/transformers-cpu.json

Embedded model, float32, greedy, prompts of 32 tokens, 64 new ones; the two take turns, and the
median of 5 runs each counts.
"""

import argparse
import json
import os
from pathlib import Path
import platform
import statistics
import time

import jax
import numpy as np
import torch
import transformers

from jaxrunner import LLM, SamplingParams, embedded

PROMPT, NEW, RUNS, BATCHES = 32, 64, 5, (1, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        embedded.PATH, dtype=torch.float32
    ).eval()
    llm = LLM(
        str(embedded.PATH), dtype="float32", max_model_len=256, max_num_seqs=16,
        max_num_batched_tokens=512, decode_buckets=BATCHES, token_buckets=(32, 512),
        enable_prefix_caching=False, use_tqdm=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    rng, figures = np.random.default_rng(0), {}
    for batch in BATCHES:
        ids = rng.integers(1, 4096, (batch, PROMPT))
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]

        def ours(prompts=prompts) -> list[list[int]]:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        def theirs(ids=ids) -> list[list[int]]:
            out = reference.generate(
                torch.tensor(ids), attention_mask=torch.ones_like(torch.tensor(ids)),
                do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, top_p=None,
                temperature=None, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            return out[:, PROMPT:].tolist()

        times: dict[str, list[float]] = {"jaxrunner": [], "transformers": []}
        same = ours() == theirs()
        for _ in range(RUNS):
            for name, run in (("jaxrunner", ours), ("transformers", theirs)):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
        rates = {name: batch * NEW / statistics.median(t) for name, t in times.items()}
        rates["ratio"] = rates["jaxrunner"] / rates["transformers"]
        figures[f"batch {batch}"] = rates | {"same tokens": same}
    result = {
        "tokens_per_second": figures,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
