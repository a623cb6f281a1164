"""The files of sentence-transformers beside a checkpoint: pooling, layers behind it, a norm."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxrunner.api.validation import shown
from jaxrunner.heads.dense import DenseConfig
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.pooling.modules_file import read_modules

MODES = {"cls_token": "CLS", "mean_tokens": "MEAN", "lasttoken": "LAST"}
# Keys of pooling_mode_... that there are, and are not served.
OTHERS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
ACTIVATIONS = dict(Identity="identity", Tanh="tanh", ReLU="relu", GELU="gelu", SiLU="silu")


class Modules(NamedTuple):
    """The modules behind the model; None where the files do not say."""

    pooling: str | None = None  # of `params.POOLING_TYPES`
    layers: tuple[DenseConfig, ...] = ()
    normalize: bool | None = None


def read(folder: Path) -> Modules:
    """Reads modules.json and the files that it names; none need be there.

    Raises:
      ValueError: a module or a setting that is not served; names it.
    """
    modules = read_modules(folder / "modules.json")
    found = Modules(normalize=False if modules else None)
    for kind, path in modules:
        if kind == "Pooling":
            found = found._replace(pooling=_pooling(folder / path / "config.json"))
        elif kind == "Dense":
            found = found._replace(layers=(*found.layers, _dense(folder, path)))
        elif kind == "Normalize":
            found = found._replace(normalize=True)
        elif kind != "Transformer":
            raise ValueError(
                f"{folder / 'modules.json'}: a module {shown(kind)} is not served, only "
                "Transformer, Pooling, Dense and Normalize: pool with token_embed and run it "
                "yourself"
            )
    return found


def _pooling(path: Path) -> str:
    """Returns the pooling of a module's config.json."""
    settings = read_json(path)
    modes = [m for m in (*MODES, *OTHERS) if settings.get(f"pooling_mode_{m}")]
    if isinstance(mode := settings.get("pooling_mode"), str):  # as later versions write it
        modes = [dict(cls="cls_token", mean="mean_tokens").get(mode, mode)]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ValueError(
            f"{path}: pooling_mode must be one of {sorted(MODES)}, got {shown(modes)}: pass "
            "pooler_config={'pooling_type': ...} to pool otherwise"
        )
    return MODES[modes[0]]


def _dense(folder: Path, path: str) -> DenseConfig:
    values: dict[str, Any] = read_json(folder / path / "config.json")
    settings = Settings(values, str(folder / path / "config.json"))
    named = settings.take("activation_function", str, "torch.nn.modules.activation.Tanh")
    kind = named.rpartition(".")[2]
    if kind not in ACTIVATIONS:
        raise ValueError(
            f"{settings.source}: activation_function must be one of {sorted(ACTIVATIONS)}, got "
            f"{shown(named)}: pool with token_embed and run the layer yourself"
        )
    return DenseConfig(
        f"{path}/linear",
        settings.size("in_features"),
        settings.size("out_features"),
        bias=settings.take("bias", bool, True),
        activation=ACTIVATIONS[kind],
    )
