"""The limits that are written down are those that hold."""

from pathlib import Path

from jaxrunner.api import limits

TEXT = (Path(__file__).parents[1] / "docs" / "limits.md").read_text(encoding="utf-8")


def test_the_limits_are_told():
    told = dict(line.strip("| \n").split(" | ")[:2] for line in TEXT.splitlines() if " | " in line)
    sizes = {name.strip("`"): most for names, most in told.items() for name in names.split(", ")}
    for name, most in limits.SIZES.items():
        assert sizes[name] == str(most), name
    assert sizes["sliding_window"] == str(limits.ANY_SIZE)
    files = {
        "tokenizer.json": limits.TOKENIZER_BYTES,
        "config.json": limits.JSON_BYTES,
        "the header of a safetensors file": limits.HEADER_BYTES,
    }
    for name, most in files.items():
        assert sizes[name] == f"{most // limits.MEBI} MiB", name
    assert sizes["a token"] == f"{limits.TOKEN_CHARS} characters"
    assert told["growth of a text in one of them"] == f"{limits.GROWTH} times"
    assert told["the text of a prompt"].startswith(f"{limits.TEXT_CHARS} characters")
    parts = "parts of a normalizer, pre-tokenizer, post-processor or decoder"
    assert told[parts] == str(limits.TOKENIZER_PARTS)
    assert f"up to {limits.SHORT_TEXT} characters" in TEXT
