"""Compiled programs: how they are chosen, kept from start to start, and looked up by a step."""
