// Decode path for 1 to 32 tokens, as one launch (FUSED) or as two, the second a programmatic dependent of the first.
//
//   prologue:  xq, x_scale = quantise(x) per token;   h[p] = x A^T over the p-th part of K   (one launch)
//   gemm:      y = (xq W^T) * w_scale * x_scale + bias + (sum_p h[p]) B^T, rounded once
//   FUSED:     up to 8 tokens: the gemm's blocks quantise all tokens for themselves, do a share of the shrink each and exchange it.
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
// Compile-time macros: DT_FP16 (0: bf16, 1: fp16 activations and adapters); ADAPTERS8 (1: adapters in e4m3); M_TILES (of 16 tokens), HALVES (1: at most 8 tokens);
// prologue: WARPS; gemm: NT (token tiles of 8), TN (weight tiles of 16 rows a block), WK (warps along K), KC (bytes of K a stage, a
// multiple of 128 WK), RB (rank / 32, rounded up; 0: no adapter), LW, WGMMA,
// EARLY (1: start to multiply at the tokens' flags; 0: at the end of the prologue), FUSED (0: two launches; n: one launch, every block
// quantises all tokens for itself, n at a time), ONE_ORDER (1: sums in the same order whatever NT is).

#include "common.cuh"
#include "rows.cuh"

#ifdef WARPS
// Blocks 0 .. num_quant-1 quantise one token each; the others compute h for (slot group, slice, part of K, 8 ranks).
// Up to 8 warps they are resident beside the gemm blocks of the projection before (without an adapter; with one, 16 warps that are
// not proved faster).
extern "C" __global__ void __launch_bounds__(WARPS * 32, WARPS <= 4 ? 5 : WARPS <= 8 ? 3 : 1)
prologue(const u16* x, long long stride_xm, int M, int K, u8* xq, float* x_scale, float* h, const Adapters ad, int num_quant,
         int splits, int groups, u32* ready, u32 token) {
  pdl_launch_dependents();
  __shared__ float red[WARPS * RED_ROWS * 8];
  const int warp = threadIdx.x >> 5;
  const bool quantises = (int)blockIdx.x < num_quant;
  ShrinkItem item = shrink_item(ad, (int)blockIdx.x - num_quant, splits);
  // Hints only, before the wait: lines on their way to the L2, which stays coherent whatever is still being written. The gemm's
  // weights fill the memory queues as soon as the previous kernel ends; these reads must not stand behind them.
  if (quantises) {
    for (int k = threadIdx.x * 64; k < K; k += WARPS * 32 * 64) prefetch_l2(x + (long long)blockIdx.x * stride_xm + k);
  } else {
    prefetch_a<WARPS>(ad, read_slots(ad, M), item, K, splits, warp);
  }
  pdl_wait();  // for x, the slot ids and the adapters
  auto sync = [] { __syncthreads(); };
  if (quantises) {
    u8* out = xq + (long long)blockIdx.x * K;
    const float scale = quantise_row<WARPS * 32, WARPS >= 16 ? 4 : 6>(
        x + (long long)blockIdx.x * stride_xm, K, threadIdx.x, red, sync,
        [&](int k, uint2 codes) { *reinterpret_cast<uint2*>(out + k) = codes; });
    if (threadIdx.x == 0) x_scale[blockIdx.x] = scale;
    __syncthreads();
    if (threadIdx.x == 0) store_release(ready + blockIdx.x, token);
    return;
  }
  const Slots slots = read_slots(ad, M);
  const int count = __popc(slots.leaders);
  for (; item.ordinal < count; item.ordinal += groups)
    shrink<WARPS, M_TILES == 2 ? 2 : 4>(x, stride_xm, M, K, ad, slots, item, splits, warp, red, sync, [] { return true; }, [&](int m, int r, float sum) {
      h[(((long long)item.split * ad.num_slices + item.slice) * M + m) * ad.rank + r] = sum;
    });
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
constexpr int CHAINS = WGMMA || ONE_ORDER ? 1 : NT == 1 ? 4 : (NT == 2 ? 2 : 1);  // independent accumulators a tile: dependent MMAs would set the pace
constexpr int WORKERS = (CONSUMERS + LW) * 32;
constexpr int MAX_STAGES = 32;
constexpr int TOKENS = NT * 8;
constexpr int W_BYTES = KC * BN, X_BYTES = FUSED ? 0 : KC * TOKENS, STAGE_BYTES = W_BYTES + X_BYTES;

#if FUSED && RB > 0
constexpr int SHRINK_RED = LW * RED_ROWS * 8;
#else
constexpr int SHRINK_RED = 0;
#endif
#if FUSED
constexpr int KEPT = FUSED > 1 ? 8 : 6;  // vectors of 8 values a thread
#endif

#ifdef STAMPS
// When what happened, for a benchmark: [block][8] nanoseconds of the GPU's clock.
__device__ u64 stamps[STAMPS * 8];
__device__ __forceinline__ void stamp(int k) {
  if ((threadIdx.x & 31) == 0 && blockIdx.x < STAMPS) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(stamps[blockIdx.x * 8 + k])::"memory");
}
#else
__device__ __forceinline__ void stamp(int) {}
#endif

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
constexpr int UB = RB <= 2 && CONSUMERS + LW <= 12 ? 2 : 1;  // (row tile, adapter) pairs whose B a warp has in flight

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
// A hint as in prefetch_a: B of the first two adapters for this block; `id` of `threads` threads.
__device__ __forceinline__ void prefetch_b(const Adapters& ad, const Slots& slots, int tiles, int N, int id, int threads) {
  const int known = min(__popc(slots.leaders), 2);
  const int slot0 = __shfl_sync(~0u, slots.slot, known > 0 ? nth_bit(slots.leaders, 0) : 0);
  const int slot1 = __shfl_sync(~0u, slots.slot, known > 1 ? nth_bit(slots.leaders, 1) : 0);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    for (int e = id; e < known * BN; e += threads) {
      const int n = tile * BN + e % BN;
      const int slot = e < BN ? slot0 : slot1;
      if (n >= N) continue;
      const RowTile at = row_tile(ad, n & ~15);
      const lora_t* row = ad.b[at.slice] + slot * ad.stride_bl[at.slice] + (long long)(at.row + (n & 15)) * ad.stride_bn;
      for (int r = 0; r < ad.rank; r += 128 / (int)sizeof(lora_t)) prefetch_l2(row + r);
    }
}
#if FUSED
// h of the slices low .. high, summed over the parts of K and rounded, into h16. Four lanes share two ranks of a token: lane q adds
// parts q, q + 4, ..., then the four sums are added; the order depends on `splits` alone.
__device__ __forceinline__ void stage_h(const u64* pairs, u32 call, int splits, int low, int high, const Adapters& ad, int M, u32 has, int id, u16* h16) {
  const int q = id & 3, two = ad.rank / 2, total = (high - low + 1) * M * two;
  const int parts = (splits + 3) / 4, each = (total + LW * 8 - 1) / (LW * 8);
  const long long step = (long long)ad.num_slices * M * ad.rank;
  float sum[2] = {0.f, 0.f};
  constexpr int U = 4;  // loads in flight
  for (int first = 0; first < each * parts; first += U) {
    TwoPairs v[U];
    u32 late;
    int spins = 0;
    do {
      late = 0;
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int i = first + u, e = id / 4 + i / parts * (LW * 8), p = q + i % parts * 4;
        const int m = e / two % M, sl = low + e / two / M;
        v[u] = {pair_of(0.f, call), pair_of(0.f, call)};
        if (i < each * parts && e < total && p < splits && (has >> m & 1)) v[u] = load_two_pairs(pairs + p * step + (sl * M + m) * ad.rank + e % two * 2);
        late |= v[u].late(call);
      }
      count_spin(spins);
    } while (__any_sync(~0u, late));
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int i = first + u;
      sum[0] += v[u].value(0);
      sum[1] += v[u].value(1);
      if (i % parts != parts - 1) continue;
#pragma unroll
      for (int d = 1; d < 4; d <<= 1) {
        sum[0] += __shfl_xor_sync(~0u, sum[0], d);
        sum[1] += __shfl_xor_sync(~0u, sum[1], d);
      }
      const int e = id / 4 + i / parts * (LW * 8), m = e / two % M, sl = low + e / two / M;
      if (q == 0 && i < each * parts && e < total) *reinterpret_cast<u32*>(h16 + (sl * TOKENS + m) * RANK_PITCH + e % two * 2) = pack2(sum[0], sum[1]);
      sum[0] = sum[1] = 0.f;
    }
  }
}
#endif
#endif

#if FUSED
constexpr int QUANT_WARPS = CONSUMERS / FUSED;  // of one row
__device__ __forceinline__ void consumers_sync() { __syncwarp(); asm volatile("bar.sync 3, %0;" ::"n"(CONSUMERS * 32) : "memory"); }
#endif
#if RB > 0
__device__ __forceinline__ void lora_sync() { __syncwarp(); asm volatile("bar.sync 2, %0;" ::"n"(LW * 32) : "memory"); }
#endif

// The prologue's dependent, or a launch of its own (FUSED). x, stride_xm, pairs are for FUSED only; x_map, x_scale, h, token are not.
// pairs: h as (value, call) pairs, see store_pair. hints: read slots and prefetch before the wait. ready: [m] token m's flag, [32] blocks
// that saw them; FUSED: [0] number of the last call, [1] blocks that know it.
extern "C" __global__ void __launch_bounds__((CONSUMERS + 2 + LW) * 32 * (FUSED || RB > 0 ? 3 : 4) / 3)  // no adapter: room for a prologue block
gemm(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, int deep, const float* x_scale, const float* w_scale,
     int w_scale_stride, const u16* bias, const float* h, int splits, const Adapters ad, u16* y, long long stride_ym, int M, int N, int K,
     int stages, int window, u32* ready, u32 token, const u16* x, long long stride_xm, u64* pairs, int hints) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 ring = (shared_address(shared) + 1023) & ~1023u;
  u8* after_ring = shared + (ring - shared_address(shared)) + stages * STAGE_BYTES;
  float* red = reinterpret_cast<float*>(after_ring);  // [WK][BN][TOKENS]
  float* scale_of_row = red + WK * BN * TOKENS;        // [BN]
  float* bias_of_row = scale_of_row + BN;              // [BN]
  float* delta = bias_of_row + BN;                     // [BN][TOKENS], with adapters
#if FUSED
  // [M][padded K + 16]: the pitch keeps two tokens on different banks
  u8* x_codes = after_ring + (WK * BN * TOKENS + 2 * BN + (RB > 0 ? BN * TOKENS : 0)) * 4 + (RB > 0 ? (SHRINK_RED + ad.num_slices * TOKENS * (RB * 16 + 4)) * 4 : 0);
#endif
  __shared__ __align__(8) u64 w_bars[MAX_STAGES], x_bars[MAX_STAGES], empty_bars[MAX_STAGES];
#if FUSED
  __shared__ __align__(8) u64 call_bar;  // complete when `call` is there
  __shared__ u32 call;
  __shared__ int guess_of_token[32];
  __shared__ float quant_red[CONSUMERS];
#else
  __shared__ __align__(8) u64 scale_bar;  // complete when scale_of_token is there
#endif
  __shared__ float scale_of_token[TOKENS];
  __shared__ u32 with_adapter;  // bit m: token m has one
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tiles = (N + BN - 1) / BN;
  const int chunks = (K + KC - 1) / KC;
  const int rounds = (tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;
  const int total = rounds * chunks;
  const int at_once = min(window, total);
  u64 stream_policy, keep_policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream_policy));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(keep_policy));
  if (warp == W_WARP) stamp(0);  // start
  if (warp == W_WARP && lane == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(shared_address(&w_bars[s]), 1);
      barrier_init(shared_address(&x_bars[s]), 1);
      barrier_init(shared_address(&empty_bars[s]), CONSUMERS);
    }
#if FUSED
    barrier_init(shared_address(&call_bar), 1);
#else
    barrier_init(shared_address(&scale_bar), 1);
#endif
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
#if FUSED
    if (hints) {  // lines on their way to the L2, see prefetch_a; the up-projection's warps have no time for it
      for (int m = 0; m < M; ++m)
        for (int k = lane * 64; k < K; k += 32 * 64) prefetch_l2(x + m * stride_xm + k);
#if RB > 0
      const Slots early = read_slots(ad, M);
#pragma unroll 1
      for (int w = 0; w < LW; ++w) prefetch_a<LW>(ad, early, shrink_item(ad, blockIdx.x, splits), K, splits, w);
      prefetch_b(ad, early, tiles, N, lane, 32);
#endif
    }
    pdl_wait();
#if RB == 0
    if (lane == 0) {
      call = ldg32(ready) + 1;
      barrier_arrive(shared_address(&call_bar));
    }
#endif
#endif
#if !FUSED
    // Token m's codes and scale are there when its flag holds this call's number. Launched in two, the blocks that set it
    // started before this kernel could; in one, they run beside this one (see the README): the wait ends. No later kernel
    // sets it before this one is complete.
#if EARLY
    if (lane < M) spin_until(ready + lane, token);
#else
    pdl_wait();
#endif
    stamp(1);  // all tokens are quantised
    asm volatile("fence.proxy.async;" ::: "memory");  // the copy engine reads what other threads wrote
    __syncwarp();
    const float scale = lane < M ? __uint_as_float(ldg32(x_scale + lane)) : 0.f;  // on its way while the first codes are asked for
    const int first_stages = min(stages, total);
    if (lane == 0)
      for (int i = 0; i < first_stages; ++i) {
        const u32 bar = shared_address(&x_bars[i]);
        barrier_expect(bar, X_BYTES);
        copy_stage(ring + i * STAGE_BYTES + W_BYTES, x_map, TOKENS, 0, i % chunks, deep, bar, keep_policy);
      }
    if (lane < TOKENS) scale_of_token[lane] = scale;
    __syncwarp();
    if (lane) return;
    barrier_arrive(shared_address(&scale_bar));
    int c = first_stages % chunks, s = first_stages % stages;
    u32 parity = first_stages == stages ? 0 : 1;
    for (int i = first_stages; i < total; ++i) {
      barrier_wait(shared_address(&empty_bars[s]), parity);
      const u32 bar = shared_address(&x_bars[s]);
      barrier_expect(bar, X_BYTES);
      copy_stage(ring + s * STAGE_BYTES + W_BYTES, x_map, TOKENS, 0, c, deep, bar, keep_policy);
      if (++c == chunks) c = 0;
      if (++s == stages) { s = 0; parity ^= 1; }
    }
#endif
    if (lane) return;
#if FUSED
    // The last block to know the call's number makes it the last call's. Numbers never repeat, so no flag is ever cleared.
    barrier_wait(shared_address(&call_bar), 0);
    if (add_acquire_release(ready + 1, 1) == gridDim.x - 1) {
      ready[1] = 0;
      ready[0] = call;
    }
#else
    // The last block to have seen the flags clears them, so that a replay of this very call waits again.
    if (add_acquire_release(ready + 32, 1) == gridDim.x - 1)
      for (int m = 0; m <= 32; ++m) ready[m] = 0;
#endif
    return;
  }

  const int worker = warp < CONSUMERS ? (int)threadIdx.x : (int)threadIdx.x - 64;  // 0 .. WORKERS-1
#if RB > 0
  float* shrink_red = delta + BN * TOKENS;  // [LW][RED_ROWS][8], FUSED only
  u16* h16 = reinterpret_cast<u16*>(shrink_red + SHRINK_RED);  // [slices][TOKENS][RANK_PITCH]
  Slots slots = {-1, 0, 0};
  bool guessed = FUSED && hints;  // slots were read before the wait: to be compared with what they are after it
  if (warp >= LORA_WARP && hints) {
#if FUSED
    if (warp == LORA_WARP) guess_of_token[lane] = load_slots(ad, M).slot;
    lora_sync();  // one guess for all warps, which meet at barriers for every adapter
    slots = resolve_slots({guess_of_token[lane], 0}, ad);
#else
    slots = read_slots(ad, M);
    prefetch_b(ad, slots, tiles, N, (warp - LORA_WARP) * 32 + lane, LW * 32);
#endif
  }
#endif
  float row_scale = 0.f, row_bias = 0.f;
  if (worker < BN && blockIdx.x * BN + worker < N) {  // weights too: before the wait
    row_scale = w_scale[(blockIdx.x * BN + worker) * w_scale_stride];
    if (bias) row_bias = widen(bias[blockIdx.x * BN + worker]);
  }
#if RB > 0
  bool h_staged = false;
  RawSlots raw = {-1, -1};
  // Whether the guess was right; the slots are what they are from here on.
  auto settle = [&] {
    const Slots now = resolve_slots(raw, ad);
    const bool right = __all_sync(~0u, now.slot == slots.slot);
    slots = now;
    guessed = false;
    const u32 mask = __ballot_sync(~0u, slots.slot >= 0);
    if (lane == 0 && warp == LORA_WARP) with_adapter = mask;
    return right;
  };
  if (warp >= LORA_WARP) {
    pdl_wait();  // for h, the slot ids and the adapters
    stamp(2);    // earlier kernels are complete
    raw = load_slots(ad, M);
#if FUSED
    const u32 last = warp == LORA_WARP && lane == 0 ? ldg32(ready) : 0;
#endif
    if (!guessed) settle();
#if FUSED
    if (warp == LORA_WARP && lane == 0) {
      call = last + 1;
      barrier_arrive(shared_address(&call_bar));
    }
    // This block's share of h; pieces without a block of their own go round.
    const int each = max(1, (ad.rank + 7) / 8) * splits * ad.num_slices, again = (int)blockIdx.x - (int)gridDim.x;
    for (int index = blockIdx.x;; index += gridDim.x) {
      if (index >= each * __popc(slots.leaders)) {
        if (!guessed || settle()) break;
        index = again;
        continue;
      }
      const ShrinkItem item = shrink_item(ad, index, splits);
      const bool right = shrink<LW, (CONSUMERS + LW <= 12 ? 8 : 4)>(
          x, stride_xm, M, K, ad, slots, item, splits, warp - LORA_WARP, shrink_red, [] { lora_sync(); }, [&] { return !guessed || settle(); },
          [&](int m, int r, float sum) {
            barrier_wait(shared_address(&call_bar), 0);
            store_pair(pairs + ((item.split * ad.num_slices + item.slice) * M + m) * ad.rank + r, sum, call);
          });
      if (!right) index = again;
    }
#endif
  }
#endif
#if FUSED
  if (warp < CONSUMERS) {
    pdl_wait();  // for x
    const int id = (warp % QUANT_WARPS) * 32 + lane;
    float* part = quant_red + warp / QUANT_WARPS * QUANT_WARPS;
    auto sync = [] { consumers_sync(); };
    const int group = warp / QUANT_WARPS, padded = chunks * KC;
    for (int m = group; m - group < M; m += FUSED) {  // all groups go round equally often: they meet at the barrier
      u8* out = x_codes + m * (padded + 16);
      const bool there = m < M && group < FUSED;
      const float scale = quantise_row<QUANT_WARPS * 32, KEPT>(x + (there ? m : 0) * stride_xm, there ? K : 0, id, part, sync,
                                                                      [&](int k, uint2 codes) { *reinterpret_cast<uint2*>(out + k) = codes; });
      if (there) {
        for (int k = K + id * 16; k < padded; k += QUANT_WARPS * 512) *reinterpret_cast<uint4*>(out + k) = make_uint4(0, 0, 0, 0);
        if (id == 0) scale_of_token[m] = scale;
      }
      consumers_sync();
    }
  }
#endif
  int s = 0;
  u32 parity = 0;
  for (int round = 0; round < rounds; ++round) {
    const int tile = blockIdx.x + round * gridDim.x;
    const int n0 = tile * BN;
    if (round && worker < BN && n0 + worker < N) {
      row_scale = w_scale[(n0 + worker) * w_scale_stride];
      if (bias) row_bias = widen(bias[n0 + worker]);
    }
    if (warp < CONSUMERS) {
      const int tn = warp % WIDE, wk = warp / WIDE;
      float acc[CHAINS][NT][4];
#pragma unroll
      for (int q = 0; q < CHAINS * NT * 4; ++q) (&acc[0][0][0])[q] = 0.f;
      const u32 piece[2] = {(u32)((2 * t) ^ g) << 4, (u32)((2 * t + 1) ^ g) << 4};
      const u32 w_row = (tn * 16 + g) * 128;
#if FUSED
      u32 x_at = shared_address(x_codes) + min(g, M - 1) * (chunks * KC + 16) + wk * (KC / WK) + t * 32;  // unswizzled
#else
      const u32 x_row = g * 128;
#endif
      for (int c = 0; c < chunks; ++c) {
#if !FUSED
        barrier_wait(shared_address(&x_bars[s]), parity);
        const u32 x_base = ring + s * STAGE_BYTES + W_BYTES;
#endif
        barrier_wait(shared_address(&w_bars[s]), parity);
        if (warp == 0 && c == 0 && round == 0) stamp(4);  // first product
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
          wgmma(d, matrix_descriptor(base + atom * (BN * 128) + within), matrix_descriptor(x_base + atom * (TOKENS * 128) + within), step);
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
#if FUSED
            xv[q][0] = lds128(x_at + step / 2 * 128 + (step & 1) * 16);
#else
#pragma unroll
            for (int j = 0; j < NT; ++j) xv[q][j] = lds128(x_base + atom * (TOKENS * 128) + x_row + j * 1024 + at);
#endif
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
#if FUSED
        x_at += KC;
#endif
      }
#pragma unroll
      for (int q = 1; q < CHAINS; ++q)
#pragma unroll
        for (int e = 0; e < NT * 4; ++e) (&acc[0][0][0])[e] += (&acc[q][0][0])[e];
      if (warp == 0 && round == rounds - 1) stamp(5);  // last product
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
    else {  // delta = h B^T for this tile, one (row tile, adapter) pair after another
      const int lw = warp - LORA_WARP;
      for (int first = lw; first < TN * __popc(slots.leaders) || !h_staged; first += LW * UB) {
        const int jobs = TN * __popc(slots.leaders);
        Raw8 bv[UB][RB][2];
        u32 members[UB];
        int slice[UB];
#if ADAPTERS8
        float row_scales[UB][2];
#endif
#pragma unroll
        for (int u = 0; u < UB; ++u) {
          const int job = first + u * LW;
          const bool there = job < jobs;
          const int leader = nth_bit(slots.leaders, there ? job / TN : 0);
          const int slot = __shfl_sync(~0u, slots.slot, leader);
          const u32 same = __shfl_sync(~0u, slots.members, leader);
          const int n = n0 + job % TN * 16;
          const RowTile at = row_tile(ad, n);
          members[u] = there && n < N ? same : 0u;
          slice[u] = at.slice;
          const lora_t* row = ad.b[at.slice] + slot * ad.stride_bl[at.slice] + (long long)(at.row + g) * ad.stride_bn;
#pragma unroll
          for (int rb = 0; rb < RB; ++rb) {
            const int r = rb * 32 + t * 8;
            const bool ok = members[u] && r < ad.rank;  // N and slice bounds are multiples of 16
            bv[u][rb][0] = ok ? load8(row + r) : Raw8{};
            bv[u][rb][1] = ok ? load8(row + 8 * ad.stride_bn + r) : Raw8{};
          }
#if ADAPTERS8
          const int height = ad.slice_end[at.slice] - (at.slice ? ad.slice_end[at.slice - 1] : 0);
          const float* row_scale8 = ad.b_scale[at.slice] + (long long)slot * height + at.row + g;
          row_scales[u][0] = members[u] ? __uint_as_float(ldg32(row_scale8)) : 0.f;
          row_scales[u][1] = members[u] ? __uint_as_float(ldg32(row_scale8 + 8)) : 0.f;
#endif
        }
        if (!h_staged) {  // sum the parts of h in order, round once, keep for all tiles of this block
          h_staged = true;
          // Only the slices that this block's tiles lie in.
          const int low = row_tile(ad, min(blockIdx.x * BN, N - 1)).slice, high = row_tile(ad, min((blockIdx.x + (rounds - 1) * gridDim.x + 1) * BN, N) - 1).slice;
#if FUSED
          barrier_wait(shared_address(&call_bar), 0);
          stage_h(pairs, call, splits, low, high, ad, M, __ballot_sync(~0u, slots.slot >= 0), lw * 32 + lane, h16);
#else
          const int quads = ad.rank / 4;
          for (int e = lw * 32 + lane; e < (high - low + 1) * M * quads; e += LW * 32) {
            const int q = e % quads, m = e / quads % M, sl = low + e / quads / M;
            float sum[4] = {0.f, 0.f, 0.f, 0.f};  // rubbish for tokens without an adapter: nobody takes their columns
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
            u32* to = reinterpret_cast<u32*>(h16 + (sl * TOKENS + m) * RANK_PITCH + q * 4);
            to[0] = pack2(sum[0], sum[1]);
            to[1] = pack2(sum[2], sum[3]);
          }
#endif
          lora_sync();
          if (warp == LORA_WARP) stamp(3);  // h is there
        }
        if (guessed && !settle()) {
          first = lw - LW * UB;  // begin again with the true slots
          continue;
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
              const uint4 low = widen8(bv[u][rb][0]), high = widen8(bv[u][rb][1]);
              mma_16bit(d, low.x, high.x, low.y, high.y, hv.x, hv.y);
              mma_16bit(d, low.z, high.z, low.w, high.w, hv.z, hv.w);
            }
#if ADAPTERS8
            d[0] *= row_scales[u][0];
            d[1] *= row_scales[u][0];
            d[2] *= row_scales[u][1];
            d[3] *= row_scales[u][1];
#endif
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
#if !FUSED
    barrier_wait(shared_address(&scale_bar), 0);
#endif
    if (warp == 0 && round == rounds - 1) stamp(6);  // the adapter's part is there
    auto sum_of = [&](int row, int m) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < WK; ++k) sum += red[(k * BN + row) * TOKENS + m];
      return sum;
    };
    for (int e = worker; e < M * (BN / 2); e += WORKERS) {
      const int row = e % (BN / 2) * 2, m = e / (BN / 2);
      const int n = n0 + row;
      if (n >= N) continue;
      float v[2];
      const float xs_m = scale_of_token[m];
      v[0] = sum_of(row, m);
      v[1] = sum_of(row + 1, m);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        v[q] = v[q] * scale_of_row[row + q] * xs_m + bias_of_row[row + q];
#if RB > 0
        if (with_adapter >> m & 1) v[q] += delta[(row + q) * TOKENS + m];
#endif
      }
      *reinterpret_cast<u32*>(y + m * stride_ym + n) = pack2(v[0], v[1]);
    }
    workers_sync();  // red, delta and the scales are free again
    if (warp == 0 && round == rounds - 1) stamp(7);  // stored
  }
}
#endif
