"""Checkpoints: safetensors files that every rank writes, and one index that names them.

    ckpt/index.json                                                     the tensors, their blocks and
                                                                        checksums, and the state of training
    ckpt/step-00000120-5f2c8b1e90d4a367.rank-00003.safetensors          the blocks that rank 3 owns, each
                                                                        under its tensor's name

`writing` writes them, `background` does so while training goes on, `resharding` reads them under any mesh,
`index` has the schema of an index, `shards` reads and writes safetensors files, and `files` has the
operations of the operating system.
docs/running/checkpoints.md describes the format and its guarantees.

Without distgraph, `safetensors.numpy.load_file` reads a file, and the index has the position of each block in
its tensor.
"""

from distgraph.runtime.execute.checkpoint.background import CheckpointInProgress
from distgraph.runtime.execute.checkpoint.index import FORMAT, INDEX
from distgraph.runtime.execute.checkpoint.resharding import Checkpoint
from distgraph.runtime.execute.checkpoint.writing import SavedTensor, owned, reserve, write_checkpoint

__all__ = [
    "FORMAT",
    "INDEX",
    "Checkpoint",
    "CheckpointInProgress",
    "SavedTensor",
    "owned",
    "reserve",
    "write_checkpoint",
]
