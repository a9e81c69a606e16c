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
from distgraph.ir.graph import Graph, Op
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
    """The layers of a module: all their ops belong to it, but for some of modules around it, such as an
    activation between two modules, and some that read no parameter, such as a dropout module of the model.

    Raises:
        ShardingError: there are none.
    """
    numbers, others = [], dict[int, str]()
    for number, layer in enumerate(layers):
        ops = [serial.producers[name] for name in layer.ops]
        if any(_contains(path, op.scope) for op in ops):
            foreign = (op.scope for op in ops if _is_foreign(op, path, serial))
            if other := next(foreign, ""):
                others[number] = other
            else:
                numbers.append(number)
    if numbers:
        return numbers
    reason = "no layer of the program has ops of it"
    if others:
        number, other = next(iter(others.items()))
        reason = (
            f"layer {number}, which has ops of it, also has ops of module {other!r} that read a parameter"
        )
    starts = (
        f"{number} ({serial.producers[layer.ops[0]].scope or 'the model itself'})"
        for number, layer in enumerate(layers)
    )
    raise ShardingError(
        f"recompute of Strategy names module {path!r} but {reason}; layers begin in {', '.join(starts)}; "
        f"name layers by these numbers, a module that contains whole layers, or recompute any module by "
        f"dg.recompute(module)"
    )


def _is_foreign(op: Op, path: str, serial: Graph) -> bool:
    """Whether an op reads a parameter and is neither of a module nor of one around it."""
    if _contains(path, op.scope) or _contains(op.scope, path):
        return False
    return any(serial.producers[value.name].kind == "param" for value in op.operands)


def _contains(module: str, scope: str) -> bool:
    """Whether a scope is that of a module or of one inside it; the scope of the model itself is empty."""
    return not module or f"{scope}.".startswith(f"{module}.")
