"""Every module of `torch.nn` imports, or stands in the table of those that do not, with the reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from support.frontends.torch_comparison import compare
from support.frontends.torch_nn_cases import CASES, NO_MODULES, REFUSED, draw
from support.paths import ROOT

import distgraph as dg
from distgraph.errors import GraphError

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

ACCEPTED = sorted(set(CASES) - set(REFUSED))
RANDOM = ("Dropout", "RReLU")
STATEFUL = ("Norm",)


def public_modules() -> set[str]:
    """Names of the classes of modules in `torch.nn`."""
    kinds = {n: getattr(torch.nn, n) for n in dir(torch.nn)}
    return {n for n, k in kinds.items() if inspect.isclass(k) and issubclass(k, torch.nn.Module)}


def built(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A module of f64 and its inputs, in training mode where that changes what it computes."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    case = CASES[name]
    inputs = tuple(draw(spec, generator) for spec in case.inputs)
    module = case.make()
    if name.startswith("Lazy"):  # its parameters get their shapes in the first call
        module(*(x.float() if x.is_floating_point() else x for x in inputs))
    return module.double().train(any(word in name for word in STATEFUL)), inputs


def test_the_list_is_complete() -> None:
    assert public_modules() == set(CASES) | NO_MODULES
    assert set(REFUSED) <= set(CASES)
    assert len(ACCEPTED) >= 0.95 * len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_module_of_torch_computes_what_torch_computes(name: str) -> None:
    module, inputs = built(name)
    compare(module, inputs, size=None, tolerance=1e-8, **(CASES[name].options or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ACCEPTED if any(word in n for word in RANDOM)])
def test_a_random_module_imports_in_training_mode(name: str) -> None:
    module, inputs = built(name)
    model = dg.frontends.torch.import_module(module.train(), inputs)
    graph = dg.trace(model, *(x.numpy() for x in inputs))
    assert any(op.kind in ("dropout", "random_uniform") for op in graph.ops)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_module_in_the_table_of_refused_ones_is_refused(name: str) -> None:
    module, inputs = built(name)
    with pytest.raises(GraphError, match=r"CrossMapLRN2d \(.*\) has a backward .* use LocalResponseNorm"):
        dg.frontends.torch.import_module(module, inputs)


def table() -> str:
    """The section of docs/models/pytorch.md about the modules of torch."""
    share = len(ACCEPTED) / len(CASES)
    lines = [
        f"{len(ACCEPTED)} of the {len(CASES)} modules of `torch.nn` ({share:.0%}) import, with the outputs",
        "and gradients of torch; containers and base classes are not counted. These do not:",
        "",
        "| module | why |",
        "| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in sorted(REFUSED.items())),
    ]
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "models" / "pytorch.md").read_text(encoding="utf-8")
    assert table() in page, f"docs/models/pytorch.md needs this text:\n{table()}"
