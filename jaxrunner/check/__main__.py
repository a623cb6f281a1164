"""Compares a checkpoint with transformers: `python -m jaxrunner.check --help`."""

import sys

from jaxrunner.check.compare import main

if __name__ == "__main__":
    sys.exit(main())
