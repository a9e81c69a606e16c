"""The search for a plan: layouts, stages, devices, recomputation and schedule of a training step."""
