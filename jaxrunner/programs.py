"""Compiled programs by bucket: built ahead of time, looked up at run time, every miss recorded."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
import functools
import logging
import os
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from jaxrunner.program_cache import ProgramCache
from jaxrunner.program_key import Key
from jaxrunner.turns import short_turns

logger = logging.getLogger(__name__)
Started = dict[Key, Future[None]]
LOADED = "from the cache"


class Spec(NamedTuple):
    """What a program is compiled from. Warm-up and dispatch both read `args`."""

    function: Callable[..., Any]  # called as function(*args, **static)
    static: tuple[tuple[str, Any], ...]  # hashable
    args: tuple[Any, ...]  # abstract arguments
    out: Any = None  # a tree with the structure of what it returns
    donated: tuple[str, ...] = ("state",)
    options: tuple[tuple[str, str], ...] = ()  # XLA's


@dataclass(frozen=True)
class Compilation:
    """One entry of the ledger."""

    key: Key
    seconds: float
    reason: str  # "warm-up", `LOADED`, or what differed from the programs there were


class Programs:
    """The table of an engine's executables. `cache` has those of earlier processes."""

    def __init__(
        self,
        spec: Callable[[Key], Spec],
        cache: ProgramCache | None = None,
        *,
        eager: bool = False,
    ):
        """eager: nothing is compiled, and each operation of a function runs by itself."""
        self._eager = eager
        self._spec = functools.cache(spec)  # loading asks for it, and compiling
        self._cache = cache
        self._table: dict[Key, Any] = {}
        self._pending: Started = {}  # a key is in the table before it leaves here
        self._pool: ThreadPoolExecutor | None = None
        self.ledger: list[Compilation] = []
        self._warm = self._told = False  # whether programs were compiled ahead, and a late one told
        self.strict = False  # whether a compilation after warm-up raises

    def warm_up(self, keys: Iterable[Key], *, progress: bool = False) -> None:
        """Loads `keys` from the cache, or compiles them."""
        keys = list(keys)
        self.wait(self.start(keys, keys), progress=progress)

    def start(self, keys: Iterable[Key], first: Iterable[Key]) -> Started:
        """Has threads load or compile `keys`, until `close`; returns at once.

        first: those that come first, the largest before others, as they take longest.

        Returns those of them that are on their way, now or since an earlier call.
        """
        new, first = [], set(first)
        started: Started = {}
        for key in dict.fromkeys(keys):
            if (future := self._pending.get(key)) is not None:
                started[key] = future
            elif key not in self._table:
                new.append(key)
                started[key] = Future()
        if new:
            # The others keep their order, behind.
            new.sort(key=lambda key: -getattr(key.size, "num_tokens", 0) if key in first else 1)
            self._pending |= {key: started[key] for key in new}
            self._pool = ThreadPoolExecutor(1 + (os.cpu_count() or 1))
            self._pool.submit(self._build_all, self._pool, new)
        return {key: future for key, future in started.items() if key in first}

    def wait(self, started: Started, *, progress: bool = False) -> None:
        """Waits for programs; what one of them raises ends all."""
        self._warm = True
        silent = not (progress and started)
        bar = tqdm(total=len(started), desc="Compiling", unit="program", disable=silent)

        def tell(key: Key, _: Any) -> None:
            bar.set_postfix_str(str(key), refresh=False)
            bar.update()

        for key, future in started.items():
            future.add_done_callback(functools.partial(tell, key))
        try:
            with bar:
                for future in started.values():
                    future.result()
        except BaseException:
            self.close()
            raise

    def ready(self) -> list[Key]:
        """Returns the programs that are there."""
        return list(self._table)

    def is_pending(self, key: Key) -> bool:
        """Whether a thread is to bring a program."""
        return key in self._pending

    def close(self) -> None:
        """Ends what `start` has threads do, without waiting."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _build_all(self, pool: ThreadPoolExecutor, todo: list[Key]) -> None:
        with short_turns():
            self._lower_all(pool, todo)
        pool.shutdown(wait=False)

    def _lower_all(self, pool: ThreadPoolExecutor, todo: list[Key]) -> None:
        """Python lowers one program after the other; loading and compiling do not hold it up."""
        loading = {key: pool.submit(self._load, key) for key in todo}
        for i, key in enumerate(todo):
            start = time.perf_counter()
            try:
                build = None if loading[key].result() else self._lower(key)
            except Exception as error:  # of this program alone
                self._done(key, error)
                continue
            if build is None:
                self._done(key)
                continue
            try:
                pool.submit(self._compile, key, start, build)
            except RuntimeError as error:  # the pool is closed, or Python ends
                for left in todo[i:]:
                    self._done(left, error)
                return

    def _compile(self, key: Key, start: float, build: "_Build") -> None:
        try:
            self._finish(key, start, build, "warm-up")
            self._done(key)
        except Exception as error:  # whatever XLA says of it
            self._done(key, error)

    def _done(self, key: Key, error: Exception | None = None) -> None:
        future = self._pending.pop(key)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def report(self) -> str:
        """Says how many programs there are, and where they come from."""
        if self._eager:
            return "none: each operation runs by itself (enforce_eager)"
        loaded = [entry for entry in self.ledger if entry.reason == LOADED]
        seconds = max((entry.seconds for entry in self.ledger), default=0.0)
        text = f"{len(self.ledger)}, {len(loaded)} {LOADED}; the slowest took {seconds:.1f} s"
        if found := self.largest():
            key, size = found
            text += f", the largest takes {size / (1 << 20):.1f} MiB: {key}"
        return text + (f"; {len(self._pending)} more to come" if self._pending else "")

    def largest(self) -> tuple[Key, int] | None:
        """Returns the program that takes most beside its arguments, and the bytes, if any tells."""
        sizes = [(key, extra_bytes(executable)) for key, executable in list(self._table.items())]
        key, size = max(sizes, key=lambda item: item[1], default=(None, 0))
        return None if key is None or not size else (key, size)

    def __getitem__(self, key: Key) -> Any:
        """Returns the executable of `key`, compiling it where warm-up did not.

        Raises:
          RuntimeError: it must be compiled and `strict` is set; names the field that differs.
        """
        if self._eager:
            return functools.partial(_run_eagerly, self._spec(key))
        if (pending := self._pending.get(key)) is not None:
            pending.result()
        if key not in self._table:
            reason = self._difference(key)
            if self.strict:
                raise RuntimeError(f"no compilation is allowed after warm-up: {key.name}, {reason}")
            if not self._load(key):
                self._tell_of_late(key)
                start = time.perf_counter()
                self._finish(key, start, self._lower(key), reason)
        return self._table[key]

    def _tell_of_late(self, key: Key) -> None:
        """Says once why a request waits, where its user was told that programs are there."""
        if self._warm and not self._told:
            self._told = True
            logger.warning(
                "Compiling (%s), which warm-up leaves out, as few requests want it: logprobs, "
                "penalties, grammars and their like. The first ones wait, up to a minute each; "
                "LLM(warm_up='all') compiles all at the start", key,
            )  # fmt: skip

    def _load(self, key: Key) -> bool:
        """Takes an executable from the cache, if it is there."""
        start = time.perf_counter()
        if self._cache is None:
            return False
        spec = self._spec(key)
        executable = self._cache.load(key, spec.args, spec.out)
        if executable is not None:
            self._table[key] = executable
            self.ledger.append(Compilation(key, time.perf_counter() - start, LOADED))
        return executable is not None

    def _lower(self, key: Key) -> "_Build":
        spec = self._spec(key)
        leaves, treedef = jax.tree.flatten(spec.args)
        return _build(spec._replace(args=tuple(leaves), out=None), treedef)

    def _finish(self, key: Key, start: float, build: "_Build", reason: str) -> None:
        self._table[key] = build.executable
        self.ledger.append(Compilation(key, time.perf_counter() - start, reason))
        if self._cache is not None:
            self._cache.save(key, build.executable)

    def _difference(self, key: Key) -> str:
        """Says in which fields `key` differs from the program nearest to it."""
        sizes = [k.size for k in self._table if k.name == key.name]
        if not sizes:
            return f"program {key.name!r} was never compiled"

        def differing(size: Any) -> list[str]:
            pairs = zip(size._fields, size, key.size, strict=True)
            return [f"{name}={new}, not {old}" for name, old, new in pairs if old != new]

        return "; ".join(min(map(differing, sizes), key=len))


def output_bytes(executable: Any) -> int:
    """Returns the bytes of a program's outputs, but for those in place of an argument.

    0 where the backend does not tell, as of some executables that were loaded.
    """
    memory = executable.memory_analysis()
    return 0 if memory is None else memory.output_size_in_bytes - memory.alias_size_in_bytes


def extra_bytes(executable: Any) -> int:
    """Returns what a program takes beside its arguments: temporaries, and `output_bytes`."""
    memory = executable.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes + output_bytes(executable)


def _run_eagerly(spec: Spec, *args: Any) -> Any:
    with jax.disable_jit():
        return spec.function(*jax.tree.map(jnp.asarray, args), **dict(spec.static))


class _Build:
    """A program on its way from its spec to an executable."""

    def __init__(self, lowered: Any, options: dict[str, str]):
        self._lowered: Any = lowered
        self._options = options
        self._executable: Any = None
        self._lock = threading.Lock()

    @property
    def executable(self) -> Any:
        """Compiles, once."""
        with self._lock:
            if self._executable is None:
                self._executable = self._lowered.compile(self._options)
                self._lowered = None
            return self._executable


@functools.lru_cache(maxsize=512)
def _build(spec: Spec, treedef) -> _Build:
    """Lowers a function. Engines of equal sizes in one process share the result."""
    args = jax.tree.unflatten(treedef, spec.args)
    names = [name for name, _ in spec.static]
    jitted = jax.jit(spec.function, static_argnames=names, donate_argnames=spec.donated)
    return _Build(jitted.lower(*args, **dict(spec.static)), dict(spec.options))
