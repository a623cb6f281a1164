"""Weights of 8 or 4 bits: how they are held, multiplied with, and made of checkpoints."""
