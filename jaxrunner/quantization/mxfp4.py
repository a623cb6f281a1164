"""MXFP4 of gpt-oss: stacks of experts; runs of 32 e2m1 share an e8m0 scale. OCP MX 1.0."""

from dataclasses import dataclass
import functools

import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.model import Source
from jaxrunner.quantization.modules import read_names
from jaxrunner.quantization.placing import Arrays, Placing, build, good_scales
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Scheme

RUN = 32  # numbers of one scale, two in a byte, the first in the low half
E8M0_NAN = 255


@dataclass(frozen=True)
class Mxfp4:
    """Settings of `quant_method: mxfp4`. Experts alone are quantised."""

    name: str = "mxfp4"

    @property
    def stacks(self) -> Scheme | None:
        """How experts are held."""
        return Scheme("float4_e2m1fn", (1, RUN), scale="uint8")

    @classmethod
    def read(cls, settings: Settings) -> "Mxfp4":
        """Reads quantization_config.

        Raises:
          ValueError: a setting that is not supported; names it.
        """
        read_names(settings, "modules_to_not_convert")
        settings.finish()
        return cls()

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme | None:
        """Returns how a module is held: as floats."""
        return None

    def sources(self, placing: Placing, bias: Source | None) -> QuantizedLinear:
        """Returns where a stack's leaves come from. A float one is stored as [X, in, out].

        Raises:
          ValueError: the inputs are not whole runs that share a scale.
        """
        (name,), ((X, inner, out),) = placing.source.names, placing.source.shapes
        if inner % RUN:
            raise ValueError(
                f"{name} must have inputs in runs of {RUN}, as MXFP4 has scales, got {inner}: "
                "take a checkpoint in bfloat16"
            )
        runs = X, out, inner // RUN
        leaves = {}
        for leaf, suffix, rest in (("weight", "blocks", (RUN // 2,)), ("scale", "scales", ())):
            join = functools.partial(_joined, placing, f"{name}_{suffix}")
            shape = ((*runs, *rest),)
            leaves[leaf] = Source((f"{name}_{suffix}",), shape, join, None, (("uint8",),))
        return build(placing.held, bias, **leaves)


def _joined(placing: Placing, name: str, parts: Arrays) -> np.ndarray:
    """Returns bytes, [X, out, runs, ...], with their outputs where the family has them."""
    (stored,) = parts
    if stored.ndim == 3:  # exponents
        good_scales([np.where(stored == E8M0_NAN, np.nan, 1)], (name,))
    return placing.source.join([np.swapaxes(stored.reshape(*stored.shape[:2], -1), 1, 2)])
