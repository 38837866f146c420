
// --- numbers -----------------------------------------------------------------------------------------------------

using u16 = unsigned short;
using u32 = unsigned int;

#if DTYPE == 0
using T = float;
#else
using T = u16;
#endif

constexpr u32 kAll = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

#if DTYPE == 0
__device__ inline float wide(float x) { return x; }
__device__ inline float narrow(float x) { return x; }
#elif DTYPE == 1
__device__ inline float wide(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
// Two values in one register, the first in the low half.
__device__ inline u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
#else
__device__ inline float wide(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ inline u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
#endif
#if DTYPE != 0
__device__ inline u16 narrow(float x) { return static_cast<u16>(pack(x, 0.0f)); }
#endif
// Logarithm of no weight.
__device__ inline float nothing() { return __int_as_float(0xff800000); }
__device__ inline float rounded(float x) { return wide(narrow(x)); }

__device__ inline const T* in(const void* pointer) { return static_cast<const T*>(pointer); }
__device__ inline T* out(void* pointer) { return static_cast<T*>(pointer); }

__device__ inline int lane() { return threadIdx.x & 31; }

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// --- launches that overlap ---------------------------------------------------------------------------------------
//
// Every kernel lets the next one start at once, and reads what the one before wrote only after `await_previous`. What it
// reads earlier (weights, keys and values of the prompt) no kernel of a token writes.

#if __CUDA_ARCH__ >= 900
__device__ inline void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
__device__ inline void start_next() {}
__device__ inline void await_previous() {}
#endif

__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// --- copies to shared memory -------------------------------------------------------------------------------------

extern __shared__ __align__(128) byte shared[];

__device__ inline u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// 16 bytes, or zeros.
__device__ inline void bring(u32 to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// --- products of 16 by 16 by 8 -----------------------------------------------------------------------------------
//
// Of the 16 by 8 results a lane holds rows lane/4 and lane/4 + 8, columns lane%4 · 2 and the next.

#if DTYPE != 0
__device__ inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if DTYPE == 1
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

__device__ inline void load_matrices(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_transposed(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
#endif

// --- raw sums and adapters ---------------------------------------------------------------------------------------

__device__ inline float sum_of(const Raw& raw, int answers, int answer, int column) {
  const float* at = raw.sums + static_cast<int64>(answer) * raw.width + column;
  const int64 step = static_cast<int64>(answers) * raw.width;
  float sum = __ldcg(at);
  for (int split = 1; split < raw.splits; ++split) sum += __ldcg(at + split * step);
  return sum;
}

// One value of an adapter's down projection.
__device__ inline float low_of(const Raw& raw, int answers, int answer, const Adapter& adapter, int r) {
  return rounded(sum_of(raw, answers, answer, adapter.column + r));
}

// Eight consecutive values of T, at an address that is a multiple of eight of them.
__device__ inline void eight(float (&x)[8], const T* from) {
#if DTYPE == 0
  const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
  const float all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = all[i];
#else
  const uint4 all = *reinterpret_cast<const uint4*>(from);
  const u32 pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = wide(static_cast<u16>(pairs[i] & 0xffffu));
    x[2 * i + 1] = wide(static_cast<u16>(pairs[i] >> 16));
  }
#endif
}

__device__ inline const T* row_of(const Adapter& adapter, int output) {
  return in(adapter.b_or) + static_cast<int64>(output) * adapter.rank;
}

// Row `output` of the up projection times the down projection's values.
__device__ inline float adapted(const Adapter& adapter, int output, const float* low) {
  const T* b = row_of(adapter, output);
  float sum = 0.0f;
  if (adapter.rank % 8 == 0) {
    for (int r = 0; r < adapter.rank; r += 8) {
      float x[8];
      eight(x, b + r);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(x[i], low[r + i], sum);
    }
  } else {
    for (int r = 0; r < adapter.rank; ++r) sum = fmaf(wide(b[r]), low[r], sum);
  }
  return sum;
}

__device__ inline void prefetch_row(const Adapter& adapter, int output) {
  if (adapter.rank == 0) return;
  const byte* from = reinterpret_cast<const byte*>(row_of(adapter, output));
  const int bytes = adapter.rank * static_cast<int>(sizeof(T));
  for (int at = 0; at < bytes; at += 32) prefetch(from + at);
}

constexpr int kRankMax = 256;
