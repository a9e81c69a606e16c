"""Reads the format of the contest on intra-operator parallelism (ASPLOS / EuroSys 2025, google/iopddl).

    {"problem": {"name": ..., "usage_limit": 50,
                 "nodes": {"intervals": [[30, 70], ...], "costs": [[15], ...], "usages": [[10], ...]},
                 "edges": {"nodes": [[0, 1], ...], "costs": [[30, 40], ...]}}}

Costs of an edge are row-major, the first node's strategies being the rows. An interval is half-open and may
be empty; `usage_limit` may be null or absent. Costs of 1e17 or more stand for "forbidden" and become inf; all
others are integers below 2**53, so float64 holds them exactly.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import GraphError
from distgraph.passes.search.solver.problem import Problem, Use
from distgraph.serialization.documents import decode, parse_json, read_bytes

__all__ = ["problem_of", "read_contest"]

MOST_BYTES: Final = 1 << 30
"""Of a problem, compressed or not: the largest at hand, A, has 94 MB."""
_FORBIDDEN = 1e17
_EXACT = 2.0**53


def read_contest(path: str | Path) -> Problem:
    """The problem in a file of the contest's format, `.json` or `.json.gz`.

    Raises:
        GraphError: where the file cannot be read or does not hold such a problem.
    """
    path = Path(path)
    content = read_bytes(path, GraphError, MOST_BYTES)
    if path.suffix == ".gz":
        content = _decompressed(content, path)
    text = decode(content, str(path), GraphError)
    document = parse_json(text, str(path), GraphError, items=MOST_BYTES // 4)
    return problem_of(document, str(path))


def _decompressed(content: bytes, path: Path) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as file:
            found = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise GraphError(f"{path}: cannot be read: {error}; give a whole .json.gz file") from None
    if len(found) > MOST_BYTES:
        raise GraphError(f"{path}: holds more than {MOST_BYTES} bytes, the limit for such a file")
    return found


def problem_of(document: object, source: str = "document") -> Problem:
    """The problem in a parsed document; source names it in messages.

    Raises:
        GraphError: where the document does not hold such a problem.

    Example:
        >>> nodes = {"intervals": [[0, 2], [1, 1]], "costs": [[3, 1], [7]], "usages": [[1, 6], [5]]}
        >>> edges = {"nodes": [[0, 1]], "costs": [[10, 20]]}
        >>> problem = problem_of({"problem": {"nodes": nodes, "edges": edges, "usage_limit": 6}})
        >>> problem.objective((1, 0)), problem.peak((1, 0)), problem.edge_costs[0].shape
        (28.0, (0, 6.0), (2, 1))
    """
    try:
        body = document["problem"]  # type: ignore[index]
        nodes, edges = body["nodes"], body["edges"]
        costs = tuple(_costs(numbers) for numbers in nodes["costs"])
        pairs = tuple((int(u), int(v)) for u, v in edges["nodes"])
        edge_costs = tuple(
            _table(numbers, len(costs[u]), len(costs[v]))
            for (u, v), numbers in zip(pairs, edges["costs"], strict=True)
        )
        uses = tuple(
            (Use(int(start), int(stop), np.array(amounts, dtype=np.float64)),) if start < stop else ()
            for (start, stop), amounts in zip(nodes["intervals"], nodes["usages"], strict=True)
        )
        name, limit = str(body.get("name") or source), body.get("usage_limit")
        limit = None if limit is None else float(limit)
    except KeyError as error:
        raise GraphError(f"{source}: no entry {str(error)[:60]} where the contest's format has one") from None
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise GraphError(f"{source}: is not a problem in the contest's format: {str(error)[:200]}") from None
    _check_exact(source, (*costs, *edge_costs))
    try:
        return Problem(name, costs, pairs, edge_costs, uses, limit)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None


def _costs(numbers: Sequence[int]) -> NDArray[np.float64]:
    costs = np.array(numbers, dtype=np.float64)
    costs[costs >= _FORBIDDEN] = math.inf
    return costs


def _table(numbers: Sequence[int], rows: int, columns: int) -> NDArray[np.float64]:
    if len(numbers) != rows * columns:
        raise ValueError(f"an edge has {len(numbers)} costs, expected {rows} x {columns}")
    return _costs(numbers).reshape(rows, columns)


def _check_exact(source: str, arrays: Sequence[NDArray[np.float64]]) -> None:
    if not arrays:
        return
    numbers = np.concatenate([a.ravel() for a in arrays])
    largest = float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
    if largest > _EXACT:
        raise GraphError(
            f"{source}: a cost of {largest:.0f} is above 2**53 and below 1e17, which float64 does not hold "
            f"exactly; scale the costs or write 1e18 to forbid"
        )
