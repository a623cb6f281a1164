"""Whether the memory plan holds: fills the KV cache to its last block, runs the largest programs.

Weights are dummies. `unused_percent` is what of the requested memory was never in use, `fits`
whether no more than that was. Start it with XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 for the whole GPU.

python benchmarks/memory.py llama8b --out FILE
python benchmarks/memory.py llama8b --utilization 0.5 --cache-dir FOLDER
python benchmarks/memory.py tiny --num-blocks 64                           on a CPU
"""

import argparse
from dataclasses import asdict
import itertools
import json
from pathlib import Path
import time
from typing import Any

import jax

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.bench.presets import PRESETS
from jaxrunner.bench.workloads import SAMPLED, Bench, machine, params

NEW = 192  # tokens of a request that fills the cache: as many steps as all prompts take
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "logprobs=20": SAMPLED | dict(logprobs=20),
    "logprobs=-1": SAMPLED | dict(logprobs=-1),
}


class Memory:
    """Runs requests on an engine, and looks at its blocks and bytes."""

    def __init__(self, bench: Bench):
        self._bench, self._engine = bench, bench.llm.engine
        self._names = map(str, itertools.count())
        self.free = self._engine.config.num_blocks  # blocks, the fewest so far
        self.peaks: dict[str, int | None] = {"start": peak_bytes()}

    def fill(self) -> None:
        """Decodes more and longer requests than the cache holds."""
        c = self._engine.config
        length = min(c.max_model_len - NEW, max(c.max_model_len * 5 // 8, self._even))
        count = min(c.max_num_seqs, 1 + c.num_blocks * c.block_size * 5 // 4 // length)
        self.run("fill", count, length, params(NEW))

    @property
    def _even(self) -> int:
        """Tokens of each request, if all slots share the cache and a little more."""
        c = self._engine.config
        return c.num_blocks * c.block_size * 9 // 8 // c.max_num_seqs

    def run(self, name: str, count: int, length: int, wanted: SamplingParams) -> None:
        """Answers `count` prompts of random ids.

        Raises:
          RuntimeError: a request failed.
        """
        start, e = time.perf_counter(), self._engine
        for _ in range(count):
            e.add(next(self._names), self._bench.prompt(length)["prompt_token_ids"], wanted)
        while e.has_unfinished:
            for request, _ in e.step():
                if request.error is not None:
                    raise RuntimeError(f"{name}: {request.error}")
            self.free = min(self.free, *(pool.num_free for pool in e.pools))
        self.peaks[name] = peak_bytes()
        seconds = time.perf_counter() - start
        print(f"{name}: peak {self.peaks[name]} bytes, {seconds:.1f} s", flush=True)


def peak_bytes() -> int | None:
    """Returns the most bytes that JAX ever had in use; None where the device does not report it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def main() -> None:
    """Runs a preset and prints or writes what became of its plan as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--num-blocks", type=int, help="in place of the utilization")
    parser.add_argument("--cache-dir", help="where programs are kept; none: a cold start")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    size = dict(num_blocks=args.num_blocks, gpu_memory_utilization=args.utilization)
    size["gpu_memory_utilization" if args.num_blocks else "num_blocks"] = None
    bench = Bench(preset, cache_dir=args.cache_dir, **size)
    print(bench.llm.report(), flush=True)
    memory, slots = Memory(bench), bench.llm.engine.config.max_num_seqs
    memory.fill()
    for name, rule in KINDS.items():
        memory.run(name, slots, 64, params(3, **rule))
    memory.run("prompt_logprobs=-1", 1, preset.context, params(1, prompt_logprobs=-1))
    plan, peak = bench.llm.memory_plan, memory.peaks["prompt_logprobs=-1"]
    result: dict[str, Any] = {"name": args.preset, **machine(), "plan_bytes": asdict(plan)}
    result |= dict(startup_s=bench.startup_s, peaks=memory.peaks)
    result |= dict(programs=bench.llm.engine.runner.programs.report(), fewest_free=memory.free)
    if peak is not None:
        unused = 100 * (1 - peak / plan.requested)
        result |= dict(unused_percent=unused, fits=peak <= plan.requested)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
