
// What all kernels read and write. The host fills it field by field (compiled.rs).
struct Rows {
  const u16* y;           // [rows, channels]: queries, keys, values
  const float* decay;     // [rows, value_heads]
  const float* strength;  // [rows, value_heads]
  // Written by `prepare`, read by the others. A chunk's rows that do not exist are zeros.
  u16* inverse;        // [value_heads, chunks, 64, 64]: T
  u16* score;          // [value_heads, chunks, 64, 64]: P
  float* scalars;      // [value_heads, chunks, 5, 64], as below
  float* query_scale;  // [key_heads, chunks * 64]
  float* key_scale;    // [key_heads, chunks * 64]
  // States before and after the rows, [value_heads, 128, 128]; for `map` increment and factor.
  const float* state;
  float* next;
  float* factor;
  u16* out;  // [rows, value_heads, 128]
  // For the gradient.
  u16* states;     // [value_heads, chunks, 128, 128]: transpose of the state before each chunk
  u16* corrected;  // [value_heads, chunks, 128, 64]: transpose of V'
  u16* dstates;    // [value_heads, chunks, 128, 128]: transposed gradient of the state after each chunk
  u16* dx;         // [value_heads, chunks, 128, 64]: transposed gradient of strength * R
  const u16* dout;  // [rows, value_heads, 128]
  u16* dy;          // [rows, channels]
  float* ddecay;
  float* dstrength;
  i64 step;      // elements from row to row of y
  i64 channels;  // of dy
  int rows, chunks, key_heads, value_heads;
};

// --- what depends on rows alone ----------------------------------------------------------------------------------

// Scalars of the rows of a chunk and a value head.
constexpr int kKnown = 0;                // c_k exp(G)
constexpr int kStrong = kChunk;          // strength
constexpr int kLeftOver = 2 * kChunk;    // c_k exp(G_last - G)
constexpr int kAsked = 3 * kChunk;       // c_q exp(G)
constexpr int kSum = 4 * kChunk;         // G
constexpr int kScalars = 5 * kChunk;

// Rows of a chunk that exist.
__device__ inline int real_rows(const Rows& rows, int chunk) { return min(rows.rows - chunk * kChunk, kChunk); }

// Running sums of the decays of a chunk, and the strengths, by one warp.
__device__ inline void sum_decays(const Rows& rows, int head, int chunk, float* sum, float* strong) {
  const int real = real_rows(rows, chunk), row = 2 * lane();
  const i64 at = (static_cast<i64>(chunk) * kChunk + row) * rows.value_heads + head;
  const float first = row < real ? rows.decay[at] : 0.0f;
  const float second = row + 1 < real ? rows.decay[at + rows.value_heads] : 0.0f;
  strong[row] = row < real ? rows.strength[at] : 0.0f;
  strong[row + 1] = row + 1 < real ? rows.strength[at + rows.value_heads] : 0.0f;
  float through = first + second;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(kAll, through, step);
    if (lane() >= step) through += before;
  }
  sum[row] = through - second;
  sum[row + 1] = through;
}

// 1 / root of the sum of squares of a row; two neighbouring lanes have the two halves of a row.
__device__ inline float inverse_norm(const u16* tile, int row, int half) {
  float squares = 0.0f;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const uint4 eight = *reinterpret_cast<const uint4*>(tile + row * kWide + half * 64 + piece * 8);
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      squares = fmaf(low(words[i]), low(words[i]), squares);
      squares = fmaf(high(words[i]), high(words[i]), squares);
    }
  }
  squares += __shfl_xor_sync(kAll, squares, 1);
  return rsqrtf(squares + 1e-6f);
}

constexpr float kQueryScale = 0.08838834764831845f;  // 128^-1/2
constexpr int kPrepareThreads = 128;
constexpr int kExact = kNarrow;  // elements from row to row of the [64, 64] float32 tile that is inverted

// Column `column` of the inverse of a 16 by 16 diagonal block of I + A, in the block's place.
__device__ inline void invert_block(float* a, int block, int column) {
  float* own = a + 16 * block * (kExact + 1);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float even = i == column ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 four = *reinterpret_cast<const float4*>(own + i * kExact + m);
      even = fmaf(-four.x, x[m], even);
      if (m + 1 < i) odd = fmaf(-four.y, x[m + 1], odd);
      if (m + 2 < i) even = fmaf(-four.z, x[m + 2], even);
      if (m + 3 < i) odd = fmaf(-four.w, x[m + 3], odd);
    }
    x[i] = even + odd;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) own[i * kExact + column] = x[i];
}

__device__ inline u32 rounded(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// c [16, 8] += a [16, 8] b [8, 8] in tf32.
__device__ inline void multiply_exact(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(rounded(a[0])), "r"(rounded(a[1])), "r"(rounded(a[2])), "r"(rounded(a[3])), "r"(rounded(b0)),
        "r"(rounded(b1)));
}

// The lower left block of an inverse, - T22 A21 T11, of blocks of SIZE rows from row and column `first` on: its rows `row` ..
// + 16, columns `column` .. + 16, into r. T11 and T22 stand in their places, A21 in its.
template <int SIZE>
__device__ inline void lower_left(float (&r)[2][4], const float* a, int first, int row, int column) {
  const int quad = lane() & 3;
  const float* of_left = a + (first + SIZE + row + line()) * kExact + first + SIZE;
  const float* of_right = a + (first + SIZE) * kExact + first + line();
  float m[SIZE / 8][4];
  clear(m);
#pragma unroll
  for (int k = 0; k < SIZE; k += 8) {
    if (k > row + 8) continue;  // zeros of T22
    const float* at = of_left + k + quad;
    const float t[4] = {at[0], at[8 * kExact], at[4], at[8 * kExact + 4]};
#pragma unroll
    for (int n = 0; n < SIZE / 8; ++n) {
      const float* b = of_right + (k + quad) * kExact + 8 * n;
      multiply_exact(m[n], t, b[0], b[4 * kExact]);
    }
  }
  clear(r);
  // The columns of m in the order in which a lane has them: the rows of T11 are taken in the same order.
  const float* of_first = a + first * (kExact + 1) + column + line();
#pragma unroll
  for (int k = 0; k < SIZE; k += 8) {
    if (k + 8 <= column) continue;  // zeros of T11
    const float t[4] = {m[k / 8][0], m[k / 8][2], m[k / 8][1], m[k / 8][3]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float* b = of_first + (k + 2 * quad) * kExact + 8 * n;
      multiply_exact(r[n], t, b[0], b[kExact]);
    }
  }
}

__device__ inline void put_lower_left(float* a, const float (&r)[2][4], int row, int column) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(a + (row + line() + 8 * half) * kExact + column + 8 * n + pair()) =
          make_float2(-r[n][2 * half], -r[n][2 * half + 1]);
    }
  }
}

// Scalars of a chunk and a value head, by one warp.
__device__ inline void write_scalars_of(float* to, const float* sum, const float* strong, const float* query_scale,
                                        const float* key_scale) {
#pragma unroll
  for (int row = lane(); row < kChunk; row += 32) {
    const float grown = __expf(sum[row]);
    to[kKnown + row] = key_scale[row] * grown;
    to[kStrong + row] = strong[row];
    to[kLeftOver + row] = key_scale[row] * __expf(sum[kChunk - 1] - sum[row]);
    to[kAsked + row] = query_scale[row] * grown;
    to[kSum + row] = sum[row];
  }
}

// Products of a warp's 16 normalised queries and keys with all keys up to its own.
__device__ inline void row_products(float (&qk)[8][4], float (&kk)[8][4], const u16* q, const u16* k,
                                    const float* query_scale, const float* key_scale) {
  const int warp = threadIdx.x / 32, m = warp * 16;
  clear(qk);
  clear(kk);
#pragma unroll
  for (int c = 0; c < kDim; c += 16) {
    u32 of_query[4], of_key[4];
    left<kWide>(of_query, shared_address(q), m, c);
    left<kWide>(of_key, shared_address(k), m, c);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      u32 b[4];
      right_transposed<kWide>(b, shared_address(k), c, n * 16);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        multiply(qk[2 * n + t], of_query, b[2 * t], b[2 * t + 1]);
        multiply(kk[2 * n + t], of_key, b[2 * t], b[2 * t + 1]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = m + line() + e / 2 * 8, j = n * 8 + pair() + e % 2;
      qk[n][e] *= query_scale[i] * key_scale[j];
      kk[n][e] *= key_scale[i] * key_scale[j];
    }
  }
}

// P as bfloat16 to `score` and A to `a`.
__device__ inline void decay_products(u16* score, float* a, const float (&qk)[8][4], const float (&kk)[8][4],
                                      const float* sum, const float* strong) {
  const int m = threadIdx.x / 32 * 16;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = m + line() + half * 8, first = n * 8 + pair();
      float p[2], own[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = first + e;
        const float gamma = j <= i ? __expf(sum[i] - sum[j]) : 0.0f;
        p[e] = qk[n][half * 2 + e] * gamma;
        own[e] = j < i ? kk[n][half * 2 + e] * strong[i] * gamma : 0.0f;
      }
      *reinterpret_cast<u32*>(score + i * kNarrow + first) = pack(p[0], p[1]);
      *reinterpret_cast<float2*>(a + i * kExact + first) = make_float2(own[0], own[1]);
    }
  }
}

// T, P and scalars of a chunk for all value heads of a key head. Block x: chunk; block y: key head.
extern "C" __global__ void __launch_bounds__(kPrepareThreads, 4) prepare(const __grid_constant__ Rows rows) {
  u16* q = reinterpret_cast<u16*>(shared);  // later P
  u16* k = q + kChunk * kWide;
  float* a = reinterpret_cast<float*>(k + kChunk * kWide);  // [64, 72]
  __shared__ float sum[2][kChunk], strong[2][kChunk], query_scale[kChunk], key_scale[kChunk];
  const int chunk = blockIdx.x, key_head = blockIdx.y, real = real_rows(rows, chunk), warp = threadIdx.x / 32;
  const int group = rows.value_heads / rows.key_heads;
  const u16* y = rows.y + static_cast<i64>(chunk) * kChunk * rows.step + key_head * kDim;
  bring_tile<kChunk, kDim, kWide, kPrepareThreads>(shared_address(q), y, rows.step, real);
  bring_tile<kChunk, kDim, kWide, kPrepareThreads>(shared_address(k), y + rows.key_heads * kDim, rows.step, real);
  commit();
  if (warp == 3) sum_decays(rows, key_head * group, chunk, sum[0], strong[0]);
  await_tiles<0>();
  __syncthreads();
  {
    const int row = threadIdx.x / 2, half = threadIdx.x % 2;
    const float of_query = inverse_norm(q, row, half) * kQueryScale, of_key = inverse_norm(k, row, half);
    if (half == 0) {
      const i64 at = (static_cast<i64>(key_head) * rows.chunks + chunk) * kChunk + row;
      query_scale[row] = rows.query_scale[at] = of_query;
      key_scale[row] = rows.key_scale[at] = of_key;
    }
  }
  __syncthreads();
  float qk[8][4], kk[8][4];
  row_products(qk, kk, q, k, query_scale, key_scale);
  __syncthreads();
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member, turn = member & 1;
    const i64 by_chunk = static_cast<i64>(head) * rows.chunks + chunk;
    decay_products(q, a, qk, kk, sum[turn], strong[turn]);
    __syncthreads();
    // T: the inverses of four diagonal blocks of 16, then of two of 32, then the whole.
    if (warp < 2) {
      invert_block(a, threadIdx.x / 16, threadIdx.x % 16);
    } else if (warp == 2) {
      write_scalars_of(rows.scalars + by_chunk * kScalars, sum[turn], strong[turn], query_scale, key_scale);
    } else if (member + 1 < group) {
      sum_decays(rows, head + 1, chunk, sum[turn ^ 1], strong[turn ^ 1]);
    }
    __syncthreads();
    float r[2][4];
    if (warp < 2) {
      lower_left<16>(r, a, 32 * warp, 0, 0);
      __syncwarp();
      put_lower_left(a, r, 32 * warp + 16, 32 * warp);
    } else {
      send_tile<kChunk, kChunk, kNarrow, 64>(rows.score + by_chunk * kSquare, kChunk, q);
    }
    __syncthreads();
    lower_left<32>(r, a, 0, 16 * (warp & 1), 16 * (warp >> 1));
    __syncthreads();
    put_lower_left(a, r, 32 + 16 * (warp & 1), 16 * (warp >> 1));
    __syncthreads();
#pragma unroll
    for (int piece = threadIdx.x; piece < kSquare / 8; piece += kPrepareThreads) {
      const float4* from = reinterpret_cast<const float4*>(a + piece / 8 * kExact + piece % 8 * 8);
      const float4 one = from[0], two = from[1];
      *reinterpret_cast<uint4*>(rows.inverse + by_chunk * kSquare + piece * 8) =
          make_uint4(pack(one.x, one.y), pack(one.z, one.w), pack(two.x, two.y), pack(two.z, two.w));
    }
    __syncthreads();
  }
}
