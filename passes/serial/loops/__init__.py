"""Loops in passes: programs whose loops are flat, which completion lays out, and back."""
