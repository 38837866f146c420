
// --- gradients of queries, keys, decays and strengths ------------------------------------------------------------
//
// For a chunk and a value head, with D_ij = exp(G_i - G_j) for i >= j, else 0:
//
//   Z = (dout V'^T) D                       N = - strength (dX V'^T) D, strictly lower
//   dq = exp(G) (dout S^T) + Z k            dk = - strength exp(G) (dX S^T) + exp(G_last - G) (V' dS^T) + (N + N^T) k + Z^T q
//   dstrength_i = (dX_i V'_i) / strength_i
//
// The gradient of G_i is the sum over all factors that hold exp(G_i) of the factor times its gradient, less the same over those
// that hold exp(-G_i). That of a decay is the sum of those of G from its row on.
//
// A block has a chunk and a key head: it adds up the gradients of the key head's value heads, one after the other.

constexpr int kGradientThreads = 512;
constexpr int kStateTile = kDim * kWide;  // elements
constexpr int kRowTile = kChunk * kWide;
constexpr int kColumnTile = kDim * kNarrow;
constexpr int kSquareTile = kChunk * kNarrow;

// Tiles in shared memory, then partial sums.
struct Tiles {
  u16 *k, *q, *corrected, *dx, *dout, *state, *dstate, *by_key, *by_query, *between;
  float *key_scale, *query_scale;
  float* of_row;     // [4, 64]: what rows add to the gradient of G, by quarters of the columns
  float* of_column;  // [4, 64]: what columns take from it, by blocks of rows
  float* of_last;    // [4, 64]: what goes to that of the last row, by quarters of the columns
  float* diagonal;   // [64]: dX_i V'_i
  float* of_state;   // [16]: parts of the sum of S dS
  float *sum, *strong;  // of this head; those of the next head lie behind or before
};
__device__ inline Tiles tiles_at(int member) {
  Tiles at;
  at.k = reinterpret_cast<u16*>(shared);
  at.q = at.k + kRowTile;
  at.corrected = at.q + kRowTile;
  at.dx = at.corrected + kColumnTile;
  at.dout = at.dx + kColumnTile;
  at.state = at.dout + kRowTile;
  at.dstate = at.state + kStateTile;
  at.by_key = at.dstate + kStateTile;
  at.by_query = at.by_key + kSquareTile;
  at.between = at.by_query + kSquareTile;
  at.key_scale = reinterpret_cast<float*>(at.between + kSquareTile);
  at.query_scale = at.key_scale + kChunk;
  at.of_row = at.query_scale + kChunk;
  at.of_column = at.of_row + 4 * kChunk;
  at.of_last = at.of_column + 4 * kChunk;
  at.diagonal = at.of_last + 4 * kChunk;
  at.of_state = at.diagonal + kChunk;
  at.sum = at.of_state + 16 + member % 2 * 2 * kChunk;
  at.strong = at.sum + kChunk;
  return at;
}

__device__ inline void bring_states(const Tiles& at, const Rows& rows, int head, int chunk) {
  const i64 state = (static_cast<i64>(head) * rows.chunks + chunk) * kState;
  bring_tile<kDim, kDim, kWide, kGradientThreads>(shared_address(at.state), rows.states + state, kDim, kDim);
  bring_tile<kDim, kDim, kWide, kGradientThreads>(shared_address(at.dstate), rows.dstates + state, kDim, kDim);
  commit();
}

__device__ inline void bring_rows(const Tiles& at, const Rows& rows, int head, int chunk) {
  const i64 by_chunk = static_cast<i64>(head) * rows.chunks + chunk;
  const i64 step = static_cast<i64>(rows.value_heads) * kDim, columns = by_chunk * kChunk * kDim;
  const u16* dout = rows.dout + static_cast<i64>(chunk) * kChunk * step + head * kDim;
  bring_tile<kDim, kChunk, kNarrow, kGradientThreads>(shared_address(at.corrected), rows.corrected + columns, kChunk,
                                                      kDim);
  bring_tile<kDim, kChunk, kNarrow, kGradientThreads>(shared_address(at.dx), rows.dx + columns, kChunk, kDim);
  bring_tile<kChunk, kDim, kWide, kGradientThreads>(shared_address(at.dout), dout, step, real_rows(rows, chunk));
  if (threadIdx.x < 32) {
    const int piece = (threadIdx.x % 16) * 4;
    const float* from = rows.scalars + by_chunk * kScalars + (threadIdx.x < 16 ? kSum : kStrong) + piece;
    bring(shared_address((threadIdx.x < 16 ? at.sum : at.strong) + piece), from, true);
  }
  commit();
}

__device__ inline float across_quad(float x) {
  x += __shfl_xor_sync(kAll, x, 1);
  return x + __shfl_xor_sync(kAll, x, 2);
}
__device__ inline float across_lines(float x) {
  x += __shfl_xor_sync(kAll, x, 4);
  x += __shfl_xor_sync(kAll, x, 8);
  return x + __shfl_xor_sync(kAll, x, 16);
}

// A warp's place: 16 rows, and a quarter of the columns: 32 of 128, 16 of 64. Of the [64, 64] results only ten places lie on
// or below the diagonal; they are dealt evenly to the four units of a multiprocessor, which have every fourth warp each.
struct Place {
  int block, quarter;
  int row;  // of the first result of the lane
};
__device__ inline Place place() {
  const int warp = threadIdx.x / 32, block = warp / 4;
  return {block, (warp - block * (block + 1) / 2) & 3, 16 * block + line()};
}

// How a [64, 128] tile lies: its rows, or its columns.
enum Lie { kRows, kColumns };

// 16 rows and columns from .. from + 16 of a [64, 128] tile as a left operand.
template <Lie LIE>
__device__ inline void left_of(u32 (&a)[4], const u16* tile, const Place& at, int from) {
  if (LIE == kRows) {
    left<kWide>(a, shared_address(tile), 16 * at.block, from);
  } else {
    left_transposed<kNarrow>(a, shared_address(tile), 16 * at.block, from);
  }
}

// c += a b^T of two [64, 128] tiles; nothing above the diagonal.
template <Lie A, Lie B>
__device__ inline void add_square(float (&c)[2][4], const u16* a_tile, const u16* b_tile, const Place& at) {
  if (at.quarter > at.block) return;
#pragma unroll
  for (int from = 0; from < kDim; from += 16) {
    u32 a[4], b[4];
    left_of<A>(a, a_tile, at, from);
    if (B == kRows) {
      right_transposed<kWide>(b, shared_address(b_tile), from, 16 * at.quarter);
    } else {
      right<kNarrow>(b, shared_address(b_tile), from, 16 * at.quarter);
    }
    multiply(c[0], a, b[0], b[1]);
    multiply(c[1], a, b[2], b[3]);
  }
}

// c += a b, a 16 rows of a [64, 64] tile (TRANSPOSED: of its transpose), b [64, 128]. Sums run over the 16-row blocks first
// .. last of b.
template <bool TRANSPOSED>
__device__ inline void add_rows(float (&c)[4][4], const u16* square, const u16* wide, const Place& at, int first, int last) {
#pragma unroll
  for (int from = 0; from < 4; ++from) {
    if (from < first || from > last) continue;
    u32 a[4], b[4];
    if (TRANSPOSED) {
      left_transposed<kNarrow>(a, shared_address(square), 16 * at.block, 16 * from);
    } else {
      left<kNarrow>(a, shared_address(square), 16 * at.block, 16 * from);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      right<kWide>(b, shared_address(wide), 16 * from, 32 * at.quarter + 16 * n);
      multiply(c[2 * n], a, b[0], b[1]);
      multiply(c[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// c += a s^T of 16 columns, a a left operand and s a state, of which `state` is the transpose.
__device__ inline void add_state_product(float (&c)[4][4], const u32 (&a)[4], const u32 (&b)[2][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) multiply(c[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
}
__device__ inline void right_of_state(u32 (&b)[2][4], const u16* state, const Place& at, int from) {
#pragma unroll
  for (int n = 0; n < 2; ++n) right<kWide>(b[n], shared_address(state), from, 32 * at.quarter + 16 * n);
}

// to += factor e, and adds to `dot` the sum of that times the rows of `tile`.
__device__ inline void take_part(float (&to)[4][4], const float (&e)[4][4], const float (&factor)[2], const u16* tile,
                                 const Place& at, float (&dot)[2]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = 32 * at.quarter + 8 * n + pair();
      const u32 both = *reinterpret_cast<const u32*>(tile + (at.row + 8 * half) * kWide + column);
      const float e0 = factor[half] * e[n][2 * half], e1 = factor[half] * e[n][2 * half + 1];
      to[n][2 * half] += e0;
      to[n][2 * half + 1] += e1;
      dot[half] = fmaf(e0, low(both), fmaf(e1, high(both), dot[half]));
    }
  }
}

// Z and N to shared memory as the operands of later products, and what they add to the gradient of G.
__device__ inline void take_squares(const Tiles& t, const Place& at, const float (&qk)[2][4], const float (&kk)[2][4],
                                    const float (&z)[2][4], const float (&d)[2][4], float (&of_row)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int first = 16 * at.quarter + 8 * n + pair();
    float of_column[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = at.row + 8 * half;
      float by_key[2], by_query[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = first + e, x = 2 * half + e;
        const float gamma = j <= i ? __expf(t.sum[i] - t.sum[j]) : 0.0f;
        const float score = z[n][x] * gamma, own = j < i ? -t.strong[i] * d[n][x] * gamma : 0.0f;
        const float grows = score * qk[n][x] + own * kk[n][x];
        of_row[half] += grows;
        of_column[e] += grows;
        by_key[e] = score * t.key_scale[j];
        by_query[e] = score * t.query_scale[i];
        if (j == i) t.diagonal[i] = d[n][x];
        if (j <= i) {
          t.between[i * kNarrow + j] = narrow(own * t.key_scale[j]);
          t.between[j * kNarrow + i] = narrow(own * t.key_scale[i]);
        }
      }
      *reinterpret_cast<u32*>(t.by_key + i * kNarrow + first) = pack(by_key[0], by_key[1]);
      *reinterpret_cast<u32*>(t.by_query + i * kNarrow + first) = pack(by_query[0], by_query[1]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float whole = across_lines(of_column[e]);
      if (lane() < 4) t.of_column[at.block * kChunk + first + e] = whole;
    }
  }
}

// Sum over the state of S dS, in parts of a warp.
__device__ inline void dot_states(const Tiles& t) {
  float dot = 0.0f;
  for (int piece = threadIdx.x; piece < kState / 8; piece += kGradientThreads) {
    const int at = piece / 16 * kWide + piece % 16 * 8;
    const uint4 a = *reinterpret_cast<const uint4*>(t.state + at), b = *reinterpret_cast<const uint4*>(t.dstate + at);
    const u32 one[4] = {a.x, a.y, a.z, a.w}, two[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) dot = fmaf(low(one[i]), low(two[i]), fmaf(high(one[i]), high(two[i]), dot));
  }
  dot = across_lines(across_quad(dot));
  if (lane() == 0) t.of_state[threadIdx.x / 32] = dot;
}

// Gradients of the decays and strengths of a chunk, by one warp.
__device__ inline void write_scalars(const Tiles& t, const Rows& rows, int head, int chunk) {
  const int row = 2 * lane();
  float last = 0.0f, own[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = row + e;
    own[e] = 0.0f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      own[e] += t.of_row[part * kChunk + i] - t.of_column[part * kChunk + i];
      last += t.of_last[part * kChunk + i];
    }
  }
  last = across_lines(across_quad(last));
  float whole = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kGradientThreads / 32; ++warp) whole += t.of_state[warp];
  last = fmaf(__expf(t.sum[kChunk - 1]), whole, last);
  float from = own[0] + own[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float behind = __shfl_down_sync(kAll, from, step);
    if (lane() + step < 32) from += behind;
  }
  from += last;
  const int real = real_rows(rows, chunk);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (row + e >= real) continue;
    const i64 to = (static_cast<i64>(chunk) * kChunk + row + e) * rows.value_heads + head;
    const float strong = t.strong[row + e];
    rows.ddecay[to] = e == 0 ? from : from - own[0];
    rows.dstrength[to] = fabsf(strong) < 1e-30f ? 0.0f : t.diagonal[row + e] / strong;
  }
}

// Gradient of rows before they were normalised, from that of the normalised ones; `scale` is what normalised them, `root`
// the root of the width in it.
__device__ inline void write_rows(u16* to, i64 step, int real, const float (&d)[4][4], const u16* tile, const float* scale,
                                  float root, float* partial, const Place& at) {
  float dot[2] = {0.0f, 0.0f};
  const int first = 32 * at.quarter + pair();
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 both = *reinterpret_cast<const u32*>(tile + (at.row + 8 * half) * kWide + first + 8 * n);
      dot[half] = fmaf(d[n][2 * half], low(both), fmaf(d[n][2 * half + 1], high(both), dot[half]));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    dot[half] = across_quad(dot[half]);
    if (lane() % 4 == 0) partial[at.quarter * kChunk + at.row + 8 * half] = dot[half];
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = at.row + 8 * half;
    const float by = scale[i], inverse = by / root;
    float along = 0.0f;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) along += partial[quarter * kChunk + i];
    along *= inverse * inverse;
    if (i >= real) continue;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const u32 both = *reinterpret_cast<const u32*>(tile + i * kWide + first + 8 * n);
      const float d0 = by * (d[n][2 * half] - along * low(both)), d1 = by * (d[n][2 * half + 1] - along * high(both));
      *reinterpret_cast<u32*>(to + i * step + first + 8 * n) = pack(d0, d1);
    }
  }
}

// Products of the normalised rows: queries with keys and keys with keys.
__device__ inline void own_products(const Tiles& t, const Place& at, float (&qk)[2][4], float (&kk)[2][4]) {
  clear(qk);
  clear(kk);
  add_square<kRows, kRows>(qk, t.q, t.k, at);
  add_square<kRows, kRows>(kk, t.k, t.k, at);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = at.row + 8 * (x / 2), j = 16 * at.quarter + 8 * n + pair() + x % 2;
      qk[n][x] *= t.query_scale[i] * t.key_scale[j];
      kk[n][x] *= t.key_scale[i] * t.key_scale[j];
    }
  }
}

// What goes through the states before and after the chunk.
__device__ inline void take_states(const Tiles& t, const Place& at, float (&dq)[4][4], float (&dk)[4][4],
                                   float (&of_row)[2]) {
  float grown[2], against[2], left_over[2], of_query[2] = {}, of_key[2] = {}, of_last[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = at.row + 8 * half;
    grown[half] = __expf(t.sum[i]);
    against[half] = -t.strong[i] * grown[half];
    left_over[half] = __expf(t.sum[kChunk - 1] - t.sum[i]);
  }
  float of_dout[4][4], other[4][4];
  clear(of_dout);
  clear(other);
#pragma unroll
  for (int from = 0; from < kDim; from += 16) {
    u32 dout[4], dx[4], b[2][4];
    left_of<kRows>(dout, t.dout, at, from);
    left_of<kColumns>(dx, t.dx, at, from);
    right_of_state(b, t.state, at, from);
    add_state_product(of_dout, dout, b);
    add_state_product(other, dx, b);
  }
  take_part(dq, of_dout, grown, t.q, at, of_query);
  take_part(dk, other, against, t.k, at, of_key);
  clear(other);
#pragma unroll
  for (int from = 0; from < kDim; from += 16) {
    u32 corrected[4], b[2][4];
    left_of<kColumns>(corrected, t.corrected, at, from);
    right_of_state(b, t.dstate, at, from);
    add_state_product(other, corrected, b);
  }
  take_part(dk, other, left_over, t.k, at, of_last);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = at.row + 8 * half;
    const float last = of_last[half] * t.key_scale[i], whole = across_quad(last);
    of_row[half] += of_query[half] * t.query_scale[i] + of_key[half] * t.key_scale[i] - last;
    if (lane() % 4 == 0) t.of_last[at.quarter * kChunk + i] = whole;
  }
}

// Block x: chunk; block y: key head.
extern "C" __global__ void __launch_bounds__(kGradientThreads, 1) gradient(const __grid_constant__ Rows rows) {
  const int chunk = blockIdx.x, key_head = blockIdx.y, real = real_rows(rows, chunk);
  const int group = rows.value_heads / rows.key_heads;
  const i64 first = static_cast<i64>(chunk) * kChunk, to_keys = rows.key_heads * kDim;
  const u16* y = rows.y + first * rows.step + key_head * kDim;
  u16* dy = rows.dy + first * rows.channels + key_head * kDim;
  const Tiles own = tiles_at(0);
  bring_tile<kChunk, kDim, kWide, kGradientThreads>(shared_address(own.q), y, rows.step, real);
  bring_tile<kChunk, kDim, kWide, kGradientThreads>(shared_address(own.k), y + to_keys, rows.step, real);
  if (threadIdx.x < 32) {
    const i64 at = (static_cast<i64>(key_head) * rows.chunks + chunk) * kChunk + (threadIdx.x % 16) * 4;
    const bool keys = threadIdx.x < 16;
    bring(shared_address((keys ? own.key_scale : own.query_scale) + (threadIdx.x % 16) * 4),
          (keys ? rows.key_scale : rows.query_scale) + at, true);
  }
  commit();
  bring_states(own, rows, key_head * group, chunk);
  bring_rows(own, rows, key_head * group, chunk);
  await_tiles<2>();
  __syncthreads();
  const Place at = place();
  float qk[2][4], kk[2][4], dq[4][4], dk[4][4];
  own_products(own, at, qk, kk);
  clear(dq);
  clear(dk);
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member;
    const Tiles t = tiles_at(member);
    const bool more = member + 1 < group;
    await_tiles<0>();
    __syncthreads();
    // 1. What needs the states.
    float of_row[2] = {};
    dot_states(t);
    take_states(t, at, dq, dk, of_row);
    __syncthreads();
    if (more) bring_states(t, rows, head + 1, chunk);
    // 2. Products of rows with rows.
    float z[2][4], d[2][4];
    clear(z);
    clear(d);
    add_square<kRows, kColumns>(z, t.dout, t.corrected, at);
    add_square<kColumns, kColumns>(d, t.dx, t.corrected, at);
    take_squares(t, at, qk, kk, z, d, of_row);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float whole = across_quad(of_row[half]);
      if (lane() % 4 == 0) t.of_row[at.quarter * kChunk + at.row + 8 * half] = whole;
    }
    __syncthreads();
    if (more) bring_rows(tiles_at(member + 1), rows, head + 1, chunk);
    // 3. What they give to queries and keys.
    add_rows<false>(dq, t.by_key, t.k, at, 0, at.block);
    add_rows<true>(dk, t.by_query, t.q, at, at.block, 3);
    add_rows<false>(dk, t.between, t.k, at, 0, 3);
    if (threadIdx.x < 32) write_scalars(t, rows, head, chunk);
  }
  __syncthreads();
  write_rows(dy, rows.channels, real, dq, own.q, own.query_scale, kQueryScale, own.of_row, at);
  write_rows(dy + to_keys, rows.channels, real, dk, own.k, own.key_scale, 1.0f, own.of_last, at);
}
