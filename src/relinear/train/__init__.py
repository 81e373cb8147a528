"""The training loop, and one file a step."""
