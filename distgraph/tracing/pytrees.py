"""Pytrees: nested dicts, lists, tuples, named tuples and dataclasses, with the path of each leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from distgraph.errors import GraphError, first_of


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path such as "params.layers.0.w", leaf) of a pytree, in order; None has no leaf.

    Example:
        >>> list(leaves({"w": [1, 2], "b": None}))
        [('w.0', 1), ('w.1', 2)]
    """
    if tree is None:
        return
    children = _children(tree)
    if children is None:
        yield path, tree
        return
    for name, child in children:
        yield from leaves(child, f"{path}.{name}" if path else name)


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """The pytree with (path, leaf) -> another leaf.

    Example:
        >>> map_leaves(lambda path, x: x + 1, {"w": (1, 2)})
        {'w': (2, 3)}
    """
    children = None if tree is None else _children(tree)
    if tree is None or children is None:
        return None if tree is None else function(path, tree)
    new = {n: map_leaves(function, child, f"{path}.{n}" if path else n) for n, child in children}
    if isinstance(tree, Mapping):
        return dict(zip(tree, new.values(), strict=True))
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **new)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*new.values())
    return type(tree)(new.values())


def same_leaves(subject: str, before: Any, after: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, in the order of another one; keys of dicts have no order.

    Raises:
        GraphError: one of them has a leaf that the other has not.
    """
    old, new = [path for path, _ in leaves(before)], dict(leaves(after))
    if set(old) != set(new):
        differing = [path for path in (*old, *new) if (path in old) != (path in new)]
        raise GraphError(
            f"{subject} has the leaves {first_of(new)} but had {first_of(old)}: different are "
            f"{first_of(differing)}; give both the same structure"
        )
    return {path: new[path] for path in old}


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """(name, child) of a node; None for a leaf."""
    if isinstance(tree, Mapping):
        return [(str(key), child) for key, child in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return [(str(i), child) for i, child in enumerate(tree)]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    return None


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The pytree of function(leaf, leaves of the others at the same place).

    Raises:
        GraphError: the pytrees do not have the same leaves.

    Example:
        >>> tree_map(lambda p, g: p - g, {"w": 3, "b": [1]}, {"w": 1, "b": [1]})
        {'w': 2, 'b': [0]}
    """
    tables = [same_leaves("a pytree of tree_map", tree, other) for other in others]
    return map_leaves(lambda path, leaf: function(leaf, *(table[path] for table in tables)), tree)
