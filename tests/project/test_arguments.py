"""Arguments of the public interface: what is not allowed is refused by a message of ours, at the call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from support.arguments.annotation_calls import annotation_calls, cluster_calls, mesh_calls
from support.arguments.engine_calls import callback_calls, engine_calls
from support.arguments.layer_calls import layer_calls, optimizer_calls
from support.arguments.op_calls import op_calls
from support.arguments.public_call import WRONG, PublicCall

import distgraph as dg
from distgraph import models, nn, ops, optim, schedules
from distgraph.errors import DistGraphError, GraphError, RuntimeFault
from distgraph.errors.arguments import (
    Bounds,
    Count,
    Finite,
    check_argument,
    check_fields,
    checked_arguments,
    switch_of,
)

GROUPS: dict[str, Callable[[Path], dict[str, PublicCall]]] = {
    "ops": lambda folder: op_calls(),
    "layers": lambda folder: layer_calls(),
    "optimizers": lambda folder: optimizer_calls(),
    "annotations": lambda folder: annotation_calls(),
    "meshes": lambda folder: mesh_calls(),
    "clusters": lambda folder: cluster_calls(),
    "engine": engine_calls,
    "callbacks": callback_calls,
}
OTHERS = {
    # objects that a user is given, errors, and functions without arguments
    "DistAttr", "DistGraphError", "Graph", "Tensor", "Cluster", "Plan", "ShardSpec", "mark_pipeline_boundary",
    "callbacks.Proposal",
    # registration of ops, whose parts are checked when they are used
    "ops.define", "ops.lookup", "ops.bind_tensor_methods",
    # what takes anything, or checks functions one by one
    "tree_map", "nn.Sequential",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Timeline. after")  # which legal numbers may lead to
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that overflow: a rate of 1e30 is legal
@pytest.mark.parametrize("group", GROUPS)
def test_wrong_arguments_are_refused(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    for name, call in GROUPS[group](tmp_path).items():
        call.call(**call.arguments)
        for argument in call.arguments:
            for label, value in WRONG.items():
                outcome = call.outcome(argument, value)
                if outcome:
                    wrong.append(f"{name}: {argument} = {label}: {outcome}")
    assert not wrong, "\n".join(wrong)


def test_every_public_name_is_tried(tmp_path: Path) -> None:
    tried = {name for make in GROUPS.values() for name in make(tmp_path)}
    public = {name for name in dg._HOMES if callable(getattr(dg, name))}
    for module, home in (("nn", dg.nn), ("models", dg.models), ("callbacks", dg.callbacks)):
        public |= {f"{module}.{name}" for name in home.__all__ if _has_arguments(getattr(home, name))}
    public |= {f"ops.{name}" for name, op in vars(dg.ops).items() if _has_arguments(op)}
    assert public - {name.removeprefix("operands of ") for name in tried} - OTHERS == set()


def _has_arguments(thing: Any) -> bool:
    if not inspect.isfunction(thing) and not inspect.isclass(thing):
        return False
    return bool(inspect.signature(thing).parameters.keys() - {"operands", "args", "kwargs"})


def test_a_wrong_argument_that_is_taken_or_fails_inside_is_told() -> None:
    def half(number: int) -> float:
        return number / 2

    call = PublicCall(half, half, {"number": 4})
    assert call.outcome("number", 1.5) == "accepted, though the annotation excludes it"
    assert call.outcome("number", "a").startswith("TypeError at test_arguments.py")
    assert call.outcome("number", 3) == ""


@checked_arguments(RuntimeFault)
def checked(
    count: Count,
    share: Finite = 0.5,
    names: list[str] | None = None,
    *,
    mode: Literal["a", "b"] = "a",
    table: dict[str, bool] | None = None,
    **further: Any,
) -> int:
    return count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count of checked is 0 but must be an integer of at least 1"),
        ({"count": True}, "count of checked is True but must be an integer"),
        ({"count": 10**30}, "count of checked is an integer beyond 9223372036854775807"),
        ({"count": 1, "share": float("nan")}, "share of checked is nan but must be a finite number"),
        (
            {"count": 1, "names": "abc"},
            "'abc' but must be a list \\(each item: text\\) or None",
        ),
        ({"count": 1, "names": ["a", 1]}, r"names of checked is \['a', 1\] but"),
        ({"count": 1, "mode": "c"}, "mode of checked is 'c' but must be 'a' or 'b'"),
        (
            {"count": 1, "table": {"a": 1}},
            "a dict but must be a dict \\(each value: True or False",
        ),
        ({"count": int}, "count of checked is the class int"),
    ],
)
def test_messages(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        checked(**arguments)


def test_numbers_of_numpy_are_taken() -> None:
    assert checked(np.int64(3), np.float32(1), names=("a",), table={"a": np.True_}, other=object()) == 3


def test_bounds_and_fields() -> None:
    check_argument("x", "rate", 0.5, float)
    with pytest.raises(GraphError, match="rate of x is 'a' but must be a number"):
        check_argument("x", "rate", "a", float)
    assert str(Bounds(above=0, most=1)) == "above 0 and at most 1"
    assert not Bounds().hold(float("inf"))
    with pytest.raises(DistGraphError, match="eps of Adam is -1 but must be a number of at least 0"):
        dg.optim.Adam(eps=-1)
    with pytest.raises(TypeError):
        check_fields(3)


X = ((4, 6), "f32")


def traced(function: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: dg.trace(function, X)


LEGAL: dict[str, Callable[[], Any]] = {
    "a mask that is padded": lambda: dg.trace(lambda m: ops.pad(m, (1,), (1,), False), ((3,), "bool")),
    "no dtype": lambda: dg.trace(lambda: dg.numpy.eye(3, dtype=None) + dg.numpy.zeros((3, 3), dtype=None)),
    "no classes": lambda: dg.trace(lambda ids: ops.one_hot(ids, 0), ((3,), "i32")),
    "a cut from the end": traced(lambda x: ops.split(x, [-1], 1)),
    "a slice from an array": traced(lambda x: x[np.asarray(1) :]),
    "dims of NumPy": traced(lambda x: dg.numpy.tensordot(x, x, axes=np.int64(0))),
    "a number of ml_dtypes": lambda: dg.trace(lambda: ops.full((2,), ml_dtypes.bfloat16(1.5), "bf16")),
    "a dtype of NumPy": lambda: models.GPTConfig(hidden=4, layers=1, heads=1, dtype=np.float32),
    "axes of a dict": lambda: dg.ProcessMesh([0, 1], {"tp": 2}.keys()),
    "tensors of a generator": traced(lambda x: ops.concat(x for _ in range(2))),
    "a tensor as its rows": traced(ops.stack),
    "whole steps as a float": lambda: schedules.cosine(0.1, steps=1e3)(3),
    "padding as an array": lambda: dg.trace(
        lambda x: ops.max_pool(x, 3, padding=np.array([(1, 1), (0, 0)])), ((2, 3, 8, 8), "f32")
    ),
    "sizes of NumPy": lambda: nn.Conv2d(np.int64(3), np.int64(4), (np.int32(3), np.int32(3))),
    "a partial function": lambda: nn.MLP(4, activation=functools.partial(ops.gelu, approximate=True)),
    "a flag of NumPy": lambda: dg.Strategy(mode="auto", uniform=np.True_),
    "borders as an array": lambda: dg.Strategy(mode="auto", borders=np.array([1, 2])),
}


@pytest.mark.parametrize("use", LEGAL)
def test_legal_uses_are_taken(use: str) -> None:
    LEGAL[use]()


def test_fields_of_a_subclass_elsewhere_are_its_own_matter() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Slow(optim.SGD):
        where: Unknown | None = None  # type: ignore[name-defined]  # noqa: F821

    @dataclass(frozen=True, kw_only=True)
    class Deep(models.GPTConfig):
        extra: int = 0

    assert Slow(lr=0.1, where=3).where == 3
    with pytest.raises(GraphError, match="hidden of Deep is 'q' but must be an integer"):
        Deep(hidden="q", layers=1, heads=1)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a seed by its place": (lambda: dg.eager("x"), "seed of eager is 'x' but must be an integer"),
    "a graph by its place": (lambda: dg.complete("g"), "graph of complete is 'g' but must be a Graph"),
    "a window as text": (lambda: nn.MaxPool2d("a"), "window of MaxPool2d is 'a' but"),
    "a number below all": (lambda: nn.Linear(-(10**30), 2), "is an integer below -9223372036854775807"),
    "one name for two inputs": (
        lambda: dg.trace(lambda a, b: a - b, X, X, names=["x1"]),
        "several inputs named 'x1'",
    ),
    "more names than inputs": (lambda: dg.trace(lambda a: a, X, names=["a", "b"]), "2 names but 1 inputs"),
    "an input that is none": (lambda: dg.trace(lambda a: a, 3), "input 'x0' of trace is 3 but must be"),
    "a length below 0": (lambda: dg.trace(lambda a: a, ((-4,), "f32")), "shape of input 'x0' of trace"),
    "a slice of step 0": (traced(lambda x: x[::0]), "step of a slice .* is 0"),
    "a slice to a fraction": (traced(lambda x: x[:1.5]), "stop of a slice .* is 1.5 but must be an integer"),
    "a dim that is not there": (traced(lambda x: dg.numpy.unstack(x, axis=7)), "axis 7 is out of range"),
    "too many dims": (traced(lambda x: dg.numpy.tensordot(x, x, axes=7)), "axes of tensordot is 7"),
    "memory as text": (
        lambda: dg.resources.Requirement(memory="q"),
        "memory of Requirement is 'q' but must be a number",
    ),
    "a rate that takes no step": (lambda: optim.SGD(lr=lambda: 1), "lr of SGD is called with 1 argument but"),
    "a decay of one argument": (lambda: optim.SGD(decays=lambda n: True), "decays of SGD is called with 2"),
    "lists of two lengths": (
        lambda: nn.Parameter((2, 2)).assign([[1], [1, 2]]),
        "value of parameter .* is no array",
    ),
    "a constant of two lengths": (
        traced(lambda x: ops.add(x, [[1], [1, 2]])),
        "is no array|cannot|no tensor",
    ),
    "a number beyond its type": (
        lambda: dg.trace(lambda: ops.full((2,), 300, "i8")),
        "300 but i8 holds whole numbers from -128 to 127",
    ),
    "a fraction as an integer": (lambda: dg.trace(lambda: ops.full((2,), 1.5, "i32")), "1.5 but i32 holds"),
    "windows of padding alone": (
        lambda: nn.MaxPool2d(2, padding=(0, 5)),
        r"padding of MaxPool2d is \(0, 5\) but windows are \(2, 2\)",
    ),
    "random integers": (
        lambda: dg.trace(lambda: ops.random_normal((2,), "i32")),
        "random numbers are floats",
    ),
    "a start of nan": (lambda: nn.Linear(2, 2, init=("normal", float("nan"))), "init is"),
    "experts on an axis that is not there": (
        lambda: nn.MoE(4, 4, 2).split_experts(dg.ProcessMesh.grid(ep=2), "ep", batch="x"),
        "axis 'x' is not in",
    ),
    "a metric without a name": (
        lambda: dg.Engine(nn.Linear(2, 1), metrics={"": ops.mean}),
        "name of a metric is '' but must be a text",
    ),
    "a field that a preset has not": (
        lambda: models.GPT.preset("350M", nope=3),
        "config of GPT has no field nope; it has hidden",
    ),
    "a cluster without a name": (lambda: dg.resources.register_cluster("", lambda: None), "name is empty"),
    "a cluster made of arguments": (
        lambda: dg.resources.register_cluster("n", lambda size: None),
        "make of register_cluster is called with 0 arguments",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(DistGraphError, match=message):
        call()


def test_what_a_registered_function_makes_is_a_cluster() -> None:
    dg.resources.register_cluster("no cluster", lambda: 3)
    with pytest.raises(DistGraphError, match="what make returns of cluster no cluster is 3"):
        dg.load_cluster("no cluster")


@pytest.mark.parametrize("variable", ["DISTGRAPH_VERIFY", "DISTGRAPH_BIND"])
def test_switches_of_the_environment_are_0_or_1(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "x")
    with pytest.raises(RuntimeFault, match=f"{variable} is 'x' but must be 0 or 1"):
        switch_of(variable, RuntimeFault)


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_a_package_that_is_not_installed_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = dg.Engine(nn.Linear(2, 1), nn.MeanSquaredError(), optim.SGD(lr=0.1))
    engine.prepare((np.zeros((4, 2), "f4"), np.zeros((4, 1), "f4")))
    monkeypatch.setattr("distgraph.plan.plan.find_spec", lambda name: None)
    apply = getattr(engine.plan.portable, f"apply_to_{package}")
    with pytest.raises(RuntimeFault, match=f"{package} is not installed but apply_to_{package} runs a plan"):
        apply(None)
