"""Host time of a step by phase and batch size, and of the admission of many requests.

python benchmarks/host_time.py qwen06b                  the part "host" of jaxrunner.bench
python benchmarks/host_time.py tiny --no-device         what the host does, alone
"""

import argparse
from dataclasses import replace
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxrunner.bench.presets import PRESETS
from jaxrunner.bench.workloads import Bench, machine
from jaxrunner.device.packing import Layout, pack
from jaxrunner.program.bucket import Bucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import admission_spec, output_spec, plan_spec

SIZES: dict[str, Any] = dict(
    max_model_len=2048, num_blocks=8192, max_num_seqs=256, max_num_batched_tokens=8192,
    token_buckets=(128, 512, 1024, 2048, 4096, 8192), decode_buckets=(1, 8, 64, 256),
    warm_up=False,
)  # fmt: skip


class NoDevice:
    """Stands for an engine's programs: counts tokens in numpy, while the host waits."""

    def __init__(self, program: Program):
        self._program, slots = program, program.dims["R"] + 1
        self._total, self._computed, self._most = np.zeros((3, slots), np.int32)
        self._launched: list[functools.partial] = []

    strict = False

    def is_pending(self, key: Any) -> bool:
        """Returns False: all programs are there."""
        return False

    def __getitem__(self, key: Any) -> Any:
        return functools.partial(getattr(self, key.name), key.size)

    def admit(self, size: Any, state: Any, vector: np.ndarray) -> Any:
        """Queues an admission, and returns the state as it is."""
        self._launched.append(functools.partial(self._admit, size, vector))
        return state

    def step(self, size: Bucket, params: Any, state: Any, vector: np.ndarray) -> Any:
        """Queues a step. Returns the state as it is, and the output to come."""
        packed = Packed(self._launched)
        self._launched.append(functools.partial(self._step, size, vector, packed))
        return state, packed

    def _admit(self, size: Any, vector: np.ndarray) -> None:
        new, _ = Layout(admission_spec(self._program, size)).read(vector)
        self._total[new.slot], self._computed[new.slot] = new.total_len, new.num_computed
        self._most[new.slot] = new.max_len

    def _step(self, size: Bucket, vector: np.ndarray, packed: "Packed") -> None:
        plan = Layout(plan_spec(self._program, size)).read(vector)
        going = self._total[plan.slot] < self._most[plan.slot]
        self._computed[plan.slot] += np.where(going, plan.num_tokens, 0)
        due = going & (self._computed[plan.slot] >= self._total[plan.slot]) & (plan.num_tokens > 0)
        self._total[plan.slot] += due
        spec = output_spec(self._program, SampleSize(size.num_rows))
        no = np.zeros_like(due)
        output = replace(
            spec, token_ids=due[:, None].astype(np.int32), num_sampled=due.astype(np.int32),
            finished=no, not_finite=no, no_choice=no,
        )  # fmt: skip
        packed.words = pack(spec, output)


class Packed:
    """An output to come."""

    def __init__(self, launched: list[functools.partial]):
        self._launched, self.words = launched, np.zeros(0, np.int32)

    def copy_to_host_async(self) -> None:
        """Does nothing: the output is made on the host."""
        pass

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        while not self.words.size:
            self._launched.pop(0)()
        return self.words


def main() -> None:
    """Runs a preset, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--no-device", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    if args.no_device:
        preset = replace(preset, host_batches=(1, 8, 64, 256), offline=(512, 512, 1))
    bench = Bench(preset, **SIZES if args.no_device else {})
    if args.no_device:
        runner: Any = bench.llm.engine.runner
        runner.programs = NoDevice(runner.program)
    result = bench.host()
    for times in result.values():
        for name, phases in times.items():
            shown = (f"{phase} {value:.4g}" for phase, value in phases.items())
            print(f"{name:>8}: {', '.join(shown)}")
    if args.out:
        args.out.write_text(json.dumps({"name": args.preset, **machine(), **result}, indent=1))


if __name__ == "__main__":
    main()
