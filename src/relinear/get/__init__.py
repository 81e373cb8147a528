"""The making of inputs: models, texts, items."""
