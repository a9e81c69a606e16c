"""Stages of a pipeline: layers, sub-meshes and micro-batches (Alpa, Zheng et al., 2022, section 5)."""
