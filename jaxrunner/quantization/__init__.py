"""Weights of 8 or 4 bits: how they are held, multiplied, and read from checkpoints."""
