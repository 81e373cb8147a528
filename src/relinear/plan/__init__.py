"""What is to be done, without torch: the catalogue, keys and paths, code closures."""
