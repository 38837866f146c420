// Elementwise work of a block in one pass each, on a GPU, in bfloat16 (DTYPE 1) or float16 (DTYPE 2). NVRTC compiles this
// file and the others of this folder together at run time (compiled.cpp). docs/decisions/0042-fused-elementwise.md says
// what is rounded where.
//
// A thread reads and writes eight elements at a time, 16 bytes. Everything between is float32, and a result is rounded
// once. Sums have one order that does not depend on the number of rows: the same bits on every run and beside any rows.

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

constexpr u32 kAll = 0xffffffffu;

#if DTYPE == 1
__device__ inline u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ inline float low(u32 both) { return __uint_as_float(both << 16); }
__device__ inline float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
#else
__device__ inline u32 pack(float low, float high) {
  u32 both;
  asm("{.reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b};}"
      : "=r"(both)
      : "f"(low), "f"(high));
  return both;
}
__device__ inline float low(u32 both) {
  float x;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(x) : "r"(both));
  return x;
}
__device__ inline float high(u32 both) { return low(both >> 16); }
#endif

__device__ inline float wide(u16 x) { return low(x); }
__device__ inline u16 narrow(float x) { return static_cast<u16>(pack(x, 0.0f)); }

// Eight elements as they lie in memory.
struct Eight {
  u32 word[4];
  __device__ float operator[](int i) const { return i % 2 == 0 ? low(word[i / 2]) : high(word[i / 2]); }
};

__device__ inline Eight load(const u16* from) {
  const uint4 read = *reinterpret_cast<const uint4*>(from);
  return {{read.x, read.y, read.z, read.w}};
}

__device__ inline Eight rounded(const float (&x)[8]) {
  return {{pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])}};
}

__device__ inline void store(u16* to, const Eight& x) {
  *reinterpret_cast<uint4*>(to) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
}

// Up to eight elements; zeros beyond `count`.
__device__ inline Eight load(const u16* from, i64 count) {
  if (count >= 8) return load(from);
  Eight read = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) read.word[i / 2] |= static_cast<u32>(from[i]) << (i % 2 * 16);
  }
  return read;
}

__device__ inline void store(u16* to, const Eight& x, i64 count) {
  if (count >= 8) return store(to, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) to[i] = static_cast<u16>(x.word[i / 2] >> (i % 2 * 16));
  }
}

// --- the gate of a feed-forward ----------------------------------------------------------------------------------

// activation(gate) · up, and its gradient.
struct Gate {
  const u16 *gate, *up, *dy;
  u16 *y, *dgate, *dup;
  i64 count;
  int gelu;
};

struct Active {
  float value, slope;
};

__device__ inline Active activate(float z, int gelu) {
  if (gelu == 0) {
    const float s = __fdividef(1.0f, 1.0f + __expf(-z));
    return {z * s, s * (1.0f + z * (1.0f - s))};
  }
  // z (1 + tanh(c (z + 0.044715 z³))) / 2 with c = √(2 / π)
  constexpr float kRoot = 0.7978845608028654f, kCube = 0.044715f;
  const float t = tanhf(kRoot * (z + kCube * z * z * z));
  return {0.5f * z * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * z * (1.0f - t * t) * kRoot * (1.0f + 3.0f * kCube * z * z)};
}

extern "C" __global__ void gate_forward(const Gate a) {
  const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 8, left = a.count - first;
  if (left <= 0) return;
  const Eight gate = load(a.gate + first, left), up = load(a.up + first, left);
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = activate(gate[i], a.gelu).value * up[i];
  store(a.y + first, rounded(y), left);
}

extern "C" __global__ void gate_backward(const Gate a) {
  const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 8, left = a.count - first;
  if (left <= 0) return;
  const Eight gate = load(a.gate + first, left), up = load(a.up + first, left), dy = load(a.dy + first, left);
  float dgate[8], dup[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Active active = activate(gate[i], a.gelu);
    dgate[i] = dy[i] * up[i] * active.slope;
    dup[i] = dy[i] * active.value;
  }
  store(a.dgate + first, rounded(dgate), left);
  store(a.dup + first, rounded(dup), left);
}
