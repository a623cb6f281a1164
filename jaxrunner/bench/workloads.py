"""The workloads of one engine: decode, prefill, first token, offline throughput, host time."""

import json
import math
from pathlib import Path
import platform
import tempfile
import time
from typing import Any

import jax
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.bench import adapters, host_time
from jaxrunner.bench.byte_floor import FORMULA, floor_ms
from jaxrunner.bench.presets import Preset
from jaxrunner.engine.engine import Engine, NewTokens
from jaxrunner.llm import LLM

SAMPLED = dict(temperature=0.8, top_k=50, top_p=0.95)
PERCENTILES = (50, 90, 99)


class Bench:
    """Runs the workloads of one preset."""

    def __init__(
        self, preset: Preset, *, speculative: tuple[int, float, bool] | None = None,
        lora: tuple[int, int] | None = None, **engine: Any,
    ):  # fmt: skip
        """speculative: drafts of a step, the tokens that a step gives on average, and whether steps
        may draft nothing. lora: a number of adapters, and their rank."""
        self.preset, self._ids = preset, np.random.default_rng(0)
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(preset.config))
        if speculative is not None:
            engine["speculative_config"] = _drafted(preset, folder / "eagle", *speculative)
        engine |= adapters.sizes(*lora) if lora else {}
        start = time.perf_counter()
        self.llm = LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True,
            enable_prefix_caching=False, **preset.engine | engine,
        )  # fmt: skip
        self.startup_s = time.perf_counter() - start
        self.adapters = adapters.add(self.llm, *lora) if lora else [None]

    def decode(self) -> dict[str, dict[str, float]]:
        """Returns milliseconds of a decode step by batch size, greedy and sampled, and their floor.

        From the first launch in which all requests of a batch get tokens to the last one; a batch
        that does not fit has no such launches, and is left out. The floor is that of a step without
        adapters; with drafts, and in a pipeline, there is none.
        """
        p, out, least = self.preset, dict[str, float](), dict[str, float]()
        middle, program = p.context + p.new // 2, self.llm.runner.program
        print(f"floor: {FORMULA}", flush=True)
        for batch in p.batches:
            for name, rule in (("greedy", {}), ("topk_topp", SAMPLED)):
                if rule and batch not in p.sampled_batches:
                    continue
                self.run(batch, p.context, 2, **rule)  # a program's first run sets up its graph
                with Arrivals(self.llm.engine) as arrivals:
                    self.run(batch, p.context, p.new, **rule)
                key = f"{name}_b{batch}_ctx{p.context}"
                launches = arrivals.of_all(batch)
                if len(launches) < 2:
                    print(f"{key}: left out, {batch} requests do not fit at once", flush=True)
                    continue
                (start, _), *launches = launches
                out[key] = (launches[-1][0] - start) / sum(n for _, n in launches) * 1e3
                told = f"{key}: {out[key]:.3f} ms a step"
                if not (program.num_drafts or program.stages):
                    least[key] = floor_ms(program, self.llm.params, batch, middle)
                    told += f", floor {least[key]:.3f} ({least[key] / out[key]:.0%})"
                print(told, flush=True)
        return {"decode_ms_per_step": out, "decode_floor_ms_per_step": least}

    def prefill(self) -> dict[str, float]:
        """Returns prompt tokens a second."""
        batch, length = self.preset.prefill
        self.run(batch // 2, length, 1)
        best = min(self.run(batch, length, 1) for _ in range(2))
        return {f"prefill_tok_s_{length}x{batch}": batch * length / best}

    def embed(self) -> dict[str, float]:
        """Returns tokens a second of texts that are embedded."""
        num, length = self.preset.embed
        prompts, best = [self.prompt(length) for _ in range(num)], math.inf
        self.llm.embed(prompts[: num // 4], use_tqdm=False)
        for _ in range(2):
            start = time.perf_counter()
            self.llm.embed(prompts, use_tqdm=False)
            best = min(best, time.perf_counter() - start)
        return {f"embed_tok_s_{num}x{length}": num * length / best}

    def ttft(self) -> dict[str, float]:
        """Returns milliseconds to the first token of one request, by prompt length."""
        best = {n: min(self.run(1, n, 1) for _ in range(5)) for n in self.preset.ttft}
        return {f"ttft_ms_1x{n}": seconds * 1e3 for n, seconds in best.items()}

    def offline(self) -> dict[str, Any]:
        """Returns output tokens a second over many requests, of equal and of mixed lengths."""
        num, length, new = self.preset.offline
        equal = num * new / self.run(num, length, new)
        return {f"offline_{num}x({length}+{new})_out_tok_s": equal} | self.offline_mixed()

    def offline_mixed(self) -> dict[str, Any]:
        """Returns output tokens a second over many requests of mixed lengths.

        Also milliseconds to the first token, from the call on, and from one delivery to a request
        to its next: of one token, or of several where a launch has many.
        """
        num, *_ = self.preset.offline
        ranges, rng = self.preset.mixed, np.random.default_rng(1)
        inputs, outputs = (rng.integers(*bounds, num) for bounds in ranges)
        prompts = [self.prompt(int(n)) for n in inputs]
        with Arrivals(self.llm.engine) as arrivals:
            start = time.perf_counter()
            seconds = self.time(prompts, [params(int(n)) for n in outputs])
        name, times = f"offline_mixed_{num}", arrivals.by_request()
        return {
            f"{name}_out_tok_s": int(outputs.sum()) / seconds,
            f"{name}_ttft_ms": percentiles_ms([at[0] - start for at in times]),
            f"{name}_itl_ms": percentiles_ms(np.concatenate([np.diff(at) for at in times])),
        }

    def host(self) -> dict[str, dict[str, dict[str, float]]]:
        """Returns what the host does, by phase: microseconds of a decode step by batch size, and
        milliseconds of one `generate` for one token of many prompts."""
        p, times = self.preset, dict[str, dict[str, float]]()
        num, length, _ = p.offline
        for batch in p.host_batches:
            prompts = [self.prompt(min(64, p.context)) for _ in range(batch)]
            ahead = 4 * self.llm.engine.config.num_decode_steps
            wanted = params(p.host_steps + batch + 16 + ahead)
            times[f"b{batch}"] = host_time.decode_us(self.llm, prompts, wanted, p.host_steps)
            print(f"host, batch {batch}: {times[f'b{batch}']['host']:.0f} us a step", flush=True)
        prompts = [self.prompt(length) for _ in range(num)]
        admission = host_time.generate_ms(self.llm, prompts, params(1))
        return {
            "host_us_per_step": times,
            "host_ms_per_admission": {f"{num}x{length}": admission},
        }

    def run(self, batch: int, length: int, new: int, **rule: Any) -> float:
        """Returns the seconds of one `generate` over random prompts of one length."""
        return self.time([self.prompt(length) for _ in range(batch)], params(new, **rule))

    def prompt(self, length: int) -> dict[str, list[int]]:
        """Returns a prompt of random ids."""
        ids = self._ids.integers(10, self.preset.config["vocab_size"] - 10, length)
        return {"prompt_token_ids": ids.tolist()}

    def time(self, prompts: list, sampling_params: Any) -> float:
        """Returns the seconds of one `generate`."""
        start = time.perf_counter()
        each = [self.adapters[i % len(self.adapters)] for i in range(len(prompts))]
        outputs = self.llm.generate(
            prompts, sampling_params, lora_request=each, use_tqdm=False, on_error="raise"
        )
        seconds = time.perf_counter() - start
        errors = [output.error for output in outputs if output.error is not None]
        assert not errors, errors[0]
        return seconds


def _drafted(
    preset: Preset, folder: Path, num_drafts: int, length: float, adaptive: bool
) -> dict[str, Any]:
    """Returns a `speculative_config` of an EAGLE head of dummy weights."""
    folder.mkdir()
    one = preset.config | dict(architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    (folder / "config.json").write_text(json.dumps(one))
    number: dict[str, Any] = dict(num_speculative_tokens=num_drafts)
    if adaptive:
        number = dict(num_speculative_tokens="auto", max_num_speculative_tokens=num_drafts)
    return number | dict(
        method="eagle", model=str(folder), rejection_sample_method="synthetic",
        synthetic_acceptance_length=length,
    )  # fmt: skip


class Arrivals:
    """When an engine's requests got tokens, while this is entered."""

    def __init__(self, engine: Engine):
        self._engine, self._step = engine, engine.step
        # Few objects: thousands that stay would bring on a full garbage collection, 0.2 s.
        self._steps: list[tuple[float, list[str], list[int]]] = []

    def __enter__(self) -> "Arrivals":
        self._engine.step = self._timed
        return self

    def __exit__(self, *_: Any) -> None:
        self._engine.step = self._step

    def _timed(self) -> NewTokens:
        gained = self._step()
        at, new = time.perf_counter(), [(r.request_id, len(t)) for r, t in gained if t]
        self._steps.append((at, [request for request, _ in new], [count for _, count in new]))
        return gained

    def of_all(self, batch: int) -> list[tuple[float, float]]:
        """Returns when, in seconds, launches ended that gave `batch` requests tokens, and how many
        each got on average."""
        return [(at, sum(n) / batch) for at, _, n in self._steps if len(n) == batch]

    def by_request(self) -> list[list[float]]:
        """Returns the times, in seconds, at which each request got tokens."""
        times: dict[str, list[float]] = {}
        for at, requests, _ in self._steps:
            for request in requests:
                times.setdefault(request, []).append(at)
        return list(times.values())


def params(new: int, **rule: Any) -> SamplingParams:
    """Returns greedy parameters, or those of `rule`, for `new` tokens that nothing stops."""
    rule = {"temperature": 0.0} | rule
    return SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, **rule)


def percentiles_ms(seconds: Any) -> dict[str, float]:
    """Returns percentiles of some seconds, in milliseconds."""
    values = np.percentile(seconds, PERCENTILES) * 1e3
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}


def machine() -> dict[str, str]:
    """Returns what figures must be quoted with."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
