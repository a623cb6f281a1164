"""The model in the package: tiny-pystdlib-7m, 7.3 million parameters, two minutes of training.

It has read nothing but the Python 3.12.1 standard library (2.2 million tokens, 24 times over), and
writes what looks like Python: indentation, docstrings, plausible names. It does not write working
programs, knows no other language, and repeats itself, the more so at temperature 0: sample at 0.7,
and give it a few lines to start from. A prompt must begin with token 0, which its tokenizer adds:
that tells it how deep the first line is. It was trained on windows of 2,048 tokens, its context. Of
files that it had not seen it predicts a byte in 1.08 bits (training.json). It is for trying,
testing and teaching jaxrunner without a download. `python -m jaxrunner.train` made it, on an H200;
NOTICE says under what licence.

In the folder EAGLE3_PATH is an EAGLE-3 head that drafts for it, of 1.1 million parameters, made by
`python -m jaxrunner.train eagle3` in a minute. Of three drafts behind a token of files that neither
had seen 1.56 stand on average at temperature 0, and 1.51 at 0.7 (its training.json).
"""

from pathlib import Path

PATH = Path(__file__).resolve().parent
EAGLE3_PATH = PATH / "eagle3"
