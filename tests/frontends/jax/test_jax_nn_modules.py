"""Functions of `jax.nn`, modules of `flax.linen` and `equinox.nn`: they import, or a table has the reason.

The tables list the names of the versions in `LISTED`, for which they must be complete. With another version
that has other names, what both have is compared with that version, and the rest is reported as skipped.
"""

from __future__ import annotations

import inspect
from importlib import import_module, metadata
from typing import Any

import pytest
from support.frontends.jax_comparison import compare
from support.frontends.jax_nn_cases import CASES, LISTED, NO_CASES, REFUSED
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


def skip_where_missing(name: str) -> None:
    """Skip a case that the installed version does not have."""
    library, item = name.rsplit(".", 1)
    if not hasattr(pytest.importorskip(library), item):
        package = library.split(".")[0]
        installed = metadata.version(package)
        pytest.skip(f"{package} {installed} has no {name}; listed are those of {LISTED[package]}")


@pytest.mark.parametrize("library", NO_CASES)
def test_the_list_is_complete(library: str) -> None:
    pytest.importorskip(library)
    package = library.split(".")[0]
    listed = {name.rsplit(".", 1)[1] for name in CASES if name.startswith(f"{library}.")} | NO_CASES[library]
    found, installed = public_names(library), metadata.version(package)
    if found != listed and installed != LISTED[package]:
        more, fewer = (", ".join(sorted(names)) or "nothing" for names in (found - listed, listed - found))
        pytest.skip(f"{package} {installed} has {more} more and {fewer} less than {LISTED[package]}")
    assert found == listed


def test_names_of_another_version_are_skipped_and_those_of_the_listed_one_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(jax.nn, "logmeanexp")
    monkeypatch.setattr(jax.nn, "brand_new", lambda x: x, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"has no jax.nn.logmeanexp; listed are those of"):
        test_a_function_or_module_computes_what_jax_computes("jax.nn.logmeanexp")
    monkeypatch.setitem(LISTED, "jax", "0.0")
    with pytest.raises(pytest.skip.Exception, match=r"has brand_new more and logmeanexp less than 0.0"):
        test_the_list_is_complete("jax.nn")
    monkeypatch.setitem(LISTED, "jax", metadata.version("jax"))
    with pytest.raises(AssertionError):
        test_the_list_is_complete("jax.nn")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")  # of flax
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_function_or_module_computes_what_jax_computes(name: str) -> None:
    skip_where_missing(name)
    compare(*CASES[name]())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax, about its ops of 8 bits
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_in_the_table_of_refused_ones_is_refused(name: str) -> None:
    skip_where_missing(name)
    function, params, inputs = CASES[name]()
    with pytest.raises(GraphError, match=r"float8_e4m3|without a rule"):
        dg.frontends.jax.import_function(function, params, *inputs)


def test_the_page_has_the_table() -> None:
    lines = [
        f"{len(ACCEPTED)} of {len(CASES)} functions of `jax.nn` and modules of `flax.linen` and `equinox.nn`",
        f"({len(ACCEPTED) / len(CASES):.0%}) import, with outputs and gradients of JAX; the list is that of",
        f"{', '.join(f'{package} {number}' for package, number in LISTED.items())}. These do not:",
        "",
        "| function or module | why |",
        "| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in sorted(REFUSED.items())),
    ]
    table = "\n".join(lines)
    page = (ROOT / "docs" / "models" / "jax.md").read_text(encoding="utf-8")
    assert table in page, f"docs/models/jax.md needs this text:\n{table}"
