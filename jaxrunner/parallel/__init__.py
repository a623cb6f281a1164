"""A model on several devices: the mesh, what is cut over it, and what is summed."""
