"""A decoder layer that is described by data: norms, attention, rotation and MLP of a family."""
