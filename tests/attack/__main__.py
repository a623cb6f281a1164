"""Runs the attack: `python -m tests.attack --count 5000 [--entry llm] [--seed 0] [--at 17]`."""

import sys

from tests.attack.command import main

if __name__ == "__main__":
    sys.exit(main())
