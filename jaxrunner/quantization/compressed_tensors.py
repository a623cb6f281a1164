"""Checkpoints of compressed-tensors, as llm-compressor writes them: groups of modules by scheme."""

from dataclasses import dataclass
import functools

import numpy as np

from jaxrunner.config import DTYPES
from jaxrunner.hf_config import Settings
from jaxrunner.model import Source
from jaxrunner.quantization.compressed_group import Group, read_group
from jaxrunner.quantization.fp8 import float_numbers, input_scale, without_nan
from jaxrunner.quantization.modules import PATTERN, pattern, read_names
from jaxrunner.quantization.packed import WORD, unpacked
from jaxrunner.quantization.placing import Arrays, Placing, build, good_scales, read_permutation
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Scheme

E8M0_NAN = 255
EVERY = "Linear"  # a target: all products, by torch's class
_ORIGIN = ("version", "global_compression_ratio", "quantization_status", "run_compressed")


@dataclass(frozen=True)
class CompressedTensors:
    """Settings of `quant_method: compressed-tensors`."""

    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    name: str = "compressed-tensors"
    stacks: Scheme | None = None

    @classmethod
    def read(cls, settings: Settings) -> "CompressedTensors":
        """Reads quantization_config.

        Raises:
          ValueError: a setting that is not supported; names it.
        """
        settings.ignore(*_ORIGIN, "kv_cache_scheme")  # a cache of 8 bits has scales of its own
        settings.expect("sparsity_config", {})
        settings.expect("transform_config", {})
        layout = settings.take("format", str, "")
        section = settings.section("config_groups")
        if section is None:
            raise ValueError("config_groups must say how modules are quantised, got none")
        names = sorted(settings.take("config_groups", dict))
        groups = []
        for name in names:
            group = section.section(name)
            assert group is not None
            groups.append(read_group(group, layout))
        ignored = read_names(settings, "ignore")
        settings.finish()
        return cls(tuple(groups), ignored)

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme | None:
        """Returns how a module is held; None for as it is."""
        group = self._of(module)
        return None if group is None else group.scheme(module, shape)

    def _of(self, module: str) -> Group | None:
        """Returns the group of a module: that which names it, before that of all."""
        if any(_is(module, name) for name in self.ignored):
            return None
        for group in self.groups:
            if any(_is(module, name) for name in group.targets if name != EVERY):
                return group
        return next((group for group in self.groups if EVERY in group.targets), None)

    def sources(self, placing: Placing, bias: Source | None) -> QuantizedLinear:
        """Returns where a product's leaves come from."""
        group = self._of(placing.modules[0])
        assert group is not None
        scheme, leaves = placing.held.scheme, {}
        if group.is_packed:
            leaves["weight"] = _packed(placing, group)
        else:
            leaves["weight"] = float_numbers(placing)
        shapes = [_scale_shape(group, shape, scheme) for shape in placing.shapes]
        scales = functools.partial(_scales, placing, group)
        kinds = ("uint8",) if scheme.scale == "uint8" else DTYPES
        leaves["scale"] = placing.tensors("weight_scale", scales, *shapes, dtypes=kinds)
        if scheme.has_zero:
            words = [(n // (WORD // group.bits), g) for n, g in shapes]
            zeros = functools.partial(_zeros, placing, group)
            leaves["zero"] = placing.tensors("weight_zero_point", zeros, *words, dtypes=("int32",))
        if scheme.has_order:
            ids = [(k,) for _, k in placing.shapes]
            names = tuple(f"{module}.weight_g_idx" for module in placing.modules)
            join, kinds = functools.partial(read_permutation, placing, names), ("int32", "int64")
            of_inputs = placing.tensors("weight_g_idx", join, *ids, dtypes=kinds)
            weight = leaves["weight"]
            if not group.is_packed:
                weight = weight._replace(join=functools.partial(_of_numbers, placing))
            leaves |= dict(weight=weight.beside(of_inputs), permutation=of_inputs)
        if scheme.activation is not None and scheme.activation.static:
            leaves["input_scale"] = input_scale(placing, (1,))
        return build(placing.held, bias, **leaves)


def _is(module: str, name: str) -> bool:
    """Whether a target or an exclusion, a whole name or a pattern, means a module."""
    if name.startswith(PATTERN):
        return pattern(name).match(module) is not None
    return module == name


def _scale_shape(group: Group, shape: tuple[int, int], scheme: Scheme) -> tuple[int, ...]:
    outputs, inputs = shape
    rows, cols = scheme.block
    if group.strategy == "tensor":
        return (1,)
    if group.strategy == "block":
        return -(-outputs // rows), -(-inputs // cols)
    return outputs, -(-inputs // cols) if cols else 1


def _scales(placing: Placing, group: Group, parts: Arrays) -> np.ndarray:
    names = tuple(f"{module}.weight_scale" for module in placing.modules)
    if placing.held.scheme.scale == "uint8":
        good_scales([np.where(part == E8M0_NAN, np.nan, 1) for part in parts], names)
        return placing.scales(parts)
    parts = good_scales(parts, names, signed=group.code.startswith("int"))
    rows = placing.held.scheme.block[0]
    if group.strategy == "tensor":
        ones = zip(parts, placing.shapes, strict=True)
        parts = [np.full((n, 1), part.reshape(())) for part, (n, _) in ones]
    elif rows > 1:
        blocks = zip(parts, placing.shapes, strict=True)
        parts = [np.repeat(part, rows, axis=0)[:n] for part, (n, _) in blocks]
    return placing.scales(parts)


def _zeros(placing: Placing, group: Group, parts: Arrays) -> np.ndarray:
    """Zero points are packed along the outputs, and shifted as numbers are."""
    half = np.int16(1 << group.bits - 1)
    wide = [unpacked(part, group.bits, 0).astype(np.int16) - half for part in parts]
    return placing.scales([part.astype(np.int8) for part in wide])


def _packed(placing: Placing, group: Group) -> Source:
    """Returns the source of numbers that are packed along the inputs, with the shape beside."""
    if group.layout == "mxfp4-pack-quantized":
        halves = [(n, k // 2) for n, k in placing.shapes]
        join = functools.partial(_of_bytes, placing)
        return placing.tensors("weight_packed", join, *halves, dtypes=("uint8",))
    per_word = WORD // group.bits
    words = [(n, -(-k // per_word)) for n, k in placing.shapes]
    join = functools.partial(_of_words, placing, group)
    packed = placing.tensors("weight_packed", join, *words, dtypes=("int32",))
    said = placing.tensors("weight_shape", join, *[(2,)] * len(words), dtypes=("int64", "int32"))
    return packed.beside(said)


def _of_words(placing: Placing, group: Group, parts: Arrays) -> np.ndarray:
    count = len(placing.modules)
    shapes = zip(placing.modules, parts[count : 2 * count], placing.shapes, strict=True)
    for module, said, shape in shapes:
        if tuple(said) != shape:
            raise ValueError(
                f"{module}.weight_shape must be {list(shape)}, got {said.tolist()}: its "
                "weight_packed is of another size, download the checkpoint again"
            )
    pairs = zip(parts[:count], placing.shapes, strict=True)
    numbers = [unpacked(part, group.bits, 1)[:, :k] for part, (_, k) in pairs]
    if group.bits == 8:
        numbers = [(part ^ np.uint8(128)).view(np.int8) for part in numbers]
    return placing.numbers(numbers, parts[2 * count :] or None)


def _of_bytes(placing: Placing, parts: Arrays) -> np.ndarray:
    count = len(placing.modules)
    halves = [np.stack([part & 15, part >> 4], -1) for part in parts[:count]]
    return placing.numbers([half.reshape(len(half), -1) for half in halves], parts[count:] or None)


def _of_numbers(placing: Placing, parts: Arrays) -> np.ndarray:
    count = len(placing.modules)
    return placing.numbers(without_nan(placing, parts[:count]), parts[count:])
