"""Tiny random checkpoints of models that pool, saved by transformers, and `LLM`s of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxrunner import LLM
from jaxrunner.text.tokenizer import Tokenizer
from tests.support.checkpoints import NEEDS_TORCH

DECODER: dict[str, Any] = dict(
    vocab_size=62, hidden_size=36, intermediate_size=44, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
ENCODER: dict[str, Any] = dict(
    vocab_size=62, hidden_size=36, intermediate_size=44, num_hidden_layers=3,
    num_attention_heads=6, max_position_embeddings=64,
)  # fmt: skip
GEMMA = DECODER | dict(
    use_bidirectional_attention=True, sliding_window=8, query_pre_attn_scalar=12,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
MODERN = ENCODER | dict(local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                        cls_token_id=1, sep_token_id=2)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = dict(
    Bert=ENCODER, Roberta=ENCODER, XLMRoberta=ENCODER, ModernBert=MODERN, Gemma3Text=GEMMA
)
ENCODERS = ("BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel", "Gemma3TextModel")
ENGINE: dict[str, Any] = dict(
    max_num_seqs=3, max_num_batched_tokens=16, token_buckets=(16,), decode_buckets=(3,),
    num_blocks=24, block_size=16, dtype="float32", use_tqdm=False, warm_up=False, cache_dir=None,
    skip_tokenizer_init=True,
)  # fmt: skip
# An encoder reads a text at once.
WHOLE: dict[str, Any] = dict(max_model_len=48, max_num_batched_tokens=64, token_buckets=(64,))
PROMPTS = [np.random.default_rng(n).integers(5, 61, n).tolist() for n in (1, 5, 16, 17, 40)]


def config(name: str, **changes: Any) -> Any:
    """Returns a config of transformers, of its class `name`."""
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    sizes = next((KINDS[stem] for stem in KINDS if name.startswith(stem)), DECODER)
    return getattr(transformers, name).config_class(**sizes | changes)


def settings(name: str, **changes: Any) -> dict[str, Any]:
    """Returns the keys of a `config.json`."""
    return config(name, **changes).to_dict() | dict(architectures=[name])


def save(folder: Path, name: str, **changes: Any) -> Any:
    """Writes a checkpoint of class `name` of transformers. Returns its module, in float32."""
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    found = config(name, **changes)
    found._attn_implementation = "eager"
    module = getattr(transformers, name)(found).eval()
    torch.manual_seed(len(name))
    for at, weight in module.named_parameters():
        norm = "norm" in at.lower() and at.endswith("weight")
        torch.nn.init.normal_(weight, mean=1.0 if norm else 0.0, std=0.2 if norm else 0.3)
    module.save_pretrained(folder)
    return module


def save_colbert(folder: Path, name: str, width: int) -> tuple[Any, np.ndarray]:
    """Writes an encoder with a product behind each token. Returns its module and the product."""
    module, file = save(folder, name), folder / "model.safetensors"
    weight = np.random.default_rng(0).normal(size=(width, 36)).astype(np.float32)
    own = {"linear.weight": weight}
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | own, file)
    return module, weight


def start(folder: Path, **options: Any) -> LLM:
    """Returns an `LLM` of few small programs, whose prompts go in chunks."""
    return LLM(str(folder), **ENGINE | options)


def tokenizer() -> Tokenizer:
    """Returns a tokenizer of letters that separates texts, [CLS] a [SEP] b [SEP]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {token: i for i, token in enumerate([*special, *"abcdef "])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return Tokenizer(inner)


def prompts(texts: list[list[int]]) -> list[dict[str, list[int]]]:
    """Returns prompts of token ids."""
    return [{"prompt_token_ids": ids} for ids in texts]


def hidden(module: Any, ids: list[int], **kwargs: Any) -> np.ndarray:
    """Returns the last hidden states of one sequence, [T, E]."""
    import torch

    with torch.no_grad():
        return module(torch.tensor([ids]), **kwargs).last_hidden_state[0].numpy()


def scores(module: Any, ids: list[int], **kwargs: Any) -> np.ndarray:
    """Returns the scores of classes of one sequence, [X], or [T, X] of its tokens."""
    import torch

    with torch.no_grad():
        return module(torch.tensor([ids]), **kwargs).logits[0].numpy()


def unit(x: np.ndarray) -> np.ndarray:
    """Returns x, [..., X], with a length of one."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
