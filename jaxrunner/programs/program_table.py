"""Compiled programs by key: built ahead of time, looked up at run time, recorded in a ledger."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
import functools
import logging
import threading
import time
from typing import Any

from tqdm.auto import tqdm

from jaxrunner.device.lowering import (
    Build,
    Died,
    LoweringProcess,
    Spec,
    extra_bytes,
    lower,
    num_cores,
    run_eagerly,
)
from jaxrunner.device.program_key import Key
from jaxrunner.device.switch_interval import short_switch_interval
from jaxrunner.programs.program_cache import ProgramCache

logger = logging.getLogger(__name__)
Started = dict[Key, Future[None]]
LOADED = "from the cache"


@dataclass(frozen=True)
class Compilation:
    """One entry of the ledger."""

    key: Key
    seconds: float
    reason: str  # "warm-up", `LOADED`, or what differed from the programs there were


class ProgramTable:
    """The table of an engine's executables. cache: executables of earlier processes."""

    def __init__(
        self,
        spec: Callable[[Key], Spec],
        cache: ProgramCache | None = None,
        *,
        eager: bool = False,
        task: bytes | None = None,
        num_processes: int | None = None,
    ):
        """eager: nothing is compiled, and each operation of a function runs by itself.
        task: sets up a `LoweringProcess`, see `lowering_task`; None for no processes.
        num_processes: number of these; None for three quarters of the CPU cores.
        """
        self._eager = eager
        self._spec = functools.cache(spec)  # loading and compiling both read it
        self._cache = cache
        self._table: dict[Key, Any] = {}
        self._pending: Started = {}  # a key is in the table before it leaves here
        self._pool: ThreadPoolExecutor | None = None
        self._task = task
        self._num_processes = num_cores() * 3 // 4 if num_processes is None else num_processes
        self._processes: list[LoweringProcess] = []
        self._closed = False
        self.ledger: list[Compilation] = []
        self._warm = self._told = False  # whether warm-up ran, and whether a late build was logged
        self.strict = False  # whether a compilation after warm-up raises

    def warm_up(self, keys: Iterable[Key], *, progress: bool = False) -> None:
        """Loads `keys` from the cache, or compiles them."""
        keys = list(keys)
        self.wait(self.start(keys, keys), progress=progress)

    def start(self, keys: Iterable[Key], first: Iterable[Key]) -> Started:
        """Loads or compiles `keys` in threads, until `close`; returns at once.

        first: keys that are built before the others, the largest first, as these take longest.

        Returns the futures of those in `first` that are pending, since now or an earlier call.
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
            # All others come behind, in their order.
            new.sort(key=lambda key: -getattr(key.size, "num_tokens", 0) if key in first else 1)
            self._pending |= {key: started[key] for key in new}
            self._pool = ThreadPoolExecutor(max(2, num_cores()))  # one thread lowers
            self._pool.submit(self._build_all, self._pool, new)
        return {key: future for key, future in started.items() if key in first}

    def wait(self, started: Started, *, progress: bool = False) -> None:
        """Waits for programs; an error of one closes the table and is raised."""
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
        """Returns the keys of the executables in the table."""
        return list(self._table)

    def is_pending(self, key: Key | None = None) -> bool:
        """Whether a thread is building the program of `key`, or any program if None."""
        return bool(self._pending) if key is None else key in self._pending

    def close(self) -> None:
        """Stops loading and compiling, without waiting."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()

    def _build_all(self, pool: ThreadPoolExecutor, todo: list[Key]) -> None:
        with short_switch_interval():
            loading = {key: pool.submit(self._load, key) for key in todo}
            self._lower_all(pool, [key for key in todo if not self._is_done(key, loading[key])])
        pool.shutdown(wait=False)

    def _is_done(self, key: Key, loaded: Future[bool]) -> bool:
        """Waits for a lookup in the cache. Returns whether the program was there, or failed."""
        try:
            if not loaded.result():
                return False
        except Exception as error:  # of this program alone
            self._done(key, error)
            return True
        self._done(key)
        return True

    def _lower_all(self, pool: ThreadPoolExecutor, todo: list[Key]) -> None:
        """Lowers programs, and hands each to a thread that compiles it.

        This thread lowers small programs, and the first one while processes start; processes lower
        the others.
        """
        large = [key for i, key in enumerate(todo) if i and not self._spec(key).is_small]
        num = min(len(large), self._num_processes)
        if self._task is None or num < 2:  # a process needs seconds to start
            return self._lower_each(pool, iter(todo), [])
        elsewhere, left = iter(large), list[Key]()
        self._processes = [LoweringProcess(self._task) for _ in range(num)]
        threads = [
            threading.Thread(target=self._lower_each, args=(pool, elsewhere, left, p), daemon=True)
            for p in self._processes
        ]
        for thread in threads:
            thread.start()
        self._lower_each(pool, iter([key for key in todo if key not in set(large)]), [])
        for thread in threads:
            thread.join()
        self._lower_each(pool, iter([*left, *elsewhere]), [])  # keys that processes left

    def _lower_each(
        self, pool: ThreadPoolExecutor, keys: Iterator[Key], left: list[Key],
        process: LoweringProcess | None = None,
    ) -> None:  # fmt: skip
        """Lowers programs, here or in a process, which a program may kill: it is added to `left`.

        Several threads may share an iterator of a list.
        """
        for key in keys:
            start, spec = time.perf_counter(), self._spec(key)
            if self._closed:
                self._done(key, RuntimeError("no program is lowered after shutdown"))
                continue
            try:
                build = self._lower(key) if process is None else process.lower(key, spec)
            except Died as error:
                logger.debug("%s is not lowered beside this process: %s", key, error)
                left.append(key)
                break
            except Exception as error:  # of this program alone
                self._done(key, error)
                continue
            try:
                pool.submit(self._compile, key, start, build)
            except RuntimeError as error:  # the pool is closed, or Python ends
                self._done(key, error)
        if process is not None:
            process.close()

    def _compile(self, key: Key, start: float, build: Build) -> None:
        try:
            self._finish(key, start, build, "warm-up")
            self._done(key)
        except Exception as error:  # any error of XLA
            self._done(key, error)

    def _done(self, key: Key, error: Exception | None = None) -> None:
        future = self._pending.pop(key)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def report(self) -> str:
        """Returns how many programs there are, and where they come from, as a line of text."""
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
        """Returns the program with the most bytes beside its arguments, and these, if known."""
        sizes = [(key, extra_bytes(executable)) for key, executable in list(self._table.items())]
        key, size = max(sizes, key=lambda item: item[1], default=(None, 0))
        return None if key is None or not size else (key, size)

    def __getitem__(self, key: Key) -> Any:
        """Returns the executable of `key`, compiling it where warm-up did not.

        Raises:
          RuntimeError: it must be compiled and `strict` is set; names the field that differs.
        """
        if self._eager:
            return functools.partial(run_eagerly, self._spec(key))
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
        """Warns once, after warm-up, that a request waits for a rare program to compile."""
        if self._warm and not self._told:
            self._told = True
            logger.warning(
                "Compiling (%s), which warm-up leaves out as few requests need it: logprobs, "
                "penalties, grammars and the like. The first such requests wait, up to a minute "
                "each; LLM(warm_up='all') compiles all programs at the start", key,
            )  # fmt: skip

    def _load(self, key: Key) -> bool:
        """Loads an executable from the cache. Returns whether it was there."""
        start = time.perf_counter()
        if self._cache is None:
            return False
        spec = self._spec(key)
        executable = self._cache.load(key, spec.args, spec.out)
        if executable is not None:
            self._table[key] = executable
            self.ledger.append(Compilation(key, time.perf_counter() - start, LOADED))
        return executable is not None

    def _lower(self, key: Key) -> Build:
        return lower(self._spec(key))

    def _finish(self, key: Key, start: float, build: Build, reason: str) -> None:
        self._table[key] = build.executable
        self.ledger.append(Compilation(key, time.perf_counter() - start, reason))
        if self._cache is not None:
            self._cache.save(key, build.executable)

    def _difference(self, key: Key) -> str:
        """Returns the fields in which `key` differs from the most similar program."""
        sizes = [k.size for k in self._table if k.name == key.name]
        if not sizes:
            return f"program {key.name!r} was never compiled"

        def differing(size: Any) -> list[str]:
            pairs = zip(size._fields, size, key.size, strict=True)
            return [f"{name}={new}, not {old}" for name, old, new in pairs if old != new]

        return "; ".join(min(map(differing, sizes), key=len))
