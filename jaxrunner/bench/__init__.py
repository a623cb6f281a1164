"""Measures one engine: `python -m jaxrunner.bench`."""
