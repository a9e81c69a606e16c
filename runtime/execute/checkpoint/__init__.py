"""Checkpoints: safetensors files that every rank writes, and one index that makes them count.

    ckpt/index.json                                                     what there is: tensors, their blocks
                                                                        and checksums, the state of training
    ckpt/step-00000120-5f2c8b1e90d4a367.rank-00003.safetensors          the blocks that rank 3 owns, each
                                                                        under its tensor's name

`writing` writes them, `reading` reads them under any mesh, `index` says what an index may hold, `shards` and
`files` know safetensors and the operating system. docs/checkpoints.md describes the format and what is
promised.

Without distgraph, `safetensors.numpy.load_file` reads a file, and the index says where in its tensor each
block belongs.
"""

from distgraph.runtime.execute.checkpoint.index import FORMAT, INDEX
from distgraph.runtime.execute.checkpoint.reading import Checkpoint
from distgraph.runtime.execute.checkpoint.writing import Placed, owned, reserve, write_checkpoint

__all__ = ["FORMAT", "INDEX", "Checkpoint", "Placed", "owned", "reserve", "write_checkpoint"]
