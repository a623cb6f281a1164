"""Trains the embedded model on the Python standard library: `python -m jaxrunner.train`."""
