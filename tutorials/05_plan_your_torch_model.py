"""A model of PyTorch comes in, is planned for a cluster that is not here, and trains here under another plan.
python tutorials/05_plan_your_torch_model.py     # needs torch: pip install "distgraph[torch]"
"""

import importlib.util
import sys

import numpy as np

import distgraph as dg

if importlib.util.find_spec("torch") is None:
    print('torch is not installed, so there is no model to plan: pip install "distgraph[torch]"')
    sys.exit()
import torch

net = torch.nn.Sequential(
    torch.nn.Embedding(256, 64),
    *[torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(1)],
    torch.nn.Linear(64, 256),
)
net.eval()  # it has no dropout: one graph for training and evaluation
model = dg.frontends.torch.import_module(net, torch.zeros(2, 16, dtype=torch.int64))
optimizer = dg.frontends.torch.import_optimizer(torch.optim.AdamW(net.parameters(), lr=3e-3))
rows = (np.arange(4096).reshape(256, 16) * 7 + np.arange(256)[:, None]) % 256
batch = rows, (rows + 7) % 256

# where would it be fast? A plan for 8 GPUs that nobody has to have; plan.save("plan.json") keeps it
searched = dg.Strategy(mode="auto", devices=8, seconds=5)
plan = dg.Engine(model, dg.nn.CrossEntropy(), optimizer, strategy=searched, cluster="dgx_h100_pod").prepare(
    batch
)
print(plan.portable)

# the same model trains here, on two ranks; on GPUs, under torchrun:
#     plan.portable.apply_to_torch(net, torch.optim.AdamW(net.parameters())).train_step(x, y, loss)
local = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", zero=2)
engine = dg.Engine(model, dg.nn.CrossEntropy(), optimizer, strategy=local)
history = engine.fit(batch, epochs=3, batch_size=64, progress=False)
print(f"loss {history.losses[0]:.2f} -> {history.losses[-1]:.2f}")
net.load_state_dict(
    {name: torch.from_numpy(array) for name, array in engine.parameters().items()}, strict=False
)
