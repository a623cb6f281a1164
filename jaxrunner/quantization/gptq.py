"""Checkpoints of GPTQ (arXiv:2210.17323): 4 or 8 bits, groups of inputs, perhaps reordered."""

from dataclasses import dataclass, replace
import functools
from typing import Any

import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.config import DTYPES
from jaxrunner.hf_config import Settings
from jaxrunner.model import Source
from jaxrunner.quantization.modules import HEAD, is_named, pattern
from jaxrunner.quantization.packed import WORD, unpacked
from jaxrunner.quantization.placing import Arrays, Placing, build, read_permutation, read_scales
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Scheme

CODES = {4: "int4", 8: "int8"}
V1, V2 = "gptq", "gptq_v2"  # of which the first stores zero points less one
SKIP, TAKE = "-:", "+:"  # before a pattern of `dynamic`
# How it was quantised, and which program did: of no account to who reads it.
ORIGIN = """damp_percent static_groups true_sequential dataset model_seqlen block_name_to_quantize
    module_name_preceding_first_block batch_size pad_token_id use_exllama max_input_length
    exllama_config cache_block_outputs model_name_or_path model_file_base_name meta tokenizer
    backend use_cuda_fp16 pack_dtype quant_method mse hyb_act act_group_aware""".split()


@dataclass(frozen=True)
class GPTQ:
    """Settings of `quant_method: gptq`."""

    bits: int
    group_size: int
    desc_act: bool
    sym: bool
    version: str
    lm_head: bool
    dynamic: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()  # patterns and overrides
    in_blocks: tuple[str, ...] = ()  # ends of names of modules; () for all
    name: str = "gptq"
    stacks: Scheme | None = None

    @classmethod
    def read(cls, settings: Settings) -> "GPTQ":
        """Reads quantization_config.

        Raises:
          ValueError: a setting that is not supported; names it.
        """
        settings.ignore(*ORIGIN)
        read = cls(
            bits=settings.size("bits"), group_size=settings.take("group_size", int, 128),
            desc_act=settings.take("desc_act", bool, False), sym=settings.take("sym", bool, True),
            version=_read_version(settings), lm_head=settings.take("lm_head", bool, False),
            dynamic=_read_dynamic(settings.take("dynamic", dict, {})),
            in_blocks=_read_in_blocks(settings),
        )  # fmt: skip
        settings.finish()
        return read._checked()

    def _checked(self) -> "GPTQ":
        if self.bits not in CODES:
            raise ValueError(f"bits must be one of {sorted(CODES)}, got {self.bits}")
        if self.group_size < 1 and self.group_size != -1:
            raise ValueError(
                f"group_size must be over 0, or -1 for all inputs, got {shown(self.group_size)}"
            )
        return self

    def of(self, module: str) -> "GPTQ | None":
        """Returns the settings of a module; None where it is left as it is."""
        if is_named(module, (HEAD,)):
            if not self.lm_head:
                return None
        elif self.in_blocks and not module.endswith(self.in_blocks):
            return None
        for text, changes in self.dynamic:
            if pattern(text.removeprefix(SKIP).removeprefix(TAKE)).match(module):
                return None if text.startswith(SKIP) else replace(self, **dict(changes))._checked()
        return self

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme | None:
        """Returns how a module is held; None for as it is.

        Raises:
          ValueError: the sizes of the module are not whole groups and words.
        """
        own = self.of(module)
        if own is None:
            return None
        outputs, inputs = shape
        size, per_word = inputs if own.group_size == -1 else own.group_size, WORD // own.bits
        ragged = inputs % size and not own.desc_act
        if ragged or inputs % per_word or outputs % per_word:
            raise ValueError(
                f"GPTQ of {own.bits} bits wants inputs in groups of {size}, and both inputs and "
                f"outputs in words of {per_word}, {module} has {inputs} and {outputs}: leave it "
                f"out by dynamic={{'-:{module}': {{}}}}"
            )
        order = own.desc_act and size < inputs
        return Scheme(CODES[own.bits], (1, size), has_zero=not own.sym, has_order=order)

    def sources(self, placing: Placing, bias: Source | None) -> QuantizedLinear:
        """Returns where a product's leaves come from."""
        own = self.of(placing.modules[0])
        assert own is not None
        per_word, length = WORD // own.bits, placing.held.scheme.block[1]
        joins = dict(weight=_numbers, zero=_zeros, permutation=_permutation)
        joins = {leaf: functools.partial(join, placing, own) for leaf, join in joins.items()}
        scales = functools.partial(read_scales, placing)
        words = [(k // per_word, n) for n, k in placing.shapes]
        groups = [(-(-k // length), n) for n, k in placing.shapes]
        packed, ids = [(g, n // per_word) for g, n in groups], [(k,) for _, k in placing.shapes]
        leaves = dict(
            weight=placing.tensors("qweight", joins["weight"], *words, dtypes=("int32",)),
            scale=placing.tensors("scales", scales, *groups, dtypes=DTYPES),
            zero=placing.tensors("qzeros", joins["zero"], *packed, dtypes=("int32",)),
            permutation=placing.tensors("g_idx", joins["permutation"], *ids, dtypes=("int32",)),
        )
        if placing.held.zero is None:  # they must be as usual: `_numbers` looks
            leaves["weight"] = leaves["weight"].beside(leaves.pop("zero"))
        leaves["weight"] = leaves["weight"].beside(leaves["permutation"])
        if placing.held.permutation is None:
            del leaves["permutation"]
        return build(placing.held, bias, **leaves)


def _numbers(placing: Placing, own: GPTQ, parts: Arrays) -> np.ndarray:
    count, held, rest = len(placing.modules), placing.held, parts
    numbers = [unpacked(part, own.bits, 0).T for part in rest[:count]]
    rest = rest[count:]
    if held.zero is None:
        for module, part in zip(placing.modules, _wide_zeros(own, rest[:count]), strict=True):
            if part.any():
                raise ValueError(
                    f"{module}.qzeros has zero points other than {1 << own.bits - 1}, which "
                    "sym=True means: set sym to false in hf_overrides"
                )
        rest = rest[count:]
    if held.permutation is None:
        for module, ids in zip(placing.modules, rest, strict=True):
            if not np.array_equal(ids, np.arange(len(ids)) // held.scheme.block[1]):
                raise ValueError(
                    f"{module}.g_idx has groups that are no runs, which desc_act=True means: set "
                    "desc_act to true in hf_overrides"
                )
    if own.bits == 8:
        numbers = [(part ^ np.uint8(128)).view(np.int8) for part in numbers]
    return placing.numbers(numbers, None if held.permutation is None else rest)


def _zeros(placing: Placing, own: GPTQ, parts: Arrays) -> np.ndarray:
    wide = _wide_zeros(own, parts)
    for module, part in zip(placing.modules, wide, strict=True):
        if part.max() > 127:
            raise ValueError(
                f"{module}.qzeros has a zero point of 256, which 8 bits do not hold: quantise it "
                "with sym=True"
            )
    return placing.scales([part.astype(np.int8) for part in wide])


def _wide_zeros(own: GPTQ, parts: Arrays) -> Arrays:
    """Returns zero points less what numbers are held less: half of their range."""
    less = (1 << own.bits - 1) - int(own.version == V1)
    return [unpacked(part, own.bits, 1).T.astype(np.int16) - np.int16(less) for part in parts]


def _permutation(placing: Placing, own: GPTQ, parts: Arrays) -> np.ndarray:
    return read_permutation(placing, tuple(f"{name}.g_idx" for name in placing.modules), parts)


def _read_version(settings: Settings) -> str:
    """Reads which zero points are stored, under either of the names that programs have for it.

    Raises:
      ValueError: a layout that is not supported, or two that differ.
    """
    keys = "checkpoint_format", "format"
    found = {key: settings.take(key, str, "").lower() for key in keys}
    found = {key: version for key, version in found.items() if version}
    for key, version in found.items():
        if version not in (V1, V2):
            raise ValueError(f"{key} must be {V1!r} or {V2!r}, got {shown(version)}")
    if len({*found.values()}) > 1:
        said = " and ".join(f"{key}={version!r}" for key, version in found.items())
        raise ValueError(
            f"{said} must be equal, as zero points are stored in one way: set both to that of the "
            "program that quantised it, in hf_overrides"
        )
    return next(iter(found.values()), V1)


def _read_in_blocks(settings: Settings) -> tuple[str, ...]:
    """Reads which modules of a layer are quantised: names, or lists of those quantised at once.

    Raises:
      ValueError: there is another value among them.
    """
    key = "modules_in_block_to_quantize"
    given = settings.take(key, list, [])
    names = [name for one in given for name in (one if isinstance(one, list) else [one])]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{key} must hold names of modules or lists of them, got {shown(given)}")
    return tuple(names)


def _read_dynamic(rules: dict[str, Any]) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """Reads what settings modules have of their own, by patterns of their names."""
    kinds, read = dict(bits=int, group_size=int, desc_act=bool, sym=bool), []
    for text, changes in rules.items():
        pattern(text.removeprefix(SKIP).removeprefix(TAKE))
        changes = changes if isinstance(changes, dict) else {"": changes}
        settings = Settings(changes, f"dynamic[{text!r:.80}]")
        own = {key: settings.take(key, kind, None) for key, kind in kinds.items()}
        settings.finish()
        read.append((text, tuple((key, value) for key, value in own.items() if value is not None)))
    return tuple(read)
