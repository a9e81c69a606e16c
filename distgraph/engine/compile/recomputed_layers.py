"""Layers that the backward part recomputes because the strategy or a plan names them.

*In:* a program, and layers by number or by the path of a module. *Out:* its serial graph, in which the
backward part computes the forward ops of each of these layers again. *Invariant:* numbers are those of the
layers of the program without recomputation; what the model marks by `dg.recompute` stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.op_positions import layers_by_first_ops
from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph
from distgraph.passes.search.layering.layer_sequence import Layer, cluster_layers


@dataclass(frozen=True, slots=True)
class RecomputedProgram:
    """A traced program.

    Attributes:
        graph: the serial graph.
        unmarked: the same without recomputed layers.
        layers: of `graph`; empty where none is recomputed.
        recomputed: numbers of the layers that are recomputed.
    """

    graph: Graph
    unmarked: Graph
    layers: tuple[Layer, ...] = ()
    recomputed: tuple[int, ...] = ()


def recomputed_program(request: CompileRequest) -> RecomputedProgram:
    """Trace a program that has no plan, with the layers recomputed that its strategy names.

    Raises:
        GraphError: shapes or dtypes do not fit.
        ShardingError: the strategy names a layer or a module that the program does not have.
    """
    serial, constraints = request.trace(), request.training_spec.strategy.constraints
    if request.mode != "train" or constraints.chooses or not constraints.recompute:
        return RecomputedProgram(serial, serial)
    layers = cluster_layers(serial)
    layer_numbers = set(constraints.recomputed(len(layers)) or ())
    if layer_numbers and max(layer_numbers) >= len(layers):
        raise ShardingError(
            f"recompute of Strategy names layer {max(layer_numbers)} but the program has layers 0 to "
            f"{len(layers) - 1}; engine.plan.portable prints them"
        )
    for path in constraints.paths:
        layer_numbers |= set(_layers_in(path, serial, layers))
    numbers = tuple(sorted(layer_numbers))
    graph = recomputing(request, layers, numbers)
    layers = layers_by_first_ops(graph, [layer.ops[0] for layer in layers])
    return RecomputedProgram(graph, serial, layers, numbers)


def recomputing(request: CompileRequest, layers: Sequence[Layer], numbers: Sequence[int]) -> Graph:
    """The serial graph of a training program with some of its layers recomputed in the backward part."""
    blocks = [layers[number].ops for number in numbers]
    fields = request.blocks(request.micro_batches)
    return request.training_spec.trace("train", fields, request.layouts, recompute=blocks)


def _layers_in(path: str, serial: Graph, layers: Sequence[Layer]) -> list[int]:
    """The layers all of whose ops belong to a module. Raises ShardingError: there are none."""
    scopes = [{serial.producers[name].scope for name in layer.ops} for layer in layers]
    numbers = [
        number
        for number, inside in enumerate(scopes)
        if all(f"{scope}.".startswith(f"{path}.") for scope in inside)
    ]
    if numbers:
        return numbers
    starts = (f"{number} ({serial.producers[layer.ops[0]].scope})" for number, layer in enumerate(layers))
    raise ShardingError(
        f"recompute of Strategy names module {path!r} but no layer of the program is in it; layers begin "
        f"in {', '.join(starts)}; name one of these modules or numbers, or recompute any module by "
        f"dg.recompute(module)"
    )
