"""Tensors as transformers 5 has them, under the names that published checkpoints have.

`save_pretrained(save_original_format=False)` and `named_parameters` have `experts.gate_up_proj`,
[X, 2 F, E], or without gates `experts.up_proj`, [X, F, E], and `experts.down_proj`, [X, E, F],
where families name a tensor for each expert, or others: the rules of transformers'
`conversion_mapping`. Its fp8 has other names of scales. Knows no JAX.
"""

from collections.abc import Collection, Iterator, Mapping
import re
from typing import Any, NamedTuple

from jaxrunner.loading.safetensors_file import Tensor

STACKED = re.compile(r"(?P<mlp>.+)\.experts\.(?P<name>gate_up_proj|up_proj|down_proj)")
# Names of one expert's gate, up and down.
EACH = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
# Other names of modules and tensors there, and in published checkpoints.
RENAMED = (
    (".weight_scale_inv", ".weight_scale"),  # fp8 with a scale a tensor
    (".activation_scale", ".input_scale"),
    (".mlp.gate.", ".block_sparse_moe.gate."),  # Mixtral
    (".block_sparse_moe.router.", ".block_sparse_moe.router.layer."),  # Granite
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    ("model.", "backbone."),  # Nemotron-H
)


class Part(NamedTuple):
    """The tensor of a published checkpoint: rows of one expert's matrix, or the whole tensor."""

    name: str
    expert: int | None = None  # None for the whole tensor
    start: int = 0
    stop: int = 0


def parts_of(name: str, shape: tuple[int, ...], wanted: Collection[str]) -> list[Part]:
    """Returns the parts of a tensor that are wanted by names of their own; itself where none is."""
    if name in wanted:
        return [Part(name)]
    if (found := STACKED.fullmatch(name)) is not None and len(shape) == 3:
        X, rows, _ = shape
        at = found["mlp"]
        others = at.removesuffix("mlp") + "block_sparse_moe", at.replace("model.", "backbone.")
        for mlp in (at, *others):
            for gate, up, down in EACH:
                one = f"{mlp}.experts.{{}}.{{}}.weight"
                if one.format(0, down) not in wanted:
                    continue
                whole = dict(up_proj=up, down_proj=down).get(found["name"])
                if whole is not None:
                    return [Part(one.format(i, whole), i, 0, rows) for i in range(X)]
                half = rows // 2
                cuts = ((gate, 0, half), (up, half, rows))
                return [Part(one.format(i, n), i, *cut) for i in range(X) for n, *cut in cuts]
    for here, there in RENAMED:
        if (other := name.replace(here, there)) != name and other in wanted:
            return [Part(other)]
    return [Part(name)]


def in_file(name: str, tensor: Tensor, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields where the parts of a tensor of a file lie; they are runs of its bytes."""
    for part in parts_of(name, tensor.shape, wanted):
        if part.expert is None:
            yield part.name, tensor
            continue
        _, rows, columns = tensor.shape
        before = (part.expert * rows + part.start) * columns
        shape = part.stop - part.start, columns
        start = tensor.start + before * tensor.dtype.itemsize
        # A checksum is of the whole tensor.
        yield part.name, Tensor(tensor.dtype, shape, start)


def unstacked(tensors: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Returns arrays, by name, as the parts that are wanted by names of their own."""
    return {
        part.name: x if part.expert is None else x[part.expert, part.start : part.stop]
        for name, x in tensors.items()
        for part in parts_of(name, tuple(x.shape), wanted)
    }
