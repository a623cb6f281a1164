"""Mixtures: weights of experts, routes recorded and replayed, loads counted and balanced."""
