"""Kernels and their specification, `reference.py`. Imported as `jaxrunner.kernels_pallas`."""

if __name__ != "jaxrunner.kernels_pallas":
    raise ImportError(f"import jaxrunner.kernels_pallas, not {__name__}")
