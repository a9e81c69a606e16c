"""Device functions that all sources of `block_kernel` share: conversion of dtypes, sums over a block.

Half precision is converted here and not by ``cuda_fp16.h``, so that no header of CUDA is needed to compile a
source. A block has a multiple of 32 threads, and all of them call the functions that sum over a block.
"""

from __future__ import annotations

DEVICE_FUNCTIONS = """
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

#ifndef DISTGRAPH_HAS_FLOAT16  // defined where the source is compiled for another machine than a GPU
static __device__ float float_of(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
static __device__ float16 float16_of(float x) {
    float16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#endif

// Rounded to the nearest, ties to even; a NaN stays one.
static __device__ bfloat16 bfloat16_of(float x) {
    const unsigned int bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    bfloat16 y;
    y.bits = (unsigned short)(is_nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    return y;
}

static __device__ A load(double x) { return A(x); }
static __device__ A load(float x) { return A(x); }
static __device__ A load(float16 x) { return A(float_of(x)); }
static __device__ A load(bfloat16 x) { return A(__uint_as_float((unsigned int)x.bits << 16)); }

static __device__ void store(double* at, A x) { *at = double(x); }
static __device__ void store(float* at, A x) { *at = float(x); }
static __device__ void store(float16* at, A x) { *at = float16_of(float(x)); }
static __device__ void store(bfloat16* at, A x) { *at = bfloat16_of(float(x)); }

static __device__ A infinity() { return A(__uint_as_float(0x7f800000u)); }

// The sum of x over the threads of a block, in an order that is the same for all of them.
static __device__ A block_sum(A x) {
    __shared__ A of_warps[32];
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    __syncthreads();  // the sums of the last call have been read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    A total = A(0);
    for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) total += of_warps[warp];
    return total;
}
"""

ROW_EXPONENTIALS = """
// The largest of some numbers, and the sum of their exponentials relative to it.
struct Exponentials { A largest, total; };

// The factor that changes a sum relative to one number into a sum relative to a larger one.
static __device__ A rescaling(A smaller, A larger) {
    return smaller == larger ? A(1) : exp(smaller - larger);
}

static __device__ Exponentials joined(Exponentials a, Exponentials b) {
    Exponentials c;
    c.largest = a.largest > b.largest ? a.largest : b.largest;
    c.total = a.total * rescaling(a.largest, c.largest) + b.total * rescaling(b.largest, c.largest);
    return c;
}

// Of a row, by all threads of a block, in one pass: the sum so far is rescaled where a larger number comes.
// A NaN or +infinity in the row, or nothing but -infinity, gives a total that is NaN.
template <class X> static __device__ Exponentials row_exponentials(const X* row, int width) {
    Exponentials sum = {-infinity(), A(0)};
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        const A x = load(row[j]);
        if (x > sum.largest) {
            sum.total = sum.total * exp(sum.largest - x) + A(1);
            sum.largest = x;
        } else if (x != -infinity()) {
            sum.total += exp(x - sum.largest);
        }
    }
    for (int step = 16; step > 0; step /= 2) {
        Exponentials other;
        other.largest = __shfl_xor_sync(0xffffffffu, sum.largest, step);
        other.total = __shfl_xor_sync(0xffffffffu, sum.total, step);
        sum = joined(sum, other);
    }
    __shared__ A largest[32], totals[32];
    if (threadIdx.x % 32 == 0) {
        largest[threadIdx.x / 32] = sum.largest;
        totals[threadIdx.x / 32] = sum.total;
    }
    __syncthreads();
    sum.largest = largest[0];
    sum.total = totals[0];
    for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) {
        const Exponentials other = {largest[warp], totals[warp]};
        sum = joined(sum, other);
    }
    sum.total += sum.largest - sum.largest;  // NaN if the largest is infinite
    return sum;
}
"""
