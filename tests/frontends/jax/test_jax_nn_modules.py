"""Functions of `jax.nn`, modules of `flax.linen` and `equinox.nn`: they import, or a table has the reason."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
from support.frontends.jax_comparison import compare
from support.frontends.jax_nn_cases import CASES, NO_CASES, REFUSED
from support.paths import ROOT

import distgraph as dg
from distgraph.errors import GraphError

jax: Any = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]

ACCEPTED = sorted(set(CASES) - set(REFUSED))


def public_names(library: str) -> set[str]:
    """Names of the functions of `jax.nn`, or of the classes of modules of a library."""
    found = import_module(library)
    items = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    if library == "jax.nn":
        return {name for name, item in items.items() if callable(item)}
    module = getattr(import_module(library.split(".")[0]), "Module", None) or found.Module
    return {name for name, item in items.items() if inspect.isclass(item) and issubclass(item, module)}


@pytest.mark.parametrize("library", NO_CASES)
def test_the_list_is_complete(library: str) -> None:
    pytest.importorskip(library)
    cases = {name.rsplit(".", 1)[1] for name in CASES if name.startswith(f"{library}.")}
    assert public_names(library) == cases | NO_CASES[library]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")  # of flax
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_function_or_module_computes_what_jax_computes(name: str) -> None:
    compare(*CASES[name]())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax, about its ops of 8 bits
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_in_the_table_of_refused_ones_is_refused(name: str) -> None:
    function, params, inputs = CASES[name]()
    with pytest.raises(GraphError, match=r"float8_e4m3|without a rule"):
        dg.frontends.jax.import_function(function, params, *inputs)


def test_the_page_has_the_table() -> None:
    lines = [
        f"{len(ACCEPTED)} of {len(CASES)} functions of `jax.nn` and modules of `flax.linen` and `equinox.nn`",
        f"({len(ACCEPTED) / len(CASES):.0%}) import, with the outputs and gradients of JAX. These do not:",
        "",
        "| function or module | why |",
        "| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in sorted(REFUSED.items())),
    ]
    table = "\n".join(lines)
    page = (ROOT / "docs" / "models" / "jax.md").read_text(encoding="utf-8")
    assert table in page, f"docs/models/jax.md needs this text:\n{table}"
