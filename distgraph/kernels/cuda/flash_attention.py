"""CUDA sources of attention that keep no matrix of scores, and their launches.

The scores of a tile of queries and a tile of keys are computed, used, and dropped. The forward kernel keeps
for each query the largest score so far and the sum of exponentials relative to it, and rescales what it has
summed where a larger score comes (Milakov and Gimelshein, 2018; Dao et al., 2022). The gradient recomputes
the probabilities of a tile from the logsumexp, twice: one kernel sums dq over the keys, another dk and dv
over the queries and over the query heads of a group (Dao, 2023). So no two blocks add to one number, and
two equal calls have the same bits.
"""

from __future__ import annotations

from typing import Any

from distgraph.kernels._common import Array, Namespace, outputs
from distgraph.kernels.cuda.block_kernel import (
    MOST_BLOCKS,
    BlockKernel,
    Result,
    compute_dtype,
    launch,
    result_dtype,
    takes,
    threads_of,
)
from distgraph.kernels.cuda.tile_products import TILES

MOST_COLUMNS = 256
"""Largest size of a head, d or e: a thread has its share of a tile of results in registers."""

_SIDE = 16
"""Threads along each side of a block."""
_THREADS = _SIDE * _SIDE

_SIZES = "int heads, long long queries, long long keys, int depth, int width, A scale, int causal"
"""Query heads of a group, rows of queries and of keys, d, e, scale, whether the mask is causal."""
_CONSTANTS = ("QK_COLUMNS", "V_COLUMNS")

ATTENTION = BlockKernel(
    "attention",
    "q k v",
    "o lse",
    _SIZES,
    """
    __shared__ Tiles tiles;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const long long blocks = (queries + TILE - 1) / TILE, matrix = blockIdx.x / blocks;
    const long long first = blockIdx.x % blocks * TILE, rows = smaller(TILE, queries - first);
    const long long ahead = keys - queries;  // under a causal mask query i sees the keys up to i + ahead
    const long long seen = causal ? smaller(keys, first + rows + ahead) : keys;
    q += (matrix * queries + first) * depth;
    k += matrix / heads * keys * depth;
    v += matrix / heads * keys * width;
    A sums[R][V_COLUMNS], largest[R], total[R];
    clear(sums);
    EACH(i, R) {
        largest[i] = -infinity();
        total[i] = A(0);
    }
    for (long long start = 0; start < seen; start += TILE) {
        A scores[R][R];
        multiply_rows(tiles, q, rows, k + start * depth, seen - start, depth, scores);
        EACH(i, R) {
            const long long last = causal ? smaller(seen - 1, first + ty + 16 * i + ahead) : seen - 1;
            A top = -infinity();
            EACH(j, R) {
                const bool visible = start + tx + 16 * j <= last;
                scores[i][j] = visible ? scores[i][j] * scale : -infinity();
                top = scores[i][j] > top ? scores[i][j] : top;
            }
            top = row_largest(top);
            const A before = largest[i];
            largest[i] = top > before ? top : before;
            const A shift = largest[i] == -infinity() ? A(0) : largest[i];
            A sum = A(0);
            EACH(j, R) {
                const A p = exp(scores[i][j] - shift);
                tiles.weights[ty + 16 * i][tx + 16 * j] = p;
                sum += p;
            }
            const A factor = before == largest[i] ? A(1) : exp(before - largest[i]);
            total[i] = total[i] * factor + row_sum(sum);
            EACH(c, V_COLUMNS) sums[i][c] *= factor;
        }
        add_products(tiles, v + start * width, seen - start, width, sums);
    }
    EACH(i, R) {
        const bool any = !(total[i] == A(0));  // a query that sees no key has the result 0
        EACH(c, V_COLUMNS) sums[i][c] = any ? sums[i][c] / total[i] : A(0);
        if (tx == 0 && ty + 16 * i < rows) {
            const A logsumexp = any ? largest[i] + log(total[i]) : -infinity();
            store(lse + matrix * queries + first + ty + 16 * i, logsumexp);
        }
    }
    store_rows(o + (matrix * queries + first) * width, rows, width, sums);
""",
    TILES,
    _CONSTANTS,
    threads=_THREADS,
)

ATTENTION_DELTA = BlockKernel(
    "attention_delta",
    "grad o",
    "delta",
    "int width",
    """
    const long long start = (long long)blockIdx.x * width;
    A sum = A(0);
    for (int j = threadIdx.x; j < width; j += blockDim.x) sum += load(grad[start + j]) * load(o[start + j]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) store(delta + blockIdx.x, sum);
""",
)

ATTENTION_GRAD_Q = BlockKernel(
    "attention_grad_q",
    "grad q k v lse delta",
    "dq",
    _SIZES,
    """
    __shared__ Tiles tiles;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const long long blocks = (queries + TILE - 1) / TILE, matrix = blockIdx.x / blocks;
    const long long first = blockIdx.x % blocks * TILE, rows = smaller(TILE, queries - first);
    const long long ahead = keys - queries;
    const long long seen = causal ? smaller(keys, first + rows + ahead) : keys;
    q += (matrix * queries + first) * depth;
    grad += (matrix * queries + first) * width;
    k += matrix / heads * keys * depth;
    v += matrix / heads * keys * width;
    A sums[R][QK_COLUMNS], shift[R], change[R];
    clear(sums);
    EACH(i, R) {
        const bool inside = ty + 16 * i < rows;
        const long long row = matrix * queries + first + ty + 16 * i;
        shift[i] = inside ? load(lse[row]) : A(0);
        if (shift[i] == -infinity()) shift[i] = A(0);
        change[i] = inside ? load(delta[row]) : A(0);
    }
    for (long long start = 0; start < seen; start += TILE) {
        A scores[R][R], dp[R][R];
        multiply_rows(tiles, q, rows, k + start * depth, seen - start, depth, scores);
        multiply_rows(tiles, grad, rows, v + start * width, seen - start, width, dp);
        EACH(i, R) {
            const long long last = causal ? smaller(seen - 1, first + ty + 16 * i + ahead) : seen - 1;
            EACH(j, R) {
                const A p = exp(scores[i][j] * scale - shift[i]);
                const bool visible = start + tx + 16 * j <= last;
                tiles.weights[ty + 16 * i][tx + 16 * j] = visible ? p * (dp[i][j] - change[i]) * scale : A(0);
            }
        }
        add_products(tiles, k + start * depth, seen - start, depth, sums);
    }
    store_rows(dq + (matrix * queries + first) * depth, rows, depth, sums);
""",
    TILES,
    _CONSTANTS,
    threads=_THREADS,
)

ATTENTION_GRAD_KV = BlockKernel(
    "attention_grad_kv",
    "grad q k v lse delta",
    "dk dv",
    _SIZES,
    """
    __shared__ Tiles tiles;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const long long blocks = (keys + TILE - 1) / TILE, group = blockIdx.x / blocks;
    const long long first = blockIdx.x % blocks * TILE, rows = smaller(TILE, keys - first);
    const long long ahead = keys - queries;
    k += (group * keys + first) * depth;
    v += (group * keys + first) * width;
    // Under a causal mask the queries before first - ahead see no key of the tile.
    const long long begin = causal && first > ahead ? (first - ahead) / TILE * TILE : 0;
    A sums_k[R][QK_COLUMNS], sums_v[R][V_COLUMNS];
    clear(sums_k);
    clear(sums_v);
    for (int head = 0; head < heads; ++head) {
        for (long long start = begin; start < queries; start += TILE) {
            const long long row = (group * heads + head) * queries + start, count = queries - start;
            A scores[R][R], dp[R][R];
            multiply_rows(tiles, k, rows, q + row * depth, count, depth, scores);
            multiply_rows(tiles, v, rows, grad + row * width, count, width, dp);
            EACH(j, R) {
                const int query = tx + 16 * j;
                const A logsumexp = query < count ? load(lse[row + query]) : A(0);
                const A shift = logsumexp == -infinity() ? A(0) : logsumexp;
                const A change = query < count ? load(delta[row + query]) : A(0);
                const long long last = causal ? start + query + ahead : keys - 1;
                EACH(i, R) {
                    const bool visible = query < count && first + ty + 16 * i <= last;
                    const A p = visible ? exp(scores[i][j] * scale - shift) : A(0);
                    tiles.weights[ty + 16 * i][query] = p;
                    dp[i][j] = visible ? p * (dp[i][j] - change) * scale : A(0);
                }
            }
            add_products(tiles, grad + row * width, count, width, sums_v);
            __syncthreads();  // the probabilities have been used
            EACH(i, R)
                EACH(j, R) tiles.weights[ty + 16 * i][tx + 16 * j] = dp[i][j];
            add_products(tiles, q + row * depth, count, depth, sums_k);
        }
    }
    store_rows(dk + (group * keys + first) * depth, rows, depth, sums_k);
    store_rows(dv + (group * keys + first) * width, rows, width, sums_v);
""",
    TILES,
    _CONSTANTS,
    threads=_THREADS,
)


def _columns(width: int) -> int:
    """Columns of a result for each thread."""
    return -(-width // _SIDE)


def _blocks(matrices: int, rows: int, compute: Any) -> int:
    """Blocks for tiles of the rows of all matrices."""
    tile = 4 * _SIDE if compute.itemsize == 4 else 2 * _SIDE
    return matrices * -(-rows // tile)


def _fits(xp: Namespace, q: Array, k: Array, v: Array, *others: Array) -> bool:
    """Whether the CUDA sources take the operands: heads of at most `MOST_COLUMNS` elements, nothing empty."""
    if not takes(xp, q, k, v, *others) or max(q.shape[3], v.shape[3]) > MOST_COLUMNS:
        return False
    tiles = max(q.shape[0] * q.shape[1] * q.shape[2], k.shape[0] * k.shape[1] * k.shape[2])
    return bool(tiles <= MOST_BLOCKS)


def _numbers(q: Array, k: Array, v: Array, scale: float | None, causal: bool) -> tuple[float, ...]:
    """The scalars of the kernels on tiles."""
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    heads, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    return heads, queries, keys, q.shape[3], v.shape[3], factor, int(causal)


def launch_attention(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    scale: float | None,
    out: Any,
    wide: bool,
) -> Any:
    """See `distgraph.kernels.attention.attention`, of operands whose shapes fit; None if not `_fits`."""
    if not _fits(xp, q, k, v):
        return None
    dtype, compute = result_dtype(q, wide), compute_dtype(q, k, v)
    results: list[Result] = [((*q.shape[:3], v.shape[3]), dtype), (q.shape[:3], dtype)]
    return launch(
        ATTENTION, xp, (q, k, v), results, _numbers(q, k, v, scale, causal), out,
        blocks=_blocks(q.shape[0] * q.shape[1], q.shape[2], compute), threads=_THREADS,
        constants=(_columns(q.shape[3]), _columns(v.shape[3])),
    )  # fmt: skip


def launch_attention_grad(
    xp: Namespace,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    causal: bool,
    scale: float | None,
    out: Any,
    wide: bool,
) -> Any:
    """See `distgraph.kernels.attention.attention_grad`; None if not `_fits`."""
    fits = do.shape == o.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3]
    if not fits or not _fits(xp, q, k, v, do, o, lse):
        return None
    out_q, out_k, out_v = outputs(out, 3)
    compute = compute_dtype(q, k, v)
    rows, width = q.shape[0] * q.shape[1] * q.shape[2], v.shape[3]
    delta = launch(
        ATTENTION_DELTA, xp, (do, o), [((rows,), compute)], (width,),
        blocks=rows, threads=threads_of(width, ATTENTION_DELTA),
    )  # fmt: skip
    operands, numbers = (do, q, k, v, lse, delta), _numbers(q, k, v, scale, causal)
    constants = (_columns(q.shape[3]), _columns(width))
    dq = launch(
        ATTENTION_GRAD_Q, xp, operands, [(q.shape, result_dtype(q, wide))], numbers, out_q,
        blocks=_blocks(q.shape[0] * q.shape[1], q.shape[2], compute), threads=_THREADS,
        constants=constants,
    )  # fmt: skip
    dk, dv = launch(
        ATTENTION_GRAD_KV, xp, operands, [(x.shape, result_dtype(x, wide)) for x in (k, v)], numbers,
        (out_k, out_v), blocks=_blocks(k.shape[0] * k.shape[1], k.shape[2], compute), threads=_THREADS,
        constants=constants,
    )  # fmt: skip
    return dq, dk, dv
