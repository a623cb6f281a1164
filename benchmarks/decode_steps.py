"""The time of a decode step, one a launch and several, in one process by turns: `Bench.decode`.

python benchmarks/decode_steps.py qwen06b --batches 1 8 64 --out FILE
python benchmarks/decode_steps.py tiny --batches 1 4       on a CPU
"""

import argparse
from dataclasses import replace
import json
from pathlib import Path
from statistics import median

from jaxrunner.bench.presets import PRESETS
from jaxrunner.bench.workloads import Bench, machine


def main() -> None:
    """Runs a preset and prints or writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=8, help="of a launch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    batches = tuple(sorted(args.batches))
    preset = replace(PRESETS[args.preset], batches=batches, sampled_batches=())
    bench = Bench(
        preset, decode_buckets=batches, max_num_seqs=batches[-1], num_decode_steps=args.steps
    )
    runs: dict[int, list[dict[str, float]]] = {1: [], args.steps: []}
    for _ in range(args.repeats):
        for num_steps, figures in runs.items():
            bench.llm.update_config({"engine_config": {"num_decode_steps": num_steps}})
            figures.append(bench.decode()["decode_ms_per_step"])
    ms = {n: {name: median(run[name] for run in of) for name in of[0]} for n, of in runs.items()}
    result = {"name": args.preset, **machine(), "ms_per_step_by_num_decode_steps": ms}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
