"""Handwritten digits on a pipeline of two stages of different size: one rank, then three.

    python tutorials/02_digits.py
    distgraph run -n 4 tutorials/02_digits.py

The first stage works on the next micro-batch while the second one, whose three ranks share each
micro-batch, works on this one. Eight images over three ranks do not divide: the last rank gets two.
"""

import os

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import distgraph as dg
from distgraph import nn, ops, optim

QUICK = bool(os.environ.get("DISTGRAPH_TUTORIAL_QUICK"))
first, second = dg.ProcessMesh([0], ["dp"]), dg.ProcessMesh([1, 2, 3], ["dp"])


class MLP(nn.Module):
    """A hidden layer on the first stage, the output layer on the second."""

    def __init__(self):
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, images):
        images = dg.shard_tensor(images, first, ["dp", None, None, None])
        hidden = ops.relu(self.up(nn.Flatten()(images)))
        hidden = dg.reshard(hidden, second, ["dp", None])  # the border between the stages
        return self.down(hidden)


class ConvNet(nn.Module):
    """One convolution on the first stage, everything else on the second."""

    def __init__(self):
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.down = nn.Linear(32 * 2 * 2, 64), nn.Linear(64, 10)
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout(0.2)

    def forward(self, images):
        images = dg.shard_tensor(images, first, ["dp", None, None, None])
        x = self.pool(ops.relu(self.conv1(images)))
        x = dg.reshard(x, second, ["dp", None, None, None])
        x = self.pool(ops.relu(self.conv2(x)))
        return self.down(self.dropout(ops.relu(self.up(nn.Flatten()(x)))))


def accuracy(logits, labels):
    return (logits.argmax(-1) == labels).astype("f32").mean()


digits = load_digits()
images, labels = (digits.images[:, None] / 16).astype("f4"), digits.target.astype("i4")
train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.25, random_state=0)

for name, model, epochs in (("MLP", MLP(), 15), ("conv net", ConvNet(), 30)):
    strategy = dg.Strategy(micro_batches=4)
    engine = dg.Engine(model, nn.CrossEntropy(), optim.Adam(lr=2e-3), metrics=[accuracy], strategy=strategy)
    engine.fit((train_x, train_y), epochs=2 if QUICK else epochs, batch_size=32)
    result = engine.evaluate((test_x, test_y))
    guesses = engine.predict(test_x).argmax(-1)
    if engine.is_chief:  # every rank evaluates and predicts; rank 0 prints
        print(f"{name}: test accuracy {result['accuracy']:.1%}, most mistakes among the", end=" ")
        print(f"{np.bincount(test_y[guesses != test_y], minlength=10).argmax()}s\n\n{engine.plan}\n")
