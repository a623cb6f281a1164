"""Seconds of Python and of XLA for programs of a start, and what XLA makes of them.

python benchmarks/start_programs.py granite4_h_tiny --layers 10 --out FILE
python benchmarks/start_programs.py granite4_h_tiny --layers 10 \\
    --option xla_gpu_experimental_enable_fusion_autotuner=False
python benchmarks/start_programs.py llama8b --all

By default a decode step of 64 requests and the largest step, each compiled alone: with its own
options, and without XLA's trials of products and fusions on the GPU. Programs never run, so that
neither weights nor a cache lie on the device.
"""

import argparse
from collections import Counter
from dataclasses import replace
import json
from pathlib import Path
import re
import tempfile
import time
from typing import Any

import jax
import numpy as np

from jaxrunner.bench.presets import PRESETS, Preset
from jaxrunner.bench.workloads import machine
from jaxrunner.device.buckets import step_buckets
from jaxrunner.device.lowering import Spec, extra_bytes
from jaxrunner.device.program_key import Key
from jaxrunner.device.program_spec import program_keys, program_spec
from jaxrunner.loading.loader import load
from jaxrunner.programs.build import Built
from jaxrunner.worker.sizing import plan_engine

WITHOUT_TRIALS: dict[str, Any] = {"xla_gpu_autotune_level": "0"}
ROWS, BLOCKS = 64, 2048  # requests of the decode step; of the KV cache


def built_of(preset: Preset) -> Built:
    """Returns what a preset's programs are made of."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(preset.config))
    sizes = {k: v for k, v in preset.engine.items() if k != "gpu_memory_utilization"}
    loaded = load(folder, load_format="dummy", dtype=sizes.pop("dtype", "auto"))
    return plan_engine(loaded, num_blocks=BLOCKS, **sizes).built


def with_layers(preset: Preset, num: int) -> Preset:
    """Returns a preset with its first layers alone."""
    config: dict[str, Any] = preset.config | dict(num_hidden_layers=num)
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num]
    return replace(preset, config=config)


def chosen(keys: list[Key]) -> list[Key]:
    """Returns the decode step of `ROWS` rows, or of most below, and the largest step."""
    steps = [key for key in keys if key.name == "step"]
    few = [key for key in steps if key.size.query_len and key.size.num_rows <= ROWS]
    return [max(few, key=lambda key: key.size.num_rows), steps[-1]]


def measured(spec: Spec, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the seconds of a program with XLA's options besides its own, and `counts`."""
    names, times = [name for name, _ in spec.static], [time.perf_counter()]
    jitted = jax.jit(spec.function, static_argnames=names, donate_argnames=spec.donated)
    traced = jitted.trace(*spec.args, **dict(spec.static))
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    on_gpu = jax.default_backend() != "cpu"  # the options are for a GPU
    compiled = lowered.compile(dict(spec.options) | options if on_gpu else {})
    times.append(time.perf_counter())
    # Behind the trials, as a process makes none twice; it finds our kernels compiled, some 3 s.
    lowered.compile(dict(spec.options) | options | WITHOUT_TRIALS if on_gpu else {})
    times.append(time.perf_counter())
    stages = "trace_s", "lower_s", "xla_s", "xla_s_without_trials"
    found: dict[str, Any] = dict(zip(stages, map(float, np.diff(times)), strict=True))
    print({stage: round(seconds, 1) for stage, seconds in found.items()}, flush=True)
    return found | counts(compiled.as_text() or "") | {"extra_mib": extra_bytes(compiled) >> 20}


def counts(hlo: str) -> dict[str, int]:
    """Returns how many instructions there are, also of kinds that take XLA long."""
    found = Counter(re.findall(r"^ +(?:ROOT )?%?[\w.\-]+ = .*? ([\w\-]+)\(", hlo, re.MULTILINE))
    products = re.findall(r"__triton_nested_gemm_fusion|__cublas\$(?:lt\$matmul|gemm)", hlo)
    kernels = re.findall(r'custom_call_target="mosaic_gpu', hlo)
    return dict(
        instructions=found.total(), fusions=found["fusion"], loops=found["while"],
        products=len(products), our_kernels=len(kernels),
    )  # fmt: skip


def main() -> None:
    """Compiles programs of a preset one by one, and prints or writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--layers", type=int, help="the first ones alone")
    parser.add_argument("--all", action="store_true", help="all programs of a start")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="of XLA")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    built = built_of(with_layers(preset, args.layers) if args.layers else preset)
    program = built.program
    buckets = step_buckets(program.engine, program.model.speculator)
    keys = program_keys(program, buckets, all_rules=False)
    options: dict[str, Any] = dict(option.split("=", 1) for option in args.option)
    result: dict[str, Any] = dict(machine()) | dict(name=args.preset, layers=args.layers)
    result |= dict(runs=built.choice.name, options=options, programs_of_a_start=len(keys))
    for key in keys if args.all else chosen(keys):
        print(key, flush=True)
        result[str(key)] = measured(program_spec(program, built.params, key), options)
        if args.out:  # a run that is cut short leaves what it has
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
