"""What goes wrong with a request, a step or an engine, in words for its user. Knows no JAX."""

import os

FATAL = (KeyboardInterrupt, SystemExit, GeneratorExit)  # these end a program, and no request
MAX_WORDS = 300  # characters of a message
NO_NUMBER = "the model gave NaN or infinite logits: look at its weights"
NO_CHOICE = (
    "its rules leave no token to sample: allowed_token_ids, bad_words, min_tokens, logits_fn and "
    "the grammar exclude each other"
)


class Standing:
    """Whether an engine can still be used: by the process that made it, until it has ended."""

    def __init__(self):
        self._process = os.getpid()
        self.ended = ""  # why it has
        self.asleep = ""  # why no request can be added before it wakes up

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked off the engine's: the threads of JAX stayed there."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Refuses what would hang, or end in the depths of JAX.

        Raises:
          RuntimeError: the engine is another process's, was closed, or is beyond repair.
        """
        self.check_process()
        if self.ended:
            raise RuntimeError(self.ended)

    def check_awake(self) -> None:
        """Refuses requests. Raises what `check` does, and RuntimeError where the engine sleeps."""
        self.check()
        if self.asleep:
            raise RuntimeError(self.asleep)

    def check_process(self) -> None:
        """Refuses another process.

        Raises:
          RuntimeError: it is one.
        """
        if self.is_foreign:
            raise RuntimeError(
                f"this engine belongs to process {self._process}, and JAX does not survive a fork: "
                'start processes with multiprocessing\'s "spawn", and build an engine in each'
            )


def in_words(error: BaseException) -> str:
    """Returns an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of several lines, such as a traceback in a message, the last one has the cause.
    text = " ... ".join(line[:MAX_WORDS] for line in dict.fromkeys(lines[:1] + lines[-1:]))
    return f"{type(error).__name__}: {text}"


def of_foreign_code(error: BaseException) -> str:
    """Returns what code that is not ours raised; panics of Rust are no `Exception`.

    Raises:
      BaseException: it is one of `FATAL`.
    """
    if isinstance(error, FATAL):
        raise error
    return in_words(error)


def of_step(error: BaseException) -> str:
    """Returns what the requests of a step that failed are told."""
    words = f"a step failed: {in_words(error)}"
    if "RESOURCE_EXHAUSTED" in words:
        words += ": lower gpu_memory_utilization, max_num_seqs or max_num_batched_tokens"
    return words


def of_engine(error: BaseException, cause: BaseException) -> str:
    """Returns what all are told once a step has lost the state, and none can be made."""
    return (
        f"the device state was lost ({in_words(error)}) and cannot be made anew "
        f"({in_words(cause)}): close this engine and build another one"
    )
