"""Seconds to all programs and a first token, then milliseconds of the first tokens that follow.

python benchmarks/first_token.py llama8b --decode --out FILE
python benchmarks/first_token.py llama8b --cache-dir FOLDER    twice: a start from kept programs
"""

import argparse
import json
import os
from pathlib import Path
from statistics import quantiles

from jaxrunner.bench.presets import PRESETS
from jaxrunner.bench.workloads import Bench, machine


def since_start() -> float:
    """Returns the seconds that this process is old, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    booted = float(Path("/proc/uptime").read_text().split()[0])
    return booted - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Runs a preset and prints or writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--cache-dir", help="of programs; none by default")
    parser.add_argument("--prompts", type=int, default=60, help="of each length, one at a time")
    parser.add_argument("--decode", action="store_true", help="decode steps and prefills too")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    bench = Bench(PRESETS[args.preset], cache_dir=args.cache_dir)
    result = {"name": args.preset, **machine(), "all_programs_s": since_start()}
    bench.run(1, bench.preset.ttft[0], 1)
    result["first_token_s"] = since_start()
    for length in bench.preset.ttft:
        ms = [bench.run(1, length, 1) * 1e3 for _ in range(args.prompts)]
        low, middle, _ = quantiles(ms, n=4)
        result[f"ttft_ms_1x{length}"] = {"min": min(ms), "p25": low, "median": middle}
    if args.decode:
        result |= bench.decode() | bench.prefill()
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
