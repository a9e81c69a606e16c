"""The schema of the index of a checkpoint, as pydantic models."""

from __future__ import annotations

import math
import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field

from distgraph.ir.dtypes import NAMES
from distgraph.runtime.execute.checkpoint.files import SHARD
from distgraph.serialization.models import Entry

_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _number(value: object) -> object:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _matching(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(expected)
        return value

    return AfterValidator(check)


def _listed(value: str) -> str:
    if value not in NAMES:
        raise ValueError(f"one of {', '.join(NAMES)}")
    return value


Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Size = Annotated[int, Field(ge=1, lt=1 << 62)]
Whole = Annotated[int, Field(gt=-(10**40), lt=10**40)]
Number = Annotated[Whole | Annotated[float, Field(allow_inf_nan=True)], BeforeValidator(_number)]
Checksum = Annotated[str, _matching(re.compile("[0-9a-f]{16}"), "a checksum of 16 hexadecimal digits")]
FileName = Annotated[str, _matching(SHARD, 'a file such as "step-00000120-5f2c....rank-00003.safetensors"')]
Dtype = Annotated[str, AfterValidator(_listed)]


class BlockEntry(Entry):
    """A block of a tensor: its position in the tensor and in a file, and the checksums of its pages."""

    file: FileName
    start: list[Count]
    shape: list[Size]
    begin: Size
    checksums: Annotated[list[Checksum], Field(min_length=1)]


class TensorEntry(Entry):
    """A tensor and its blocks."""

    kind: str
    shape: list[Count]
    dtype: Dtype
    shards: list[BlockEntry]


class FileEntry(Entry):
    """A file: its bytes, the bytes of its header, and the checksum of the header."""

    bytes: Size
    header: Size
    checksum: Checksum


class Training(Entry):
    """The state of training in a checkpoint, with the version and the time that wrote it.

    Attributes:
        run: identifier of a training and of trainings resumed from its checkpoints.
        skipped: steps whose gradients were not finite and were not applied.
        loss_scale: factor of the loss under precision fp16, and steps without overflow since it changed;
            empty otherwise.
    """

    distgraph: str
    run: str
    written: str
    step: Count
    epoch: Count
    position: Count
    seed: Whole
    unused: list[str]
    losses: list[Number]
    epochs: list[dict[str, Number]]
    means: Annotated[tuple[dict[str, list[Number]], Count], BeforeValidator(_pair)]
    skipped: list[Count]
    loss_scale: list[Number] = Field(default_factory=list)


class Index(Training):
    """The content of an index, without its own checksum."""

    format: str
    page: Size
    fingerprint: str
    files: dict[FileName, FileEntry]
    tensors: dict[str, TensorEntry]
