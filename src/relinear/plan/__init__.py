"""The plan, without torch: the catalogue, keys and paths, code closures."""
