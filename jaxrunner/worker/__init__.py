"""The device of one process: its memory, how large an engine on it is, its weights, sleep."""
