"""Products with weights of 16 bits, and the norms around them."""
