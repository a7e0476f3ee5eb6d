// What both decode kernels use: types, loads, matrix instructions, the batch's slots.
//
// Macros: DT_FP16: 16-bit values are bf16 (0) or fp16 (1). ADAPTERS8: adapters are 16-bit (0) or e4m3 with a scale a row (1).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if ADAPTERS8
typedef u8 lora_t;
#else
typedef u16 lora_t;
#endif

struct Adapters {
  // One entry per output slice; unused ones repeat the last.
  const lora_t* a[4];    // [slots, R, K]
  const lora_t* b[4];    // [slots, N_slice, R]
  const float* a_scale[4];  // [slots, R], with 8-bit adapters
  const float* b_scale[4];  // [slots, N_slice]
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
__device__ __forceinline__ void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ u32 add_acquire_release(u32* p, u32 v) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
// A wait on another block that lasts this long is a defect of the launch; an error is better than a GPU that hangs.
__device__ __forceinline__ void count_spin(int& spins) {
  if (++spins > (1 << 26)) __trap();
}
__device__ __forceinline__ void spin_until(const u32* p, u32 value) {
  u32 seen;
  int spins = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p) : "memory");
    count_spin(spins);
  } while (seen != value);
}

// Values that blocks hand to each other travel as 8-byte pairs (fp32 value, number of the call): a pair is written and read
// whole, so that a reader needs no flag beside it. It reads again until the number is this call's.
__device__ __forceinline__ u64 pair_of(float value, u32 call) { return (u64)call << 32 | __float_as_uint(value); }
__device__ __forceinline__ void store_pair(u64* p, float value, u32 call) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(pair_of(value, call)) : "memory");
}
__device__ __forceinline__ void store_two_pairs(u64* p, float v0, float v1, u32 call) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(pair_of(v0, call)), "l"(pair_of(v1, call)) : "memory");
}
// Two neighbours; a pair's value is in its low half.
struct TwoPairs {
  u64 a, b;
  __device__ __forceinline__ u32 late(u32 call) const { return ((u32)(a >> 32) ^ call) | ((u32)(b >> 32) ^ call); }
  __device__ __forceinline__ float value(int i) const { return __uint_as_float((u32)(i ? b : a)); }
};
__device__ __forceinline__ TwoPairs load_two_pairs(const u64* p) {
  TwoPairs v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(v.a), "=l"(v.b) : "l"(p) : "memory");
  return v;
}

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

// Eight neighbours of an adapter's row, as loaded and as 16-bit values.
#if ADAPTERS8
typedef uint2 Raw8;
__device__ __forceinline__ Raw8 load8(const u8* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 widen2(u32 codes) {  // of the low half; exact
  u32 v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"((u16)codes));
#if !DT_FP16
  float low, high;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(v));
  v = pack2(low, high);
#endif
  return v;
}
__device__ __forceinline__ uint4 widen8(const Raw8& v) { return make_uint4(widen2(v.x), widen2(v.x >> 16), widen2(v.y), widen2(v.y >> 16)); }
#else
typedef uint4 Raw8;
__device__ __forceinline__ Raw8 load8(const u16* p) { return ldg128(p); }
__device__ __forceinline__ uint4 widen8(const Raw8& v) { return v; }
#endif

// Slots of the batch as one warp sees them: lane m holds token m.
struct Slots {
  int slot;       // of this lane's token, -1 for none
  u32 members;    // lanes with the same slot
  u32 leaders;    // first lane of every distinct slot >= 0
};

// As loaded; nothing waits for the values before resolve_slots.
struct RawSlots {
  int slot, active;
};
__device__ __forceinline__ RawSlots load_slots(const Adapters& ad, int M) {
  const int lane = threadIdx.x & 31;
  RawSlots raw = {-1, ad.active ? -1 : 0};
  if (lane < M) raw.slot = (int)ldg32(ad.slot_of_token + lane);
  if (ad.active && lane < ad.num_active) raw.active = (int)ldg32(ad.active + lane);
  for (int i = lane + 32; ad.active && i < ad.num_active; i += 32) raw.active = max(raw.active, (int)ldg32(ad.active + i));
  return raw;
}
__device__ __forceinline__ Slots resolve_slots(const RawSlots& raw, const Adapters& ad) {
  const bool valid = __any_sync(~0u, raw.active >= 0) && raw.slot >= 0 && raw.slot < ad.num_slots;
  Slots s;
  s.slot = valid ? raw.slot : -1;
  s.members = __match_any_sync(~0u, s.slot);
  s.leaders = __ballot_sync(~0u, valid && (int)(threadIdx.x & 31) == __ffs(s.members) - 1);
  return s;
}
__device__ __forceinline__ Slots read_slots(const Adapters& ad, int M) { return resolve_slots(load_slots(ad, M), ad); }
// Lane of the `ordinal`-th set bit.
__device__ __forceinline__ int nth_bit(u32 mask, int ordinal) {
  for (int i = 0; i < ordinal; ++i) mask &= mask - 1;
  return __ffs(mask) - 1;
}
