// Work on the tokens' 16-bit rows: quantise one row, and one piece of the down-projection h = x A^T.
//
// Both are done by a group of warps that meets at a barrier of its own (`sync`); every thread of the group calls them.
#pragma once

#include "common.cuh"

// x / scale, correctly rounded, with inverse = 1 / scale rounded: a quotient, corrected twice by its remainder. The corrections would
// make a negative zero positive, so the sign is x's.
__device__ __forceinline__ float divide(float x, float scale, float inverse) {
  float q = x * inverse;
  q = __fmaf_rn(__fmaf_rn(-q, scale, x), inverse, q);
  return copysignf(__fmaf_rn(__fmaf_rn(-q, scale, x), inverse, q), x);
}

// Eight 16-bit values as e4m3 codes. scale may be infinite (a row that holds an infinity): the remainders would be NaN then.
__device__ __forceinline__ uint2 encode8(const uint4& v, float scale, float inverse) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  u32 codes[2] = {0, 0};
  const bool plain = !(scale < __int_as_float(0x7f800000));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float lo = widen((u16)words[i]), hi = widen((u16)(words[i] >> 16));
    lo = plain ? __fdiv_rn(lo, scale) : divide(lo, scale, inverse);
    hi = plain ? __fdiv_rn(hi, scale) : divide(hi, scale, inverse);
    lo = fmaxf(-448.f, fminf(lo, 448.f));  // NaN becomes 448, as in vLLM's op
    hi = fmaxf(-448.f, fminf(hi, 448.f));
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
    codes[i >> 1] |= (u32)pair << (16 * (i & 1));
  }
  return make_uint2(codes[0], codes[1]);
}

// Quantise a row of K values: `id` of `THREADS` threads; red: one float a warp of the group, free again after the second sync
// that follows. store(k, codes of k .. k+7). Returns the row's scale. KEPT vectors of 8 values a thread stay in registers;
// longer rows are read twice.
template <int THREADS, int KEPT, class Sync, class Store>
__device__ __forceinline__ float quantise_row(const u16* row, int K, int id, float* red, Sync sync, Store store) {
  uint4 kept[KEPT];
  float largest = 0.f;
  // fmaxf passes over NaN, as vLLM's reduction does
  auto grow = [&](const uint4& v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fmaxf(fabsf(widen((u16)words[i])), fabsf(widen((u16)(words[i] >> 16)))));
  };
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int k = (i * THREADS + id) * 8;
    kept[i] = k < K ? ldg128(row + k) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < KEPT; ++i) grow(kept[i]);
  for (int k = (KEPT * THREADS + id) * 8; k < K; k += THREADS * 8) grow(ldg128(row + k));
#pragma unroll
  for (int d = 16; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  if ((id & 31) == 0) red[id >> 5] = largest;
  sync();
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) largest = fmaxf(largest, red[w]);
  const float scale = fmaxf(__fdiv_rn(largest, 448.f), 1.f / (448.f * 512.f));
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int k = (i * THREADS + id) * 8;
    if (k < K) store(k, encode8(kept[i], scale, inverse));
  }
  for (int k = (KEPT * THREADS + id) * 8; k < K; k += THREADS * 8) store(k, encode8(ldg128(row + k), scale, inverse));
  return scale;
}

#ifdef M_TILES
// Which piece of h: of all adapters' (rank tile of 8, part of K, slice), the rank tile fastest.
struct ShrinkItem {
  int r0, split, slice, ordinal;
};
__device__ __forceinline__ ShrinkItem shrink_item(const Adapters& ad, int index, int splits) {
  const int rank_tiles = max(1, (ad.rank + 7) / 8);
  ShrinkItem item;
  item.r0 = index % rank_tiles * 8;
  index /= rank_tiles;
  item.split = index % splits;
  index /= splits;
  item.slice = ad.num_slices ? index % ad.num_slices : 0;
  item.ordinal = ad.num_slices ? index / ad.num_slices : 0;
  return item;
}
// Part of K of one of NW warps.
template <int NW>
__device__ __forceinline__ int shrink_span(int K, int splits) { return (K + splits * NW * 32 - 1) / (splits * NW * 32) * 32; }

constexpr int RED_ROWS = 8 * HALVES * M_TILES;  // tokens of a reduction buffer

// Lines of A on their way to the L2: a hint, allowed before the wait, since the L2 stays coherent.
template <int NW>
__device__ __forceinline__ void prefetch_a(const Adapters& ad, const Slots& slots, const ShrinkItem& item, int K, int splits, int warp) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (item.ordinal >= __popc(slots.leaders)) return;
  const int slot = __shfl_sync(~0u, slots.slot, nth_bit(slots.leaders, item.ordinal));
  const lora_t* a_row = ad.a[item.slice] + slot * ad.stride_al + (long long)(item.r0 + g) * ad.stride_ar;
  const int span = shrink_span<NW>(K, splits), k_from = (item.split * NW + warp) * span, k_to = min(K, k_from + span);
  if (item.r0 + g < ad.rank)
    for (int k = k_from + t * (128 / (int)sizeof(lora_t)); k < k_to; k += 512 / (int)sizeof(lora_t)) prefetch_l2(a_row + k);
}

// h of one item: warp of NW multiplies its part of K, the group adds the warps' sums in order. red: [NW][RED_ROWS][8], free again
// when the function returns. store(m, r, sum) for the adapter's tokens and ranks, unless proceed() says no, which is returned.
// U: 16-byte loads of A in flight a thread.
template <int NW, int U, class Sync, class Proceed, class Store>
__device__ __forceinline__ bool shrink(const u16* x, long long stride_xm, int M, int K, const Adapters& ad, const Slots& slots,
                                       const ShrinkItem& item, int splits, int warp, float* red, Sync sync, Proceed proceed, Store store) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int span = shrink_span<NW>(K, splits), k_from = (item.split * NW + warp) * span, k_to = min(K, k_from + span);
  const int leader = nth_bit(slots.leaders, item.ordinal);
  const int slot = __shfl_sync(~0u, slots.slot, leader);
  const u32 members = __shfl_sync(~0u, slots.members, leader);
  const lora_t* a_row = ad.a[item.slice] + slot * ad.stride_al + (long long)(item.r0 + g) * ad.stride_ar;
  const bool rank_ok = item.r0 + g < ad.rank;
  float c[M_TILES][4];
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
  for (int k = k_from; k < k_to; k += 32 * U) {
    Raw8 av[U];
    uint4 xv[U][M_TILES][HALVES];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int kk = k + u * 32 + t * 8;
      const bool ok = kk < k_to;
      av[u] = Raw8{};
      if (ok && rank_ok) av[u] = load8(a_row + kk);
#pragma unroll
      for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int m = i * 16 + half * 8 + g;
          xv[u][i][half] = make_uint4(0, 0, 0, 0);
          if (ok && (members >> m & 1)) xv[u][i][half] = ldg128(x + m * stride_xm + kk);
        }
    }
    __syncwarp();  // after the divergent loads, before the products
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint4 a = widen8(av[u]);
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        const uint4 low = xv[u][i][0];
        const uint4 high = HALVES == 2 ? xv[u][i][HALVES - 1] : make_uint4(0, 0, 0, 0);
        mma_16bit(c[i], low.x, high.x, low.y, high.y, a.x, a.y);
        mma_16bit(c[i], low.z, high.z, low.w, high.w, a.z, a.w);
      }
    }
  }
  float* mine = red + warp * RED_ROWS * 8 + g * 8 + 2 * t;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i) {
    *reinterpret_cast<float2*>(mine + i * 128) = make_float2(c[i][0], c[i][1]);
    if (HALVES == 2) *reinterpret_cast<float2*>(mine + i * 128 + 64) = make_float2(c[i][2], c[i][3]);
  }
  sync();
  const bool go = proceed();
  for (int e = warp * 32 + lane; go && e < RED_ROWS * 8; e += NW * 32) {
    const int m = e >> 3, r = item.r0 + (e & 7);
    if (m < M && (members >> m & 1) && r < ad.rank) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < NW; ++w) sum += red[w * RED_ROWS * 8 + e];
#if ADAPTERS8
      sum *= __uint_as_float(ldg32(ad.a_scale[item.slice] + slot * ad.rank + r));
#endif
      store(m, r, sum);
    }
  }
  sync();
  return go;
}
#endif
