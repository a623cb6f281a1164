"""Bad values at every public entry: `python -m tests.attack --count 5000`; see `harness`."""
