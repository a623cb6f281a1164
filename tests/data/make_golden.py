"""Makes golden.npz: Hugging Face logits of every variant, to check models without torch.

python tests/data/make_golden.py
"""

from pathlib import Path
import sys

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support import families, huggingface

LENGTH, KEPT = 40, 3


def main() -> None:
    golden = {}
    for variant in families.VARIANTS:
        logits = huggingface.logits(huggingface.model(variant), families.ids(LENGTH))
        golden[variant] = logits[-KEPT:].astype(np.float32)
    np.savez_compressed(Path(__file__).with_name("golden.npz"), **golden)


if __name__ == "__main__":
    main()
