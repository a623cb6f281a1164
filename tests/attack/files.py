"""Checkpoints of others that were tampered with: config.json, weights, tokenizers, templates."""

from collections.abc import Iterator
import json
import random
import re
import shutil
from typing import Any

from jaxrunner import LLM
from jaxrunner.text.tokenizer import Tokenizer
from tests.attack import models, tamper
from tests.attack.harness import Case, Entry
from tests.attack.tamper import Folder

WEIGHTS = "model.safetensors"
HEADERS = ("dtype", "shape", "data_offsets")


class Checkpoints(Entry):
    """`LLM(folder)` of a folder of which one file is another."""

    def __init__(self) -> None:
        path = models.scratch() / "tampered"
        shutil.rmtree(path, ignore_errors=True)
        self.folder = Folder(models.write_checkpoint(path))
        self.llm = models.llm()

    def case(self, rng: random.Random) -> Case:
        what = rng.randrange(8)
        if what < 3:
            words = self._json(rng, rng.choice(("config.json",) * 3 + models.FILES[2:]))
        elif what < 6:
            words = self._header(rng)
        elif what == 6:
            words = self.folder.tamper(rng, lambda path: path.name != "tokenizer.json")
        else:
            words = self._index(rng)
        keys = re.findall(r"/(\w+)", words)  # where in a file
        return Case(self._opened, (str(self.folder.path), *NAMES, *keys), None, words)

    def _json(self, rng: random.Random, name: str) -> str:
        path = self.folder.path / name
        new, words = tamper.json_text(rng, self.folder.files[path])
        self.folder.write(path, new)
        return f"{name}: {words}"

    def _header(self, rng: random.Random) -> str:
        """Lies in the header of the weights; of their length, or of a tensor."""
        path = self.folder.path / WEIGHTS
        data = self.folder.files[path]
        size = int.from_bytes(data[:8], "little")
        header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
        how = rng.randrange(8)
        if how == 0:
            length = rng.choice((0, 1, size - 1, size + 1, len(data), 2**31, 2**63, 2**64 - 1))
            self.folder.write(path, length.to_bytes(8, "little") + data[8:])
            return f"header of {length} bytes"
        if how == 1:
            many = {
                f"t{i}": dict(dtype="F32", shape=[0], data_offsets=[0, 0]) for i in range(60_000)
            }
            text, words = json.dumps(header | many).encode(), "60,000 tensors more"
        elif how == 2:
            one = rng.choice([*header])
            text = json.dumps(header)[:-1].encode() + f', "{one}": '.encode()
            text, words = text + json.dumps(header[one]).encode() + b"}", f"{one} twice"
        elif how < 6 and (names := [n for n in header if n != "__metadata__"]):
            one, field = rng.choice(names), rng.choice(HEADERS)
            new = tamper.json_value(rng) if how < 5 else header[rng.choice(names)][field]
            header[one] = header[one] | {field: new}
            text, words = (
                json.dumps(header).encode("utf-8", "surrogatepass"),
                f"{one}: {field}={new!r:.80}",
            )
        else:
            text, words = tamper.json_text(rng, json.dumps(header).encode())
        self.folder.write(path, len(text).to_bytes(8, "little") + text + rest)
        return f"header: {words}"

    def _index(self, rng: random.Random) -> str:
        """Weights that an index leads to, which lies."""
        path = self.folder.path
        data = self.folder.files[path / WEIGHTS]
        size = int.from_bytes(data[:8], "little")
        part = "model-00001-of-00001.safetensors"
        names = [name for name in json.loads(data[8 : 8 + size]) if name != "__metadata__"]
        index = dict(metadata={}, weight_map=dict.fromkeys(names, part))
        new, words = tamper.json_text(rng, json.dumps(index).encode())
        self.folder.remove(path / WEIGHTS)
        self.folder.write(path / part, data)
        self.folder.write(path / "model.safetensors.index.json", new)
        return f"index: {words}"

    def _opened(self) -> None:
        LLM(str(self.folder.path), **models.SIZES).close()

    def mend(self) -> None:
        self.folder.mend()

    def canary(self) -> Iterator[Any]:
        return models.streamed(self.llm)

    def close(self) -> None:
        self.llm.close()


# What a message of a folder names, if not the folder.
NAMES = (r"config\.json", "safetensors", "tokenizer", "generation_config", "index", "bos_token",
         "eos_token", "pad_token", "vocab_size", "max_model_len",
         "chat_template", "temperature", "top_p")  # fmt: skip
TEXTS = ("AB", "", "x" * 200, "é\u2028\U0001f600 A", "<B>")


class Tokenizers(Entry):
    """`Tokenizer.from_folder`, and texts and ids through what came of it."""

    def __init__(self) -> None:
        path = models.scratch() / "tokenizer"
        path.mkdir(exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(models.checkpoint() / name, path / name)
        self.folder = Folder(path)

    def case(self, rng: random.Random) -> Case:
        path = self.folder.path / rng.choice(("tokenizer.json",) * 4 + ("tokenizer_config.json",))
        if rng.random() < 0.1:
            words = self.folder.tamper(rng)
        else:
            data, words = self.folder.files[path], ""
            if path.name == "tokenizer.json" and rng.random() < 0.4:
                data, words = self._machinery(rng, data)
            else:
                data, words = tamper.json_text(rng, data)
            self.folder.write(path, data)
            words = f"{path.name}: {words}"
        return Case(self._used, (str(self.folder.path), *NAMES), None, words)

    def _machinery(self, rng: random.Random, data: bytes) -> tuple[bytes, str]:
        """Returns a file with parts that are legal, and no good."""
        told = json.loads(data)
        part, new = rng.choice(PARTS)
        if part == "vocab":
            told["model"]["vocab"] = new
        elif part == "id":
            told["model"]["vocab"][rng.choice("ABCDEF")] = new
        else:
            told[part] = new
        return json.dumps(told).encode(), f"{part}={new!r:.120}"

    def _used(self) -> None:
        tokenizer = Tokenizer.from_folder(self.folder.path)
        for text in TEXTS:
            ids = tokenizer.encode(text)
            tokenizer.decode(ids[:99])
        for i in (0, 1, 60, 61, 2**31):
            tokenizer.token_text(i) if i in tokenizer else None
        assert tokenizer.vocab_size >= 0

    def mend(self) -> None:
        self.folder.mend()

    def canary(self) -> Iterator[Any]:
        return models.neighbour(models.calm())


def _replacing(pattern: str, content: str) -> dict[str, Any]:
    return dict(type="Replace", pattern=dict(Regex=pattern), content=content)


PARTS: tuple[tuple[str, Any], ...] = (
    ("id", 2 * 10**8), ("id", 2**32 - 1), ("id", 2**31), ("id", 0), ("vocab", {}),
    ("vocab", {"A": 2 * 10**8}), ("vocab", {f"{i}": i for i in range(9999)}),
    ("decoder", _replacing("", "x" * 9999)), ("decoder", _replacing(".", "x" * 10**6)),
    ("decoder", dict(type="Sequence", decoders=[_replacing(".", "xxxxxxxxxx")] * 12)),
    ("decoder", dict(type="Sequence", decoders=[])), ("decoder", None),
    ("decoder", dict(type="Strip", content="A", start=2**40, stop=2**40)),
    ("decoder", dict(type="ByteFallback")), ("decoder", dict(type="CTC", pad_token="", cleanup=True,
                                                            word_delimiter_token="")),
    ("normalizer", _replacing("(a+)+$", "")), ("normalizer", _replacing("", "ab")),
    ("normalizer", dict(type="Sequence", normalizers=[_replacing(".", "xxxxxxxxxx")] * 12)),
    ("normalizer", dict(type="Prepend", prepend="x" * 10**6)),
    ("normalizer", dict(type="Precompiled", precompiled_charsmap="AAAA")),
    ("pre_tokenizer", dict(type="Split", pattern=dict(Regex="(x+x+)+y"), behavior="Isolated",
                           invert=False)),
    ("pre_tokenizer", dict(type="Metaspace", replacement="é", prepend_scheme="always", split=True)),
    ("post_processor", dict(type="TemplateProcessing", single=[], pair=[], special_tokens={})),
    ("post_processor", dict(type="TemplateProcessing", pair=[], special_tokens={},
                            single=[{"SpecialToken": {"id": "Q", "type_id": 0}}])),
    ("truncation", dict(direction="Right", max_length=0, strategy="LongestFirst", stride=9)),
    ("padding", dict(strategy=dict(Fixed=2 * 10**9), direction="Right", pad_to_multiple_of=0,
                     pad_id=0, pad_type_id=0, pad_token="A")),
    ("added_tokens", [dict(id=2**32 - 1, content="A", single_word=False, lstrip=False, rstrip=False,
                           normalized=False, special=True)]),
    ("added_tokens", [dict(id=i, content=f"t{i}", single_word=False, lstrip=False, rstrip=False,
                           normalized=False, special=True) for i in range(3000)]),
    ("added_tokens", [dict(id=70, content="", single_word=False, lstrip=False, rstrip=False,
                           normalized=False, special=False)]),
)  # fmt: skip
