"""What the kernels need to run CUDA sources by CuPy; a source is declared next to the NumPy form of its op.

`elementwise_kernel` has kernels of one element, which CuPy puts into a loop. `block_kernel` has kernels in
which a block of threads computes a row. `flash_attention` has the sources of attention, which share a product
of tiles.
"""

from __future__ import annotations
