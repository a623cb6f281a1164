"""The dtype that a model computes in, where its user or its checkpoint leaves that open."""

import logging

import jax

from jaxrunner.config import check_dtype

logger = logging.getLogger(__name__)

CPU_DTYPE = "float32"  # others take XLA 9 to 300 times as long there


def choose_dtype(asked: str, stored: str) -> str:
    """Returns the dtype of weights and activations; "auto" is the checkpoint's, float32 on a CPU.

    On a CPU it says in one line what is not as the checkpoint, or slow.

    Raises:
      ValueError: `asked` is no dtype.
    """
    dtype = stored if asked == "auto" else check_dtype("dtype", asked)
    if jax.default_backend() != "cpu" or dtype == CPU_DTYPE:
        return dtype
    if asked == "auto":
        logger.warning(
            "dtype='auto' is %s on a CPU, which computes %s, the checkpoint's, many times slower",
            CPU_DTYPE, stored,
        )  # fmt: skip
        return CPU_DTYPE
    logger.warning(
        "dtype=%r was asked for: on a CPU it is many times slower than %s", dtype, CPU_DTYPE
    )
    return dtype
