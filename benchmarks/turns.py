"""Two trees of jaxrunner measured by turns on one GPU: what a change costs or gains.

    git worktree add /tmp/old COMMIT
    python benchmarks/turns.py /tmp/old . --preset llama8b --parts ttft prefill --rounds 5 \\
        --engine gpu_memory_utilization=null num_blocks=640 --out turns.json

A process of each tree builds its engine and waits; then each runs a part while the others wait, in
reverse order every other round. All run on the same CPU cores, as sockets differ by more than most
changes do. Both engines must fit: XLA_PYTHON_CLIENT_MEM_FRACTION=0.46 gives each its half. A tree
that is named twice shows what figures differ by on their own. Where a machine's pace changes from
second to second, many short rounds tell more than few long ones, as for the host's time of a step:

    --parts host --rounds 60 --set host_steps=40 offline=[8,64,8]
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
import importlib
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
from typing import Any

CORES = 8


def main() -> None:
    """Measures trees by turns and prints the median of each figure, and ratios to the first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=Path, help="folders that hold jaxrunner")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--parts", nargs="+", default=["ttft", "prefill"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", nargs="+", default=[], metavar="NAME=JSON", help="of LLM")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=JSON", help="of the preset")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.preset, parsed(args.set), parsed(args.engine))
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--preset", args.preset]
    command += ["--engine", *args.engine] if args.engine else []
    command += ["--set", *args.set] if args.set else []
    workers = [
        subprocess.Popen(
            command, cwd=tree, env=os.environ | dict(PYTHONPATH="."), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for tree in args.trees
    ]  # fmt: skip
    found = [{key: [x] for key, x in flat(ask(worker))} for worker in workers]
    order = [*zip(workers, found, strict=True)]
    told: dict[str, Any] = {}
    for _ in range(args.rounds):
        for part in args.parts:
            for worker, figures in order:
                for key, x in flat(ask(worker, part)):
                    figures.setdefault(key, []).append(x)
        order.reverse()
        told = compared(found)
        if args.out:  # so a run that is ended keeps its rounds
            args.out.write_text(json.dumps(told, indent=1) + "\n")
    for worker in workers:
        worker.communicate("\n")
    for key, figure in told.items():
        print(key.ljust(44), *(f"{x:12.3f}" for x in figure["medians"]),
              *(f"{x:7.3f}" for x in figure["ratios"][1:]))  # fmt: skip


def compared(found: Sequence[Mapping[str, list[float]]]) -> dict[str, Any]:
    """Returns each figure that all trees have: its runs and median by tree, ratios to the first."""
    medians = [{key: statistics.median(xs) for key, xs in each.items()} for each in found]
    return {
        key: dict(
            medians=[each[key] for each in medians], runs=[each[key] for each in found],
            ratios=[each[key] / first for each in medians],
        )
        for key, first in medians[0].items() if first and all(key in each for each in medians)
    }  # fmt: skip


def ask(worker: Any, part: str | None = None) -> dict[str, Any]:
    """Returns what a worker measures of a part, or of its start.

    Raises:
      RuntimeError: the worker has ended.
    """
    if part is not None:
        worker.stdin.write(part + "\n")
        worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("{"):  # the rest is what benchmarks print
            return json.loads(line)
    raise RuntimeError(f"a worker ended, status {worker.wait()}: what it wrote says why")


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """Returns settings, NAME=JSON each, by their names."""
    return {name: json.loads(value) for name, _, value in (x.partition("=") for x in settings)}


def work(preset: str, changes: dict[str, Any], engine: dict[str, Any]) -> None:
    """Builds an engine of the tree in this folder, and measures the parts that it is asked for."""
    sys.path.insert(0, ".")
    try:
        found = [importlib.import_module(f"jaxrunner.bench.{x}") for x in ("presets", "workloads")]
    except ImportError:  # trees in which it was one file
        found = [importlib.import_module("jaxrunner.bench")] * 2
    presets, workloads = found
    bench = workloads.Bench(replace(presets.PRESETS[preset], **changes), **engine)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[:CORES]
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
    print(json.dumps(dict(startup_s=bench.startup_s)), flush=True)
    for line in sys.stdin:
        if not (part := line.strip()):
            break
        print(json.dumps(getattr(bench, part)()), flush=True)


def flat(told: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Yields figures and their names, those of floors left out."""
    for name, value in told.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        elif "floor" not in before:
            yield before + name, value


if __name__ == "__main__":
    main()
