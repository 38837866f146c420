// The gated delta rule on a GPU, for heads of 128 by 128 in bfloat16. NVRTC compiles this file and the others of this
// folder together at run time (compiled.rs). plain.rs has the formulas; docs/decisions/0040-delta-kernel.md the plan.
//
// Names, for one value head and a chunk of 64 rows: q, k, v the rows as given; G the running sum of the decays; c the
// factors that normalise (c_k of a key, c_q of a query with the root of the width); T = (I + A)^-1, unit lower; P the
// masked scores.
//
//   R = v - exp(G) c_k (k S)      V' = T (strength R)      out = exp(G) c_q (q S) + P V'
//   S <- exp(G_last) S + k^T (c_k exp(G_last - G) V')
//
// Operands of products are bfloat16, sums and states float32. Rows are scaled after the products where that is possible,
// so that queries and keys are used as given. Sums have one order: the same bits on every run.

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

constexpr int kChunk = 64;   // rows of a chunk
constexpr int kDim = 128;    // width of keys and of values
constexpr int kSlice = 64;   // columns of the state that a block carries from chunk to chunk, 16 a warp
constexpr int kWide = 136;   // elements from row to row of a 128-wide tile in shared memory: no bank conflicts
constexpr int kNarrow = 72;  // of a 64-wide one
constexpr int kSquare = kChunk * kChunk;
constexpr int kState = kDim * kDim;
constexpr u32 kAll = 0xffffffffu;

extern __shared__ __align__(16) char shared[];

// --- numbers -----------------------------------------------------------------------------------------------------

__device__ inline u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ inline float low(u32 both) { return __uint_as_float(both << 16); }
__device__ inline float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
__device__ inline u16 narrow(float x) { return static_cast<u16>(pack(x, 0.0f)); }

// --- tiles in shared memory --------------------------------------------------------------------------------------

__device__ inline u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// 16 bytes, or zeros.
__device__ inline void bring(u32 to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ inline void await_tiles() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// COUNT rows of COLUMNS elements, of which `real` exist, into rows STRIDE elements apart.
template <int COUNT, int COLUMNS, int STRIDE, int THREADS>
__device__ inline void bring_tile(u32 to, const u16* from, i64 step, int real) {
  constexpr int kPieces = COLUMNS / 8;
#pragma unroll
  for (int at = threadIdx.x % THREADS; at < COUNT * kPieces; at += THREADS) {
    const int row = at / kPieces, piece = at % kPieces;
    const bool exists = row < real;
    bring(to + (row * STRIDE + piece * 8) * 2, from + (exists ? row * step : 0) + piece * 8, exists);
  }
}

// The reverse: from shared memory to `real` rows `step` elements apart.
template <int COUNT, int COLUMNS, int STRIDE, int THREADS>
__device__ inline void send_tile(u16* to, i64 step, const u16* from, int real = COUNT) {
  constexpr int kPieces = COLUMNS / 8;
#pragma unroll
  for (int at = threadIdx.x % THREADS; at < COUNT * kPieces; at += THREADS) {
    const int row = at / kPieces, piece = at % kPieces;
    if (row >= real) continue;
    *reinterpret_cast<uint4*>(to + row * step + piece * 8) =
        *reinterpret_cast<const uint4*>(from + row * STRIDE + piece * 8);
  }
}

// --- products of 16 by 16 by 8 -----------------------------------------------------------------------------------

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

__device__ inline int lane() { return threadIdx.x & 31; }

// The left operand, rows m .. m + 16 and columns c .. c + 16 of a tile.
template <int STRIDE>
__device__ inline void left(u32 (&a)[4], u32 tile, int m, int c) {
  load_matrices(a, tile + ((m + (lane() & 15)) * STRIDE + c + (lane() >> 4) * 8) * 2);
}
// The left operand from a tile that holds its transpose: [c, m].
template <int STRIDE>
__device__ inline void left_transposed(u32 (&a)[4], u32 tile, int m, int c) {
  load_transposed(a, tile + ((c + (lane() & 7) + (lane() >> 4) * 8) * STRIDE + m + ((lane() >> 3) & 1) * 8) * 2);
}
// Two right operands, of columns n .. n + 8 and n + 8 .. n + 16, from a tile [c, n].
template <int STRIDE>
__device__ inline void right(u32 (&b)[4], u32 tile, int c, int n) {
  load_transposed(b, tile + ((c + (lane() & 15)) * STRIDE + n + (lane() >> 4) * 8) * 2);
}
// The same from a tile that holds the transpose: [n, c].
template <int STRIDE>
__device__ inline void right_transposed(u32 (&b)[4], u32 tile, int c, int n) {
  load_matrices(b, tile + ((n + (lane() & 7) + (lane() >> 4) * 8) * STRIDE + c + ((lane() >> 3) & 1) * 8) * 2);
}

__device__ inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int N>
__device__ inline void clear(float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = 0.0f;
  }
}

// Of a product's 16 by 8 results a lane holds rows line() and line() + 8, columns pair() and pair() + 1.
__device__ inline int line() { return lane() >> 2; }
__device__ inline int pair() { return (lane() & 3) * 2; }

// Two neighbouring columns of results as bfloat16, in the layout of a left operand: rows line() and line() + 8 of the
// results in tiles n and n + 1, 16 columns in all.
template <int N>
__device__ inline void as_left(u32 (&a)[4], const float (&c)[N][4], int n) {
  a[0] = pack(c[n][0], c[n][1]);
  a[1] = pack(c[n][2], c[n][3]);
  a[2] = pack(c[n + 1][0], c[n + 1][1]);
  a[3] = pack(c[n + 1][2], c[n + 1][3]);
}

// The transpose of an 8 by 8 matrix, two elements a lane.
__device__ inline u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
