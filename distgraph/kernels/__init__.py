"""Kernels: the arithmetic of the ops on one device, over NumPy or CuPy arrays.

Calling convention, the same for every kernel::

    kernel(xp, *arrays, out=None, **attrs)

``xp`` is ``numpy``, ``cupy``, or the array namespace of a registered device. The result is an array, or a
tuple of arrays for several results.
``out`` is an array, or a tuple of arrays of which any may be None: contiguous, of the result's shape; the
result is written there and returned. Without it the kernel allocates. Inputs may be non-contiguous views.
An elementwise or row kernel may be given one of its inputs as ``out``.
Results have the dtype of the input they follow; float16 and bfloat16 are computed in float32 and rounded
once.

Three implementations stand behind the one name and are chosen per call, from the arrays alone: plain array
code that runs on NumPy and CuPy; loops compiled by Numba (extra ``fast``) for large NumPy arrays, where one
pass over memory replaces many; CUDA kernels on CuPy (`cuda/`), elementwise ones and those of rows and
attention. They agree to rounding, and bit for bit for random numbers.

Nothing is imported here: take kernels from their family, ``from distgraph.kernels.norm import layer_norm``.
"""
