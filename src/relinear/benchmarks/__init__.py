"""Measurement campaigns of speed and memory."""
