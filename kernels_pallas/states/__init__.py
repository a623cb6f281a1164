"""Layers with states: convolutions, Mamba-2 and gated delta nets."""
