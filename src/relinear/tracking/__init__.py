"""The MLflow mirror of the result files."""
