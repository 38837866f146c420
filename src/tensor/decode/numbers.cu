
// --- numbers -----------------------------------------------------------------------------------------------------

using u16 = unsigned short;
using u32 = unsigned int;

#if DTYPE == 0
using T = float;
#else
using T = u16;
#endif

constexpr u32 kAll = 0xffffffffu;

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
// Every kernel lets the next one start at once, and reads what the one before wrote only after `await_previous`. What
// it reads earlier (weights, keys and values of the prompt) no kernel of a token writes.

#if __CUDA_ARCH__ >= 900
__device__ inline void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
__device__ inline void start_next() {}
__device__ inline void await_previous() {}
#endif

// --- copies to shared memory -------------------------------------------------------------------------------------

extern __shared__ __align__(128) byte shared[];

__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

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
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
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
//
// What a thread needs is requested all at once: a load takes longer than all arithmetic of these kernels.

// The first splits of N values of the raw sums: requested first and added later, so that other loads are on their way.
template <int N>
struct Request {
  static constexpr int kSplits = N > 4 ? 3 : 4;
  float splits[kSplits][N];
  int at[N];

  // Values at `places` of the first split.
  __device__ inline Request(const Raw& raw, int answers, const int (&places)[N]) {
    const int step = answers * raw.width;
#pragma unroll
    for (int i = 0; i < N; ++i) at[i] = places[i];
#pragma unroll
    for (int j = 0; j < kSplits; ++j) {
      const float* from = raw.sums + static_cast<int64>(j) * step;
#pragma unroll
      for (int i = 0; i < N; ++i) splits[j][i] = j < raw.splits ? __ldcg(from + at[i]) : 0.0f;
    }
  }

  // Sums over splits in their order.
  __device__ inline void add(float (&x)[N], const Raw& raw, int answers) const {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = splits[0][i];
#pragma unroll
    for (int j = 1; j < kSplits; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] += splits[j][i];
    }
    const int64 step = static_cast<int64>(answers) * raw.width;
#pragma unroll 1
    for (int j = kSplits; j < raw.splits; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] += __ldcg(raw.sums + j * step + at[i]);
    }
  }
};

// Value r of an adapter's down projection.
__device__ inline Request<1> low_request(const Raw& raw, int answers, int answer, const Adapter& adapter, int r) {
  return Request<1>(raw, answers, {answer * raw.width + adapter.column + r});
}
__device__ inline float low_of(const Request<1>& request, const Raw& raw, int answers) {
  float x[1];
  request.add(x, raw, answers);
  return rounded(x[0]);
}

constexpr int kRankMax = 256;
constexpr int kRankKept = 16;
constexpr int kVector = 16 / sizeof(T);  // elements that are loaded at once

// The beginning of a row of an adapter's up projection; zeros behind its rank.
struct Up {
  uint4 parts[kRankKept / kVector];
};

__device__ inline const T* row_of(const Adapter& adapter, int output) {
  return in(adapter.b_or) + static_cast<int64>(output) * adapter.rank;
}

__device__ inline Up up_of(const Adapter& adapter, int output) {
  Up up;
  const bool whole = adapter.rank % kVector == 0;
#pragma unroll
  for (int i = 0; i < kRankKept / kVector; ++i) {
    const bool real = whole && i * kVector < adapter.rank;
    const T* from = row_of(adapter, output) + i * kVector;
    up.parts[i] = real ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }
  return up;
}

__device__ inline float dot(const uint4& b, const float* low, float sum) {
  const u32 words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if DTYPE == 0
    sum = fmaf(__uint_as_float(words[i]), low[i], sum);
#else
    sum = fmaf(wide(static_cast<u16>(words[i] & 0xffffu)), low[2 * i], sum);
    sum = fmaf(wide(static_cast<u16>(words[i] >> 16)), low[2 * i + 1], sum);
#endif
  }
  return sum;
}

// Row `output` of the up projection, which begins with `up`, times the down projection's values.
__device__ inline float adapted(const Adapter& adapter, int output, const Up& up, const float* low) {
  const T* b = row_of(adapter, output);
  float sum = 0.0f;
  if (adapter.rank % kVector != 0) {
    for (int r = 0; r < adapter.rank; ++r) sum = fmaf(wide(b[r]), low[r], sum);
    return sum;
  }
#pragma unroll
  for (int i = 0; i < kRankKept / kVector; ++i) {
    if (i * kVector < adapter.rank) sum = dot(up.parts[i], low + i * kVector, sum);
  }
  for (int r = kRankKept; r < adapter.rank; r += kVector) {
    sum = dot(*reinterpret_cast<const uint4*>(b + r), low + r, sum);
  }
  return sum;
}
