"""The machine a stage runs on: devices, processes, locks."""
