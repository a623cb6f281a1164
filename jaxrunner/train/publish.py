"""Writes a trained model as a folder that Hugging Face's tools, and ours, can load."""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import math
from pathlib import Path
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from jaxrunner.config import ModelConfig
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.llama import llama
from jaxrunner.train import tokenizer as text
from jaxrunner.train.corpus import File, file_list
from jaxrunner.train.trainer import Result, TrainConfig, evaluate

GENERATION = dict(
    do_sample=True, temperature=0.7, top_p=0.95, bos_token_id=0, eos_token_id=0, pad_token_id=0
)
NOTICE = """\
{name}: a language model of {params} parameters.

Its weights and its tokenizer were trained from random values on the standard library of
CPython {python} alone (files.txt lists the files with their SHA-256), by
`python -m jaxrunner.train`. That text is Copyright (c) 2001 Python Software Foundation; All Rights
Reserved, and is licensed under the terms in LICENSE-PSF.txt, which lies beside this file. Files
that carry a notice of anyone else's were left out, unless they are licensed to the Python Software
Foundation under a contributor agreement.

Changes made to that text: it was cut into tokens and learnt from; no file of it is included. A
small model can repeat passages of what it was trained on word for word: LICENSE-PSF.txt covers
those. The Python Software Foundation does not endorse this model.

The model writes what looks like Python. It knows nothing else, and what it writes is not to be
relied on. It exists so that jaxrunner can be tried, tested and taught without a download.
"""


def publish(
    folder: Path,
    corpus: Sequence[File],
    tokenizer: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    trained: tuple[ModelConfig, TrainConfig, Result],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes the model's folder and returns what `training.json` says.

    settings: of config.json. origin: `name`, `python` (version of the library), `licence` (path).
    The held-out losses are those of the weights as they are stored, in bfloat16.
    """
    config, train, result = trained
    folder.mkdir(parents=True, exist_ok=True)
    params = jax.tree.map(lambda p: jnp.asarray(p).astype(jnp.bfloat16), result.params)
    save_checkpoint(folder, llama, config, params, dict(settings))
    text.save_tokenizer(tokenizer, folder, config.longest_len)
    shutil.copyfile(origin["licence"], folder / "LICENSE-PSF.txt")
    num_params = sum(p.size for p in jax.tree.leaves(params))
    notice = NOTICE.format(name=origin["name"], params=f"{num_params:,}", python=origin["python"])
    _write(folder / "NOTICE", notice)
    _write(folder / "files.txt", file_list(corpus))
    _write(folder / "generation_config.json", _json(GENERATION))
    record = dict(
        name=origin["name"],
        python=origin["python"],
        parameters=num_params,
        corpus_sha256=hashlib.sha256(file_list(corpus).encode()).hexdigest(),
        train_tokens=len(text.stream(tokenizer, [f.text for f in corpus if not f.held_out])),
        held_out=_held_out(config, params, tokenizer, corpus, train.length),
        training=dataclasses.asdict(train),
        best=result.best,
        loss_curve=result.curve,
        versions={m.__name__: m.__version__ for m in (jax, optax, tokenizers)},
        device=jax.devices()[0].device_kind,
        sha256={p.name: _sha256(p) for p in sorted(folder.iterdir()) if p.name != "training.json"},
    )
    _write(folder / "training.json", _json(record))
    return record


def _held_out(
    config: ModelConfig, params: Any, tokenizer: tokenizers.Tokenizer, corpus: Sequence[File],
    length: int,
) -> dict[str, Any]:  # fmt: skip
    """Scores the held-out files, as one stream and the start of each, in float32."""
    files = [f for f in corpus if f.held_out]
    losses = evaluate(config, params, text.stream(tokenizer, [f.text for f in files]), length)
    num_bytes = sum(len(f.text.encode()) for f in files)
    start = {}
    for file in files:
        ids = text.stream(tokenizer, [file.text])[:513]
        start[file.path] = round(float(evaluate(config, params, ids, 512).mean()), 4)
    return dict(
        files=len(files),
        tokens=len(losses),
        bytes=num_bytes,
        loss_per_token=round(float(losses.mean()), 4),
        bits_per_byte=round(float(np.sum(losses, dtype=np.float64)) / math.log(2) / num_bytes, 4),
        loss_of_first_512_tokens=start,
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
