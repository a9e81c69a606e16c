"""Wide ResNet: bottleneck blocks (He et al., 2016) whose 3x3 convolutions alone are widened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, check_fields, checked_arguments
from distgraph.models.megatron_layout import Placed, Stack
from distgraph.nn import BatchNorm2d, Conv2d, Linear, MaxPool2d
from distgraph.tracing.annotations import on
from distgraph.tracing.annotations import recompute as again
from distgraph.tracing.tensor import Tensor

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Depth -> number of blocks at each resolution (He et al., 2016, table 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WideResNetConfig:
    """Shape of a wide residual network.

    Attributes:
        blocks: number of bottleneck blocks at each resolution; `BLOCKS` has those of depths 50 and 101.
        channels: of the stem and inside the first blocks; twice as many at each next resolution.
        width: how many times more channels the 3x3 convolutions put out.
        image: height and width of the images, which have three channels.
        classes: number of classes.
        dtype: of parameters and computation.
    """

    channels: Count
    width: Count
    blocks: tuple[Count, ...] = BLOCKS[50]
    image: Count = 224
    classes: Count = 1024
    dtype: Any = "f32"

    def __post_init__(self) -> None:
        check_fields(self)


WIDE_RESNET_PRESETS: dict[str, WideResNetConfig] = {
    name: WideResNetConfig(channels=channels, width=width, blocks=BLOCKS[depth])
    for name, depth, channels, width in (
        ("250M", 50, 160, 2),
        ("500M", 50, 224, 2),
        ("1B", 50, 320, 2),
        ("2B", 50, 448, 2),
        ("4B", 50, 640, 2),
        ("6.8B", 50, 320, 16),
        ("13B", 101, 320, 16),
    )
}
"""Those of Alpa (Zheng et al., OSDI 2022, table 6)."""


class Bottleneck(Placed):
    """1x1, 3x3 (with the stride), 1x1, each with batch norm, plus the input, projected where shapes differ.

    Args:
        inputs: channels of the input.
        channels: channels after the first convolution; the output has four times as many.
        width: factor by which the 3x3 convolution has more channels.
    """

    def __init__(self, inputs: int, channels: int, width: int, stride: int, dtype: str) -> None:
        inner, outputs = channels * width, 4 * channels
        self.conv1 = Conv2d(inputs, channels, 1, bias=False, dtype=dtype)
        self.bn1 = BatchNorm2d(channels, dtype=dtype)
        self.conv2 = Conv2d(channels, inner, 3, stride, padding=1, bias=False, dtype=dtype)
        self.bn2 = BatchNorm2d(inner, dtype=dtype)
        self.conv3 = Conv2d(inner, outputs, 1, bias=False, dtype=dtype)
        self.bn3 = BatchNorm2d(outputs, dtype=dtype)
        self.project = self.bn4 = None
        if inputs != outputs or stride != 1:
            self.project = Conv2d(inputs, outputs, 1, stride, bias=False, dtype=dtype)
            self.bn4 = BatchNorm2d(outputs, dtype=dtype)

    def forward(self, x: Any) -> Tensor:
        """x [n, inputs, h, w] -> [n, 4 channels, h / stride, w / stride]."""
        y = ops.relu(self.bn1(self.conv1(x)))
        y = ops.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        past = x if self.project is None or self.bn4 is None else self.bn4(self.project(x))
        out: Tensor = self.layout.batch(ops.relu(y + past))
        return out


@checked_arguments()
class WideResNet(Stack):
    """Images [n, 3, h, w] -> logits [n, classes].

    Example:
        >>> WideResNet.preset("250M").parameter_count()
        254123104
    """

    tail = ("head",)
    presets = WIDE_RESNET_PRESETS

    def __init__(self, config: WideResNetConfig) -> None:
        c, self.config = config, config
        self.stem = Conv2d(3, c.channels, 7, 2, padding=3, bias=False, dtype=c.dtype)
        self.bn = BatchNorm2d(c.channels, dtype=c.dtype)
        self.pool = MaxPool2d(3, 2, padding=1)
        self.blocks: list[Bottleneck] = []
        inputs = c.channels
        for level, count in enumerate(c.blocks):
            for number in range(count):
                stride = 2 if level and not number else 1
                self.blocks.append(Bottleneck(inputs, c.channels * 2**level, c.width, stride, c.dtype))
                inputs = 4 * c.channels * 2**level
        self.head = Linear(inputs, c.classes, dtype=c.dtype)

    def forward(self, images: Any) -> Tensor:
        """images [n, 3, h, w] -> logits [n, classes]. Raises GraphError for another number of channels."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise GraphError(f"images are {images.value.type} but must be [n, 3, h, w]")
        with on(self.layout.mesh):
            x = self.layout.batch(images)
            x = self.layout.batch(again(self._begin)(x) if self.recompute else self._begin(x))
        x = self.through(x)
        with on(self.end.mesh):
            y: Tensor = self.head(ops.mean(x, (2, 3)))
        return y

    def _begin(self, images: Any) -> Tensor:
        """The modules before the blocks, recomputed like blocks since their activations are the largest."""
        y: Tensor = self.pool(ops.relu(self.bn(self.stem(images))))
        return y

    def loss(self, logits: Any, labels: Any) -> Tensor:
        """Mean cross-entropy of the logits [n, classes] and labels [n]."""
        with on(self.end.mesh):
            return ops.mean(ops.cross_entropy(logits, self.end.batch(labels)))
