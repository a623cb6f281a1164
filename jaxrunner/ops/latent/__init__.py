"""Latent attention, absorbed and by keys and values of each head."""
