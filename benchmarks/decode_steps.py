"""What a decode step takes, one a launch and several, in one process by turns.

From the difference of two runs, of one token and of `--new` more; prefills of long batches mix with
decodes in it. `same` says whether all tokens were the same.

python benchmarks/decode_steps.py qwen06b --batches 1 8 64 --out FILE
python benchmarks/decode_steps.py tiny --batches 1 4 --new 16            on a CPU
"""

import argparse
import json
from pathlib import Path
from statistics import median

from jaxrunner.bench import PRESETS, Bench, machine, params


def run(bench: Bench, prompts: list, num_steps: int, new: int) -> tuple[float, list]:
    """Returns the milliseconds of a step, and the tokens."""
    bench.llm.update_config({"engine_config": {"num_decode_steps": num_steps}})
    short = bench.time(prompts, params(1))
    seconds = bench.time(prompts, params(1 + new)) - short
    outputs = bench.llm.generate(prompts, params(1 + new), use_tqdm=False)
    return 1e3 * seconds / new, [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    """Runs a preset and prints or writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=8, help="of a launch")
    parser.add_argument("--new", type=int, default=160, help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    most = max(args.batches)
    sizes = dict(decode_buckets=tuple(sorted(args.batches)), max_num_seqs=most)
    bench = Bench(PRESETS[args.preset], **sizes, num_decode_steps=args.steps)
    figures: dict[str, dict[str, float | bool]] = {}
    for batch in args.batches:
        prompts = [bench.prompt(bench.preset.context) for _ in range(batch)]
        times: dict[int, list[float]] = {1: [], args.steps: []}
        tokens = []
        for _ in range(1 + args.repeats):  # the first is a warm-up
            for num_steps, some in times.items():
                milliseconds, said = run(bench, prompts, num_steps, args.new)
                some.append(milliseconds)
                tokens.append(said)
        ms = [median(some[1:]) for some in times.values()]
        same = all(said == tokens[0] for said in tokens)
        figures[str(batch)] = {"one": ms[0], "several": ms[1], "same": same}
        print(batch, figures[str(batch)], flush=True)
    result = {"name": args.preset, **machine(), "steps": args.steps, "ms_per_step": figures}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
