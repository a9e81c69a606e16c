"""The array API of traced tensors: NumPy functions and array API code trace like operators.

Loading this package binds the protocols of NumPy to `Tensor`.
"""

from distgraph.array_api.numpy_protocols import bind_numpy_protocols

bind_numpy_protocols()
