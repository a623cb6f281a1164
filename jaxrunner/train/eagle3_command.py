"""The command that trains the embedded model's EAGLE-3 head: `python -m jaxrunner.train eagle3`."""

import argparse
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
import platform
import sysconfig
import time
from typing import Any

import jax
from tokenizers import Tokenizer

from jaxrunner import embedded
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.loading.weights import load_params
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import llama
from jaxrunner.speculators.eagle3_config import read
from jaxrunner.train import tokenizer as text
from jaxrunner.train.acceptance import Pair
from jaxrunner.train.corpus import read_corpus
from jaxrunner.train.eagle3 import HeadTraining, fit
from jaxrunner.train.eagle3_publish import held_out_windows, publish
from jaxrunner.train.rollout import rollouts, rows_of

OPTIONS = (  # fields of `HeadTraining`
    *("steps", "batch", "length", "unroll", "decay", "peak_rate", "weight_decay", "clip"),
    *("eval_every", "budget_s", "seed"),
)


def settings(target: DecoderConfig, layers_given: Sequence[int]) -> dict[str, Any]:
    """Returns the config.json of a head. layers_given: of the target, whose outputs it reads."""
    return dict(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        vocab_size=target.vocab_size,
        draft_vocab_size=None,  # all, and the target's own logits
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        hidden_act="silu",
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=10000.0,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_ids[0],
        # In both ways to count that are in use: vLLM reads one, SGLang the other.
        eagle_aux_hidden_state_layer_ids=[i + 1 for i in layers_given],
        eagle_config=dict(
            use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=list(layers_given)
        ),
    )


def main(argv: Sequence[str]) -> None:
    """Writes text with the target, trains a head on it, measures and saves it."""
    args, began = _arguments(argv), time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {message}", flush=True)

    target = llama.read(Settings(read_json(args.target / "config.json")))
    assert isinstance(target, DecoderConfig)
    params = load_params(args.target, llama, target, dtype=args.dtype, progress=False)
    bpe = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    corpus = read_corpus(args.stdlib)
    learnt = text.stream(bpe, [f.text for f in corpus if not f.held_out])
    say(f"{len(corpus)} files, {len(learnt):,} tokens, on {jax.devices()[0].device_kind}")
    places, written = text.openings(bpe, learnt), []
    shape = args.rows, min(args.row_len, target.longest_len)
    for i in range(args.rollouts):
        written.append(rollouts(target, params, learnt, places, shape=shape, seed=args.seed + i))
        say(f"{sum(part.size for part in written):,} tokens written")
    rows = rows_of([*written, learnt], shape[1])
    values = settings(target, args.layers)
    pair = Pair(target, read(Settings(values), target))
    train = HeadTraining(dtype=args.dtype, **{name: getattr(args, name) for name in OPTIONS})
    held_out = held_out_windows(bpe, corpus)[0]
    trained = fit(pair, params, train, rows, held_out, report=say, began=began)
    origin = dict(
        target=args.target,
        python=args.python,
        tokens_written=sum(part.size for part in written),
        tokens_of_corpus=int(rows.size - sum(part.size for part in written)),
        training=dataclasses.asdict(train),
        began=began,
    )
    record = publish(args.out, values, (pair, trained), (bpe, corpus), origin)
    say(f"saved {args.out}: {json.dumps(record['held_out'])}")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    default = HeadTraining()
    parser = argparse.ArgumentParser(prog="python -m jaxrunner.train eagle3")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write the head to")
    add("--target", type=Path, default=embedded.PATH, help="folder of the model it drafts for")
    stdlib = Path(sysconfig.get_path("stdlib"))
    add("--stdlib", type=Path, default=stdlib, help="folder of the library to begin texts from")
    add("--python", default=platform.python_version(), help="version of that library")
    add("--layers", type=int, nargs="+", default=[1, 4, 6], help="whose outputs the head reads")
    add("--rollouts", type=int, default=3, help="times that the model writes rows of text")
    add("--rows", type=int, default=512, help="texts that it writes at once")
    add("--row-len", type=int, default=1024, help="tokens of a text")
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    add("--dtype", default=dtype, help="of the computation")
    for name in OPTIONS:
        value = getattr(default, name)
        add("--" + name.replace("_", "-"), type=type(value), default=value)
    return parser.parse_args(argv)
