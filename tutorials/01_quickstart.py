"""A small GPT learns Python from the source of Python's own standard library, on 2 x 2 ranks.
python tutorials/01_quickstart.py                 # four threads, nothing else to start
distgraph run -n 4 tutorials/01_quickstart.py     # the same on four MPI ranks
"""

import os
from pathlib import Path

import numpy as np

import distgraph as dg
from distgraph import nn, optim, schedules

QUICK = bool(os.environ.get("DISTGRAPH_TUTORIAL_QUICK"))
LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 2
mesh = dg.ProcessMesh.grid(dp=2, tp=2)  # batches split two ways, layers two ways


class GPT(nn.Module):
    def __init__(self):
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Parameter((LENGTH, WIDTH))
        self.blocks = [nn.TransformerBlock(WIDTH, HEADS, dropout=0.1) for _ in range(LAYERS)]
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for block in self.blocks:
            dg.shard_tensor(block.attn.q.weight, mesh, [None, "tp"])  # the heads; k, v and out follow
            dg.shard_tensor(block.mlp.up.weight, mesh, [None, "tp"])  # the hidden width; down follows

    def forward(self, text):
        x = dg.shard_tensor(self.token(text) + self.place, mesh, ["dp", None, None])  # the batch
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Windows:  # a map-style data set: pieces of some files, and the bytes that follow each byte
    def __init__(self, files):
        self.data = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)

    def __len__(self):
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index):
        piece = self.data[index * LENGTH : (index + 1) * LENGTH + 1].astype("i4")
        return piece[:-1], piece[1:]


files = sorted(Path(os.__file__).parent.glob("*.py"))[: 8 if QUICK else 28]
train, valid = Windows([f for i, f in enumerate(files) if i % 8]), Windows(files[::8])
rate = schedules.warmup(schedules.cosine(3e-3, steps=len(train) // 32), steps=20)
engine = dg.Engine(GPT(), nn.CrossEntropy(), optim.AdamW(lr=rate, clip_norm=1.0))
history = engine.fit(train, epochs=1, batch_size=32, valid_data=valid)

prompt = list(b"    def __init__(self")  # tokens are bytes
(text,) = engine.generate([prompt], 20 if QUICK else 300, temperature=0.7, keep=LENGTH // 2)
if engine.is_chief:
    print(engine.plan, f"loss {history.losses[0]:.2f} -> {history.losses[-1]:.2f}", sep="\n\n")
    print(bytes(text.tolist()).decode("latin1"))
