"""What the docs say of tests."""

from pathlib import Path
import re

TESTS = Path(__file__).parent


def test_tests_that_docs_name_are_there():
    text = (TESTS.parent / "docs" / "model_runner.md").read_text(encoding="utf-8")
    named, missing = 0, []
    for cell in re.findall(r"`(test_\w+\.py[^|\n]*)\|", text):
        files = re.findall(r"(test_\w+\.py|::\w+)", cell)
        source = ""
        for name in files:
            if name.startswith("test_"):
                source = (TESTS / name).read_text(encoding="utf-8")
            elif f"def {name[2:]}(" not in source:
                missing.append(name)
            named += 1
    assert not missing and named > 60
