"""Mixtures beyond their layers: routes recorded and replayed, loads counted and balanced."""
