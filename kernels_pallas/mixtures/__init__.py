"""Experts of mixtures: which a token goes to, and their products."""
