"""Which steps an offline run of mixed lengths is made of, and their time: `Bench.offline_mixed`.

python benchmarks/offline_steps.py qwen3_30b_a3b --out FILE
python benchmarks/offline_steps.py tiny        on a CPU

A step counts as its launch, from the tokens of the launch before it to its own.
"""

import argparse
from collections import defaultdict
import json
from pathlib import Path
import time
from typing import Any

from jaxrunner.bench.presets import PRESETS
from jaxrunner.bench.workloads import Bench, machine
from jaxrunner.device.buckets import choose
from jaxrunner.scheduling.request import SchedulerOutput


class Launches:
    """The steps of an engine while this is entered."""

    def __init__(self, bench: Bench):
        self._engine = bench.llm.engine
        self._runner = self._engine.runner
        self._step, self._read = self._runner.step, self._engine.read
        self.sizes: list[tuple[str, int]] = []  # kind, requests
        self.ends: list[float] = []

    def __enter__(self) -> "Launches":
        self._runner.step, self._engine.read = self._launched, self._arrived
        return self

    def __exit__(self, *_: Any) -> None:
        self._runner.step, self._engine.read = self._step, self._read

    def _launched(self, output: SchedulerOutput) -> Any:
        if counts := output.num_scheduled_tokens:
            self.sizes.append((self._kind(output), len(counts)))
        return self._step(output)

    def _kind(self, output: SchedulerOutput) -> str:
        several, counts = output.num_steps > 1, output.num_scheduled_tokens
        each = [1] * len(counts) if several else list(counts.values())
        bucket = choose(self._runner.buckets, each, several=several)
        if bucket.query_len:
            return f"{output.num_steps} x decode, up to {bucket.num_rows} requests"
        return f"with prompts, up to {bucket.num_tokens} tokens"

    def _arrived(self) -> None:
        self._read()
        self.ends.append(time.perf_counter())

    def table(self) -> dict[str, dict[str, float]]:
        """Returns by kind: launches, their seconds, milliseconds of one, requests on average."""
        spans = defaultdict[str, list[tuple[float, int]]](list)
        pairs = zip(self.ends, self.ends[1:], self.sizes[1:], strict=False)
        for before, end, (kind, requests) in pairs:
            spans[kind].append((end - before, requests))
        out = {}
        for kind, found in sorted(spans.items(), key=lambda of: -sum(s for s, _ in of[1])):
            seconds, num = sum(s for s, _ in found), len(found)
            mean = sum(n for _, n in found) / num
            out[kind] = dict(launches=num, s=seconds, ms=seconds / num * 1e3, requests=mean)
        return out


def main() -> None:
    """Runs a preset and prints or writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    bench = Bench(PRESETS[args.preset])
    bench.offline_mixed()
    with Launches(bench) as launches:
        figures = bench.offline_mixed()
    result = {"name": args.preset, **machine(), **figures, "launches": launches.table()}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
