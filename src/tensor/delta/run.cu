
// --- from chunk to chunk -----------------------------------------------------------------------------------------
//
// A warp carries 16 columns of one head's state through all chunks. It holds their transpose, [16, 128] in float32, as the
// results of its products: rounded to bfloat16 these are left operands as they stand, so that nothing that goes from chunk
// to chunk leaves the registers, and warps wait for nothing but the tiles of the chunks. All products are transposed:
//
//   R^T = v^T - (S^T k^T) exp(G) c_k      V'^T = (R^T strength) T^T      out^T = (S^T q^T) exp(G) c_q + V'^T P^T
//
// Four warps of a block compute. Four others bring tiles of later chunks, and send what was computed of the chunk before from
// shared to global memory.

constexpr int kRunThreads = 256, kBringers = 128;
constexpr int kSliceBytes = kChunk * kNarrow * 2, kScalarBytes = 2048;
constexpr int kSmallStage = kWideBytes + kSquareBytes + kSliceBytes + kScalarBytes;
constexpr int kLargeStage = kSmallStage + kWideBytes + kSquareBytes;

// Shared memory from the first multiple of 1024 bytes on.
__device__ inline u32 aligned_shared() { return (shared_address(shared) + 1023) & ~1023u; }

// Tiles of a chunk, as shared addresses.
struct Stage {
  u32 k, inverse, v, scalars, q, score;
};
__device__ inline Stage stage_at(int bytes, int which) {
  const u32 k = aligned_shared() + which * bytes, inverse = k + kWideBytes, v = inverse + kSquareBytes;
  const u32 scalars = v + kSliceBytes, q = scalars + kScalarBytes;
  return {k, inverse, v, scalars, q, q + kWideBytes};
}

// Brings keys, T and row scalars of a chunk, and with QUERIES queries and P. `v` is 64 columns of values or of output
// gradients, or null.
template <bool QUERIES>
__device__ inline void bring_chunk(const Stage& stage, const Rows& rows, int head, int chunk, const u16* v, i64 step) {
  const int real = real_rows(rows, chunk), key_head = head / (rows.value_heads / rows.key_heads);
  const i64 first = static_cast<i64>(chunk) * kChunk, by_chunk = static_cast<i64>(head) * rows.chunks + chunk;
  const u16* q = rows.y + first * rows.step + key_head * kDim;
  bring_operand<kDim, kBringers>(stage.k, q + rows.key_heads * kDim, rows.step, real);
  if (v != nullptr) bring_tile<kChunk, kSlice, kNarrow, kBringers>(stage.v, v + first * step, step, real);
  bring_operand<kChunk, kBringers>(stage.inverse, rows.inverse + by_chunk * kSquare, kChunk, kChunk);
  const int piece = threadIdx.x % kBringers;
  if (piece < kScalars / 4) bring(stage.scalars + piece * 16, rows.scalars + by_chunk * kScalars + piece * 4, true);
  if (QUERIES) {
    bring_operand<kDim, kBringers>(stage.q, q, rows.step, real);
    bring_operand<kChunk, kBringers>(stage.score, rows.score + by_chunk * kSquare, kChunk, kChunk);
  }
}

// Where computing warps leave what is sent to global memory, for one of two chunks in turn.
struct Sent {
  u16* state;    // [64, 128]: 64 columns of a state, transposed
  u16* columns;  // [64, 64]: of V' or dX, transposed
  u16* rows;     // [64, 64]: of outputs or value gradients
};
template <int STAGES, bool QUERIES, bool STATE>
__device__ inline Sent sent_at(int turn) {
  constexpr int kBytes = QUERIES ? kLargeStage : kSmallStage;
  constexpr int kOfState = STATE ? kSlice * kWide : 0, kOfColumns = STATE ? kSlice * kNarrow : 0;
  constexpr int kEach = kOfState + kOfColumns + kChunk * kNarrow;
  const u32 aligned = aligned_shared() - shared_address(shared);
  u16* at = reinterpret_cast<u16*>(shared + aligned + STAGES * kBytes) + (turn & 1) * kEach;
  return {at, at + kOfState, at + kOfState + kOfColumns};
}

// What the four bringing warps do: the tiles of all chunks, in order or from the last to the first. send(turn) takes what
// was computed in a turn to global memory. Computing warps meet the same barriers.
template <int STAGES, bool QUERIES, bool BACKWARDS, typename Send>
__device__ inline void bring_all(const Rows& rows, int head, const u16* v, i64 step, Send send) {
  constexpr int kBytes = QUERIES ? kLargeStage : kSmallStage;
  const auto bring_next = [&](int turn) {
    if (turn < rows.chunks) {
      const int chunk = BACKWARDS ? rows.chunks - 1 - turn : turn;
      bring_chunk<QUERIES>(stage_at(kBytes, turn % STAGES), rows, head, chunk, v, step);
    }
    commit();
  };
  for (int turn = 0; turn < STAGES - 1; ++turn) bring_next(turn);
  for (int turn = 0; turn < rows.chunks; ++turn) {
    await_tiles<STAGES - 2>();
    publish();
    // This turn's tiles are there, and the computing warps have left those of the turn before.
    __syncthreads();
    bring_next(turn + STAGES - 1);
    if (turn > 0) send(turn - 1);
  }
  __syncthreads();
  send(rows.chunks - 1);
}

// The transpose of 16 columns of a state: rows are columns `column` .. + 16 of the state.
struct Carried {
  float s[16][4];
};

// Calls each(n, e, row, column) for the elements of a lane, row and column of the state.
template <typename Each>
__device__ inline void each_of_state(int column, Each each) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) each(n, e, 8 * n + pair() + e % 2, column + line() + e / 2 * 8);
  }
}

// Left operands to 16 rows of a tile in shared memory, columns `first` .. + 16.
template <int STRIDE>
__device__ inline void keep(u16* to, const u32 (&a)[4], int first) {
  u16* at = to + line() * STRIDE + first + pair();
  *reinterpret_cast<u32*>(at) = a[0];
  *reinterpret_cast<u32*>(at + 8 * STRIDE) = a[1];
  *reinterpret_cast<u32*>(at + 8) = a[2];
  *reinterpret_cast<u32*>(at + 8 * STRIDE + 8) = a[3];
}

// Two neighbouring scalars for the columns of a lane in tile n.
__device__ inline float2 scalars_of(u32 scalars, int which, int n) {
  float2 two;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(two.x), "=f"(two.y)
               : "r"(scalars + (which + 8 * n + pair()) * 4)
               : "memory");
  return two;
}
__device__ inline float scalar_of(u32 scalars, int which) {
  float one;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(scalars + which * 4) : "memory");
  return one;
}

// Columns of c times scalars.
__device__ inline void scale(float (&c)[8][4], u32 scalars, int which) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 by = scalars_of(scalars, which, n);
    c[n][0] *= by.x;
    c[n][1] *= by.y;
    c[n][2] *= by.x;
    c[n][3] *= by.y;
  }
}

// The transpose of c [16, 64] to 16 columns of a [64, 64] tile in shared memory.
__device__ inline void keep_rows(u16* to, const float (&c)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    u16* at = to + (8 * n + line()) * kNarrow + pair();
    *reinterpret_cast<u32*>(at) = transposed(pack(c[n][0], c[n][1]));
    *reinterpret_cast<u32*>(at + 8) = transposed(pack(c[n][2], c[n][3]));
  }
}

// strength R^T as left operands: `known` is S^T k^T. `values` [64, 64] has v, of which 16 columns are read;
// it is 0 for none.
__device__ inline void correct(u32 (&x)[4][4], const float (&known)[8][4], const Stage& stage, bool values, int column) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    u32 v[4] = {};
    if (values) left_transposed<kNarrow>(v, stage.v, column, 16 * c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * c + half;
      const float2 by = scalars_of(stage.scalars, kKnown, n), strong = scalars_of(stage.scalars, kStrong, n);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 both = v[2 * half + e];
        x[c][2 * half + e] = pack(strong.x * fmaf(-by.x, known[n][2 * e], low(both)),
                                  strong.y * fmaf(-by.y, known[n][2 * e + 1], high(both)));
      }
    }
  }
}

// With OUT: outputs and the state after the rows. With KEEP: the state before each chunk and V'. MAP: increment in blocks
// x = 0, 1 and factor in blocks x = 2, 3. Block x: columns of the state; block y: value head.
template <bool OUT, bool KEEP, bool MAP>
__device__ inline void run(const Rows& rows) {
  constexpr int kBytes = OUT ? kLargeStage : kSmallStage, kStages = 3;
  const int head = blockIdx.y, slice = (blockIdx.x % 2) * kSlice;
  const bool factor = MAP && blockIdx.x >= 2;
  if (threadIdx.x >= kRunThreads - kBringers) {
    const u16* v = factor ? nullptr : rows.y + 2 * rows.key_heads * kDim + head * kDim + slice;
    bring_all<kStages, OUT, false>(rows, head, v, rows.step, [&](int chunk) {
      const Sent sent = sent_at<kStages, OUT, KEEP>(chunk);
      const i64 by_chunk = static_cast<i64>(head) * rows.chunks + chunk;
      if (KEEP) {
        send_tile<kSlice, kDim, kWide, kBringers>(rows.states + by_chunk * kState + slice * kDim, kDim, sent.state);
        send_tile<kSlice, kChunk, kNarrow, kBringers>(rows.corrected + (by_chunk * kDim + slice) * kChunk, kChunk,
                                                      sent.columns);
      }
      if (OUT) {
        const i64 step = static_cast<i64>(rows.value_heads) * kDim;
        send_tile<kChunk, kSlice, kNarrow, kBringers>(rows.out + chunk * kChunk * step + head * kDim + slice, step,
                                                      sent.rows, real_rows(rows, chunk));
      }
    });
    return;
  }
  const int own = threadIdx.x / 32 * 16, column = slice + own;
  const i64 of_head = static_cast<i64>(head) * kState;
  Carried carried;
  each_of_state(column, [&](int n, int e, int row, int at) {
    const float identity = factor && row == at ? 1.0f : 0.0f;
    carried.s[n][e] = MAP ? identity : rows.state[of_head + row * kDim + at];
  });
  for (int chunk = 0; chunk < rows.chunks; ++chunk) {
    const Stage stage = stage_at(kBytes, chunk % kStages);
    const Sent sent = sent_at<kStages, OUT, KEEP>(chunk);
    __syncthreads();
    u32 a[8][4], x[4][4], left_over[4][4];
    float known[8][4], out[8][4];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      as_left(a[c], carried.s, 2 * c);
      if (KEEP) keep<kWide>(sent.state + own * kWide, a[c], 16 * c);
    }
    multiply_rows(known, a, stage.k);
    if (OUT) multiply_rows(out, a, stage.q);
    await_products<OUT ? 1 : 0>(known);
    correct(x, known, stage, !factor, own);
    multiply_triangle<true, false>(known, x, stage.inverse);
    const float kept = __expf(scalar_of(stage.scalars, kSum + kChunk - 1));
    each_of_state(column, [&](int n, int e, int, int) { carried.s[n][e] *= kept; });
    await_products<0>(known);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      as_left(x[c], known, 2 * c);
      if (KEEP) keep<kNarrow>(sent.columns + own * kNarrow, x[c], 16 * c);
    }
    if (OUT) {
      await_products<0>(out);
      scale(out, stage.scalars, kAsked);
      multiply_triangle<true, true>(out, x, stage.score);
    }
    scale(known, stage.scalars, kLeftOver);
#pragma unroll
    for (int c = 0; c < 4; ++c) as_left(left_over[c], known, 2 * c);
    add_outer(carried.s, left_over, stage.k);
    if (OUT) {
      await_products<1>(out);
      keep_rows(sent.rows + own, out);
    }
    await_products<0>(carried.s);
  }
  __syncthreads();
  if (KEEP) return;
  float* next = factor ? rows.factor : rows.next;
  each_of_state(column, [&](int n, int e, int row, int at) { next[of_head + row * kDim + at] = carried.s[n][e]; });
}

extern "C" __global__ void __launch_bounds__(kRunThreads, 1) forward(const __grid_constant__ Rows rows) {
  run<true, false, false>(rows);
}
extern "C" __global__ void __launch_bounds__(kRunThreads, 1) states(const __grid_constant__ Rows rows) {
  run<false, true, false>(rows);
}
extern "C" __global__ void __launch_bounds__(kRunThreads, HOPPER ? 1 : 2) map(const __grid_constant__ Rows rows) {
  run<false, false, true>(rows);
}

// --- gradients of states, from the last chunk to the first -------------------------------------------------------
//
//   dV'^T = dout^T P + (dS^T k^T) c_k exp(G_last - G)        dX^T = dV'^T T        dv = strength dX
//   dS^T <- exp(G_last) dS^T + (dout^T c_q exp(G)) q - (dX^T c_k exp(G) strength) k
//
// With WRITE: dS after each chunk, dX and dv. Block x: columns of the state; block y: value head.
template <bool WRITE>
__device__ inline void reverse(const Rows& rows) {
  constexpr int kStages = WRITE ? 2 : 3;
  const int head = blockIdx.y, slice = blockIdx.x * kSlice;
  if (threadIdx.x >= kRunThreads - kBringers) {
    const i64 step = static_cast<i64>(rows.value_heads) * kDim;
    bring_all<kStages, true, true>(rows, head, rows.dout + head * kDim + slice, step, [&](int turn) {
      if (!WRITE) return;
      const Sent sent = sent_at<kStages, true, true>(turn);
      const int chunk = rows.chunks - 1 - turn;
      const i64 by_chunk = static_cast<i64>(head) * rows.chunks + chunk;
      send_tile<kSlice, kDim, kWide, kBringers>(rows.dstates + by_chunk * kState + slice * kDim, kDim, sent.state);
      send_tile<kSlice, kChunk, kNarrow, kBringers>(rows.dx + (by_chunk * kDim + slice) * kChunk, kChunk, sent.columns);
      u16* dv = rows.dy + chunk * kChunk * rows.channels + 2 * rows.key_heads * kDim + head * kDim + slice;
      send_tile<kChunk, kSlice, kNarrow, kBringers>(dv, rows.channels, sent.rows, real_rows(rows, chunk));
    });
    return;
  }
  const int own = threadIdx.x / 32 * 16, column = slice + own;
  const i64 of_head = static_cast<i64>(head) * kState;
  Carried carried;
  each_of_state(column, [&](int n, int e, int row, int at) { carried.s[n][e] = rows.state[of_head + row * kDim + at]; });
  for (int turn = 0; turn < rows.chunks; ++turn) {
    const Stage stage = stage_at(kLargeStage, turn % kStages);
    const Sent sent = sent_at<kStages, true, true>(turn);
    __syncthreads();
    u32 a[8][4], dout[4][4], asked[4][4], x[4][4];
    float d[8][4];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      as_left(a[c], carried.s, 2 * c);
      if (WRITE) keep<kWide>(sent.state + own * kWide, a[c], 16 * c);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      left_transposed<kNarrow>(dout[c], stage.v, own, 16 * c);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 by = scalars_of(stage.scalars, kAsked, 2 * c + e / 2);
        asked[c][e] = pack(by.x * low(dout[c][e]), by.y * high(dout[c][e]));
      }
    }
    const float kept = __expf(scalar_of(stage.scalars, kSum + kChunk - 1));
    each_of_state(column, [&](int n, int e, int, int) { carried.s[n][e] *= kept; });
    multiply_rows(d, a, stage.k);
    add_outer(carried.s, asked, stage.q);
    await_products<1>(d);
    scale(d, stage.scalars, kLeftOver);
    multiply_triangle<false, true>(d, dout, stage.score);
    await_products<0>(d);
    await_products<0>(carried.s);
#pragma unroll
    for (int c = 0; c < 4; ++c) as_left(x[c], d, 2 * c);
    multiply_triangle<false, false>(d, x, stage.inverse);
    await_products<0>(d);
    if (WRITE) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        as_left(x[c], d, 2 * c);
        keep<kNarrow>(sent.columns + own * kNarrow, x[c], 16 * c);
      }
    }
    scale(d, stage.scalars, kStrong);
    if (WRITE) keep_rows(sent.rows + own, d);
    scale(d, stage.scalars, kKnown);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      as_left(x[c], d, 2 * c);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[c][e] ^= 0x80008000u;  // negative
    }
    add_outer(carried.s, x, stage.k);
    await_products<0>(carried.s);
  }
  __syncthreads();
  each_of_state(column, [&](int n, int e, int row, int at) { rows.next[of_head + row * kDim + at] = carried.s[n][e]; });
}

extern "C" __global__ void __launch_bounds__(kRunThreads, 1) dstates(const __grid_constant__ Rows rows) {
  reverse<true>(rows);
}
extern "C" __global__ void __launch_bounds__(kRunThreads, 1) pull(const __grid_constant__ Rows rows) {
  reverse<false>(rows);
}
