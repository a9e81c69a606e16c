"""Calibration: numbers of resource files and runtime models, fitted to measured steps, with their errors."""
