"""Compiles a stranger's grammar in a process of its own, which may die of it. Knows no JAX.

llguidance's own limits bound neither time nor memory: a Lark grammar of 173 bytes takes it 44 s
and 4.7 GB. Run as a program, this file is that process, so it imports nothing of the package.
"""

from collections.abc import Iterator
import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
from typing import Any, NamedTuple

# It recurses along chains of definitions: 64 KiB of them need less than 64 MiB, more than a
# thread usually has.
STACK_BYTES = 2**28
# Masks are computed on the engine's thread: a step's fuel is about 20 ms, a request's lexer at
# most 200 MB. Messages come without the parser's state.
LIMITS = {"step_lexer_fuel": 50_000, "max_lexer_states": 100_000, "verbose_errors": False}
MAX_ERROR = 300  # characters


class Setup(NamedTuple):
    """The inputs of a trial besides the grammar."""

    tokenizer: str  # as in tokenizer.json
    n_vocab: int
    eos_token: int
    timeout_s: float
    max_bytes: int  # beyond the tokenizer's


class Trial:
    """The parent's handle of the trial process. It tries one grammar at a time."""

    def __init__(self, setup: Setup):
        self._setup = setup
        # Without -P the folder of this file would hide modules of Python's library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.died = not self._send(setup)

    def error(self, grammar: str) -> str:
        """Returns why a grammar does not compile, "" if it does."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline() if self._send(grammar) else b""
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self.died = True
        if self._process.wait() == -signal.SIGALRM:
            return f"compiling took longer than {self._setup.timeout_s} s: simplify it"
        size = self._setup.max_bytes // 2**20
        return f"compiling crashed, or took more than {size} MiB: simplify it"

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # a buffer that nobody reads any more
                pass

    def _send(self, value: Any) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True


def llguidance() -> Any:
    """Returns the module.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(
            "structured_outputs needs llguidance, which is not installed: pip install llguidance"
        ) from error
    return llguidance


def tokenizer(setup: Setup) -> Any:
    """Returns llguidance's tokenizer, which takes up to a second."""
    return llguidance().LLTokenizer(
        setup.tokenizer, n_vocab=setup.n_vocab, eos_token=setup.eos_token
    )


def matcher(tokens: Any, grammar: str) -> tuple[Any, str]:
    """Returns a matcher at the start of its grammar, and what is wrong with the grammar."""
    limits = llguidance().LLParserLimits(**LIMITS)
    made = llguidance().LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not made.is_error():
        made.compute_bitmask()  # notices what no text satisfies
    return made, one_line(made.get_error())


def one_line(error: str) -> str:
    """Returns the cause alone; the regex parser names it after the regex."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("error: ")] or lines[:1]
    line = " ".join(causes).replace("<non-verbose/>", "").strip()
    line = line.replace("NoExtensionBias", "no text satisfies it")
    return line if len(line) <= MAX_ERROR else f"{line[:MAX_ERROR]}..."


@contextlib.contextmanager
def deep_stacks() -> Iterator[None]:
    """Lets threads that start within recurse deeply; others that start meanwhile may too."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def answer_all() -> None:
    """Reads a `Setup`, then answers each grammar with its error."""
    setup = Setup(*json.loads(sys.stdin.readline()))
    tokens = tokenizer(setup)
    limit_memory(setup.max_bytes)
    for line in sys.stdin:
        # Its default action ends the process, also within llguidance.
        signal.setitimer(signal.ITIMER_REAL, setup.timeout_s)
        _, error = matcher(tokens, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(error), flush=True)


def limit_memory(max_bytes: int) -> None:
    """Lets this process grow by `max_bytes`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # others do not limit the address space
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + max_bytes, used + max_bytes))


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    worker = threading.Thread(target=answer_all)
    with deep_stacks():
        worker.start()
    worker.join()
