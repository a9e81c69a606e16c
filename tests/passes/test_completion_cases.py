"""Completion of whole models beside PaddlePaddle 2.6.2's (see tests/support/data/README.md).

The six models are rebuilt op by op from the file, exactly the tensors annotated there are annotated, and the
layouts of parameters, biases and matmul results are compared. The file is the policy of that version, not the
truth; where ours differs, DEVIATIONS says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.paths import DATA

from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import result_layout
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.complete import complete
from distgraph.tracing.tensor import Tensor, emit
from distgraph.tracing.tracer import Trace

CASES = {c["case"]: c for c in json.loads((DATA / "completion.json").read_text())}

DEVIATIONS: dict[tuple[str, str], str] = {}  # (case, tensor) -> reason


def mesh_of(case: Mapping[str, Any], ranks: list[int]) -> ProcessMesh:
    """The mesh of a tensor: the file lists its ranks flat."""
    array = np.asarray(case["mesh"])
    if array.size != len(ranks):
        array = np.asarray(ranks)
    return ProcessMesh(np.asarray(ranks).reshape(array.shape), case["dim_names"])


def spec_of(case: Mapping[str, Any], mapping: list[int]) -> ShardSpec:
    return ShardSpec(tuple(() if d < 0 else (case["dim_names"][d],) for d in mapping))


def _matmul(op: Mapping[str, Any], x: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    if x.shape[-1] == y.shape[-2] and (*x.shape[:-1], y.shape[-1]) == shape:
        return ops.matmul(x, y)
    return ops.einsum("bhqd,bhkd->bhqk", x, y)


def _emit(op: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """One op of the file; `shape` is that of its main result."""
    names = list(op["ins"])
    first = tensors[names[0]]
    match op["op"]:
        case "layer_norm":
            bias, weight, x = (tensors[n] for n in names)
            y: Tensor = emit("layer_norm", x, weight, bias, eps=1e-5)[0]
            return y
        case "matmul_v2":
            return _matmul(op, first, tensors[names[1]], shape)
        case "elementwise_add":
            return first + tensors[names[1]]
        case "gelu":
            return ops.gelu(first)
        case "dropout":
            return ops.dropout(first, 0.1)
        case "reshape2":
            return ops.reshape(first, shape)
        case "transpose2":
            return ops.transpose(first, (0, 2, 1, 3))
        case "scale":
            return first * 0.125
        case "softmax":
            return ops.softmax(first, -1)
        case "lookup_table_v2":
            return ops.embedding(tensors[names[1]], first)
    raise AssertionError(f"no builder for {op['op']}")


def main_result(op: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """The result that carries on: of layer_norm the largest, of dropout not the mask, else the first."""
    names = list(op["outs"])
    if op["op"] == "layer_norm":
        return max(names, key=lambda n: math.prod(case["tensors"][n]["shape"]))
    return names[-1] if op["op"] == "dropout" else names[0]


def build(case: Mapping[str, Any]) -> tuple[Graph, dict[str, Tensor]]:
    trace, tensors = Trace(case["case"]), {}
    made = {n for op in case["ops"] for n in op["outs"]}

    def pin(name: str, x: Tensor) -> None:
        told = case["tensors"][name]
        if told["annotated"]:
            attr = DistAttr(
                mesh_of(case, told["mesh"]), spec_of(case, told["dims_mapping"]), Origin("user", name)
            )
            trace.annotate(x.value, attr)

    with trace.activate():
        for name, told in case["tensors"].items():
            if name in made:
                continue
            data = name in ("input", "query", "input_ids", "position_ids")
            dtype = "i64" if name.endswith("_ids") else "f32"
            tensors[name] = trace.source("input" if data else "param", name, told["shape"], dtype)
            pin(name, tensors[name])
        for op in case["ops"]:
            name = main_result(op, case)
            tensors[name] = _emit(op, tensors, tuple(case["tensors"][name]["shape"]))
            assert tensors[name].shape == tuple(case["tensors"][name]["shape"])
            pin(name, tensors[name])
        graph = trace.finish({"y": tensors[name]})
    return graph, tensors


def compared(case: Mapping[str, Any]) -> list[str]:
    """Parameters, biases and matmul results."""
    params = [n for n in case["tensors"] if n.split(".")[-1] in ("w_0", "b_0") or n.endswith("embeddings")]
    return params + [main_result(op, case) for op in case["ops"] if op["op"] == "matmul_v2"]


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    graph, tensors = build(case)
    completed = complete(graph)
    partial = {n: axes for op in case["ops"] for n, axes in op["partial"].items()}
    wrong = {}
    for tensor in compared(case):
        value, told = tensors[tensor].value.name, case["tensors"][tensor]
        attr, op = completed.attrs[value], completed.producers[value]
        wanted = DistAttr(mesh_of(case, told["mesh"]), spec_of(case, told["dims_mapping"]))
        ours, theirs = [str(attr)], [str(wanted)]
        if op.operands:
            ours.append(str(sorted(result_layout(op, 0).partial)))
            axes = sorted((case["dim_names"][a], "sum") for a in partial.get(tensor, ()))
            theirs.append(str(axes))
        if ours != theirs:
            wrong[tensor] = f"ours {' '.join(ours)}, theirs {' '.join(theirs)}"
    expected = {t for c, t in DEVIATIONS if c == name}
    assert set(wrong) == expected, wrong


def test_every_model_is_there() -> None:
    assert list(CASES) == ["mlp_dp", "mlp_mp", "mlp_dp_mp", "attention_mp", "decoder_dp_mp", "mlp_pp"]
    assert [len(compared(c)) for c in CASES.values()] == [8, 8, 8, 14, 26, 8]
