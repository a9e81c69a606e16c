"""Generation: tokens of a causal language model one after the other, with a cache of keys and values.

All sequences of a batch are at the same position. As long as the prompt of a sequence reaches further than
that position, its next token is read from the prompt; then it is chosen from the logits. So the most probable
tokens of a sequence are those that it would get alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from distgraph.engine.agreement import agree_on_arrays, compare
from distgraph.engine.compile.incremental_decoding import LAST, START
from distgraph.engine.compile.training_spec import arguments
from distgraph.engine.data import POSITION, Batch, whole
from distgraph.engine.executable import Compiled
from distgraph.engine.session import Session
from distgraph.errors import GraphError
from distgraph.errors.arguments import Bounds, Count, NonNegative, check_argument, check_fields
from distgraph.ir.dtypes import to_numpy

CHUNK = 64
"""Positions of a prompt that are computed at once: enough rows for products at nearly their full rate, and
few enough that little is computed beyond the end of a prompt."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from logits.

    Attributes:
        temperature: divides the logits; 0 chooses the largest one.
        top_k: number of the largest logits that are candidates; None for all, as a number above the
            vocabulary.
        top_p: only the fewest tokens whose probabilities add up to this are candidates; None for all.

    Raises:
        GraphError: a number is out of range, or given without a temperature.
    """

    temperature: NonNegative = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Bounds(above=0, most=1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, subject="generate")
        if not self.temperature and (self.top_k, self.top_p) != (None, None):
            raise GraphError(
                "top_k or top_p is given but temperature is 0, which always chooses the most probable token; "
                "give a temperature, such as 1.0, or leave them out"
            )

    def choose(self, logits: np.ndarray, dice: np.random.Generator) -> np.ndarray:
        """The next token of every row of logits [b, v]: integers [b]."""
        if not self.temperature:
            chosen: np.ndarray = logits.argmax(-1)
            return chosen
        scores = logits.astype(np.float64) / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = np.partition(scores, -self.top_k)[:, -self.top_k, None]
            scores[scores < least] = -np.inf
        if self.top_p is not None:
            order = np.argsort(-scores, axis=-1, kind="stable")
            ranked = np.take_along_axis(scores, order, -1)
            chances = np.exp(ranked - ranked[:, :1])
            before = np.cumsum(chances, -1) - chances
            outside = before >= self.top_p * chances.sum(-1, keepdims=True)
            np.put_along_axis(scores, order, np.where(outside, -np.inf, ranked), -1)
        drawn: np.ndarray = (scores + dice.gumbel(size=scores.shape)).argmax(-1)
        return drawn


@dataclass(frozen=True, slots=True)
class Limits:
    """Where generation ends; see `Engine.generate`.

    Raises:
        GraphError: a number is out of range.
    """

    max_new_tokens: Annotated[int, Bounds(least=1, most=2**31)]
    length: Count | None = None
    keep: Count | None = None
    end_token: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, subject="generate")

    def check(self, needed: int, positions: int) -> None:
        """Raises GraphError where a sequence takes more positions than the model has."""
        if needed > positions and self.keep is None:
            raise GraphError(
                f"prompts and new tokens take {needed} positions but the model has {positions}; generate "
                f"fewer, or give keep=N to go on from the last N tokens when the positions are used up"
            )
        if self.keep is not None and self.keep >= positions:
            raise GraphError(
                f"keep is {self.keep} but must be less than the {positions} positions of the model"
            )

    def check_end_token(self, vocabulary: int) -> None:
        """Raises GraphError where no logit is that of the end token."""
        if self.end_token is not None and not 0 <= self.end_token < vocabulary:
            raise GraphError(
                f"end_token is {self.end_token} but the model gives logits of tokens 0 to {vocabulary - 1}; "
                f"give one of these, or leave end_token out"
            )


def generate(
    session: Session, prompts: Any, limits: Limits, sampling: Sampling, seed: int
) -> list[np.ndarray]:
    """The prompts with the tokens that follow them.

    Raises:
        GraphError: as `Engine.generate`.
        RuntimeFault: the processes give different arguments.
    """
    model = arguments(session.training_spec.model)
    if model is not None and len(model) != 1:
        raise GraphError(
            f"model takes ({', '.join(model)}) but generation gives it tokens alone; wrap it in a model of "
            f"one argument"
        )
    check_argument("generate", "seed", seed, Annotated[int, Bounds(least=0)])
    rows = _prompts(prompts)
    compare("engine.generate()", {"seed": seed, "limits": limits, "sampling": sampling})
    agree_on_arrays("engine.generate()", "tokens", {f"prompt {n}": row for n, row in enumerate(rows)})
    lengths = np.array([len(row) for row in rows])
    ends = lengths + limits.max_new_tokens
    last = int(ends.max())
    positions, dtype = _positions(session, limits, last - 1)
    _check_tokens(rows, dtype)
    limits.check(last - 1, positions)
    tokens = np.zeros((len(rows), last), dtype)
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    cache, dice = _Cache(session, tokens, positions), np.random.default_rng(seed)
    first = 0  # the token in the first position of the cache
    for front in range(int(lengths.min()), last):
        if front - first > positions:
            assert limits.keep is not None
            first, cache.filled = front - limits.keep, 0
        logits = cache.logits(first, front)
        limits.check_end_token(logits.shape[-1])
        chosen = sampling.choose(logits, dice)
        free = (lengths <= front) & (front < ends)
        tokens[free, front] = chosen[free]
        ends[free & (tokens[:, front] == limits.end_token)] = front + 1
        if (ends <= front + 1).all():
            break
    return [row[:end].copy() for row, end in zip(tokens, ends, strict=True)]


@dataclass(slots=True)
class _Cache:
    """The programs that fill the cache, and how far it is filled.

    Attributes:
        session: compiles and runs them.
        tokens: [b, n]; those known so far, and zeros.
        positions: of the cache.
        filled: positions that hold keys and values of the present tokens.
        steps: positions of a step -> its tokens, the batch that reads them from there, and its program.
    """

    session: Session
    tokens: np.ndarray
    positions: int
    filled: int = 0
    steps: dict[int, tuple[np.ndarray, Batch, Compiled]] = field(default_factory=dict)

    def logits(self, first: int, front: int) -> np.ndarray:
        """Logits [b, v] of token number `front`, after those from `first` on are in the cache."""
        count = front - first
        logits = np.empty(0)
        while self.filled < count:
            width = 1 if count - self.filled == 1 else min(CHUNK, self.positions)
            start = min(self.filled, self.positions - width)
            block = self.tokens[:, first + start : min(first + start + width, front)]
            step, batch, compiled = self._step(width)
            step[:, : block.shape[1]], step[:, block.shape[1] :] = block, 0  # zeros are overwritten later
            self.filled = start + block.shape[1]
            scalars = {START: start, LAST: block.shape[1] - 1}
            ((_, output),) = self.session.arrays(compiled, batch, scalars).items()
            logits = output[:, 0]
        return logits

    def _step(self, width: int) -> tuple[np.ndarray, Batch, Compiled]:
        if width not in self.steps:
            step = np.zeros((len(self.tokens), width), self.tokens.dtype)
            batch = whole((step,))  # no copy: tokens of every call are written into `step`
            self.steps[width] = step, batch, self.session.program("generate", batch, self.positions)
        return self.steps[width]


def _prompts(prompts: Any) -> list[np.ndarray]:
    """One array of integers for each sequence. Raises GraphError for anything else."""
    try:
        rows = [np.asarray(row) for row in prompts]
    except (TypeError, ValueError):  # no sequence; one that is ragged
        rows = []
    if not rows or any(row.ndim != 1 or not row.size or row.dtype.kind not in "iu" for row in rows):
        raise GraphError(
            "prompts must be a sequence of sequences of token numbers, each of one token or more, such as "
            "[[5, 1, 7], [5, 2]] or integers [b, n]"
        )
    return rows


def _check_tokens(rows: list[np.ndarray], dtype: np.dtype[Any]) -> None:
    """Raises GraphError where a token of a prompt is negative, or above what the dtype of tokens holds."""
    smallest, largest = min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)
    bounds = f"the model takes 0 to {np.iinfo(dtype).max}"
    if smallest < 0:
        raise GraphError(
            f"prompts have token numbers down to {smallest} but {bounds}; leave out tokens that fill up "
            f"rows, as prompts may differ in length"
        )
    if largest > np.iinfo(dtype).max:
        raise GraphError(f"prompts have token numbers up to {largest} but {bounds}; give one of these")


def _positions(session: Session, limits: Limits, needed: int) -> tuple[int, np.dtype[Any]]:
    """Positions of a sequence if not given, and dtype of tokens: those of the longest samples so far.

    Before there are samples, positions are those that the call needs, as far as the model has them.
    """
    most = getattr(session.training_spec.model, "most_positions", None)
    if isinstance(most, int) and limits.length is not None and limits.length > most:
        raise GraphError(
            f"length is {limits.length} but the model has {most} positions; give length={most} or less"
        )
    names = {f"{POSITION}0", *(arguments(session.training_spec.model) or ())}
    seen = [
        (shape[0], dtype)
        for mode, _, fields, _ in session.programs
        for name, (shape, dtype) in fields
        if mode != "generate" and name in names and len(shape) == 1
    ]
    if isinstance(most, int):  # to start anew takes all positions, as after training
        needed = most if limits.keep is not None else min(needed, most)
    longest, dtype = max(seen, default=(needed, "i32"))
    if to_numpy(dtype).kind not in "iu":
        raise GraphError(
            f"model has been given samples of {dtype} but generation gives it token numbers; use a model "
            "that takes whole numbers"
        )
    return limits.length or longest, to_numpy(dtype)
