"""Models for others to use: exports, self-contained folders, generation."""
