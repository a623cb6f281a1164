"""Offline throughput of the engine's scheduler on a modelled H200, without a device.

python benchmarks/schedules.py              one GPU
python benchmarks/schedules.py --stages 2   a pipeline; --num-decode-steps 4: several a launch

A step takes what one of Llama-3-8B's shape takes by its padded tokens and its requests' contexts.
What `benchmarks/parallel-h200.json` (0a0ebf5) has of one GPU is met within 2%, of two stages within
6%.
"""

import argparse
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.bench.presets import PRESETS
from jaxrunner.caches.cache_group import CacheGroup
from jaxrunner.caches.full import FullAttention
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.request import Request, SchedulerOutput
from jaxrunner.scheduling.scheduler import Scheduler

PRESET = PRESETS["llama8b"]
TOKENS, ROWS = (512, 1024, 2048, 4096, 8192), (64, 128, 256)  # padded sizes of steps
NUM_SEQS, DEPTH = 256, 2  # requests of a step, launches ahead on each stage
HEAD_MS, COPY_MS = 0.6, 0.15  # the head and sampling; hidden states or tokens to another GPU
READ_MS = 1.0  # of the host, for a step's output


class Stages:
    """The GPUs of a pipeline, or one: when each has done what was launched."""

    def __init__(self, num: int) -> None:
        self.num, self.free_ms, self.busy_ms = num, [0.0] * num, [0.0] * num
        self._token_ms: dict[str, float] = {}  # when a request's last token is there

    def run(self, output: SchedulerOutput, now_ms: float) -> float:
        """Runs a launch; returns when its tokens are there."""
        at = max([now_ms, *(self._token_ms.get(name, 0.0) for name in output.requests)])
        each_ms = layers_ms(output) / self.num
        for stage in range(self.num):
            mine = each_ms + output.num_steps * HEAD_MS * (stage == self.num - 1)
            at = max(at, self.free_ms[stage]) + mine
            self.free_ms[stage], self.busy_ms[stage] = at, self.busy_ms[stage] + mine
            at += COPY_MS * (self.num > 1)
        self._token_ms |= dict.fromkeys(output.requests, at)
        return at


def layers_ms(output: SchedulerOutput) -> float:
    """Returns the milliseconds of all layers in a launch."""
    counts, several = output.num_scheduled_tokens, output.num_steps > 1
    decoding = [name for name, n in counts.items() if several or n == 1]
    contexts = sum(output.requests[name].num_computed for name in decoding)
    is_decode = len(decoding) == len(counts)
    num = len(counts) if is_decode else sum(counts.values())
    padded = next(size for size in (ROWS if is_decode else TOKENS) if size >= num)
    products = max(3.9 + 0.0118 * padded, 1 + 0.0222 * padded)
    return output.num_steps * (products + 3.33e-5 * contexts)


def run(
    lengths: Sequence[tuple[int, int]], num_stages: int, num_steps: int, launch_ms: float
) -> str:
    """Returns what requests of some lengths, (prompt, answer), take, in words.

    launch_ms: of the host, for the plan and the launches of a step.
    """
    group = CacheGroup(FullAttention(), (), 16, 0)
    scheduler = Scheduler(
        [group], [BlockPool(60_000 * num_stages, 16, 0)], max_num_seqs=NUM_SEQS * num_stages,
        max_num_batched_tokens=TOKENS[-1], max_model_len=8192, num_stages=num_stages,
        step_sizes=TOKENS,
    )  # fmt: skip
    for i, (prompt, answer) in enumerate(lengths):
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        scheduler.add(Request(str(i), [i] * prompt, params, 0, prompt + answer))
    stages, now_ms, due = Stages(num_stages), 0.0, Counter[str]()
    in_flight, between, told = deque[tuple[SchedulerOutput, float, dict[str, int]]](), [], {}
    while scheduler.has_unfinished:
        while len(in_flight) < DEPTH * num_stages:
            output = scheduler.schedule(num_steps)
            if not output.num_scheduled_tokens:
                break
            now_ms += launch_ms
            gains = {name: r.num_in_flight - due[name] for name, r in output.requests.items()}
            due += Counter(gains)
            in_flight.append((output, stages.run(output, now_ms), gains))
        output, at, gains = in_flight.popleft()
        now_ms = max(now_ms, at) + READ_MS
        due -= Counter(gains)
        scheduler.update(output, {name: [5] * n for name, n in gains.items() if n})
        for name in (name for name, n in gains.items() if n):
            between += [at - told[name]] if name in told else []
            told[name] = at
    end_ms = max(stages.free_ms)
    rate = sum(answer for _, answer in lengths) / end_ms * 1e3
    busy = ", ".join(f"{part / end_ms:.0%}" for part in stages.busy_ms)
    tails = ", ".join(f"{x:.0f}" for x in np.percentile(between, [50, 90, 99]))
    return f"{rate:,.0f} tokens/s; {tails} ms between tokens (50, 90, 99%); stages at work {busy}"


def main() -> None:
    """Prints a line for equal lengths, and one for mixed ones with the longest answers first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--num-decode-steps", type=int, default=1)
    parser.add_argument("--launch-ms", type=float, help="of the host, a step")
    args = parser.parse_args()
    launch_ms = args.launch_ms or (1.0 if args.stages == 1 else 6.0)
    num, length, new = PRESET.offline
    rng = np.random.default_rng(1)
    mixed = [rng.integers(*bounds, num * args.stages).tolist() for bounds in PRESET.mixed]
    longest = sorted(zip(*mixed, strict=True), key=lambda pair: -pair[1])
    for name, lengths in (("equal", [(length, new)] * num * args.stages), ("mixed", longest)):
        print(f"{name}: {run(lengths, args.stages, args.num_decode_steps, launch_ms)}")


if __name__ == "__main__":
    main()
