"""Device functions of attention: products of tiles, by 16 x 16 threads, through shared memory.

A tile of scores has 16 R rows and columns. Thread (ty, tx) has the scores of rows ty + 16 i and columns
tx + 16 j in registers, for i and j below R, and of a result with C columns for each thread the rows ty + 16 i
and columns tx + 16 c. `QK_COLUMNS` and `V_COLUMNS` are the C of the last dim of queries and of values.
"""

from __future__ import annotations

TILES = """
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < count; ++i)  // keeps arrays in registers

constexpr int R = sizeof(A) == 4 ? 4 : 2;
constexpr int TILE = 16 * R;    // rows and columns of a tile of scores
constexpr int DEPTH = 16;       // elements of the sum of a score that are in shared memory at a time
constexpr int SLICE = 4 * R;    // rows of the second operand of a product that are in shared memory at a time
constexpr int WIDEST = 16 * (QK_COLUMNS > V_COLUMNS ? QK_COLUMNS : V_COLUMNS);

struct Tiles {
    A left[DEPTH][TILE + 1], right[DEPTH][TILE + 1];  // one more column: no two threads of a warp on one bank
    A weights[TILE][TILE + 1];
    A slice[SLICE][WIDEST];
};

static __device__ long long smaller(long long a, long long b) { return a < b ? a : b; }

// scores[i][j] = sum over d of left[ty + 16 i][d] * right[tx + 16 j][d]; rows beyond the last count as zero.
template <class X, class Y>
static __device__ void multiply_rows(
    Tiles& tiles, const X* left, long long left_rows, const Y* right, long long right_rows, int depth,
    A (&scores)[R][R]
) {
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    EACH(i, R)
        EACH(j, R) scores[i][j] = A(0);
    for (int start = 0; start < depth; start += DEPTH) {
        __syncthreads();  // the last elements have been used
        for (int e = threadIdx.x; e < TILE * DEPTH; e += 256) {
            const int row = e / DEPTH, d = e % DEPTH;
            const bool inside = start + d < depth;
            const long long at = (long long)row * depth + start + d;
            tiles.left[d][row] = inside && row < left_rows ? load(left[at]) : A(0);
            tiles.right[d][row] = inside && row < right_rows ? load(right[at]) : A(0);
        }
        __syncthreads();
        for (int d = 0; d < DEPTH; ++d) {
            A x[R], y[R];
            EACH(i, R) x[i] = tiles.left[d][ty + 16 * i];
            EACH(j, R) y[j] = tiles.right[d][tx + 16 * j];
            EACH(i, R)
                EACH(j, R) scores[i][j] += x[i] * y[j];
        }
    }
}

// sums[i][c] += sum over k of weights[ty + 16 i][k] * rows[k][tx + 16 c]. Every thread has written its
// weights before the call; they may be overwritten after the next __syncthreads.
template <int COLUMNS, class X>
static __device__ void add_products(
    Tiles& tiles, const X* rows, long long count, int width, A (&sums)[R][COLUMNS]
) {
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (int start = 0; start < TILE && start < count; start += SLICE) {
        __syncthreads();  // the weights have been written, and the last slice has been used
        for (int e = threadIdx.x; e < SLICE * 16 * COLUMNS; e += 256) {
            const int row = e / (16 * COLUMNS), column = e % (16 * COLUMNS);
            const bool inside = start + row < count && column < width;
            tiles.slice[row][column] = inside ? load(rows[(long long)(start + row) * width + column]) : A(0);
        }
        __syncthreads();
        for (int k = 0; k < SLICE; ++k) {
            A x[R];
            EACH(i, R) x[i] = tiles.weights[ty + 16 * i][start + k];
            EACH(c, COLUMNS) {
                const A y = tiles.slice[k][tx + 16 * c];
                EACH(i, R) sums[i][c] += x[i] * y;
            }
        }
    }
}

template <int COLUMNS, class X>
static __device__ void store_rows(X* rows, long long count, int width, const A (&sums)[R][COLUMNS]) {
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    EACH(i, R)
        EACH(c, COLUMNS)
            if (ty + 16 * i < count && tx + 16 * c < width)
                store(rows + (long long)(ty + 16 * i) * width + tx + 16 * c, sums[i][c]);
}

template <int COLUMNS> static __device__ void clear(A (&sums)[R][COLUMNS]) {
    EACH(i, R)
        EACH(c, COLUMNS) sums[i][c] = A(0);
}

// Over the 16 threads that have the columns of one row.
static __device__ A row_sum(A x) {
    for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

static __device__ A row_largest(A x) {
    for (int step = 8; step > 0; step /= 2) {
        const A other = __shfl_xor_sync(0xffffffffu, x, step);
        x = other > x ? other : x;
    }
    return x;
}
"""
