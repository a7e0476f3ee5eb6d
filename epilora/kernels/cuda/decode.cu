// Decode path for 1 to 32 tokens: two kernels, the second a programmatic dependent of the first.
//
//   prologue:  xq, x_scale = quantise(x) per token;   h[p] = x A^T over the p-th part of K   (one launch)
//   gemm:      y = (xq W^T) * w_scale * x_scale + bias + (sum_p h[p]) B^T, rounded once
//
// Legend: M tokens, K in features, N out features, R rank, slot index of an adapter in its stack (-1: none).
// W is [N, K] e4m3, row-major. A is [slots, R, K], B is [slots, N_slice, R] in 16 bits. h is fp32 [splits, slices, M, R].
//
// The gemm fills its shared-memory ring with weights before it waits for anything: weights do not depend on earlier
// kernels. Everything else (x, adapters, slot ids) is read after griddepcontrol.wait. All sums have a fixed order.
// WGMMA 0: weights are the 16-row operand of m16n8k32, tokens its 8 columns. On sm_90 that instruction widens e4m3 to fp16
// (exact) and accumulates in fp32, so there is no reduced-precision accumulation to promote.
// WGMMA 1 (sm_90a): weights are the 64-row operand of a warpgroup, tokens its 8 to 32 columns, both straight from shared memory.
// Inside a run of K, thread t of a quad holds 16 consecutive bytes of both operands: a permutation of K that is the same on
// both sides, so every load is 16 bytes wide. Stages hold 128-byte atoms as the tensor copy engine swizzles them (16-byte
// piece c of row r sits at c ^ (r mod 8)); thread t takes pieces 2t and 2t+1, which keeps two rows of a phase on different banks.
//
// Warps of a gemm block: TN x WK multiply, one brings weights, one activations, LW do the up-projection beside the main loop.
// Compile-time macros: DT_FP16 (0: bf16, 1: fp16 activations and adapters); prologue: WARPS, M_TILES (of 16 tokens),
// HALVES (1: at most 8 tokens); gemm: NT (token tiles of 8), TN (weight tiles of 16 rows a block), WK (warps along K), KC (bytes of K a stage, a
// multiple of 128 WK), RB (rank / 32, rounded up; 0: no adapter), LW,
// WGMMA, EARLY (1: start to multiply at the tokens' flags; 0: at the end of the prologue).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Adapters {
  // One entry per output slice; unused ones repeat the last.
  const u16* a[4];       // [slots, R, K]
  const u16* b[4];       // [slots, N_slice, R]
  long long stride_al;   // elements between slots of A
  long long stride_ar;   // elements between rows of A
  long long stride_bl[4];  // elements between slots of B
  long long stride_bn;   // elements between rows of B
  const int* slot_of_token;  // [M] int32; entries outside 0 .. num_slots-1 mean no adapter
  const int* active;     // [num_active] int32 or null: with no entry >= 0 nobody has an adapter
  int num_active;
  int num_slots;
  int num_slices;
  int rank;
  int slice_end[4];      // exclusive; the last is N
};

__device__ __forceinline__ void pdl_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Loads of what earlier kernels wrote go to the L2 (.cg): a kernel that started early must not meet an old line in its L1.
__device__ __forceinline__ uint4 ldg128(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 ldg32(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint4 lds128(u32 p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));  // volatile: stays between the barriers
  return v;
}
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// volatile: a plain asm may be sunk into a divergent branch that uses its result, and mma.sync needs the whole warp
__device__ __forceinline__ void mma_fp8(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_16bit(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if DT_FP16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two floats rounded to the 16-bit type, the first in the low half.
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 v;
#if DT_FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#endif
  return v;
}
__device__ __forceinline__ float widen(u16 bits) {
#if DT_FP16
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
#else
  return __uint_as_float((u32)bits << 16);
#endif
}

// Slots of the batch as one warp sees them: lane m holds token m.
struct Slots {
  int slot;       // of this lane's token, -1 for none
  u32 members;    // lanes with the same slot
  u32 leaders;    // first lane of every distinct slot >= 0
};

__device__ __forceinline__ Slots read_slots(const Adapters& ad, int M) {
  const int lane = threadIdx.x & 31;
  int slot = -1;
  if (lane < M) slot = (int)ldg32(ad.slot_of_token + lane);
  if (slot < 0 || slot >= ad.num_slots) slot = -1;
  if (ad.active) {
    bool any = false;
    for (int i = lane; i < ad.num_active; i += 32) any |= (int)ldg32(ad.active + i) >= 0;
    if (!__any_sync(~0u, any)) slot = -1;
  }
  Slots s;
  s.slot = slot;
  s.members = __match_any_sync(~0u, slot);
  s.leaders = __ballot_sync(~0u, slot >= 0 && lane == __ffs(s.members) - 1);
  return s;
}
// Lane of the `ordinal`-th set bit.
__device__ __forceinline__ int nth_bit(u32 mask, int ordinal) {
  for (int i = 0; i < ordinal; ++i) mask &= mask - 1;
  return __ffs(mask) - 1;
}

#ifdef WARPS
// Blocks 0 .. num_quant-1 quantise one token each; the others compute h for (slot group, slice, part of K, 8 ranks).
// Few registers, so that a multiprocessor that holds a gemm block has room for one of these and the other way round.
extern "C" __global__ void __launch_bounds__(WARPS * 32, WARPS <= 4 ? 5 : WARPS <= 8 ? 3 : 1)
prologue(const u16* x, long long stride_xm, int M, int K, u8* xq, float* x_scale, float* h, const Adapters ad, int num_quant,
         int splits, int groups, u32* ready, u32 token) {
  pdl_launch_dependents();
  __shared__ float red[WARPS][16 * M_TILES][8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int b = blockIdx.x - num_quant;
  const int rank_tiles = max(1, (ad.rank + 7) / 8);
  const int r0 = (b % rank_tiles) * 8;
  b /= rank_tiles;
  const int split = b % splits;
  b /= splits;
  const int sl = ad.num_slices ? b % ad.num_slices : 0;
  const int group = ad.num_slices ? b / ad.num_slices : 0;
  const int span = (K + splits * WARPS * 32 - 1) / (splits * WARPS * 32) * 32;
  const int k_from = (split * WARPS + warp) * span;
  const int k_to = min(K, k_from + span);
  // Hints only, before the wait: lines on their way to the L2, which stays coherent whatever is still being written. The gemm's
  // weights fill the memory queues as soon as the previous kernel ends; these reads must not stand behind them.
  if ((int)blockIdx.x < num_quant) {
    for (int k = threadIdx.x * 64; k < K; k += WARPS * 32 * 64) prefetch_l2(x + (long long)blockIdx.x * stride_xm + k);
  } else {
    const Slots slots = read_slots(ad, M);
    if (group < __popc(slots.leaders)) {
      const int slot = __shfl_sync(~0u, slots.slot, nth_bit(slots.leaders, group));
      const u16* a_row = ad.a[sl] + slot * ad.stride_al + (long long)(r0 + g) * ad.stride_ar;
      for (int k = k_from + t * 64; k < k_to; k += 256)
        if (r0 + g < ad.rank) prefetch_l2(a_row + k);
    }
  }
  pdl_wait();  // for x, the slot ids and the adapters
  if ((int)blockIdx.x < num_quant) {
    const u16* row = x + (long long)blockIdx.x * stride_xm;
    u8* out = xq + (long long)blockIdx.x * K;
    constexpr int KEPT = WARPS >= 16 ? 4 : 6;  // vectors of 8 values a thread keeps in registers; longer rows are read twice
    constexpr int STRIDE = WARPS * 256;
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
      const int k = (i * WARPS * 32 + threadIdx.x) * 8;
      kept[i] = k < K ? ldg128(row + k) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < KEPT; ++i) grow(kept[i]);
    for (int k = KEPT * STRIDE + threadIdx.x * 8; k < K; k += STRIDE) grow(ldg128(row + k));
#pragma unroll
    for (int d = 16; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    if (lane == 0) red[warp][0][0] = largest;
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, red[w][0][0]);
    const float scale = fmaxf(__fdiv_rn(largest, 448.f), 1.f / (448.f * 512.f));
    if (threadIdx.x == 0) x_scale[blockIdx.x] = scale;
    auto encode = [&](const uint4& v, int k) {
      const u32 words[4] = {v.x, v.y, v.z, v.w};
      u32 codes[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float lo = fmaxf(-448.f, fminf(__fdiv_rn(widen((u16)words[i]), scale), 448.f));
        const float hi = fmaxf(-448.f, fminf(__fdiv_rn(widen((u16)(words[i] >> 16)), scale), 448.f));
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
        codes[i >> 1] |= (u32)pair << (16 * (i & 1));
      }
      *reinterpret_cast<uint2*>(out + k) = make_uint2(codes[0], codes[1]);
    };
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const int k = (i * WARPS * 32 + threadIdx.x) * 8;
      if (k < K) encode(kept[i], k);
    }
    for (int k = KEPT * STRIDE + threadIdx.x * 8; k < K; k += STRIDE) encode(ldg128(row + k), k);
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(ready + blockIdx.x), "r"(token) : "memory");
    return;
  }
  const Slots slots = read_slots(ad, M);
  const int count = __popc(slots.leaders);
  for (int ordinal = group; ordinal < count; ordinal += groups) {
    const int leader = nth_bit(slots.leaders, ordinal);
    const int slot = __shfl_sync(~0u, slots.slot, leader);
    const u32 members = __shfl_sync(~0u, slots.members, leader);
    const u16* a_row = ad.a[sl] + slot * ad.stride_al + (long long)(r0 + g) * ad.stride_ar;
    const bool rank_ok = r0 + g < ad.rank;
    float c[M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
    constexpr int U = M_TILES == 2 ? 2 : 4;  // 16-byte loads of A in flight a thread
    for (int k = k_from; k < k_to; k += 32 * U) {
      uint4 av[U], xv[U][M_TILES][HALVES];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int kk = k + u * 32 + t * 8;
        const bool ok = kk < k_to;
        av[u] = make_uint4(0, 0, 0, 0);
        if (ok && rank_ok) av[u] = ldg128(a_row + kk);
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
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          const uint4 low = xv[u][i][0];
          const uint4 high = HALVES == 2 ? xv[u][i][HALVES - 1] : make_uint4(0, 0, 0, 0);
          mma_16bit(c[i], low.x, high.x, low.y, high.y, av[u].x, av[u].y);
          mma_16bit(c[i], low.z, high.z, low.w, high.w, av[u].z, av[u].w);
        }
    }
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      red[warp][i * 16 + g][2 * t] = c[i][0];
      red[warp][i * 16 + g][2 * t + 1] = c[i][1];
      red[warp][i * 16 + g + 8][2 * t] = c[i][2];
      red[warp][i * 16 + g + 8][2 * t + 1] = c[i][3];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 16 * M_TILES * 8; e += WARPS * 32) {
      const int m = e >> 3, r = r0 + (e & 7);
      if (m < M && (members >> m & 1) && r < ad.rank) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += red[w][m][e & 7];
        h[(((long long)split * ad.num_slices + sl) * M + m) * ad.rank + r] = sum;
      }
    }
    __syncthreads();
  }
}
#endif

#ifdef NT
constexpr int BN = TN * 16;
#if WGMMA
constexpr int WIDE = 4;  // warps along the weight rows: a warpgroup covers 64, of which BN count
#else
constexpr int WIDE = TN;
#endif
constexpr int CONSUMERS = WIDE * WK;  // warps that multiply
constexpr int W_WARP = CONSUMERS, X_WARP = CONSUMERS + 1, LORA_WARP = CONSUMERS + 2;  // two producers, LW for the up-projection
constexpr int CHAINS = WGMMA ? 1 : NT == 1 ? 4 : (NT == 2 ? 2 : 1);  // independent accumulators a tile: dependent MMAs would set the pace
constexpr int WORKERS = (CONSUMERS + LW) * 32;
constexpr int MAX_STAGES = 32;
constexpr int TOKENS = NT * 8;
constexpr int W_BYTES = KC * BN, X_BYTES = KC * TOKENS, STAGE_BYTES = W_BYTES + X_BYTES;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ void barrier_init(u32 bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy_box(u32 dst, const TensorMap& map, int c0, int c1, int c2, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;"
               ::"r"(dst), "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(bar), "l"(policy) : "memory");
}
// One stage of `rows`-high atoms. deep: the map is [K/128][rows][128], one box a stage; else [1][rows][K], one box an atom.
__device__ __forceinline__ void copy_stage(u32 dst, const TensorMap& map, int rows, int row0, int c, bool deep, u32 bar, u64 policy) {
  if (deep) {
    copy_box(dst, map, 0, row0, c * (KC / 128), bar, policy);
  } else {
    for (int atom = 0; atom < KC / 128; ++atom) copy_box(dst + atom * rows * 128, map, c * KC + atom * 128, row0, 0, bar, policy);
  }
}
// A warp may arrive in parts after a divergent branch, and its first part would count for all of it: converge first.
__device__ __forceinline__ void workers_sync() { __syncwarp(); asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

#if WGMMA
// Matrix descriptor of rows of 128 bytes along K in the copy engine's 128-byte swizzle, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ u64 matrix_descriptor(u32 at) { return (u64)((at & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
// d (+)= 64 rows of weights x TOKENS tokens over 32 values of K; `add` 0 starts afresh.
__device__ __forceinline__ void wgmma(float (&d)[NT][4], u64 w, u64 x, int add) {
#if NT == 1
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, p, 1, 1; }"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]) : "l"(w), "l"(x), "r"(add));
#elif NT == 2
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1; }"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]) : "l"(w), "l"(x), "r"(add));
#else
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1; }"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                 "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]) : "l"(w), "l"(x), "r"(add));
#endif
}
#endif

#if RB > 0
constexpr int RANK_PITCH = RB * 32 + 8;  // of h in shared memory, 16-bit values
constexpr int UB = RB <= 2 ? 2 : 1;  // (row tile, adapter) pairs whose B a warp has in flight

// Where a 16-row tile lies: its slice and the first row of B.
struct RowTile {
  int slice;
  int row;  // in the slice
};
__device__ __forceinline__ RowTile row_tile(const Adapters& ad, int n) {
  int sl = 0;
  while (sl < ad.num_slices - 1 && n >= ad.slice_end[sl]) ++sl;
  return {sl, n - (sl ? ad.slice_end[sl - 1] : 0)};
}
#endif

extern "C" __global__ void __launch_bounds__((CONSUMERS + 2 + LW) * 32)
gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, int deep, const float* x_scale, const float* w_scale,
     int w_scale_stride, const u16* bias, const float* h, int splits, const Adapters ad, u16* y, long long stride_ym, int M, int N, int K,
     int stages, int window, u32* ready, u32 token) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 ring = (shared_address(shared) + 1023) & ~1023u;
  u8* after_ring = shared + (ring - shared_address(shared)) + stages * STAGE_BYTES;
  float* red = reinterpret_cast<float*>(after_ring);  // [WK][BN][TOKENS]
  float* scale_of_row = red + WK * BN * TOKENS;        // [BN]
  float* bias_of_row = scale_of_row + BN;              // [BN]
  float* delta = bias_of_row + BN;                     // [BN][TOKENS], with adapters
  __shared__ __align__(8) u64 w_bars[MAX_STAGES], x_bars[MAX_STAGES], empty_bars[MAX_STAGES];
  __shared__ float scale_of_token[TOKENS];
  __shared__ u32 with_adapter;  // bit m: token m has one
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int chunks = (K + KC - 1) / KC;
  const int tiles = (N + BN - 1) / BN;
  const int rounds = (tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;
  const int total = rounds * chunks;
  const int at_once = min(window, total);
  u64 stream_policy, keep_policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream_policy));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(keep_policy));
  if (warp == W_WARP && lane == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(shared_address(&w_bars[s]), 1);
      barrier_init(shared_address(&x_bars[s]), 1);
      barrier_init(shared_address(&empty_bars[s]), CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < at_once; ++i) {  // the first weights before anything else happens
      const u32 bar = shared_address(&w_bars[i]);
      barrier_expect(bar, W_BYTES);  // boxes count in full, parts outside the tensor arrive as zeros
      copy_stage(ring + i * STAGE_BYTES, w_map, BN, (blockIdx.x + i / chunks * gridDim.x) * BN, i % chunks, deep, bar, stream_policy);
    }
  }
  __syncthreads();
  pdl_launch_dependents();

  if (warp == W_WARP) {
    if (lane) return;
    int tile = blockIdx.x + at_once / chunks * gridDim.x, c = at_once % chunks, s = at_once % stages;
    u32 parity = at_once == stages ? 0 : 1;  // of the empty barriers: the first round passes at once
    int s_before = 0;                        // the stage `window` stages back
    u32 parity_before = 0;
    for (int i = at_once; i < total; ++i) {
      // No more than `window` stages under way: more would only queue, and every other read of this GPU behind them.
      barrier_wait(shared_address(&w_bars[s_before]), parity_before);
      if (++s_before == stages) { s_before = 0; parity_before ^= 1; }
      barrier_wait(shared_address(&empty_bars[s]), parity);
      const u32 bar = shared_address(&w_bars[s]);
      barrier_expect(bar, W_BYTES);
      copy_stage(ring + s * STAGE_BYTES, w_map, BN, tile * BN, c, deep, bar, stream_policy);
      if (++c == chunks) { c = 0; tile += gridDim.x; }
      if (++s == stages) { s = 0; parity ^= 1; }
    }
    return;
  }
  if (warp == X_WARP) {
    // Token m's codes and scale are there when ready[m] holds this call's token. The blocks that set it started before this
    // kernel could, so the wait ends; no later kernel sets it before this one is complete.
#if EARLY
    if (lane < M) {
      u32 seen;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready + lane) : "memory");
      } while (seen != token);
    }
#else
    pdl_wait();
#endif
    if (lane < M) scale_of_token[lane] = __uint_as_float(ldg32(x_scale + lane));
    asm volatile("fence.proxy.async;" ::: "memory");  // the copy engine reads what other threads wrote
    __syncwarp();
    if (lane) return;
    int c = 0, s = 0;
    u32 parity = 1;
    for (int i = 0; i < total; ++i) {
      barrier_wait(shared_address(&empty_bars[s]), parity);
      const u32 bar = shared_address(&x_bars[s]);
      barrier_expect(bar, X_BYTES);
      copy_stage(ring + s * STAGE_BYTES + W_BYTES, x_map, TOKENS, 0, c, deep, bar, keep_policy);
      if (++c == chunks) c = 0;
      if (++s == stages) { s = 0; parity ^= 1; }
    }
    // The last block to have seen the flags clears them, so that a replay of this very call waits again.
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ready + 32) : "memory");
    if (before == gridDim.x - 1)
      for (int m = 0; m <= 32; ++m) ready[m] = 0;
    return;
  }

  const int worker = warp < CONSUMERS ? (int)threadIdx.x : (int)threadIdx.x - 64;  // 0 .. WORKERS-1
#if RB > 0
  u16* h16 = reinterpret_cast<u16*>(delta + BN * TOKENS);  // [slices][TOKENS][RANK_PITCH]
  if (warp >= LORA_WARP) {
    // A hint only, as in the prologue: B of the first adapters on its way to the L2.
    const Slots early = read_slots(ad, M);
    const int known = min(__popc(early.leaders), 2);
    const int slot0 = __shfl_sync(~0u, early.slot, known > 0 ? nth_bit(early.leaders, 0) : 0);
    const int slot1 = __shfl_sync(~0u, early.slot, known > 1 ? nth_bit(early.leaders, 1) : 0);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
      for (int e = (warp - LORA_WARP) * 32 + lane; e < known * BN; e += LW * 32) {
        const int n = tile * BN + e % BN;
        const int slot = e < BN ? slot0 : slot1;
        if (n >= N) continue;
        const RowTile at = row_tile(ad, n & ~15);
        const u16* row = ad.b[at.slice] + slot * ad.stride_bl[at.slice] + (long long)(at.row + (n & 15)) * ad.stride_bn;
        for (int r = 0; r < ad.rank; r += 64) prefetch_l2(row + r);
      }
  }
#endif
  float row_scale = 0.f, row_bias = 0.f;
  if (worker < BN && blockIdx.x * BN + worker < N) {  // weights too: before the wait
    row_scale = w_scale[(blockIdx.x * BN + worker) * w_scale_stride];
    if (bias) row_bias = widen(bias[blockIdx.x * BN + worker]);
  }
#if RB > 0
  Slots slots = {-1, 0, 0};
  bool h_staged = false;
  if (warp >= LORA_WARP) {
    pdl_wait();  // for h, the slot ids and the adapters
    slots = read_slots(ad, M);
    const u32 mask = __ballot_sync(~0u, slots.slot >= 0);
    if (lane == 0 && warp == LORA_WARP) with_adapter = mask;
  }
  const int count = __popc(slots.leaders);
#endif
  int s = 0;
  u32 parity = 0;
  for (int round = 0; round < rounds; ++round) {
    const int tile = blockIdx.x + round * gridDim.x;
    const int n0 = tile * BN;
    if (tile != (int)blockIdx.x && worker < BN && n0 + worker < N) {
      row_scale = w_scale[(n0 + worker) * w_scale_stride];
      if (bias) row_bias = widen(bias[n0 + worker]);
    }
    if (warp < CONSUMERS) {
      const int tn = warp % WIDE, wk = warp / WIDE;
      float acc[CHAINS][NT][4];
#pragma unroll
      for (int q = 0; q < CHAINS * NT * 4; ++q) (&acc[0][0][0])[q] = 0.f;
      const u32 piece[2] = {(u32)((2 * t) ^ g) << 4, (u32)((2 * t + 1) ^ g) << 4};
      const u32 w_row = (tn * 16 + g) * 128, x_row = W_BYTES + g * 128;
      for (int c = 0; c < chunks; ++c) {
        barrier_wait(shared_address(&x_bars[s]), parity);
        barrier_wait(shared_address(&w_bars[s]), parity);
        const u32 base = ring + s * STAGE_BYTES;
#if WGMMA
        // The tensor core keeps fewer bits inside a run; a stage's share of K is one run, moved to fp32 registers after it.
        __syncwarp();
        float d[NT][4];
#pragma unroll
        for (int j = 0; j < NT; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < KC / WK / 32; ++step) {
          const int atom = wk * (KC / WK / 128) + step / 4, within = step % 4 * 32;
          wgmma(d, matrix_descriptor(base + atom * (BN * 128) + within), matrix_descriptor(base + W_BYTES + atom * (TOKENS * 128) + within), step);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            asm volatile("" : "+f"(d[j][e])::"memory");
            acc[0][j][e] += d[j][e];
          }
#else
        constexpr int STEPS = KC / WK / 64, MOST = NT == 4 ? 2 : 4, BATCH = STEPS < MOST ? STEPS : MOST;
#pragma unroll
        for (int first = 0; first < STEPS; first += BATCH) {
          uint4 wlo[BATCH], whi[BATCH], xv[BATCH][NT];
#pragma unroll
          for (int q = 0; q < BATCH; ++q) {  // all loads of a batch before its first product
            const int step = first + q, atom = wk * (KC / WK / 128) + step / 2;
            const u32 at = piece[step & 1];
            wlo[q] = lds128(base + atom * (BN * 128) + w_row + at);
            whi[q] = lds128(base + atom * (BN * 128) + w_row + 1024 + at);
#pragma unroll
            for (int j = 0; j < NT; ++j) xv[q][j] = lds128(base + atom * (TOKENS * 128) + x_row + j * 1024 + at);
          }
#pragma unroll
          for (int q = 0; q < BATCH; ++q)
#pragma unroll
            for (int j = 0; j < NT; ++j) {
              mma_fp8(acc[2 * q % CHAINS][j], wlo[q].x, whi[q].x, wlo[q].y, whi[q].y, xv[q][j].x, xv[q][j].y);
              mma_fp8(acc[(2 * q + 1) % CHAINS][j], wlo[q].z, whi[q].z, wlo[q].w, whi[q].w, xv[q][j].z, xv[q][j].w);
            }
        }
#endif
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&empty_bars[s]));
        if (++s == stages) { s = 0; parity ^= 1; }
      }
#pragma unroll
      for (int q = 1; q < CHAINS; ++q)
#pragma unroll
        for (int e = 0; e < NT * 4; ++e) (&acc[0][0][0])[e] += (&acc[q][0][0])[e];
      if (round == 0) pdl_wait();  // nothing is stored before all earlier kernels are complete
      float* mine = red + (wk * BN + tn * 16 + g) * TOKENS + 2 * t;
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        if (tn >= TN) break;  // rows of the next atoms
        *reinterpret_cast<float2*>(mine + j * 8) = make_float2(acc[0][j][0], acc[0][j][1]);
        *reinterpret_cast<float2*>(mine + 8 * TOKENS + j * 8) = make_float2(acc[0][j][2], acc[0][j][3]);
      }
    }
#if RB > 0
    else if (count) {  // delta = h B^T for this tile, one (row tile, adapter) pair after another
      const int lw = warp - LORA_WARP;
      const int pairs = TN * count;
      for (int first = lw; first < pairs || !h_staged; first += LW * UB) {
        uint4 bv[UB][RB][2];
        u32 members[UB];
        int slice[UB];
#pragma unroll
        for (int u = 0; u < UB; ++u) {
          const int pair = first + u * LW;
          const bool there = pair < pairs;
          const int leader = nth_bit(slots.leaders, there ? pair / TN : 0);
          const int slot = __shfl_sync(~0u, slots.slot, leader);
          const u32 same = __shfl_sync(~0u, slots.members, leader);
          const int n = n0 + pair % TN * 16;
          const RowTile at = row_tile(ad, n);
          members[u] = there && n < N ? same : 0u;
          slice[u] = at.slice;
          const u16* row = ad.b[at.slice] + slot * ad.stride_bl[at.slice] + (long long)(at.row + g) * ad.stride_bn;
#pragma unroll
          for (int rb = 0; rb < RB; ++rb) {
            const int r = rb * 32 + t * 8;
            const bool ok = members[u] && r < ad.rank;  // N and slice bounds are multiples of 16
            bv[u][rb][0] = ok ? ldg128(row + r) : make_uint4(0, 0, 0, 0);
            bv[u][rb][1] = ok ? ldg128(row + 8 * ad.stride_bn + r) : make_uint4(0, 0, 0, 0);
          }
        }
        if (!h_staged) {  // sum the parts of h in order, round once, keep for all tiles of this block
          h_staged = true;
          const int quads = ad.rank / 4;
          const u32 has = __ballot_sync(~0u, slots.slot >= 0);
          for (int e = lw * 32 + lane; e < ad.num_slices * M * quads; e += LW * 32) {
            const int q = e % quads, m = e / quads % M, sl = e / quads / M;
            float sum[4] = {0.f, 0.f, 0.f, 0.f};
            if (has >> m & 1) {
              const float* part = h + ((long long)sl * M + m) * ad.rank + q * 4;
              const long long part_step = (long long)ad.num_slices * M * ad.rank;
#pragma unroll 8
              for (int p = 0; p < splits; ++p) {
                const uint4 v = ldg128(part + p * part_step);
                sum[0] += __uint_as_float(v.x);
                sum[1] += __uint_as_float(v.y);
                sum[2] += __uint_as_float(v.z);
                sum[3] += __uint_as_float(v.w);
              }
            }
            u32* to = reinterpret_cast<u32*>(h16 + (sl * TOKENS + m) * RANK_PITCH + q * 4);
            to[0] = pack2(sum[0], sum[1]);
            to[1] = pack2(sum[2], sum[3]);
          }
          __syncwarp();
          asm volatile("bar.sync 2, %0;" ::"n"(LW * 32) : "memory");
        }
        __syncwarp();  // after the divergent loads, before the products
#pragma unroll
        for (int u = 0; u < UB; ++u) {
          if (!members[u]) continue;
          const int row = (first + u * LW) % TN * 16 + g;
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            if (!(members[u] >> (j * 8) & 0xff)) continue;
            float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int rb = 0; rb < RB; ++rb) {
              const int r = rb * 32 + t * 8;
              uint4 hv = lds128(shared_address(h16 + (slice[u] * TOKENS + min(j * 8 + g, M - 1)) * RANK_PITCH + r));
              if (r >= ad.rank) hv = make_uint4(0, 0, 0, 0);
              mma_16bit(d, bv[u][rb][0].x, bv[u][rb][1].x, bv[u][rb][0].y, bv[u][rb][1].y, hv.x, hv.y);
              mma_16bit(d, bv[u][rb][0].z, bv[u][rb][1].z, bv[u][rb][0].w, bv[u][rb][1].w, hv.z, hv.w);
            }
            const int m = j * 8 + 2 * t;
            if (members[u] >> m & 1) {
              delta[row * TOKENS + m] = d[0];
              delta[(row + 8) * TOKENS + m] = d[2];
            }
            if (members[u] >> (m + 1) & 1) {
              delta[row * TOKENS + m + 1] = d[1];
              delta[(row + 8) * TOKENS + m + 1] = d[3];
            }
          }
        }
      }
    }
#endif
    if (worker < BN) {
      scale_of_row[worker] = row_scale;
      bias_of_row[worker] = row_bias;
    }
    workers_sync();
    for (int e = worker; e < M * (BN / 2); e += WORKERS) {
      const int row = e % (BN / 2) * 2, m = e / (BN / 2);
      const int n = n0 + row;
      if (n >= N) continue;
      float v[2];
      const float xs = scale_of_token[m];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < WK; ++k) sum += red[(k * BN + row + q) * TOKENS + m];
        v[q] = sum * scale_of_row[row + q] * xs + bias_of_row[row + q];
#if RB > 0
        if (with_adapter >> m & 1) v[q] += delta[(row + q) * TOKENS + m];
#endif
      }
      *reinterpret_cast<u32*>(y + m * stride_ym + n) = pack2(v[0], v[1]);
    }
    workers_sync();  // red, delta and the scales are free again
  }
}
#endif
