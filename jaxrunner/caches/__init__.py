"""The kinds of caches that layers keep of earlier tokens, one kind a file."""
