"""Dense families that `models.blocks` runs, one file each: a reader of `config.json`, and names."""
