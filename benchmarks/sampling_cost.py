"""The cost of each sampling feature in a decode step, against greedy decoding of the same batch.

The context is short, 64 to 136 tokens, so that attention does not hide the difference.

python benchmarks/sampling_cost.py qwen06b --batches 1 64 256 --out FILE
"""

import argparse
from dataclasses import replace
import json
from pathlib import Path
from typing import Any

from jaxrunner.bench.presets import PRESETS
from jaxrunner.bench.workloads import Bench, machine

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": dict(temperature=0.8),
    "top_k, top_p": dict(temperature=0.8, top_k=50, top_p=0.95),
    "min_p": dict(temperature=0.8, min_p=0.05),
    "penalties": dict(temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.1),
    "logit_bias": dict(temperature=0.8, logit_bias={7: 1.0, 9: -1.0}),
    "allowed_token_ids": dict(temperature=0.8, allowed_token_ids=list(range(1000))),
    "bad_words": dict(temperature=0.8, bad_words=[[5, 6], [7]]),
    "logprobs=0": dict(temperature=0.8, logprobs=0),
    "logprobs=20": dict(temperature=0.8, logprobs=20),
}


def main() -> None:
    """Runs every kind at every batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    preset = replace(PRESETS[args.preset], context=64, short=8, long=72)
    bench = Bench(preset)
    p, out = bench.preset, {}
    for batch in args.batches:
        for name, rule in KINDS.items():
            bench.run(batch, p.context, 8, **rule)
            short, long = (
                min(bench.run(batch, p.context, new, **rule) for _ in range(2))
                for new in (p.short, p.long)
            )
            out[f"{name}, batch {batch}"] = (long - short) / (p.long - p.short) * 1e3
            print(f"{name}, batch {batch}: {out[f'{name}, batch {batch}']:.3f} ms", flush=True)
            result = {"name": args.preset, **machine(), "decode_ms_per_step": out}
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
