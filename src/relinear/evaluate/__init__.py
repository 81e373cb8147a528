"""Evaluation: lm-eval tasks (harness), perplexity, and the fidelity of attention weights and outputs."""
