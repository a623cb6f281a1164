"""Trains a model on the standard library: `python -m jaxrunner.train --out DIR`.

`python -m jaxrunner.train eagle3 --out DIR` trains the head that drafts for it.
"""

import argparse
from pathlib import Path
import platform
import sys
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.models.llama import llama
from jaxrunner.train import eagle3_command
from jaxrunner.train import tokenizer as text
from jaxrunner.train.corpus import read_corpus
from jaxrunner.train.publish import publish
from jaxrunner.train.sample import complete
from jaxrunner.train.trainer import TrainConfig, fit

SIZES = {
    "tiny": dict(layers=2, hidden=64, intermediate=160, heads=2, kv_heads=1, head_dim=32),
    "7m": dict(layers=8, hidden=256, intermediate=768, heads=4, kv_heads=2, head_dim=64),
}
VOCAB = 4096
VARIANTS = 8  # random cuts of the corpus into tokens
OPTIONS = (  # fields of `TrainConfig`
    *("steps", "batch", "length", "peak_rate", "weight_decay", "dropout"),
    *("eval_every", "patience", "budget_s", "seed"),
)
PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n",
    "import os\n\ndef ",
    'def read_lines(path):\n    """Return',
    "",
)


def settings(size: str, length: int) -> dict:
    """Returns the config.json of a model trained on windows of `length` tokens."""
    shape = SIZES[size]
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        hidden_act="silu",
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        torch_dtype="bfloat16",
    )


def main() -> None:
    """Reads the corpus, trains the tokenizer and the model, saves both, and shows samples."""
    if sys.argv[1:2] == ["eagle3"]:
        eagle3_command.main(sys.argv[2:])
        return
    args, began = _arguments(), time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {message}", flush=True)

    corpus = read_corpus(args.stdlib)
    learnt, held_out = ([f.text for f in corpus if f.held_out is part] for part in (False, True))
    bpe = text.train_tokenizer(learnt, VOCAB)
    variants = [text.shuffled_stream(bpe, learnt, args.seed + i) for i in range(VARIANTS)]
    say(f"{len(corpus)} files, {len(variants[0]):,} tokens, on {jax.devices()[0].device_kind}")
    train = _train_config(args)
    values = settings(args.size, train.length)
    config = llama.read(Settings(values))
    stream, held_out = np.concatenate(variants), text.stream(bpe, held_out)
    result = fit(config, train, (stream, text.openings(bpe, stream)), held_out, say)
    origin = dict(name=args.name, python=args.python, licence=args.stdlib / "LICENSE.txt")
    record = publish(args.out, corpus, bpe, values, (config, train, result), origin)
    say(f"saved {args.out}: {record['held_out']}")
    params = jax.tree.map(jnp.asarray, result.params)
    for completion in complete(config, params, bpe, PROMPTS):
        print(f"{'-' * 72}\n{completion}")
    say("done")


def _train_config(args: argparse.Namespace) -> TrainConfig:
    return TrainConfig(dtype=args.dtype, **{name: getattr(args, name) for name in OPTIONS})


def _arguments() -> argparse.Namespace:
    head = "`python -m jaxrunner.train eagle3 --help`: the head that drafts for the model"
    parser = argparse.ArgumentParser(prog="python -m jaxrunner.train", epilog=head)
    default = TrainConfig()
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write the model to")
    add("--name", default="tiny-pystdlib-7m")
    add("--size", choices=sorted(SIZES), default="7m")
    stdlib = Path(sysconfig.get_path("stdlib"))
    add("--stdlib", type=Path, default=stdlib, help="folder of the library to learn from")
    add("--python", default=platform.python_version(), help="version of that library")
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    add("--dtype", default=dtype, help="of the computation")
    for name in OPTIONS:
        value = getattr(default, name)
        add("--" + name.replace("_", "-"), type=type(value), default=value)
    return parser.parse_args()


if __name__ == "__main__":
    main()
