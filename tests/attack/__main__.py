"""Runs the attack: `python -m tests.attack --count 5000 [--entry llm] [--seed 0] [--at 17]`."""

from pathlib import Path
import sys

sys.path.insert(0, str(Path(__file__).parents[1]))

from attack.command import main

if __name__ == "__main__":
    sys.exit(main())
