"""The gain and the cost of drafts: the embedded model alone, and the verify step of a preset.

python benchmarks/drafts.py embedded --out FILE    tokens a second, batch 1, with its EAGLE-3 head
python benchmarks/drafts.py llama8b --out FILE     ms of a step of 1 + 3 tokens a request
"""

import argparse
from dataclasses import replace
from itertools import pairwise
import json
from pathlib import Path
from statistics import median
import time
from typing import Any

from acceptance import texts

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.bench.presets import PRESETS
from jaxrunner.bench.workloads import Arrivals, Bench, machine

EAGLE3 = dict(method="eagle3", model=str(embedded.EAGLE3_PATH), num_speculative_tokens=3)
NGRAM = dict(
    method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=3
)  # without weights: what such a step takes more is verification
KINDS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "no drafts, 8 steps a launch": dict(num_decode_steps=8),
    "eagle3": dict(speculative_config=EAGLE3),
    "eagle3, 4 steps a launch": dict(speculative_config=EAGLE3, num_decode_steps=4),
}
SIZES: dict[str, Any] = dict(
    max_num_seqs=1, max_num_batched_tokens=128, token_buckets=(128,), decode_buckets=(1,),
    max_model_len=512, gpu_memory_utilization=0.05, use_tqdm=False, cache_dir=None,
)  # fmt: skip
NUM_PROMPTS, PROMPT_LEN, NUM_TOKENS, NUM_RUNS = 8, 100, 256, 3


def embedded_tok_s() -> dict[str, dict[str, float]]:
    """Returns tokens a second of one request after another, by kind and temperature."""
    llms = {name: LLM(str(embedded.PATH), **SIZES, **more) for name, more in KINDS.items()}
    out: dict[str, dict[str, float]] = {}
    for temperature in (0.0, 0.7):
        runs: dict[str, list[float]] = {name: [] for name in KINDS}
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        for _ in range(NUM_RUNS):
            for name, llm in llms.items():
                assert llm.tokenizer is not None
                ids = [llm.tokenizer.encode(text)[:PROMPT_LEN] for text in texts()[:NUM_PROMPTS]]
                start = time.perf_counter()
                for prompt in ids:
                    llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
                seconds = time.perf_counter() - start
                runs[name].append(NUM_PROMPTS * NUM_TOKENS / seconds)
        out[f"temperature {temperature}"] = {name: median(of) for name, of in runs.items()}
    return out


def step_ms(name: str) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of a step, one token a request and 1 + 3, by batch size."""
    batches = tuple(batch for batch in PRESETS[name].batches if batch <= 64)
    out: dict[str, dict[str, float]] = {}
    for kind, more in {"1 token": {}, "4 tokens": dict(speculative_config=NGRAM)}.items():
        preset = replace(PRESETS[name], batches=batches)
        sizes: dict[str, Any] = dict(decode_buckets=batches, max_num_seqs=batches[-1])
        bench = Bench(preset, **sizes, **more)
        out[kind] = {}
        for batch in batches:
            bench.run(batch, preset.context, 2)
            with Arrivals(bench.llm.engine) as arrivals:
                bench.run(batch, preset.context, preset.new)
            at = [at for at, _ in arrivals.of_all(batch)]
            steps = [(after - before) * 1e3 for before, after in pairwise(at)]
            out[kind][f"b{batch}"] = median(steps)
        bench.llm.close()
    return out


def main() -> None:
    """Prints or writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("embedded", *PRESETS))
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    is_embedded = args.what == "embedded"
    figures = dict(tok_s=embedded_tok_s()) if is_embedded else dict(step_ms=step_ms(args.what))
    result = {"name": args.what, **machine(), **figures}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
