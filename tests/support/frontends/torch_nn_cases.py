"""One case for each module of `torch.nn`: how to make it, and the inputs of an example with 4 samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
nn: Any = torch.nn


@dataclass(frozen=True, slots=True)
class Case:
    """A module and its inputs.

    Attributes:
        make: the module, of f32.
        inputs: shape of each input; behind a name of `DRAWS` where it is not normal numbers.
        options: of `import_module`.
    """

    make: Callable[[], Any]
    inputs: tuple[Any, ...]
    options: dict[str, Any] | None = None


def draw(spec: Any, generator: Any) -> Any:
    """An input of f64, or of integers: normal numbers of a shape, or (kind, *shape)."""
    kind, shape = (spec[0], spec[1:]) if isinstance(spec[0], str) else ("normal", spec)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "normal":
        return numbers
    if kind == "share":  # probabilities
        return torch.sigmoid(numbers)
    if kind == "sign":
        return torch.where(numbers > 0, 1.0, -1.0).to(torch.float64)
    if kind == "logs":  # logarithms of probabilities in the last dim
        return torch.log_softmax(numbers, -1)
    return torch.randint(0, int(kind), shape, generator=generator)  # labels below a number


class SelfAttention(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x)


class Unpool(nn.Module):  # type: ignore[misc]
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.down = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.up = getattr(nn, f"MaxUnpool{dims}d")(2)

    def forward(self, x: Any) -> Any:
        return self.up(*self.down(x))


class CTC(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CTCLoss()

    def forward(self, logs: Any, labels: Any) -> Any:
        batch = logs.shape[0]
        return self.loss(logs.transpose(0, 1), labels + 1, torch.full((batch,), 7), torch.full((batch,), 2))


SEQUENCE, IMAGE, VOLUME = (4, 3, 10), (4, 3, 8, 6), (4, 3, 6, 5, 4)
SHAPES = {1: SEQUENCE, 2: IMAGE, 3: VOLUME}
CASES: dict[str, Case] = {}


def _add(name: str, make: Callable[[], Any], *inputs: Any, **options: Any) -> None:
    CASES[name] = Case(make, inputs, options or None)


for _name in (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
    "LogSigmoid", "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
    "Softshrink", "Softsign", "Tanh", "Tanhshrink",
):  # fmt: skip
    _add(_name, getattr(nn, _name), (4, 5))
_add("Threshold", lambda: nn.Threshold(0.1, 2.0), (4, 5))
_add("GLU", nn.GLU, (4, 6))
for _name in ("Softmax", "LogSoftmax", "Softmin"):
    _add(_name, lambda name=_name: getattr(nn, name)(dim=1), (4, 5, 3))
_add("Softmax2d", nn.Softmax2d, IMAGE)
for _name in ("Dropout", "AlphaDropout", "FeatureAlphaDropout"):
    _add(_name, getattr(nn, _name), (4, 5, 3))
for _d, _shape in SHAPES.items():
    _add(f"Dropout{_d}d", getattr(nn, f"Dropout{_d}d"), _shape)
    _add(f"AdaptiveAvgPool{_d}d", lambda d=_d: getattr(nn, f"AdaptiveAvgPool{d}d")(3), _shape)
    _add(f"AdaptiveMaxPool{_d}d", lambda d=_d: getattr(nn, f"AdaptiveMaxPool{d}d")(3), _shape)
    _add(
        f"AvgPool{_d}d", lambda d=_d: getattr(nn, f"AvgPool{d}d")(3, 2, 1, True, False), _shape
    )  # ceil_mode, without the padding in the count
    _add(f"MaxPool{_d}d", lambda d=_d: getattr(nn, f"MaxPool{d}d")(3, 2, 1, ceil_mode=True), _shape)
    _add(f"MaxUnpool{_d}d", lambda d=_d: Unpool(d), (4, 3, 6, 4, 4)[: _d + 2])
    _add(f"LPPool{_d}d", lambda d=_d: getattr(nn, f"LPPool{d}d")(2, 3), _shape)
    _add(f"BatchNorm{_d}d", lambda d=_d: getattr(nn, f"BatchNorm{d}d")(3), _shape)
    _add(f"InstanceNorm{_d}d", lambda d=_d: getattr(nn, f"InstanceNorm{d}d")(3, affine=True), _shape)
    _add(f"Conv{_d}d", lambda d=_d: getattr(nn, f"Conv{d}d")(3, 4, 3, 2, 1), _shape)
    _add(f"ConvTranspose{_d}d", lambda d=_d: getattr(nn, f"ConvTranspose{d}d")(3, 6, 3, 2, 1, 1, 3), _shape)
    _add(f"LazyConv{_d}d", lambda d=_d: getattr(nn, f"LazyConv{d}d")(4, 3, padding="same"), _shape)
    _add(f"LazyConvTranspose{_d}d", lambda d=_d: getattr(nn, f"LazyConvTranspose{d}d")(4, 3), _shape)
    _add(f"LazyBatchNorm{_d}d", getattr(nn, f"LazyBatchNorm{_d}d"), _shape)
    _add(
        f"LazyInstanceNorm{_d}d",
        lambda d=_d: getattr(nn, f"LazyInstanceNorm{d}d")(track_running_stats=False),
        _shape,
    )
    _add(f"ConstantPad{_d}d", lambda d=_d: getattr(nn, f"ConstantPad{d}d")(1, 2.5), _shape)
    for _kind in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"):
        _add(f"{_kind}{_d}d", lambda k=_kind, d=_d: getattr(nn, f"{k}{d}d")(1), _shape)
_add(
    "FractionalMaxPool2d",
    lambda: nn.FractionalMaxPool2d(3, output_ratio=0.5, _random_samples=torch.rand(4, 3, 2)),
    IMAGE,
)
_add(
    "FractionalMaxPool3d",
    lambda: nn.FractionalMaxPool3d(2, output_ratio=0.5, _random_samples=torch.rand(4, 3, 3)),
    VOLUME,
)

_add("Linear", lambda: nn.Linear(5, 3), (4, 6, 5))
_add("LazyLinear", lambda: nn.LazyLinear(3), (4, 5))
_add("Bilinear", lambda: nn.Bilinear(3, 5, 4), (4, 3), (4, 5))
_add("Embedding", lambda: nn.Embedding(9, 5, padding_idx=2), ("9", 4, 6))
_add("EmbeddingBag", lambda: nn.EmbeddingBag(9, 5), ("9", 4, 6))
_add("LayerNorm", lambda: nn.LayerNorm((3, 5)), (4, 3, 5))
_add("RMSNorm", lambda: nn.RMSNorm(5), (4, 3, 5))
_add("GroupNorm", lambda: nn.GroupNorm(2, 6), (4, 6, 5))
_add("LocalResponseNorm", lambda: nn.LocalResponseNorm(2), IMAGE)
_add("CrossMapLRN2d", lambda: nn.CrossMapLRN2d(3), IMAGE)
_add("SyncBatchNorm", lambda: nn.SyncBatchNorm(3), IMAGE)
_add("Flatten", nn.Flatten, IMAGE)
_add("Unflatten", lambda: nn.Unflatten(1, (2, 3)), (4, 6))
_add("PixelShuffle", lambda: nn.PixelShuffle(2), (4, 8, 3, 5))
_add("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), (4, 2, 6, 4))
_add("ChannelShuffle", lambda: nn.ChannelShuffle(2), (4, 6, 3, 5))
_add("Upsample", lambda: nn.Upsample(scale_factor=1.5, mode="bicubic", align_corners=True), IMAGE)
_add("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE)
_add("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(size=(11, 9)), IMAGE)
_add("Unfold", lambda: nn.Unfold(3, padding=1, stride=2), IMAGE)
_add("Fold", lambda: nn.Fold((8, 6), 3, padding=1, stride=2), (4, 27, 12))
_add("CosineSimilarity", nn.CosineSimilarity, (4, 5), (4, 5))
_add("PairwiseDistance", nn.PairwiseDistance, (4, 5), (4, 5))

_add("RNN", lambda: nn.RNN(5, 6, 2, batch_first=True), (4, 3, 5))
_add("LSTM", lambda: nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True), (4, 3, 5))
_add("GRU", lambda: nn.GRU(5, 6, batch_first=True), (4, 3, 5))
_add("RNNCell", lambda: nn.RNNCell(5, 6), (4, 5))
_add("LSTMCell", lambda: nn.LSTMCell(5, 6), (4, 5))
_add("GRUCell", lambda: nn.GRUCell(5, 6), (4, 5))
_add("MultiheadAttention", SelfAttention, (4, 3, 8))
_LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
_add("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(**_LAYER), (4, 3, 8))
_add("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(**_LAYER), (4, 3, 8), (4, 5, 8))
_add("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**_LAYER), 2), (4, 3, 8))
_add(
    "TransformerDecoder",
    lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**_LAYER), 2),
    (4, 3, 8),
    (4, 5, 8),
)
_add("Transformer", lambda: nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True), (4, 3, 8), (4, 5, 8))

for _name in ("L1Loss", "MSELoss", "HuberLoss", "SmoothL1Loss"):
    _add(_name, getattr(nn, _name), (4, 5), (4, 5))
for _name in ("SoftMarginLoss", "HingeEmbeddingLoss"):
    _add(_name, getattr(nn, _name), (4, 5), ("sign", 4, 5))
for _name in ("BCELoss", "BCEWithLogitsLoss", "MultiLabelSoftMarginLoss"):
    _add(_name, getattr(nn, _name), ("share", 4, 5), ("share", 4, 5))
_add("KLDivLoss", lambda: nn.KLDivLoss(reduction="batchmean"), ("logs", 4, 5), ("share", 4, 5))
_add("PoissonNLLLoss", nn.PoissonNLLLoss, (4, 5), ("share", 4, 5))
_add("GaussianNLLLoss", nn.GaussianNLLLoss, (4, 5), (4, 5), ("share", 4, 5))
_add("CrossEntropyLoss", lambda: nn.CrossEntropyLoss(label_smoothing=0.1), (4, 5, 3), ("5", 4, 3))
_add("NLLLoss", nn.NLLLoss, (4, 5), ("5", 4))
_add("MultiMarginLoss", nn.MultiMarginLoss, (4, 5), ("5", 4))
_add("MultiLabelMarginLoss", nn.MultiLabelMarginLoss, (4, 5), ("5", 4, 5))
_add("MarginRankingLoss", nn.MarginRankingLoss, (4,), (4,), ("sign", 4))
_add("CosineEmbeddingLoss", nn.CosineEmbeddingLoss, (4, 5), (4, 5), ("sign", 4))
_add("TripletMarginLoss", nn.TripletMarginLoss, (4, 5), (4, 5), (4, 5))
_add("TripletMarginWithDistanceLoss", nn.TripletMarginWithDistanceLoss, (4, 5), (4, 5), (4, 5))
_add("CTCLoss", CTC, ("logs", 4, 7, 5), ("4", 4, 2))
_add("LinearCrossEntropyLoss", lambda: nn.LinearCrossEntropyLoss(5, 7), (4, 5), ("7", 4))
_add("AdaptiveLogSoftmaxWithLoss", lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 10, [4]), (4, 6), ("10", 4))

NO_MODULES = {
    "Container", "DataParallel", "Module", "ModuleDict", "ModuleList", "NLLLoss2d", "ParameterDict",
    "ParameterList", "RNNBase", "RNNCellBase", "Sequential",
}  # fmt: skip
"""Containers, base classes, and an old name of NLLLoss."""


REFUSED = {
    "CrossMapLRN2d": "its backward in torch is not the derivative of its forward part; use LocalResponseNorm",
}
"""Modules that cannot be imported, and why."""
