"""Reads modules.json, the list of what sentence-transformers runs one after the other."""

import json
from pathlib import Path
from typing import Any

from jaxrunner.api.limits import JSON_BYTES, check_bytes
from jaxrunner.api.validation import shown


def read_modules(path: Path) -> list[tuple[str, str]]:
    """Returns the class and the folder of each module, none where there is no such file.

    Raises:
      ValueError: it is broken, or names a folder that is none of the checkpoint's.
    """
    if not path.is_file():
        return []
    check_bytes(path, JSON_BYTES)
    try:
        modules: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} must hold a list of modules, got {error}: fetch it again"
        ) from error
    found = []
    for one in modules if isinstance(modules, list) else [modules]:
        kind, at = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        # A name with a folder could point anywhere on this machine.
        if not isinstance(kind, str) or not isinstance(at, str) or Path(at).name != at:
            raise ValueError(
                f"{path} must hold a list of modules, each with a type and a folder of the "
                f"checkpoint as path, got {shown(one)}: fetch it again"
            )
        found.append((kind.rpartition(".")[2], at))
    return found
