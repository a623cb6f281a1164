"""Data ranks of one engine: tables of requests, and outputs of steps, of all of them as one."""
