"""Is a checkpoint computed as transformers computes it?"""
