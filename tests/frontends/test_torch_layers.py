"""Equal layers in a row are exported once and repeated: the graph is that of the export of all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.frontends.torch_comparison import compare
from support.frontends.torch_models import TinyGPT, TinyLlama, ViT

torch: Any = pytest.importorskip("torch")
from distgraph.frontends.torch import exporting  # noqa: E402
from distgraph.frontends.torch.exported_graph import (  # noqa: E402
    Exported,
    module_path,
    source_line,
    value_text,
)
from distgraph.frontends.torch.forward_recording import computes_the_same  # noqa: E402
from distgraph.frontends.torch.opaque_ops import OpaqueOps  # noqa: E402
from distgraph.frontends.torch.repeated_layers import Run, find_runs  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
nn: Any = torch.nn
IDS = torch.arange(24).reshape(4, 6) % 20
X = torch.zeros(4, 6)


class Layer(nn.Module):  # type: ignore[misc]
    """A residual layer; `forward` may be another function of the layer and its input."""

    def __init__(self, index: int, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.index, self.body, self.linear = index, forward, nn.Linear(6, 6)

    def forward(self, x: Any, *others: Any) -> Any:
        return x + torch.tanh(self.linear(x)) if self.body is None else self.body(self, x, *others)


class Stack(nn.Module):  # type: ignore[misc]
    """Layers, and what calls them, which is a function of the module and its input."""

    def __init__(self, make: Callable[[int], Any] = Layer, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(make(i) for i in range(5)), nn.Linear(6, 2)
        self.table, self.call = nn.Parameter(torch.zeros(5, 6)), call

    def forward(self, x: Any) -> Any:
        if self.call is not None:
            return self.call(self, x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def in_turn(layers: Any, x: Any, *others: Any) -> Any:
    for layer in layers:
        x = layer(x, *others)
    return x


def crossed(own: Any, x: Any, y: Any) -> Any:
    return x + own.linear(y)


class Offset(Layer):
    """Adds a number of its own, which is not saved, and one that all layers make."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("offset", torch.tensor([float(index)]), persistent=False)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.offset + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


class Towers(nn.Module):  # type: ignore[misc]
    """Two runs; layers of the second read the result of the first, and a norm that they share follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Offset(i) for i in range(4)))
        self.norm = nn.LayerNorm(6)
        self.second = nn.ModuleList(Layer(i, crossed) for i in range(5))
        self.second[4].linear.weight = self.second[3].linear.weight

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        for layer in self.second:
            x = self.norm(layer(x, y)) + y.exp()
        return x, y


REPEATED: dict[str, tuple[Callable[[], Any], Any]] = {
    "gpt with dropout": (lambda: TinyGPT(layers=4, rate=0.1), IDS),
    "llama": (lambda: TinyLlama(layers=4).eval(), IDS),
    "vit": (lambda: ViT(layers=4).eval(), torch.zeros(4, 3, 12, 8)),
    "two runs with buffers, constants and a tied weight": (Towers, X),
}


def by_index(own: Any, x: Any) -> Any:
    return x + own.linear(x) * own.index


def alternating(own: Any, x: Any) -> Any:
    return x + (torch.tanh(own.linear(x)) if own.index % 2 else torch.sin(own.linear(x)))


def constant_of_index(own: Any, x: Any) -> Any:
    return own.linear(x) + torch.tensor([float(own.index)])


def without_gradient_late(own: Any, x: Any) -> Any:
    with torch.set_grad_enabled(own.index != 4):
        return own.linear(x)


def collected(own: Any, x: Any) -> Any:
    states = []
    for layer in own.layers:
        x = layer(x)
        states.append(x)
    return torch.stack(states, 0).sum(0), x


def skipping(own: Any, x: Any) -> Any:
    middle = in_turn(own.layers[:3], x)
    return in_turn(own.layers[3:], middle) + middle


def dropped(own: Any, x: Any) -> Any:
    return in_turn([layer for i, layer in enumerate(own.layers) if i != 4], x)


def late_row(own: Any, x: Any) -> Any:
    for i, layer in enumerate(own.layers):
        x = layer(x) + own.table[i]
    return x


def another(make: Callable[[int], Any]) -> Callable[[], Any]:
    """Layers with one function, so that they are equal but for their index."""
    return lambda: Stack(lambda i: Layer(i, make))


WHOLE: dict[str, Callable[[], Any]] = {
    "a number that is the index": another(by_index),
    "types that alternate by the index": another(alternating),
    "a constant of the index": another(constant_of_index),
    "no gradient in one": another(without_gradient_late),
    "hidden states collected": lambda: Stack(call=collected),
    "a skip connection": lambda: Stack(call=skipping),
    "a layer left out": lambda: Stack(call=dropped),
    "a row of a table each": lambda: Stack(call=late_row),
    "the last layers first": lambda: Stack(call=lambda own, x: in_turn(reversed(own.layers), x)),
    "called twice": lambda: Stack(call=lambda own, x: in_turn(own.layers, in_turn(own.layers, x))),
    "chosen by number": lambda: Stack(call=lambda own, x: in_turn([own.layers[i] for i in range(5)], x)),
}
AFTER_EXPORT: dict[str, Callable[[], Any]] = {
    "running statistics": lambda: Stack(lambda i: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    "a sum of layers": lambda: Stack(call=lambda own, x: sum(layer(x) for layer in own.layers)),
}


def described(net: Any, exported: Exported) -> list[Any]:
    """Nodes of a graph in order: op, operands by number or name, shapes, line and module."""
    tensors = {name: id(tensor) for name, tensor in net.named_parameters(remove_duplicate=False)}
    first = {id(tensor): name for name, tensor in net.named_parameters()}
    names: dict[Any, str] = {}
    lines = []
    for node in exported.module.graph.nodes:
        if node.op == "placeholder":
            source = exported.inputs[node.name]
            constant = source.kind == "constant"
            path = first.get(tensors.get(source.name, 0), source.name)  # the first name of a tied one
            names[node] = f"{source.kind} {value_text(source.value) if constant else path}"
            continue
        names[node] = f"%{len(lines)}"
        operands = torch.fx.map_arg((node.args, node.kwargs), lambda x: names[x])
        value = torch.utils._pytree.tree_map(lambda x: str(getattr(x, "shape", x)), node.meta.get("val"))
        lines.append((str(node.target), str(operands), str(value), source_line(node), module_path(node)))
    return [*lines, exported.mutated, exported.outputs, exported.kind, list(exported.shapes)]


@pytest.fixture
def exported_paths(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The paths of the modules that torch exported, for each export."""
    made: list[list[str]] = []
    export_whole = exporting.export_whole

    def spy(module: Any, *rest: Any) -> Any:
        made.append([path for path, _ in module.named_modules()])
        return export_whole(module, *rest)

    monkeypatch.setattr(exporting, "export_whole", spy)
    return made


def equal_to_all_layers(net: Any, x: Any) -> None:
    """Compare the export of a module with the export of all its layers."""
    shown, modes = str(net), [part.training for part in net.modules()]
    state = {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()}
    ours = described(net, exporting.export(net, (x,), {}, None, True, OpaqueOps()))
    assert state == {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()}
    assert (shown, modes) == (str(net), [part.training for part in net.modules()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "find_runs", lambda module: [])
        theirs = described(net, exporting.export(net, (x,), {}, None, True, OpaqueOps()))
    assert ours == theirs


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_layers_give_the_graph_of_all_layers(name: str, exported_paths: list[list[str]]) -> None:
    make, x = REPEATED[name]
    net = make()
    equal_to_all_layers(net, x)
    (short, whole), runs = exported_paths, find_runs(net)
    assert {path for run in runs for path in run.cut} <= set(whole).difference(short)


@pytest.mark.parametrize("name", WHOLE)
def test_a_recording_shows_that_layers_compute_something_else(name: str) -> None:
    net = WHOLE[name]()
    runs = find_runs(net)
    assert [len(run.paths) for run in runs] == [5]
    assert not computes_the_same(net, runs, (X,), {})


@pytest.mark.parametrize("name", AFTER_EXPORT)
def test_layers_that_differ_are_exported_as_they_are(name: str, exported_paths: list[list[str]]) -> None:
    net = AFTER_EXPORT[name]()
    equal_to_all_layers(net, X)
    short, *whole = exported_paths
    assert len(short) < len(whole[0])
    assert whole[0] == whole[1]


def test_a_model_of_repeated_layers_computes_what_torch_computes() -> None:
    torch.manual_seed(0)
    compare(Towers().double(), (X.double(),), tolerance=1e-9)


@pytest.mark.parametrize(
    "layers",
    [
        [Layer(0), Layer(1), Layer(2)],
        [nn.Linear(6, 6), nn.Linear(6, 6, bias=False)] * 3,
        [nn.Dropout(0.1 * i) for i in range(5)],
        [nn.Linear(6, 6).requires_grad_(i != 2) for i in range(5)],
        [nn.Linear(6, 6).train(i != 2) for i in range(5)],
    ],
    ids=["few", "types", "rates", "frozen", "modes"],
)
def test_layers_that_are_not_equal_are_no_run(layers: list[Any]) -> None:
    assert find_runs(nn.Sequential(*layers)) == []


def test_runs_are_found_between_other_layers_and_below_them() -> None:
    inner = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    net = nn.Sequential(
        nn.Linear(6, 5), *(Layer(i) for i in range(4)), nn.Tanh(), nn.ModuleDict({"a": inner})
    )
    assert find_runs(net) == [
        Run(("1", "2", "3", "4")),
        Run(("6.a.0", "6.a.1", "6.a.2", "6.a.3")),
    ]
