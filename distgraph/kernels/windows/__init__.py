"""Arithmetic of windows that move over an input: where they lie, their products, pooling."""
