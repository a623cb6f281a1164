"""Compares a checkpoint with transformers: `python -m jaxrunner.check MODEL_DIR`.

Both compute logits of a few prompts in float32, on this machine, or what a model pools of them.
Where they differ, so do hidden states: the first layer that makes another output of the same input
is named.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
import json
from pathlib import Path
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrunner.check import pooled
from jaxrunner.config import ModelConfig
from jaxrunner.heads.pooled import PooledConfig
from jaxrunner.hf_config import read_json
from jaxrunner.loading.loader import load
from jaxrunner.ops.backends import dense
from jaxrunner.text.tokenizer import Tokenizer
from jaxrunner.types import Array

EQUAL, DIFFERENT, NOT_COMPARED = 0, 1, 2  # exit statuses
LENGTHS = (1, 7, 40)
TOLERANCE = 1e-4
LOGITS, POOLED = "the logits", "the pooled array"  # names of the last stage
BEHIND = {
    LOGITS: "the final norm, the head, or a scale of logits",
    POOLED: "the final norm, the pooling, or the layers behind it",
}
NEEDS = "the reference is computed by transformers and torch: install them, or jaxrunner[hf]"


class States(NamedTuple):
    """The arrays that a model computes of one prompt, one row a token."""

    residuals: list[np.ndarray]  # inputs of each layer, and the output of the last, [T, E]
    logits: np.ndarray  # [T, V]; what is pooled, [1, X] or [T, X], of a model that pools
    last: str = LOGITS

    def stages(self) -> list[tuple[str, np.ndarray]]:
        """Returns every array with its name, in the order that they are computed in."""
        names = ["the embedding", *(f"layer {i}" for i in range(len(self.residuals) - 1))]
        return [*zip(names, self.residuals, strict=True), (self.last, self.logits)]


class Row(NamedTuple):
    """How far two models are apart in one stage."""

    name: str
    apart: float  # largest difference, of the largest value of the reference
    prompt: int  # that it was found in
    token: int  # the first one of it that is too far apart, else the farthest


def ours(
    folder: Path, prompts: Sequence[Sequence[int]], overrides: dict | None, runner: str = "auto"
) -> list[States]:
    """Returns what jaxrunner computes.

    Raises:
      FileNotFoundError, ValueError: the checkpoint is not supported; names it.
    """
    loaded = load(folder, dtype="float32", hf_overrides=overrides, runner=runner)
    model, config = loaded.model, loaded.config
    params = loaded.read_params(progress=False)
    names = tuple(f"residual.{i}" for i in range(config.num_hidden_layers + 1))
    scored = _reference(folder, config).endswith(pooled.SCORED)

    @jax.jit
    def run(params: Any, ids: Array) -> tuple[dict[str, Array], Array]:
        inputs = pooled.inputs_of(model, config, ids)
        batch = pooled.batch_of(inputs)
        x, none = model.embed(config, params, inputs), (None,) * config.num_hidden_layers
        ops = replace(dense(1), batch=batch)
        hidden, _, found = model.layers(config, params, x, none, inputs, ops, extras=names)
        if isinstance(config, PooledConfig):
            return found, pooled.ours(config, params, hidden, batch, scored=scored)
        return found, model.logits(config, params, hidden)

    last = POOLED if isinstance(config, PooledConfig) else LOGITS
    made = (jax.device_get(run(params, np.asarray(ids, np.int32))) for ids in prompts)
    return [States([found[name] for name in names], told, last) for found, told in made]


def theirs(folder: Path, prompts: Sequence[Sequence[int]], config: ModelConfig) -> list[States]:
    """Returns what transformers computes. config: ours, which says what is pooled, and how.

    Raises:
      ImportError: it is not installed. Others are its own.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = dict(dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    kind = getattr(transformers, _reference(folder, config))
    model = kind.from_pretrained(folder, **options).eval()
    made = []
    for ids in prompts:
        with torch.no_grad():
            residuals, output = _hooked(model, torch.tensor([ids]))
        states = [x[0].numpy() for x in residuals]
        if not isinstance(config, PooledConfig):
            made.append(States(states, output.logits[0].numpy()))
        elif "logits" in output:
            rows = output.logits.numpy().reshape(-1, config.num_out)
            made.append(States(states, rows, POOLED))
        else:
            hidden = output.last_hidden_state[0].numpy()
            made.append(States(states, pooled.theirs(config, hidden), POOLED))
    return made


def _reference(folder: Path, config: ModelConfig) -> str:
    return pooled.reference(read_json(folder / "config.json"), config)


def _hooked(model: Any, ids: Any) -> tuple[list[Any], Any]:
    """Runs a module of transformers. Returns what its layers read and gave, and its output."""
    num = model.config.get_text_config().num_hidden_layers  # there may be a tower beside the text
    lists = (m for m in model.get_decoder().modules() if type(m).__name__ == "ModuleList")
    layers = next(m for m in lists if len(m) == num)
    found: list[Any] = []

    def keep(*passed: Any) -> None:
        hidden = passed[-1]  # a hook's last argument: the inputs, or the output
        found.append(hidden[0] if isinstance(hidden, tuple) else hidden)

    hooks = [layers[0].register_forward_pre_hook(keep)]
    hooks += [layer.register_forward_hook(keep) for layer in layers]
    output = model(ids)
    for hook in hooks:
        hook.remove()
    return found, output


def compare(got: list[States], want: list[States], tolerance: float) -> list[Row]:
    """Returns how far apart each stage is, in the prompt where that is farthest."""
    rows: list[Row] = []
    for prompt, (a, b) in enumerate(zip(got, want, strict=True)):
        pairs = zip(a.stages(), b.stages(), strict=True)
        for i, ((name, x), (_, y)) in enumerate(pairs):
            apart = np.abs(x - y).max(-1) / max(np.abs(y).max(), np.finfo(np.float32).tiny)
            apart = np.where(np.isfinite(apart), apart, np.inf)
            far = apart > tolerance
            token = int(far.argmax() if far.any() else apart.argmax())
            row = Row(name, float(apart.max()), prompt, token)
            if prompt == 0:
                rows.append(row)
            elif row.apart > rows[i].apart:
                rows[i] = row
    return rows


def report(rows: list[Row], lengths: list[int], tolerance: float) -> tuple[int, str]:
    """Returns the exit status, and what is to be said."""
    lines = [f"{row.name:<14} {row.apart:.1e}{'  <' * (row.apart > tolerance)}" for row in rows]
    lines.insert(0, "largest difference of a stage, of its largest value")
    first = next((row for row in rows if row.apart > tolerance), None)
    if first is None:
        return EQUAL, "\n".join([*lines, f"equal: all within {tolerance:g} of transformers"])
    where = f"token {first.token} of prompt {first.prompt}, which has {lengths[first.prompt]}"
    if first.name == POOLED:
        where = where.partition(" of ")[2]  # one array may be that of all tokens
    said = f"different: {first.name} is the first that is apart, by {first.apart:.1e} from {where}"
    if first.name in BEHIND:
        said += f": {BEHIND[first.name]}"
    return DIFFERENT, "\n".join([*lines, said])


def prompts_of(
    folder: Path, texts: Sequence[str], lengths: Sequence[int], config: ModelConfig
) -> list[list[int]]:
    """Returns token ids: of texts where there are some, else random ones of some lengths.

    Raises:
      FileNotFoundError, ValueError: the folder has no tokenizer, or no config.
    """
    if texts:
        tokenizer = Tokenizer.from_folder(folder)
        return [tokenizer.encode(text) for text in texts]
    # Transformers counts positions of RoBERTa, and looks for the last token, by what is no padding.
    padding = read_json(folder / "config.json").get("pad_token_id")
    padding = {padding, getattr(config, "first_position", 0) - 1}
    ids = [i for i in range(config.vocab_size) if i not in padding]
    rng = np.random.default_rng(0)
    return [rng.choice(ids, length).tolist() for length in lengths]


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, compares and reports. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrunner.check", description=__doc__,
        epilog="exit status: 0 equal, 1 different, 2 not compared",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, metavar="MODEL_DIR", help="a checkpoint folder")
    parser.add_argument("texts", nargs="*", help="prompts; random tokens by default")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N",
        help="of random prompts; one over a sliding window tries it (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE,
        help="of a difference, relative to a stage's largest value (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--hf-overrides", type=json.loads, help="JSON of config.json's keys, for jaxrunner alone"
    )
    parser.add_argument(
        "--runner", default="auto", choices=("auto", "generate", "pooling"),
        help="as of LLM; pooling compares what a decoder pools (%(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if min(args.lengths) < 1 or not args.tolerance > 0:
        parser.error("--lengths and --tolerance must be over 0")
    try:
        config = load(args.folder, hf_overrides=args.hf_overrides, runner=args.runner).config
        prompts = prompts_of(args.folder, args.texts, args.lengths, config)
        want = theirs(args.folder, prompts, config)
        got = ours(args.folder, prompts, args.hf_overrides, args.runner)
    except ImportError as error:
        print(f"not compared: {error}; {NEEDS}", file=sys.stderr)
        return NOT_COMPARED
    except (OSError, ValueError) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return NOT_COMPARED
    rows = compare(got, want, args.tolerance)
    status, text = report(rows, [len(ids) for ids in prompts], args.tolerance)
    print(text)
    return status
