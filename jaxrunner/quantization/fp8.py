"""Checkpoints in fp8: with blocks (`weight_scale_inv`), or a scale a tensor or an output."""

from dataclasses import dataclass
import functools

import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.config import DTYPES
from jaxrunner.hf_config import Settings
from jaxrunner.model import Source
from jaxrunner.quantization.modules import HEAD, is_named, read_names
from jaxrunner.quantization.placing import Arrays, Placing, build, good_scales
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Activation, Scheme

E4M3 = "float8_e4m3fn"
SCALES = (*DTYPES, "float8_e8m0fnu")  # the last is of powers of two
SCHEMES = (None, "none", "dynamic", "static")


@dataclass(frozen=True)
class Fp8:
    """Settings of `quant_method: fp8`, as DeepSeek, Qwen and AutoFP8 have it."""

    activation_scheme: str | None
    weight_block_size: tuple[int, int] | None
    ignored: tuple[str, ...]
    name: str = "fp8"
    stacks: Scheme | None = None

    @classmethod
    def read(cls, settings: Settings) -> "Fp8":
        """Reads quantization_config.

        Raises:
          ValueError: a setting that is not supported; names it.
        """
        settings.expect("fmt", "e4m3", "float8_e4m3fn")
        settings.expect("scale_fmt", "float32", "float", "ue8m0")  # the file tells which it has
        settings.expect("expert_dtype", "fp8")
        settings.expect("dequantize", False)  # which would leave inputs as they are
        settings.expect("is_checkpoint_fp8_serialized", True)
        settings.expect("modules_to_convert", None, [])
        block = tuple(settings.each("weight_block_size", int, []))
        if block and (len(block) != 2 or min(block) < 1):
            raise ValueError(
                f"weight_block_size must be two numbers over 0, got {shown(list(block))}"
            )
        scheme = settings.take("activation_scheme", str, None)
        if scheme not in SCHEMES:
            raise ValueError(f"activation_scheme must be one of {SCHEMES}, got {shown(scheme)}")
        ignored = read_names(settings, "modules_to_not_convert", "ignored_layers")
        settings.finish()
        return cls(scheme if scheme != "none" else None, block or None, ignored)

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme | None:
        """Returns how a module is held; None for a head, which stays as it is.

        Raises:
          ValueError: the inputs of the module are not whole blocks.
        """
        if is_named(module, (*self.ignored, HEAD)):
            return None
        block = self.weight_block_size or (1, 0)
        if self.activation_scheme == "dynamic" and block[1] and shape[1] % block[1]:
            raise ValueError(
                f"activation_scheme='dynamic' wants inputs in blocks of {block[1]}, {module} has "
                f"{shape[1]}: set activation_scheme to 'none' in hf_overrides"
            )
        static = self.activation_scheme == "static"
        asked = self.activation_scheme and Activation(E4M3, static, 0 if static else block[1])
        return Scheme(E4M3, block, activation=asked or None)

    def sources(self, placing: Placing, bias: Source | None) -> QuantizedLinear:
        """Returns where a product's leaves come from."""
        leaves = {"weight": float_numbers(placing)}
        if self.weight_block_size is None:
            ones = [()] * len(placing.modules)
            join = functools.partial(_per_tensor, placing)
            leaves["scale"] = placing.tensors("weight_scale", join, *ones, dtypes=DTYPES)
        else:
            rows, cols = self.weight_block_size
            shapes = [(-(-n // rows), -(-k // cols)) for n, k in placing.shapes]
            join = functools.partial(_by_blocks, placing, rows)
            leaves["scale"] = placing.tensors("weight_scale_inv", join, *shapes, dtypes=SCALES)
        if self.activation_scheme == "static":
            leaves["input_scale"] = input_scale(placing, ())
        return build(placing.held, bias, **leaves)


def float_numbers(placing: Placing) -> Source:
    """Returns the source of weights that are stored as the numbers that we hold."""
    source, kind = placing.source, (placing.held.weight.dtype.name,)
    join = functools.partial(_numbers, placing)
    return source._replace(join=join, dtypes=(kind,) * len(source.names))


def without_nan(placing: Placing, parts: Arrays) -> Arrays:
    """Returns each module's numbers as they are.

    Raises:
      ValueError: there is NaN among numbers in e4m3; names the tensor.
    """
    if placing.held.scheme.code == E4M3:
        for name, part in zip(placing.source.names, parts, strict=True):
            # 0x7f and 0xff, the largest bytes of each sign: looking for these allocates nothing.
            if 0x7F in (part.view(np.int8).max(), part.view(np.uint8).max() & 0x7F):
                raise ValueError(f"{name} holds NaN: download the checkpoint again")
    return parts


def input_scale(placing: Placing, shape: tuple[int, ...]) -> Source:
    """Returns the source of a scale of inputs that the checkpoint has."""
    names, held = tuple(f"{module}.input_scale" for module in placing.modules), placing.held
    assert held.input_scale is not None
    stack = held.input_scale.shape

    def join(parts: Arrays) -> np.ndarray:
        scales = [part.reshape(()) for part in good_scales(parts, names)]
        return placing.shared(scales, "input_scale", placing.modules, stack)

    return placing.tensors("input_scale", join, *[shape] * len(names), dtypes=DTYPES)


def _numbers(placing: Placing, parts: Arrays) -> np.ndarray:
    return placing.source.join(without_nan(placing, parts))


def _per_tensor(placing: Placing, parts: Arrays) -> np.ndarray:
    """Returns scales of outputs, of those of whole tensors."""
    names = tuple(f"{module}.weight_scale" for module in placing.modules)
    pairs = zip(good_scales(parts, names), placing.shapes, strict=True)
    return placing.scales([np.full((rows, 1), part.reshape(())) for part, (rows, _) in pairs])


def _by_blocks(placing: Placing, rows: int, parts: Arrays) -> np.ndarray:
    """Returns scales of runs, of those of blocks."""
    names = tuple(f"{module}.weight_scale_inv" for module in placing.modules)
    pairs = zip(good_scales(parts, names), placing.shapes, strict=True)
    return placing.scales([np.repeat(part, rows, axis=0)[:n] for part, (n, _) in pairs])
