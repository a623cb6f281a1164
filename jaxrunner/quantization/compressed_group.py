"""A config group of compressed-tensors: modules that are quantised alike, and what is supported."""

from dataclasses import dataclass

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import Settings
from jaxrunner.quantization.modules import read_names
from jaxrunner.quantization.scheme import Activation, Scheme

FP8, INT8 = "float8_e4m3fn", "int8"
PACKED, MXFP4 = "pack-quantized", "mxfp4-pack-quantized"
LAYOUTS = ("naive-quantized", "float-quantized", "int-quantized", PACKED, MXFP4)
STRATEGIES = ("tensor", "channel", "group", "block")
# How scales were found: of no account to who reads them.
_ORIGIN = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclass(frozen=True)
class Group:
    """One of `config_groups`."""

    targets: tuple[str, ...]
    layout: str
    bits: int
    code: str
    strategy: str
    block: tuple[int, int]
    has_zero: bool
    has_order: bool
    activation: Activation | None

    @property
    def is_packed(self) -> bool:
        """Whether several numbers share a word."""
        return self.layout in (PACKED, MXFP4)

    def scheme(self, module: str, shape: tuple[int, int]) -> Scheme:
        """Returns how a module is held.

        Raises:
          ValueError: sizes that the layout does not hold.
        """
        outputs, inputs = shape
        rows, cols = self.block
        if self.strategy == "channel" and self.code == "int4":
            cols = inputs
        ragged = cols and inputs % cols and not self.has_order and rows == 1
        wide = self.has_zero and outputs % (32 // self.bits)
        group = self.activation.group if self.activation else 0
        if ragged or wide or (group and inputs % group):
            raise ValueError(
                f"compressed-tensors wants whole groups of {group or cols} inputs, and with zero "
                f"points whole words of outputs, {module} has {inputs} and {outputs}: take another "
                "group_size, or name it in ignore"
            )
        scale = "uint8" if self.layout == MXFP4 else "float32"
        return Scheme(
            self.code, (rows, cols), self.has_zero, self.has_order, scale, self.activation
        )


def read_group(settings: Settings, layout: str) -> Group:
    """Reads one of `config_groups`; layout: `format` of all of them, where it has none of its own.

    Raises:
      ValueError: a setting that is not supported; names it, and those that are.
    """
    targets = read_names(settings, "targets")
    layout = settings.take("format", str, layout)
    if layout not in LAYOUTS:
        raise ValueError(f"format must be one of {LAYOUTS}, got {shown(layout)}")
    settings.expect("output_activations", {})
    weights, inputs = settings.section("weights"), settings.section("input_activations")
    if weights is None:
        raise ValueError(f"{settings.source}: weights must say how they are quantised, got none")
    settings.finish()
    weights.ignore(*_ORIGIN)
    weights.expect("dynamic", False)
    bits, kind = weights.size("num_bits"), weights.take("type", str, "int")
    strategy, block = _block(weights)
    group = Group(
        targets, layout, bits, _code(weights, bits, kind, layout), strategy, block,
        has_zero=_has_zero(weights, layout), has_order=_has_order(weights, strategy),
        activation=None if inputs is None else _activation(inputs),
    )  # fmt: skip
    weights.finish()
    return group


def _block(settings: Settings) -> tuple[str, tuple[int, int]]:
    """Reads what shares a scale: the strategy's name, outputs and inputs."""
    strategy = settings.take("strategy", str, "tensor")
    if strategy not in STRATEGIES:
        raise ValueError(
            f"{settings.source}: strategy must be one of {STRATEGIES}, got {shown(strategy)}"
        )
    size, block = settings.take("group_size", int, 0), settings.each("block_structure", int, [])
    shape = {"group": [1, size], "block": block}.get(strategy, [1, 0])
    if len(shape) != 2 or (strategy in ("group", "block") and min(shape) < 1):
        raise ValueError(
            f"{settings.source}: strategy={strategy!r} wants group_size, or block_structure of "
            f"two, over 0, got {size} and {block}"
        )
    return strategy, (shape[0], shape[1])


def _has_zero(settings: Settings, layout: str) -> bool:
    symmetric = settings.take("symmetric", bool, True)
    if not symmetric and layout != PACKED:
        raise ValueError(
            f"{settings.source}: symmetric=False wants format={PACKED!r}, got {layout!r}"
        )
    return not symmetric


def _has_order(settings: Settings, strategy: str) -> bool:
    """Reads whether groups are no runs of inputs, as they are with "weight" and "static" too."""
    actorder = settings.take("actorder", str, None)
    if actorder not in (None, "group", "weight", "static", "dynamic"):
        raise ValueError(
            f"{settings.source}: actorder must be 'group', 'weight', 'static', 'dynamic' or null, "
            f"got {shown(actorder)}"
        )
    return actorder in ("group", "dynamic") and strategy == "group"


def _code(settings: Settings, bits: int, kind: str, layout: str) -> str:
    known = {("float", 8): FP8, ("int", 8): INT8, ("int", 4): "int4", ("float", 4): "float4_e2m1fn"}
    code = known.get((kind, bits))
    packed_alone = (code == "int4" and layout != PACKED) or (code == FP8 and layout == PACKED)
    if code is None or packed_alone or (code == "float4_e2m1fn") != (layout == MXFP4):
        raise ValueError(
            f"{settings.source}: weights must be of float 8, int 8 or packed int 4, or with "
            f"{MXFP4} of float 4, got {kind} {bits} in {layout!r}"
        )
    return code


def _activation(settings: Settings) -> Activation:
    """Reads how inputs of products are rounded.

    Raises:
      ValueError: a way that is not supported.
    """
    settings.ignore(*_ORIGIN)
    kind, bits = settings.take("type", str, "int"), settings.size("num_bits")
    dynamic, size = settings.take("dynamic", bool, False), settings.take("group_size", int, 0) or 0
    strategy = settings.take("strategy", str, "tensor")
    settings.expect("symmetric", True)
    settings.expect("actorder", None)
    settings.expect("block_structure", [])
    settings.finish()
    code = {("float", 8): FP8, ("int", 8): INT8}.get((kind, bits))
    ways = (("tensor", False), ("token", True), ("group", True))
    if code is None or (strategy, dynamic) not in ways or (strategy == "group") != bool(size):
        raise ValueError(
            f"{settings.source}: inputs must be of 8 bits, with one static scale for all, or "
            f"dynamic ones for tokens or their groups, got {kind} {bits}, dynamic={dynamic}, "
            f"strategy={strategy!r}, group_size={size}: a token must not depend on others"
        )
    return Activation(code, static=not dynamic, group=size)
