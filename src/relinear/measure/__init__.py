"""Metrics: one metric, one file."""
