"""A program in parts, of which equal ones are compiled once: how it is cut, run and kept."""
