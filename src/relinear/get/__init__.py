"""How inputs are made: models, texts, items."""
