"""GPT-2 in NumPy: a serial training step, and one decorator makes it a pipeline of 2 stages on 2 x 2 ranks.
python tutorials/04_parallelize.py     # or: distgraph run -n 4 tutorials/04_parallelize.py
"""

import numpy as np

import distgraph as dg

WIDTH, HEADS, WORDS, LENGTH = 64, 4, 64, 32


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(dg.ops.var(x, -1, keepdims=True) + 1e-5)


def gpt2(params, ids):
    x = dg.ops.embedding(params["words"], ids) + params["places"]
    for number, p in enumerate(params["blocks"]):
        if number == 1:
            dg.mark_pipeline_boundary()
        heads = (norm(x) @ p["qkv"]).reshape(len(ids), LENGTH, 3 * HEADS, -1).transpose(0, 2, 1, 3)
        mixed = dg.ops.attention(*np.split(heads, 3, axis=1), causal=True)
        x = x + mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ p["out"]
        x = x + dg.ops.gelu(norm(x) @ p["up"]) @ p["down"]
    return norm(x) @ params["words"].T


@dg.parallelize(method="pipeline", layers="manual", stages=2, devices=4, micro_batches=4)
def train_step(state, batch):
    def loss_func(params):
        return dg.ops.cross_entropy(gpt2(params, batch["ids"]), batch["labels"]).mean()

    loss, grads = dg.value_and_grad(loss_func)(state["params"])
    momentum = dg.tree_map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = dg.tree_map(lambda p, m: p - 0.05 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, {"loss": loss}


draw = np.random.default_rng(0)
widths = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
blocks = [
    {name: draw.normal(0, 0.05, (WIDTH * a, WIDTH * b)) for name, (a, b) in widths.items()} for _ in "12"
]
params = {
    "words": draw.normal(0, 0.05, (WORDS, WIDTH)),
    "places": np.zeros((LENGTH, WIDTH)),
    "blocks": blocks,
}
state = {"params": params, "momentum": dg.tree_map(np.zeros_like, params)}
for step in range(30):
    rows = (draw.integers(0, WORDS, (16, 1)) + 3 * np.arange(LENGTH + 1)) % WORDS
    state, metrics = train_step(state, {"ids": rows[:, :-1], "labels": rows[:, 1:]})
    if step % 10 == 9 and train_step.engine.is_chief:
        print(f"step {step}: loss {metrics['loss']:.3f}")
