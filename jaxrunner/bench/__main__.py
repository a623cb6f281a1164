"""Measures an engine or the kernels: `python -m jaxrunner.bench --help`."""

from jaxrunner.bench.command import main

if __name__ == "__main__":
    main()
