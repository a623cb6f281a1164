"""The attack as a command: each entry in a process of its own, which may die or hang."""

import argparse
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
import json
import os
from pathlib import Path
import platform
import re
import select
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests.attack.entries import ENTRIES
from tests.attack.harness import FINE, Result, attack

START_S, DEAD_S = 300.0, 45.0  # without a word of the process: it is ended
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Reads the command line. Returns 1 where there were findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--entry", action="append", choices=[*ENTRIES], help="all by default")
    parser.add_argument("--count", type=int, default=5000, help="bad values an entry")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at", type=int, default=0, help="the first case: to replay one, -count 1")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--show", type=int, default=8, help="groups of findings told an entry")
    parser.add_argument("--to", type=int, help=argparse.SUPPRESS)  # a file descriptor, of a child
    args = parser.parse_args()
    entries = args.entry or [*ENTRIES]
    if args.to is not None:
        return _child(entries[0], args)
    figures, found = {}, 0
    for name in entries:
        start = time.monotonic()
        results = list(watch(name, args.count, args.seed, args.at))
        figures[name] = summary(results) | dict(seconds=round(time.monotonic() - start))
        for line in findings(name, results, args.show):
            print(line, flush=True)
        print(row(name, figures[name]), flush=True)
        found += sum(figures[name]["findings"].values())
    print("\n" + "\n".join(row(name, figure) for name, figure in figures.items()))
    if args.json:
        args.json.write_text(json.dumps(told(args, figures), indent=1) + "\n")
    return int(found > 0)


def watch(name: str, count: int, seed: int, first: int) -> Iterator[Result]:
    """Yields what became of an entry's cases, of those too that ended the process."""
    with tempfile.TemporaryDirectory() as folder:
        while count > 0:
            last = first - 1
            for result in _processed(name, count, seed, first, Path(folder)):
                last = result.number
                count -= result.good is not True
                yield result
            if last < first:  # not one: it would be so for ever
                return
            first = last + 1


def _processed(name: str, count: int, seed: int, first: int, folder: Path) -> Iterator[Result]:
    """Yields what a process tells, until it has ended."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "tests.attack", f"--entry={name}", f"--count={count}",
               f"--seed={seed}", f"--at={first}", f"--to={write}"]  # fmt: skip
    settings = dict(
        JAX_COMPILATION_CACHE_DIR=str(folder / "jax"), TMPDIR=str(folder),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", HF_HUB_OFFLINE="1",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1", TOKENIZERS_PARALLELISM="false",
        XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    )  # fmt: skip
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | settings, pass_fds=[write], stdout=errors,
            stderr=errors, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    os.close(write)
    begun, ended = (first, ""), ""
    try:
        for word, *rest in _words(read):
            if word == "done":
                return
            if word == "silence":
                ended = f"no word for {rest[0]:.0f} s"
                break
            if word == "begun":
                begun = rest
            else:
                yield Result(*rest)
        if not ended:
            process.wait(DEAD_S)
    finally:
        process.kill()
        process.wait()
    words = log.read_text(errors="replace")[-600:]
    kind = "hang" if ended else "died"
    yield Result(begun[0], kind, None, begun[1], ended or f"{process.returncode}: {words}")


def _words(read: int) -> Iterator[Any]:
    """Yields what a process says, a line each; "silence" where it says nothing for too long."""
    left, wait_s = b"", START_S
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], wait_s)[0]:
                yield "silence", wait_s
                return
            if not (data := pipe.read(1 << 16)):
                return
            *lines, left = (left + data).split(b"\n")
            yield from map(json.loads, lines)
            wait_s = DEAD_S


def _child(name: str, args: argparse.Namespace) -> int:
    os.chdir(tempfile.gettempdir())  # where folders of any name may be made
    with os.fdopen(args.to, "w", buffering=1) as out:

        def tell(*words: Any) -> None:
            out.write(json.dumps(words) + "\n")

        results = attack(
            ENTRIES[name], args.count, seed=args.seed, first=args.at,
            before=lambda index, case: tell("begun", index, case.told),
        )  # fmt: skip
        for result in results:
            tell("result", *result)
        tell("done")
    os._exit(0)  # nothing of what is left is to be waited for


def summary(results: list[Result]) -> dict[str, Any]:
    """Returns the figures of an entry."""
    kinds = Counter(result.kind for result in results)
    return dict(
        thrown=sum(result.good is not True for result in results),
        refused=kinds["refused"],
        harmless=kinds["accepted"],
        findings={kind: n for kind, n in sorted(kinds.items()) if kind not in FINE},
    )


def row(name: str, figure: dict[str, Any]) -> str:
    """Returns an entry's line of the table."""
    found = ", ".join(f"{kind} {n}" for kind, n in figure["findings"].items()) or "none"
    return (
        f"{name:22} thrown {figure['thrown']:6}  refused by name {figure['refused']:6}  "
        f"harmless {figure['harmless']:5}  findings: {found}"
    )


def findings(name: str, results: list[Result], most: int) -> Iterator[str]:
    """Yields findings, alike ones together, the most frequent first."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.kind not in FINE:
            field = re.sub(r"=.*", "", result.told) if result.kind == "silent" else ""
            alike = re.sub(r"[\d'\"\[\]()]+|0x\w+|of \w+$", "", result.message[:70])
            groups.setdefault((result.kind, field + alike), []).append(result)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    for (kind, _), alike in ordered[:most]:
        one = min(alike, key=lambda r: len(r.told))
        numbers = ", ".join(str(r.number) for r in alike[:4])
        words = f"{one.told:.200} -> {one.message:.300}"
        yield f"  {name} {kind} x{len(alike)} (--at {numbers}): {words}"
    if len(groups) > most:
        yield f"  {name}: {len(groups) - most} groups more (--show)"


def told(args: argparse.Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    """Returns what a file of figures holds."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True)
    return dict(
        command=f"python -m tests.attack --count {args.count} --seed {args.seed}",
        commit=head.stdout.decode().strip(),
        python=platform.python_version(),
        jax=version("jax"),
        entries=figures,
    )
