"""Hybrids: decoders some of whose layers carry a state on in place of keys and values."""
