"""`distgraph tune`: two-dimensional tensor parallelism for layers of given sizes on a cluster."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from distgraph.errors import ShardingError
from distgraph.passes.matmul_algorithms.tune_mesh2d import tune_mesh2d


def tune(
    cluster: Annotated[str, typer.Argument(help="Shipped name or resource file.")],
    layers: Annotated[
        list[str], typer.Argument(help="name=SAMPLESxINPUTSxOUTPUTS, such as up=65536x12288x49152.")
    ],
    devices: Annotated[
        int | None, typer.Option("--devices", "-n", help="Devices of the mesh; all by default.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of all matrices; bf16, f16 or f32 by default.")
    ] = None,
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="Of the products; the others are compared with it.")
    ] = "meshslice",
) -> None:
    """Choose mesh, dataflows and slices for fully connected layers, and compare with other algorithms."""
    sizes = dict(map(_layer, layers))
    typer.echo(tune_mesh2d(sizes, cluster, devices=devices, dtype=dtype, algorithm=algorithm))


def _layer(text: str) -> tuple[str, tuple[int, int, int]]:
    match = re.fullmatch(r"(.+)=(\d{1,15})x(\d{1,15})x(\d{1,15})", text)
    if match is None:
        raise ShardingError(
            f"tune: layer {text!r} is not name=SAMPLESxINPUTSxOUTPUTS; write one such as up=65536x12288x49152"
        )
    name, samples, inputs, outputs = match.groups()
    return name, (int(samples), int(inputs), int(outputs))
