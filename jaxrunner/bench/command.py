"""Speed of one engine: decode, prefill, first token, offline throughput, host time, start-up.

    python -m jaxrunner.bench llama8b --out result.json
    python -m jaxrunner.bench tiny --parts decode,host --repeats 3
    python -m jaxrunner.bench llama8b --speculative 2.5 --parts decode
    python -m jaxrunner.bench llama8b --lora 8x16 --parts decode
    python -m jaxrunner.bench llama8b --engine tensor_parallel_size=2 num_decode_steps=4
    python -m jaxrunner.bench qwen06b --parts embed
    python -m jaxrunner.bench --kernels quantized

Weights are dummies, prompts are random ids, nothing stops before `max_tokens`. A decode step is
what one token more costs a batch that decodes together; beside it stands its floor, the bytes that
such a step has to move over 4.8 TB/s, with the formula as `decode_floor`. With `--speculative` an
EAGLE head of dummy weights drafts, and so many tokens a step are taken as right. With `--lora` each
request has one of so many adapters of a rank, on all products. `--kernels` profiles kernels on a
GPU, by default all, else those whose names begin so, and no model; the L2 cache is full of other
numbers before each call. What `--engine` sets of `LLM` goes over the preset's. The part `embed` is
alone: its model pools.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
import json
from pathlib import Path
import statistics
from typing import Any

from jaxrunner.bench import adapters, kernels
from jaxrunner.bench.byte_floor import FORMULA
from jaxrunner.bench.presets import PRESETS, Preset
from jaxrunner.bench.workloads import Bench, machine

PARTS = ("decode", "prefill", "ttft", "offline", "host")
POOLS = "embed"  # the part whose model pools


def main() -> None:
    """Runs a preset and prints or writes its figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrunner.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("preset", choices=PRESETS, nargs="?", default="tiny")
    parser.add_argument(
        "--kernels", nargs="?", const="", metavar="NAME", help="profile these alone"
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}, or {POOLS}"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each part, for medians")
    parser.add_argument("--speculative", type=float, metavar="LENGTH", help="tokens a step")
    parser.add_argument("--drafts", type=int, default=3, help="of a step, with --speculative")
    parser.add_argument("--adaptive", action="store_true", help="none where these do not pay")
    parser.add_argument("--lora", type=adapters.read, metavar="8x16", help="adapters, their rank")
    parser.add_argument(
        "--engine", type=setting, nargs="+", default=[], metavar="NAME=VALUE",
        help="arguments of LLM; values as in JSON",
    )  # fmt: skip
    parser.add_argument("--batches", type=int, nargs="+", help="of decode, the preset's by default")
    parser.add_argument("--requests", type=int, help="of offline, the preset's by default")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    if args.kernels is not None:
        _write(args.out, machine() | kernels.run(args.kernels))
        return
    drafted = args.speculative and (args.drafts, args.speculative, args.adaptive)
    parts = args.parts.split(",")
    if POOLS in parts and (len(parts) > 1 or drafted or args.lora):
        parser.error(f"--parts {POOLS} goes alone, without drafts and adapters: its model pools")
    engine = dict(args.engine)
    if POOLS in parts:
        engine |= dict(runner="pooling", num_decode_steps=1)
    preset = _preset(args.preset, args.batches, args.requests)
    bench = Bench(preset, speculative=drafted, lora=args.lora, **engine)
    result: dict[str, Any] = {"name": args.preset, **machine(), "startup_s": bench.startup_s}
    result["engine"] = engine
    result["programs"] = bench.llm.engine.runner.programs.report()
    result["speculative"], result["lora"] = drafted, args.lora
    result["num_decode_steps"] = bench.llm.engine.config.num_decode_steps
    result |= dict(decode_floor=FORMULA) if "decode" in parts else {}
    for part in parts:
        run: Callable[[], dict[str, Any]] = getattr(bench, part)
        result |= medians([run() for _ in range(args.repeats)])
        _write(args.out, result)  # after each part: a run that is cut short leaves what it has
    print(json.dumps(result, indent=1))


def _write(out: Path | None, result: dict[str, Any]) -> None:
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


def _preset(name: str, batches: list[int] | None, requests: int | None) -> Preset:
    """Returns a preset, with other batches of decode and requests of offline where given."""
    preset = PRESETS[name]
    if requests is not None:
        preset = replace(preset, offline=(requests, *preset.offline[1:]))
    if batches is None:
        return preset
    sampled = tuple(b for b in preset.sampled_batches if b in batches)
    return replace(preset, batches=tuple(batches), sampled_batches=sampled)


def medians(results: list[Any]) -> Any:
    """Returns the median of each figure of several like results."""
    if isinstance(results[0], dict):
        return {name: medians([result[name] for result in results]) for name in results[0]}
    return statistics.median(results)


def setting(text: str) -> tuple[str, Any]:
    """Returns the name and the value of `NAME=VALUE`; a value that is no JSON is text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
