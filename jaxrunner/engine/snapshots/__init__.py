"""A running engine as files and back: requests, their blocks, and what must agree."""
