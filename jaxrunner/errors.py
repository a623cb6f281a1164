"""Error messages of requests, steps and engines, for their users. Knows no JAX."""

FATAL = (KeyboardInterrupt, SystemExit, GeneratorExit)  # raised to the caller, never swallowed
MAX_WORDS = 300  # characters of a message
NO_NUMBER = "the model gave NaN or infinite logits: look at its weights"
NO_CHOICE = (
    "its rules leave no token to sample: allowed_token_ids, bad_words, min_tokens, logits_fn and "
    "the grammar exclude each other"
)


class StepTimeout(RuntimeError):
    """A step exceeded its time limit; its device may hang."""


def in_words(error: BaseException) -> str:
    """Returns an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # In a message of several lines, such as one with a traceback, the last line has the cause.
    text = " ... ".join(line[:MAX_WORDS] for line in dict.fromkeys(lines[:1] + lines[-1:]))
    return f"{type(error).__name__}: {text}"


def of_foreign_code(error: BaseException) -> str:
    """Returns an error of foreign code in words. Rust's panics are no `Exception`, so callers catch
    `BaseException`.

    Raises:
      BaseException: `error`, if it is one of `FATAL`.
    """
    if isinstance(error, FATAL):
        raise error
    return in_words(error)


def of_step(error: BaseException) -> str:
    """Returns the error of the requests of a failed step."""
    words = f"a step failed: {in_words(error)}"
    if "RESOURCE_EXHAUSTED" in words:
        words += ": lower gpu_memory_utilization, max_num_seqs or max_num_batched_tokens"
    return words


def of_engine(error: BaseException, cause: BaseException) -> str:
    """Returns the error of all requests once a step lost the state and no new one can be made."""
    return (
        f"the device state was lost ({in_words(error)}) and cannot be made anew "
        f"({in_words(cause)}): close this engine and build another one"
    )


def of_hang(timeout_s: float | None) -> str:
    """Returns the error of all requests once a device has exceeded the time limit of a step."""
    return (
        f"the device did not end a step within step_timeout_s={timeout_s} and is not restarted, as "
        "it may hang: end this process; where steps take so long raise it, or None for no limit"
    )


def of_processes(error: BaseException) -> str:
    """Returns the error of all requests once a step of several processes has failed."""
    return (
        "a process of this mesh is gone, or failed in a step that all of them run "
        f"({in_words(error)}): end those that are left, and start all anew"
    )
