"""The progress bar and warnings of calls that answer prompts."""

from collections.abc import Callable, Iterable
import logging
from typing import Any

from tqdm.auto import tqdm

from jaxrunner.api.outputs import RequestOutput

logger = logging.getLogger(__name__)
Bar = bool | Callable[..., Any]  # whether there is one, or what makes it, called as tqdm is
REDRAW_S = 0.1  # a count of what is finished looks at every completion


def progress_bar(use_tqdm: Bar, **kwargs: Any) -> Any:
    """Returns tqdm's bar, a hidden one, or the user's own."""
    make = tqdm if isinstance(use_tqdm, bool) else use_tqdm
    return make(disable=not use_tqdm, **kwargs)


def tell_failures(outputs: Iterable[RequestOutput]) -> None:
    """Warns once of failed prompts, whose empty texts are easily overlooked."""
    outputs = list(outputs)
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        logger.warning(
            "%d of %d prompts failed, each with its `error`; the first: %s",
            len(errors), len(outputs), errors[0],
        )  # fmt: skip
