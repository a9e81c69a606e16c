"""Matrix products with operands sharded over both axes of a mesh: algorithms, and the tuner that chooses."""
