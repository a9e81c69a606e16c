"""Tracing: Python code that runs once on symbolic tensors and leaves a serial graph behind."""
