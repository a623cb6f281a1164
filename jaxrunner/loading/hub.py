"""From a model's name to the folder that holds it. Fetches no pickle and no code."""

import os
from pathlib import Path
import re
from typing import Any

import huggingface_hub
from huggingface_hub import errors

WANTED = ("*.safetensors", "*.json", "*.txt", "*.jinja")
# Subfolders hold other formats; `consolidated` holds the same weights under Mistral's own names.
UNWANTED = ("*/*", "consolidated*")
NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    name: str = "model",
    **kwargs: Any,
) -> Path:
    """Returns the folder of `model`: itself, or fetched from the Hugging Face hub by its name.

    `revision` is a branch, tag or commit. name: of the argument, for errors. `kwargs` are those of
    `huggingface_hub.snapshot_download`.

    Raises:
      FileNotFoundError: there is no such folder or model, or no way to it from here.
      ValueError: `model` is neither a folder nor a name of the form owner/name.
    """
    path = os.path.expanduser(model)  # os.path's functions say no where pathlib's raise
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise ValueError(f"{name}={str(model)!r} is a file: give the folder that holds it")
    if isinstance(model, Path) or model.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{name}={str(model)!r} is no folder on this machine: correct it")
    if not NAME.fullmatch(model):
        raise ValueError(
            f"{name}={model!r} must be a folder, or owner/name as on the Hugging Face hub"
        )
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            **kwargs,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
        )
    except errors.HFValidationError as error:
        raise ValueError(
            f"{name}={model!r} must be a folder, or owner/name as on the hub: {error}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{name}={model!r} is not all in the cache, and the hub cannot be asked: go online "
            "(without HF_HUB_OFFLINE), or give a folder that holds it"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise FileNotFoundError(
            f"{name}={model!r}, revision={revision!r} is not on the hub, or not open to you: "
            "correct the name, or log in with `hf auth login`"
        ) from error
    return Path(folder)
