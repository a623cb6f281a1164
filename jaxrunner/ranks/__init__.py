"""Data ranks of one engine: their tables of requests, outputs of steps and saved blocks, as one."""
