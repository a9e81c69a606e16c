"""Views and other ops that move elements."""

from __future__ import annotations

from typing import Any

from distgraph import ops
from distgraph.frontends.torch.rule_registry import aten

aten("detach.default")(ops.stop_gradient)
aten("t.default")(ops.transpose)
aten("unsqueeze.default")(ops.expand_dims)
aten("stack.default", operands="result")(ops.stack)


@aten("view.default", "reshape.default", "_unsafe_view.default", "_reshape_alias.default")
def _view(x: Any, shape: Any, *strides: Any) -> Any:
    return ops.reshape(x, tuple(shape))


@aten(
    "alias.default", "clone.default", "contiguous.default", "lift_fresh_copy.default", "lift_fresh.default",
    "positive.default",
)  # fmt: skip
def _same(x: Any, memory_format: Any = None) -> Any:
    return x


@aten("copy.default")
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    return ops.cast(ops.broadcast_to(source, x.shape), x.dtype)


@aten("permute.default")
def _permute(x: Any, dims: Any) -> Any:
    return ops.transpose(x, tuple(dims))


@aten("transpose.int")
def _transpose(x: Any, first: int, second: int) -> Any:
    return x.swapaxes(first, second)


@aten("movedim.int", "movedim.intlist")
def _movedim(x: Any, source: Any, destination: Any) -> Any:
    sources = [d % x.ndim for d in ([source] if isinstance(source, int) else source)]
    targets = [d % x.ndim for d in ([destination] if isinstance(destination, int) else destination)]
    order = [d for d in range(x.ndim) if d not in sources]
    for target, moved in sorted(zip(targets, sources, strict=True)):
        order.insert(target, moved)
    return ops.transpose(x, order)


@aten("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(x: Any, dim: Any = None) -> Any:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    single = tuple(d % x.ndim for d in dims if x.shape[d] == 1) if x.ndim else ()
    return ops.squeeze(x, single) if single else x


@aten("expand.default")
def _expand(x: Any, size: Any, implicit: bool = False) -> Any:
    extra = len(size) - x.ndim
    shape = tuple(x.shape[d - extra] if n == -1 else n for d, n in enumerate(size))
    return ops.broadcast_to(x, shape)


@aten("expand_as.default")
def _expand_as(x: Any, other: Any) -> Any:
    return ops.broadcast_to(x, other.shape)


@aten("flatten.using_ints")
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % max(1, x.ndim), end_dim % max(1, x.ndim)
    return ops.reshape(x, (*x.shape[:first], -1, *x.shape[last + 1 :]))


@aten("unflatten.int")
def _unflatten(x: Any, dim: int, sizes: Any) -> Any:
    axis = dim % x.ndim
    return ops.reshape(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


@aten("slice.Tensor")
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    axis = dim % x.ndim
    return ops.getitem(x, (*(slice(None),) * axis, slice(start, end, step)))


@aten("narrow.default")
def _narrow(x: Any, dim: int, start: int, length: int) -> Any:
    return _slice(x, dim, start, start + length)


@aten("select.int")
def _select(x: Any, dim: int, index: int) -> Any:
    return ops.getitem(x, (*(slice(None),) * (dim % x.ndim), index))


@aten("cat.default", "concat.default", operands="result")
def _cat(tensors: Any, dim: int = 0) -> Any:
    parts = [x for x in tensors if x.shape != (0,)]  # torch lets an empty list stand for no rows of any shape
    return ops.concat(parts or tensors[:1], dim)


@aten("split_with_sizes.default", "split.sizes")
def _split_with_sizes(x: Any, sizes: Any, dim: int = 0) -> Any:
    cuts, position = [], 0
    for size in sizes[:-1]:
        position += size
        cuts.append(position)
    return tuple(ops.split(x, cuts, dim))


@aten("split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> Any:
    return tuple(ops.split(x, list(range(size, x.shape[dim], size)), dim))


@aten("chunk.default")
def _chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    return _split(x, -(-x.shape[dim] // chunks), dim)


@aten("unbind.int")
def _unbind(x: Any, dim: int = 0) -> Any:
    return tuple(_select(x, dim, i) for i in range(x.shape[dim]))


@aten("flip.default")
def _flip(x: Any, dims: Any) -> Any:
    return ops.flip(x, tuple(dims))


@aten("roll.default")
def _roll(x: Any, shifts: Any, dims: Any = ()) -> Any:
    shifts, dims = ([n] if isinstance(n, int) else list(n) for n in (shifts, dims))
    if not dims:
        return ops.reshape(ops.roll(ops.reshape(x, (-1,)), shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = ops.roll(x, shift, dim)
    return x


@aten("repeat.default", "tile.default")
def _repeat(x: Any, repeats: Any) -> Any:
    return ops.tile(x, tuple(repeats))


@aten("repeat_interleave.self_int")
def _repeat_interleave(x: Any, count: int, dim: int | None = None, output_size: Any = None) -> Any:
    return ops.repeat(ops.reshape(x, (-1,)), count, 0) if dim is None else ops.repeat(x, count, dim)


@aten("constant_pad_nd.default")
def _pad(x: Any, pad: Any, value: Any = 0) -> Any:
    low, high = [0] * x.ndim, [0] * x.ndim
    for position in range(len(pad) // 2):
        low[-1 - position], high[-1 - position] = pad[2 * position], pad[2 * position + 1]
    cut = tuple(slice(max(0, -a), n + min(0, b)) for a, b, n in zip(low, high, x.shape, strict=True))
    if any(n < 0 for n in (*low, *high)):
        x = ops.getitem(x, cut)
    return ops.pad(x, [max(0, n) for n in low], [max(0, n) for n in high], value)


@aten("pixel_shuffle.default")
def _pixel_shuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    wide = ops.reshape(x, (*lead, channels // factor**2, factor, factor, height, width))
    n = len(lead)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return ops.reshape(
        ops.transpose(wide, order), (*lead, channels // factor**2, height * factor, width * factor)
    )


@aten("pixel_unshuffle.default")
def _pixel_unshuffle(x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    split = ops.reshape(x, (*lead, channels, height // factor, factor, width // factor, factor))
    n = len(lead)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    shape = (*lead, channels * factor**2, height // factor, width // factor)
    return ops.reshape(ops.transpose(split, order), shape)


@aten("channel_shuffle.default")
def _channel_shuffle(x: Any, groups: int) -> Any:
    batch, channels, *rest = x.shape
    split = ops.reshape(x, (batch, groups, channels // groups, *rest))
    order = (0, 2, 1, *range(3, split.ndim))
    return ops.reshape(ops.transpose(split, order), x.shape)


@aten("diagonal.default")
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    rows, columns = dim1 % x.ndim, dim2 % x.ndim
    others = [d for d in range(x.ndim) if d not in (rows, columns)]
    moved = ops.transpose(x, (*others, rows, columns))
    height, width = moved.shape[-2:]
    top, left = max(0, -offset), max(0, offset)
    length = max(0, min(height - top, width - left))
    block = ops.getitem(moved, (..., slice(top, top + length), slice(left, left + length)))
    eye = ops.one_hot(ops.arange(length), length, x.dtype, outside="zeros")
    return ops.reduce("sum", ops.where(ops.cast(eye, "bool"), block, 0), -1)
