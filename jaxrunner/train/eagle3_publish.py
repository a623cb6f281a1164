"""Writes a trained EAGLE-3 head as a folder that is read as published ones are, with a record."""

from collections.abc import Mapping, Sequence
import hashlib
import json
from pathlib import Path
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from jaxrunner.loading.weights import load_params, save_checkpoint
from jaxrunner.models.llama import llama
from jaxrunner.speculators.eagle3 import eagle3
from jaxrunner.train import tokenizer as text
from jaxrunner.train.acceptance import Pair, acceptance, mean_length
from jaxrunner.train.corpus import File, file_list
from jaxrunner.train.eagle3 import Trained
from jaxrunner.train.rollout import rows_of

WINDOW = 512  # tokens of the text that drafts are measured on

NOTICE = """\
An EAGLE-3 head of {params:,} parameters for the model in the folder above.

It was trained from random values, by `python -m jaxrunner.train eagle3`, on the standard library of
CPython {python} and on text that the model wrote, which begins with passages of that library. What
the NOTICE and the LICENSE-PSF.txt of that folder say of the model holds for the head.
"""


def publish(
    folder: Path,
    settings: Mapping[str, Any],
    trained: tuple[Pair, Trained],
    data: tuple[Tokenizer, Sequence[File]],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes the head's folder and returns what `training.json` says.

    settings: of config.json. origin: `target` (folder), `python` (version), `training` (options),
    `tokens_written`, `tokens_of_corpus`, `began`. Acceptance is that of the weights as they are
    stored, in bfloat16, computed in float32.
    """
    (pair, result), (bpe, corpus) = trained, data
    params = jax.tree.map(lambda p: jnp.asarray(p).astype(jnp.bfloat16), result.params)
    save_checkpoint(folder, eagle3, pair.head, params, dict(settings))
    num_params = sum(p.size for p in jax.tree.leaves(params))
    notice = NOTICE.format(params=num_params, python=origin["python"])
    (folder / "NOTICE").write_text(notice, encoding="utf-8")
    target = load_params(origin["target"], llama, pair.target, dtype="float32", progress=False)
    exact = target, jax.tree.map(lambda p: p.astype(jnp.float32), params)
    record = dict(
        parameters=num_params,
        target_sha256=_sha256(origin["target"] / "model.safetensors"),
        python=origin["python"],
        corpus_sha256=hashlib.sha256(file_list(corpus).encode()).hexdigest(),
        tokens_written=origin["tokens_written"],
        tokens_of_corpus=origin["tokens_of_corpus"],
        held_out=_held_out(pair, exact, bpe, corpus),
        training=origin["training"],
        best=result.best,
        curve=result.curve,
        seconds=round(time.monotonic() - origin["began"], 1),
        versions={m.__name__: m.__version__ for m in (jax, optax)},
        device=jax.devices()[0].device_kind,
        sha256={p.name: _sha256(p) for p in sorted(folder.iterdir()) if p.name != "training.json"},
    )
    record_text = json.dumps(record, indent=1) + "\n"
    (folder / "training.json").write_text(record_text, encoding="utf-8")
    return record


def held_out_windows(
    bpe: Tokenizer, corpus: Sequence[File]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the held-out files as one stream in windows, [N, L], and the start of each, [L].

    Files shorter than a window have no start.
    """
    files = [file for file in corpus if file.held_out]
    stream = text.stream(bpe, [file.text for file in files])
    starts = {file.path: text.stream(bpe, [file.text])[:WINDOW] for file in files}
    starts = {path: ids for path, ids in starts.items() if len(ids) == WINDOW}
    return rows_of([stream], min(WINDOW, len(stream))), starts


def _held_out(pair: Pair, params: Any, bpe: Tokenizer, corpus: Sequence[File]) -> dict[str, Any]:
    """Measures drafts on the held-out files, as one stream and the start of each."""
    windows, starts = held_out_windows(bpe, corpus)
    found: dict[str, Any] = dict(windows=len(windows), tokens_of_window=windows.shape[1])
    for name, temperature in (("greedy", 0.0), ("temperature_0.7", 0.7)):
        rates = acceptance(pair, params, windows, temperature=temperature)
        share = rates.mean(0).round(4).tolist()
        found[name] = dict(accepted=share, mean_length=round(mean_length(rates), 4))
    if starts:
        rates = acceptance(pair, params, np.stack(list(starts.values())))
        lengths = {path: round(mean_length(r), 4) for path, r in zip(starts, rates, strict=True)}
        found["greedy_mean_length_of_first_512_tokens"] = lengths
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
