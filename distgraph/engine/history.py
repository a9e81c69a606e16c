"""History: the losses and metrics of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class History:
    """Losses of every step, and means of every epoch.

    Attributes:
        losses: loss of every step, in order.
        epochs: one dict an epoch: "epoch", "loss", every metric, and the same of the validation data as
            "valid_..."; under Strategy(nonfinite="skip") also "skipped_steps".
        skipped: numbers of the steps whose update was left out, see Strategy(nonfinite="skip").

    Example:
        >>> history = History(losses=[2.0, 1.0], epochs=[{"epoch": 0, "loss": 1.5}])
        >>> history["loss"]
        [1.5]
    """

    losses: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def __getitem__(self, name: str) -> list[float]:
        """One number an epoch. Raises KeyError for a name that was not measured."""
        numbers = [epoch[name] for epoch in self.epochs if name in epoch]
        if not numbers and self.epochs:
            raise KeyError(f"{name!r} was not measured; there is {', '.join(self.epochs[0])}")
        return numbers

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)


@dataclass(slots=True)
class Means:
    """Exact means over samples, of batches of different sizes.

    Attributes:
        terms: name -> (mean of a batch x its samples), one a batch.
        count: samples so far.

    Example:
        >>> means = Means()
        >>> means.add({"loss": 1.0}, 3), means.add({"loss": 5.0}, 1), means.result()
        (None, None, {'loss': 2.0})
    """

    terms: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0

    def add(self, logs: Mapping[str, float], size: int) -> None:
        """Add the means of a batch; of 0 samples, such as of a step that was left out, the names alone."""
        for name, number in logs.items():
            terms = self.terms.setdefault(name, [])
            if size:
                terms.append(number * size)
        self.count += size

    def copy(self) -> Means:
        """Means with the same numbers, to which others can be added."""
        return Means({name: list(terms) for name, terms in self.terms.items()}, self.count)

    def result(self) -> dict[str, float]:
        """Name -> mean over all samples added so far; nan where there are none."""
        return {
            name: math.fsum(terms) / self.count if self.count else math.nan
            for name, terms in self.terms.items()
        }
