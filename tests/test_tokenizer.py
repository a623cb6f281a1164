"""Tokenizers: files are read or refused, and text that streams is the text of the whole."""

from itertools import accumulate
import json

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.text.detokenizer import MAX_PENDING, Detokenizer, StopChecker
from jaxrunner.text.tokenizer import Tokenizer

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

TEXTS = [
    "Hello world, how are you? The quick brown fox  jumps.",
    "日本語のテキスト、中文字符測試。",
    "naïve café 😀😀 👩‍👩‍👧 flags 🇩🇪 done",
    "def f(x):\n    return x\n\n\tif not x:\r\n",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]


def byte_level() -> Tokenizer:
    """Returns a tokenizer like those of GPT-2, Llama 3 and Qwen."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    return Tokenizer(inner, bos_token="<s>", eos_token="</s>")


def byte_fallback(metaspace: bool = False) -> Tokenizer:
    """Returns a tokenizer like those of Llama 2 and Mistral, or one with a Metaspace decoder."""
    letters = sorted(set("".join(TEXTS)) - set("日本語😀\n\r\t "))
    words = ["▁", "▁▁", "▁Hello", "▁world", "lo", "▁the", "中文"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    inner = Inner(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        space = [decoders.Metaspace(prepend_scheme="first")]
        inner.decoder = decoders.Sequence([decoders.ByteFallback(), *space])
    else:
        inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        strip = [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), *strip]
        )
    inner.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return Tokenizer(inner, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte fallback": byte_fallback(),
    "metaspace": byte_fallback(metaspace=True),
}
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
texts = st.text(alphabet="".join(TEXTS) + "𝄞é\u200d\ufffd", max_size=12)
parts = st.lists(st.one_of(texts, st.sampled_from(SPECIAL)), max_size=3)


def added_text(tokenizer, prompt, output, skip):
    """Returns what an output adds to the text of its prompt."""
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    while not whole.startswith(before):  # which ended in half a character
        before = before[:-1]
    return whole[len(before) :]


def ids_of(tokenizer, *tokens):
    vocab = tokenizer.inner.get_vocab()
    return [vocab[token] for token in tokens]


def stream(tokenizer, prompt, output, skip, size=1):
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    deltas = [detokenizer.append(output[i : i + size]) for i in range(0, len(output), size)]
    deltas.append(detokenizer.flush())
    assert detokenizer.text == "".join(deltas)
    return deltas


@each_tokenizer
@hypothesis.settings(max_examples=100)
@hypothesis.given(before=parts, after=parts, skip=st.booleans(), size=st.integers(1, 3))
def test_a_stream_gives_the_text_of_the_whole(name, before, after, skip, size):
    tokenizer = TOKENIZERS[name]
    prompt, output = (
        [i for part in side for i in tokenizer.encode(part, add_special_tokens=False)]
        for side in (before, after)
    )
    want = added_text(tokenizer, prompt, output, skip)
    assert "".join(stream(tokenizer, prompt, output, skip, size)) == want


@hypothesis.settings(max_examples=300)
@hypothesis.given(data=st.data(), size=st.integers(1, 3))
def test_bytes_that_are_no_text_stream_as_the_whole_decodes(data, size):
    tokenizer = TOKENIZERS["byte-level"]
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=20)
    prompt, output = data.draw(ids), data.draw(ids)
    deltas = stream(tokenizer, prompt, output, True, size)
    assert "".join(deltas) == added_text(tokenizer, prompt, output, True)


@each_tokenizer
@pytest.mark.parametrize("text", TEXTS)
def test_a_character_comes_whole(name, text):
    tokenizer = TOKENIZERS[name]
    deltas = stream(tokenizer, [], tokenizer.encode(text), True)
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas) and deltas[-1] == ""


def test_bytes_that_break_a_run_leave_what_was_shown():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in "日".encode() + b"\xff"), "lo")
    assert tokenizer.decode(ids) == "\ufffd" * 4 + "lo"
    assert "".join(stream(tokenizer, [], ids, True)) == "日\ufffdlo"
    # A newline is a byte in such vocabularies: a stop string must not wait for what follows.
    newline = ids_of(tokenizer, "<0x0A>")
    assert stream(tokenizer, [], newline * 3, True) == ["\n", "\n", "\n", ""]


@each_tokenizer
def test_a_space_after_the_prompt_is_kept(name):
    tokenizer = TOKENIZERS[name]
    hello, both = tokenizer.encode("Hello"), tokenizer.encode("Hello world")
    eos = [tokenizer.eos_token_id]
    assert "".join(stream(tokenizer, hello, both[len(hello) :], True)) == " world"
    assert "".join(stream(tokenizer, hello + eos * 50, both[len(hello) :], True)) == " world"
    late = hello + eos * 99 + both[len(hello) :]
    assert "".join(stream(tokenizer, [], late, True)) == "Hello world"


def test_a_run_of_broken_bytes_is_not_held_for_ever():
    tokenizer = TOKENIZERS["byte-level"]
    broken = tokenizer.encode("日", add_special_tokens=False)[:1] * (4 * MAX_PENDING)
    detokenizer = Detokenizer(tokenizer, [])
    shown = accumulate(len(detokenizer.append([i])) for i in broken)
    assert all(n - s <= MAX_PENDING for n, s in enumerate(shown, 1))
    assert detokenizer.text + detokenizer.flush() == tokenizer.decode(broken)


def test_ids_without_a_token_add_no_text():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("Hello")
    strange = [len(tokenizer), 2**31 - 1, 2**40, -1, tokenizer.eos_token_id]
    detokenizer = Detokenizer(tokenizer, strange)
    assert detokenizer.append(strange * 99 + ids + strange * 99) == "Hello"
    assert len(detokenizer._ids) < 9  # else each token would cost more than the last
    assert tokenizer.decode(strange + ids) == "Hello"
    assert [i in tokenizer for i in (0, *strange)] == [True, False, False, False, False, True]


@pytest.mark.parametrize(
    "stop, want",
    [
        ("lo", ("lo", "Hel")),
        (["o", "l"], ("l", "He")),  # the first place wins
        (["ll", "llo"], ("ll", "He")),  # then the order given
        (["llo", "ll"], ("llo", "He")),
        ("x", None),
        ("Hello!", None),
        (None, None),
    ],
)
def test_the_first_stop_string_ends_the_text(stop, want):
    assert StopChecker(SamplingParams(stop=stop)).find("Hello", 5, 1) == want
    including = SamplingParams(stop=stop, include_stop_str_in_output=True)
    kept = want and (want[0], want[1] + want[0])
    assert StopChecker(including).find("Hello", 5, 1) == kept


def test_stop_strings_count_in_new_text_after_the_least_tokens():
    checker = StopChecker(SamplingParams(stop="ab", min_tokens=3))
    assert checker.find("xab", 1, 3) is None
    assert checker.find("xab", 1, 4) == ("ab", "x")
    assert checker.find("xaby", 1, 4) is None  # it ended before
    assert checker.find("xaby", 2, 4) == ("ab", "x")


@hypothesis.given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text=st.text("abc", max_size=12),
)
def test_a_stream_holds_what_may_begin_a_stop_string(stops, text):
    held = StopChecker(SamplingParams(stop=stops)).num_held(text)
    begins = [
        n for n in range(1, len(text) + 1) for s in stops if s != text[-n:] == s[:n] and n < len(s)
    ]
    assert held == max(begins, default=0)
    params = SamplingParams(stop=stops, include_stop_str_in_output=True)
    assert StopChecker(params).num_held(text) == 0


def save(folder, name="byte-level", config=None, **files):
    """Writes a tokenizer's files."""
    TOKENIZERS[name].inner.save(str(folder / "tokenizer.json"))
    given = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
    files = {"tokenizer_config.json": json.dumps(given | (config or {}))} | files
    for file, content in files.items():
        (folder / file).write_text(content, encoding="utf-8")
    return folder


@each_tokenizer
def test_a_folder_reads_as_transformers_reads_it(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    save(tmp_path, name, {"tokenizer_class": "PreTrainedTokenizerFast"})
    ours = Tokenizer.from_folder(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert len(ours) == ours.vocab_size == len(theirs) and ours.pad_token_id is None
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<s>", "</s>", None)
    assert ours.bos_token_id == theirs.bos_token_id and ours.eos_token_id == theirs.eos_token_id
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode("<s>" + text + "</s>", special)
            assert ids == theirs.encode("<s>" + text + "</s>", add_special_tokens=special)
            want = theirs.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, special) == want


def test_special_tokens_and_template_come_from_any_file(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"bos_token": None, "chat_template": named, "pad_token": "not there"}
    save(tmp_path, config=config, **{"special_tokens_map.json": '{"bos_token": "<|end|>"}'})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token, tokenizer.chat_template) == ("<|end|>", "D")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("not there", None)
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert Tokenizer.from_folder(str(tmp_path)).chat_template == "own file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"template.jinja is not UTF-8 \(.*\): fetch it again"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).chat_template is None


def test_a_file_cannot_shorten_or_pad_prompts(tmp_path):
    want, inner = TOKENIZERS["byte-level"].encode(TEXTS[0]), byte_level().inner
    inner.enable_truncation(3)
    inner.enable_padding(length=99)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(TEXTS[0]) == want


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer.json": "{"}, "tokenizer.json is not a tokenizer .*: fetch it again"),
        ({"tokenizer.json": "{}"}, "tokenizer.json is not a tokenizer .*: fetch it again"),
        ({"tokenizer_config.json": "{"}, r"config.json must be JSON, got .*: fetch it again"),
        ({"tokenizer_config.json": "[" * 10**5}, "tokenizer_config.json must be JSON"),
        ({"special_tokens_map.json": "[]"}, "special_tokens_map.json must hold a JSON object, got"),
        ({"tokenizer_config.json": '{"eos_token": 3}'}, "eos_token must be a string or hold one"),
        ({"tokenizer_config.json": '{"eos_token": "</x>"}'}, "'</x>' is not in the vocabulary: co"),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, "chat_template of tokenizer_config.j"),
    ],
)
def test_a_broken_file_is_refused_by_name(files, message, tmp_path):
    save(tmp_path, **files)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder has none: save one with transf"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"missing and tokenizer.model cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "text, error, message",
    [
        (3, TypeError, "text to encode must be a str, got int: pass a str"),
        (b"a", TypeError, "text to encode must be a str, got bytes"),
        ("ab\ud800", ValueError, "text has half a surrogate pair at character 2, which no UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        TOKENIZERS["byte-level"].encode(text)
