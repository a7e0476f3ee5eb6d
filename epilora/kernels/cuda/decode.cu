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
// Weights are the 16-row operand of m16n8k32, tokens its 8 columns. On sm_90 that instruction widens e4m3 to fp16
// (exact) and accumulates in fp32, so there is no reduced-precision accumulation to promote.
// Within a 64-byte (fp8) or 64-byte (16-bit) run of K, thread t of a quad holds bytes 16t .. 16t+15 of both operands:
// a permutation of K that is the same on both sides, so every load is 16 bytes wide.
//
// Compile-time macros: DT_FP16 (0: bf16, 1: fp16 activations and adapters); prologue: WARPS, M_TILES (of 16 tokens);
// gemm: NT (token tiles of 8), TN (weight tiles of 16 rows a block), WK (warps along K), KC (bytes of K a stage),
// RB (rank / 32, rounded up; 0: no adapter).

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
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

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
extern "C" __global__ void __launch_bounds__(WARPS * 32)
prologue(const u16* x, long long stride_xm, int M, int K, u8* xq, float* x_scale, float* h, const Adapters ad, int num_quant,
         int splits, int groups) {
  pdl_launch_dependents();
  __shared__ float red[WARPS][16 * M_TILES][8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  pdl_wait();  // for x, the slot ids and the adapters
  if ((int)blockIdx.x < num_quant) {
    const u16* row = x + (long long)blockIdx.x * stride_xm;
    u8* out = xq + (long long)blockIdx.x * K;
    constexpr int KEPT = 8;  // vectors of 8 values a thread keeps in registers; longer rows are read twice
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
    return;
  }
  int b = blockIdx.x - num_quant;
  const int rank_tiles = (ad.rank + 7) / 8;
  const int r0 = (b % rank_tiles) * 8;
  b /= rank_tiles;
  const int split = b % splits;
  b /= splits;
  const int sl = b % ad.num_slices;
  const int group = b / ad.num_slices;
  const Slots slots = read_slots(ad, M);
  const int count = __popc(slots.leaders);
  const int span = (K + splits * WARPS * 32 - 1) / (splits * WARPS * 32) * 32;
  const int k_from = (split * WARPS + warp) * span;
  const int k_to = min(K, k_from + span);
  for (int ordinal = group; ordinal < count; ordinal += groups) {
    const int leader = nth_bit(slots.leaders, ordinal);
    const int slot = __shfl_sync(~0u, slots.slot, leader);
    const u32 members = __shfl_sync(~0u, slots.members, leader);
    const u16* a_row = ad.a[sl] + slot * ad.stride_al + (long long)(r0 + g) * ad.stride_ar;
    const bool rank_ok = r0 + g < ad.rank;
    float c[M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
    constexpr int U = M_TILES == 1 ? 8 : 4;  // 16-byte loads of A in flight a thread
    for (int k = k_from; k < k_to; k += 32 * U) {
      uint4 av[U], xv[U][M_TILES][2];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int kk = k + u * 32 + t * 8;
        const bool ok = kk < k_to;
        av[u] = make_uint4(0, 0, 0, 0);
        if (ok && rank_ok) av[u] = ldg128(a_row + kk);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int m = i * 16 + half * 8 + g;
            xv[u][i][half] = make_uint4(0, 0, 0, 0);
            if (ok && (members >> m & 1)) xv[u][i][half] = ldg128(x + m * stride_xm + kk);
          }
      }
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          mma_16bit(c[i], xv[u][i][0].x, xv[u][i][1].x, xv[u][i][0].y, xv[u][i][1].y, av[u].x, av[u].y);
          mma_16bit(c[i], xv[u][i][0].z, xv[u][i][1].z, xv[u][i][0].w, xv[u][i][1].w, av[u].z, av[u].w);
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
constexpr int CONSUMERS = TN * WK;  // warps; one more produces
constexpr int PITCH = KC + 64;      // bytes a staged row: two rows of a 16-byte phase fall on different banks
constexpr int MAX_STAGES = 32;
constexpr int TOKENS = NT * 8;

__device__ __forceinline__ void barrier_init(u32 bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS * 32) : "memory"); }

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * 32)
gemm(const u8* xq, const float* x_scale, const u8* w, const float* w_scale, int w_scale_stride, const u16* bias, const float* h,
     int splits, const Adapters ad, u16* y, long long stride_ym, int M, int N, int K, int stages) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ __align__(8) u64 full_bars[MAX_STAGES], empty_bars[MAX_STAGES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 stage_bytes = (u32)(BN + M) * PITCH;
  const u32 ring = shared_address(shared);
  const int chunks = (K + KC - 1) / KC;
  const int tiles = (N + BN - 1) / BN;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(shared_address(&full_bars[s]), 1);
      barrier_init(shared_address(&empty_bars[s]), CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  pdl_launch_dependents();

  if (warp == CONSUMERS) {  // the producer: weights at once, activations when they exist
    u64 stream_policy, keep_policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream_policy));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(keep_policy));
    const int my_tiles = ((int)blockIdx.x < tiles) ? (tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0;
    const int total = my_tiles * chunks;
    const int ahead = min(stages, total);
    int tile = blockIdx.x, c = 0;
    for (int i = 0; i < total; ++i) {
      const int s = i % stages;
      const u32 bar = shared_address(&full_bars[s]);
      const u32 bytes = min(KC, K - c * KC);
      const int rows = min(BN, N - tile * BN);
      if (i >= stages) barrier_wait(shared_address(&empty_bars[s]), (i / stages - 1) & 1);
      if (lane == 0) barrier_expect(bar, bytes * (rows + M));
      __syncwarp();
      const u32 dst = ring + s * stage_bytes;
      for (int r = lane; r < rows; r += 32) bulk_copy(dst + r * PITCH, w + (long long)(tile * BN + r) * K + c * KC, bytes, bar, stream_policy);
      if (i >= ahead) {
        if (lane < M) bulk_copy(dst + (BN + lane) * PITCH, xq + (long long)lane * K + c * KC, bytes, bar, keep_policy);
      }
      if (i == ahead - 1) {
        pdl_wait();  // for xq
        for (int j = 0; j < ahead; ++j) {
          const int cj = j % chunks;
          const u32 xbytes = min(KC, K - cj * KC);
          if (lane < M)
            bulk_copy(ring + j * stage_bytes + (BN + lane) * PITCH, xq + (long long)lane * K + cj * KC, xbytes, shared_address(&full_bars[j]), keep_policy);
        }
      }
      if (++c == chunks) { c = 0; tile += gridDim.x; }
    }
    return;
  }

  const int tn = warp % TN, wk = warp / TN;
  float* red = reinterpret_cast<float*>(shared + stages * stage_bytes);  // [WK][BN][TOKENS]
  pdl_wait();  // for xq, x_scale, h, the slot ids and the adapters
#if RB > 0
  float* delta = red + WK * BN * TOKENS;                                   // [BN][TOKENS]
  constexpr int RANK_PITCH = RB * 32 + 8;                                  // of h in shared memory, 16-bit values
  u16* h16 = reinterpret_cast<u16*>(delta + BN * TOKENS);                  // [slices][TOKENS][RANK_PITCH]
  const Slots slots = read_slots(ad, M);
  const int count = __popc(slots.leaders);
  const u32 with_adapter = __ballot_sync(~0u, slots.slot >= 0);
  if (count) {
    const int quads = ad.rank / 4;
    for (int e = threadIdx.x; e < ad.num_slices * M * quads; e += CONSUMERS * 32) {
      const int q = e % quads, m = e / quads % M, sl = e / quads / M;
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      if (with_adapter >> m & 1) {
        const float* part = h + ((long long)sl * M + m) * ad.rank + q * 4;
        const long long step = (long long)ad.num_slices * M * ad.rank;
#pragma unroll 8
        for (int p = 0; p < splits; ++p) {
          const uint4 v = ldg128(part + p * step);
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
  }
  consumers_sync();
#endif

  int xrow[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) xrow[j] = min(j * 8 + g, M - 1);  // columns past M repeat the last token; never stored
  int i = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int n0 = tile * BN;
#if RB > 0
    {  // the up-projection first: it runs while the ring fills
      const int n_tile = n0 + tn * 16;
      int sl = 0;
      while (sl < ad.num_slices - 1 && n_tile >= ad.slice_end[sl]) ++sl;
      const int begin = sl ? ad.slice_end[sl - 1] : 0;
      const u16* b_rows = ad.b[sl] + (long long)(n_tile - begin + g) * ad.stride_bn;
      const bool low_ok = n_tile + g < N, high_ok = n_tile + g + 8 < N;
      constexpr int UB = RB <= 2 ? 4 : (RB <= 4 ? 2 : 1);  // adapters whose B is in flight
      for (int first = wk; first < count; first += WK * UB) {
        uint4 bv[UB][RB][2];
        u32 members[UB];
#pragma unroll
        for (int u = 0; u < UB; ++u) {
          const int ordinal = first + u * WK;
          const bool there = ordinal < count;
          const int leader = there ? nth_bit(slots.leaders, ordinal) : 0;
          const int slot = __shfl_sync(~0u, slots.slot, leader);
          const u32 same = __shfl_sync(~0u, slots.members, leader);
          members[u] = there ? same : 0u;
          const u16* row = b_rows + (there ? slot : 0) * ad.stride_bl[sl];
#pragma unroll
          for (int rb = 0; rb < RB; ++rb) {
            const int r = rb * 32 + t * 8;
            const bool ok = there && r < ad.rank;
            bv[u][rb][0] = make_uint4(0, 0, 0, 0);
            bv[u][rb][1] = make_uint4(0, 0, 0, 0);
            if (ok && low_ok) bv[u][rb][0] = ldg128(row + r);
            if (ok && high_ok) bv[u][rb][1] = ldg128(row + 8 * ad.stride_bn + r);
          }
        }
#pragma unroll
        for (int u = 0; u < UB; ++u) {
          if (!members[u]) continue;
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            if (!(members[u] >> (j * 8) & 0xff)) continue;
            float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int rb = 0; rb < RB; ++rb) {
              const int r = rb * 32 + t * 8;
              uint4 hv = make_uint4(0, 0, 0, 0);
              if (r < ad.rank && j * 8 + g < M) hv = lds128(shared_address(h16 + (sl * TOKENS + j * 8 + g) * RANK_PITCH + r));
              mma_16bit(d, bv[u][rb][0].x, bv[u][rb][1].x, bv[u][rb][0].y, bv[u][rb][1].y, hv.x, hv.y);
              mma_16bit(d, bv[u][rb][0].z, bv[u][rb][1].z, bv[u][rb][0].w, bv[u][rb][1].w, hv.z, hv.w);
            }
            const int m = j * 8 + 2 * t, row = tn * 16 + g;
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
    float acc[NT][4];
#pragma unroll
    for (int j = 0; j < NT; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
    for (int c = 0; c < chunks; ++c, ++i) {
      const int s = i % stages;
      barrier_wait(shared_address(&full_bars[s]), (i / stages) & 1);
      const u32 base = ring + s * stage_bytes;
      const int valid = K - c * KC;  // bytes of K in this stage, more than KC in all but the last
#pragma unroll
      for (int step = 0; step < KC / WK / 64; ++step) {
        const int off = wk * (KC / WK) + step * 64 + t * 16;
        uint4 wlo = lds128(base + (tn * 16 + g) * PITCH + off);
        uint4 whi = lds128(base + (tn * 16 + g + 8) * PITCH + off);
        uint4 xv[NT];
#pragma unroll
        for (int j = 0; j < NT; ++j) xv[j] = lds128(base + (BN + xrow[j]) * PITCH + off);
        if (valid < KC && off >= valid) {  // past the end of K: what an earlier round left there
          wlo = whi = make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int j = 0; j < NT; ++j) xv[j] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          mma_fp8(acc[j], wlo.x, whi.x, wlo.y, whi.y, xv[j].x, xv[j].y);
          mma_fp8(acc[j], wlo.z, whi.z, wlo.w, whi.w, xv[j].z, xv[j].w);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&empty_bars[s]));
    }
    {
      float* mine = red + (wk * BN + tn * 16 + g) * TOKENS + 2 * t;
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        *reinterpret_cast<float2*>(mine + j * 8) = make_float2(acc[j][0], acc[j][1]);
        *reinterpret_cast<float2*>(mine + 8 * TOKENS + j * 8) = make_float2(acc[j][2], acc[j][3]);
      }
    }
    consumers_sync();
    for (int e = threadIdx.x; e < M * (BN / 2); e += CONSUMERS * 32) {
      const int row = e % (BN / 2) * 2, m = e / (BN / 2);
      const int n = n0 + row;
      if (n >= N) continue;
      float v[2];
      const float xs = __uint_as_float(ldg32(x_scale + m));
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < WK; ++k) sum += red[(k * BN + row + q) * TOKENS + m];
        v[q] = sum * w_scale[(n + q) * w_scale_stride] * xs;
        if (bias) v[q] += widen(bias[n + q]);
#if RB > 0
        if (with_adapter >> m & 1) v[q] += delta[(row + q) * TOKENS + m];
#endif
      }
      *reinterpret_cast<u32*>(y + m * stride_ym + n) = pack2(v[0], v[1]);
    }
    consumers_sync();  // red and delta are free again
  }
}
#endif
