"""The files of a checkpoint folder that hold the tensors, checked by name, shape and dtype."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import read_json
from jaxrunner.loading.safetensors_file import Tensor, read_header
from jaxrunner.loading.stacked_experts import in_file

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# May be there unwanted: the config says the first, the second is the tied embedding again. Masks of
# GPT-2 and GPT-NeoX. A cache of 8 bits has scales of its own, by token and head; inputs are rounded
# where settings say so.
SPARE = ("rotary_emb.inv_freq", "lm_head.weight", ".attn.bias", ".attn.masked_bias",
         ".attention.bias", ".attention.masked_bias", ".k_scale", ".v_scale",
         ".input_scale", ".activation_scale")  # fmt: skip
MOST_NAMED = 5  # problems in one message


class Wanted(NamedTuple):
    """The shape and the dtypes that a tensor must have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] | None  # None for any


def find(
    folder: Path,
    wanted: Mapping[str, Wanted],
    files: Sequence[Path] = (),
    *,
    spare: tuple[str, ...] = (),
) -> dict[str, tuple[Path, Tensor]]:
    """Returns the file and place of each tensor that is wanted.

    files: where to look, if not usual. spare: what names of tensors begin with that may be there
    unwanted.

    Raises:
      FileNotFoundError, ValueError: a file or tensor is missing, extra, twice there, or not what
        it should be; names up to five.
    """
    files, index = (files, None) if files else _files(folder)
    found: dict[str, tuple[Path, Tensor]] = {}
    problems = []
    for path in files:
        for name, tensor in read_header(path).items():
            if name in found:
                problems.append(f"{name} is in {found[name][0].name} and again in {path.name}")
            found[name] = path, tensor
    if index is not None:
        problems += _check_index(index, found)
    found |= _beside(folder, wanted)
    parts: dict[str, tuple[Path, Tensor]] = {}
    for name, (path, tensor) in _with_beginnings(found, wanted).items():
        for own, part in in_file(name, tensor, wanted):
            if own in parts:
                problems.append(
                    f"{own} is in {parts[own][0].name} and again in {path.name}: {name}"
                )
            parts[own] = path, part
    found = parts
    problems += _check_tensors(wanted, found, spare)
    if problems:
        more = len(problems) - MOST_NAMED
        named = "; ".join(problems[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"the weights in {folder} must be those of its config.json, got: {named}. Download "
            "the checkpoint again, or correct config.json"
        )
    return {name: found[name] for name in wanted}


def names(folder: Path) -> frozenset[str]:
    """Returns the names of all tensors in a checkpoint folder; raises as `find`."""
    return frozenset(name for path in _files(folder)[0] for name in read_header(path))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors in a checkpoint folder, of none where it holds no weights.

    Raises as `find`.
    """
    if not any(folder.glob("*.safetensors")):
        return {}
    headers = (read_header(path) for path in _files(folder)[0])
    return {name: tensor.shape for header in headers for name, tensor in header.items()}


def _files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Returns the files that hold the weights, and the shard of each tensor if an index says so."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be a folder that holds {WHOLE} or {INDEX}")
    if (folder / WHOLE).is_file():
        return [folder / WHOLE], None
    if (folder / INDEX).is_file():
        index = _read_index(folder / INDEX)
        return [folder / shard for shard in sorted(set(index.values()))], index
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return single, None
    if single:
        raise ValueError(
            f"{folder} holds {len(single)} safetensors files, {single[0].name} and others, but no "
            f"{INDEX} that says what is in which: download it too"
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ValueError(
            f"{folder} holds its weights as {pickles[0]}: that is a pickle, and unpickling can "
            "run any code. Get the model as safetensors, or convert it where you trust its author"
        )
    raise FileNotFoundError(f"{folder} holds no weights: it needs {WHOLE} or {INDEX}")


def _read_index(path: Path) -> dict[str, str]:
    index: Any = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(
            f"{path}: weight_map must name the shard of each tensor, got {shown(index)}"
        )
    for name, shard in index.items():
        # A name with a folder could point anywhere on this machine.
        plain = isinstance(shard, str) and Path(shard).name == shard
        if not plain or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{path}: {name:.200} must lie in a *.safetensors file of the same folder, got "
                f"{shown(shard)}"
            )
    missing = [s for s in sorted(set(index.values())) if not (path.parent / s).is_file()]
    if missing:
        names = ", ".join(f"{name:.200}" for name in missing[:MOST_NAMED])
        raise FileNotFoundError(
            f"{path} names {len(set(index.values()))} shards, {len(missing)} of them missing: "
            f"{names}. Download the checkpoint again"
        )
    return index


def _check_index(index: Mapping[str, str], found: Mapping[str, tuple[Path, Tensor]]) -> list[str]:
    """Returns where the index and the shards differ."""
    problems = []
    for name, shard in index.items():
        if name not in found:
            problems.append(f"{name:.200} is not in {shard:.200}, where {INDEX} says it is")
        elif found[name][0].name != shard:
            problems.append(f"{name:.200} is in {found[name][0].name}, {INDEX} says {shard:.200}")
    for name in found.keys() - index.keys():
        problems.append(f"{name:.200} is in {found[name][0].name}, but not in {INDEX}")
    return sorted(problems)


def _with_beginnings(
    found: dict[str, tuple[Path, Tensor]], wanted: Mapping[str, Wanted]
) -> dict[str, tuple[Path, Tensor]]:
    """Returns what was found, its names as wanted: files without a head may leave out "model."."""
    short = {name.partition(".")[2]: name for name in wanted.keys() - found.keys()}
    return {name if name in wanted else short.get(name, name): at for name, at in found.items()}


def _beside(folder: Path, wanted: Mapping[str, Wanted]) -> dict[str, tuple[Path, Tensor]]:
    """Returns tensors of modules in folders of their own, called "folder/name" where wanted."""
    found: dict[str, tuple[Path, Tensor]] = {}
    for at in dict.fromkeys(name.partition("/")[0] for name in wanted if "/" in name):
        path = folder / at / WHOLE
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: modules.json names its folder")
        found |= {f"{at}/{name}": (path, tensor) for name, tensor in read_header(path).items()}
    return found


def _check_tensors(
    wanted: Mapping[str, Wanted],
    found: Mapping[str, tuple[Path, Tensor]],
    spare: tuple[str, ...],
) -> list[str]:
    """Returns where the tensors are not those wanted."""
    problems = []
    for name, (shape, dtypes) in wanted.items():
        if name not in found:
            problems.append(f"{name} {list(shape)} is missing")
            continue
        path, tensor = found[name]
        is_scalar = shape == () and tensor.shape in ((1,), (1, 1))  # as some programs write one
        if tensor.shape != shape and not is_scalar:
            problems.append(f"{name} in {path.name} must be {list(shape)}, is {list(tensor.shape)}")
        if dtypes is not None and tensor.dtype.name not in dtypes:
            kinds = ", ".join(dtypes)
            problems.append(f"{name} in {path.name} must be one of {kinds}, is {tensor.dtype}")
    for name in sorted(found.keys() - wanted.keys()):
        if not name.endswith(SPARE) and not name.startswith(spare):
            path, tensor = found[name]
            problems.append(f"{name} {list(tensor.shape)} in {path.name} is not wanted")
    return problems
