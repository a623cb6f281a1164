"""Checkpoints of AWQ (arXiv:2306.00978): 4 bits, groups of inputs with a scale and a zero point."""

from dataclasses import dataclass
import functools

import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.config import DTYPES
from jaxrunner.hf_config import Settings
from jaxrunner.model import Source
from jaxrunner.quantization.gptq import ORIGIN
from jaxrunner.quantization.modules import HEAD, is_named
from jaxrunner.quantization.packed import unpacked
from jaxrunner.quantization.placing import Arrays, Placing, build, read_scales
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Scheme

BITS, PER_WORD = 4, 8
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each output in turn
_RUNNING = """do_fuse fuse_max_seq_len modules_to_fuse""".split()


@dataclass(frozen=True)
class AWQ:
    """Settings of `quant_method: awq`, in the layout "gemm"."""

    group_size: int
    zero_point: bool
    ignored: tuple[str, ...]  # parts of names
    name: str = "awq"
    stacks: Scheme | None = None

    @classmethod
    def read(cls, settings: Settings) -> "AWQ":
        """Reads quantization_config.

        Raises:
          ValueError: a setting that is not supported; names it.
        """
        settings.expect("bits", BITS)
        settings.expect("w_bit", BITS)
        for layout in ("version", "format", "checkpoint_format"):
            settings.expect(layout, "gemm", "GEMM")
        settings.expect("desc_act", False)
        # How weights were rounded, which `zero_point` speaks for; others are of GPTQ's programs.
        settings.ignore("sym", *_RUNNING, *ORIGIN)
        group = settings.take("group_size", int, settings.take("q_group_size", int, 128))
        if group < 1 and group != -1:
            raise ValueError(f"group_size must be over 0, or -1 for all inputs, got {shown(group)}")
        ignored = tuple(settings.each("modules_to_not_convert", str, []))
        zero_point = settings.take("zero_point", bool, True)
        settings.finish()
        return cls(group, zero_point, ignored)

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme | None:
        """Returns how a module is held; None for a head, which stays as it is."""
        if is_named(module, (HEAD,)) or any(part in module for part in self.ignored):
            return None
        return Scheme("int4", (1, _group(self.group_size, module, shape)), self.zero_point)

    def sources(self, placing: Placing, bias: Source | None) -> QuantizedLinear:
        """Returns where a product's leaves come from."""
        length, leaves = placing.held.scheme.block[1], {}
        words = [(k, n // PER_WORD) for n, k in placing.shapes]
        packed = functools.partial(_numbers, placing)
        leaves["weight"] = placing.tensors("qweight", packed, *words, dtypes=("int32",))
        scales = functools.partial(read_scales, placing)
        shapes = [(k // length, n) for n, k in placing.shapes]
        leaves["scale"] = placing.tensors("scales", scales, *shapes, dtypes=DTYPES)
        if self.zero_point:
            zeros = functools.partial(_zeros, placing)
            words = [(k // length, n // PER_WORD) for n, k in placing.shapes]
            leaves["zero"] = placing.tensors("qzeros", zeros, *words, dtypes=("int32",))
        return build(placing.held, bias, **leaves)


def _group(size: int, module: str, shape: tuple[int, int]) -> int:
    """Returns the inputs of a group.

    Raises:
      ValueError: sizes that the layout does not hold.
    """
    outputs, inputs = shape
    size = inputs if size == -1 else size
    if inputs % size or outputs % PER_WORD:
        raise ValueError(
            f"AWQ wants inputs in groups of {size} and outputs in words of {PER_WORD}, {module} "
            f"has {inputs} and {outputs}: name it in modules_to_not_convert"
        )
    return size


def _numbers(placing: Placing, parts: Arrays) -> np.ndarray:
    return placing.numbers([_outputs(part) for part in parts])


def _zeros(placing: Placing, parts: Arrays) -> np.ndarray:
    return placing.scales([_outputs(part).astype(np.int8) - np.int8(8) for part in parts])


def _outputs(words: np.ndarray) -> np.ndarray:
    """Returns numbers, [outputs, inputs or groups], of words, [inputs or groups, outputs / 8]."""
    return unpacked(words, BITS, 1, ORDER).T
