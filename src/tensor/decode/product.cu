
// --- weights times few rows --------------------------------------------------------------------------------------
//
// Block x has every gridDim.x-th tile of 16 weight rows, block y a share of the inputs (a split). The inputs are cut
// into steps of 64; a split's steps go to the block's warps in turn. Every warp brings its own pieces of weights, 16
// rows by 64 inputs, through a ring in shared memory, many at once and across tiles, before it knows x. Sums meet in the
// order of the warps: the bits of a row do not depend on how many answers there are.
//
// A lane of a product of 16 by 16 by 8 wants inputs 2t, 2t + 1, 2t + 8, 2t + 9 of a step of 16. Weights and x take
// inputs 8t to 8t + 8 of 32 instead, as two steps: both operands are permuted alike, and a lane loads 16 bytes at once.

constexpr int kProductThreads = 256;
constexpr int kProductWarps = kProductThreads / 32;
constexpr int kTileRows = 16;

// 16 rows of one weight.
struct Tile {
  const T* weight;
  int rows;    // that exist
  int column;  // of the first in the raw sums
};
__device__ inline Tile tile_of(const Product& all, int tile) {
  for (int part = 0; part < all.parts; ++part) {
    const Rows& rows = all.rows[part];
    const int tiles = (rows.outputs + kTileRows - 1) / kTileRows;
    if (tile < tiles) {
      const int first = tile * kTileRows;
      return {in(rows.weight) + static_cast<int64>(first) * all.inputs, min(kTileRows, rows.outputs - first),
              rows.column + first};
    }
    tile -= tiles;
  }
  return {nullptr, 0, 0};
}
__device__ inline int tiles_of(const Product& all) {
  int tiles = 0;
  for (int part = 0; part < all.parts; ++part) tiles += (all.rows[part].outputs + kTileRows - 1) / kTileRows;
  return tiles;
}

#if DTYPE != 0

constexpr int kStep = 64;                       // inputs
constexpr int kPiece = kTileRows * kStep * 2;   // bytes of weights
constexpr int kLine = 20;                       // floats from answer to answer of a warp's sums: no bank conflicts
constexpr int kPiecesMany = 8, kPiecesFew = 4;  // of a warp's ring
constexpr int kXBytesMax = 72 * 1024;           // x of a split in shared memory beside many pieces
constexpr int kXBytesMost = 136 * 1024;         // beside few
constexpr int kPace = 1;                        // pieces of a warp on their way before x is there

// Steps of this block's split.
struct Steps {
  int first, count;
};
__device__ inline Steps steps_of(const Product& all) {
  const int steps = (all.inputs + kStep - 1) / kStep, splits = gridDim.y, split = blockIdx.y;
  const int first = steps * split / splits;
  return {first, steps * (split + 1) / splits - first};
}

// What a warp brings next.
struct Supply {
  const byte* from;  // of the lane: row lane/8 of the tile, 16 of the step's 128 bytes
  int rows;          // that exist from the lane's on
  int input;         // of the lane
  int number;        // of the tile
  int turn;          // of the warp's steps
  int slot;
};

template <int TILES, int PIECES, bool KEPT>
struct Stream {
  const Product& all;
  Steps steps;
  int tiles, warp, turns;
  u32 ring;
  const uint4* kept;  // x as lanes want it, [steps, 2, TILES, 32]
  Supply next;

  __device__ inline void begin(int number) {
    const Tile tile = tile_of(all, number);
    next.number = number;
    next.turn = 0;
    next.input = (steps.first + warp) * kStep + lane() % 8 * 8;
    next.rows = tile.rows - lane() / 8;
    next.from = reinterpret_cast<const byte*>(tile.weight + static_cast<int64>(lane() / 8) * all.inputs + next.input);
  }

  // Brings the next piece; an empty group of copies at the end.
  __device__ inline void supply() {
    if (next.number < tiles && turns > 0) {
      const int half = lane() % 8 / 4, line = lane() / 8;
      // Rows 0 to 8 before rows 8 to 16; neighbours change places in the second half: no bank conflicts.
      const u32 to = ring + next.slot * kPiece + half * (kPiece / 2) + lane() % 4 * 16;
      const u32 near = to + (line ^ half) * 64, far = to + ((line + 4) ^ half) * 64;
      const int64 step = static_cast<int64>(all.inputs) * 8;  // bytes of four rows
      const bool real = next.input < all.inputs;
      const byte* none = static_cast<const byte*>(all.x_ai);
      bring(near, real && next.rows > 0 ? next.from : none, real && next.rows > 0);
      bring(far, real && next.rows > 4 ? next.from + step : none, real && next.rows > 4);
      bring(near + 512, real && next.rows > 8 ? next.from + 2 * step : none, real && next.rows > 8);
      bring(far + 512, real && next.rows > 12 ? next.from + 3 * step : none, real && next.rows > 12);
      next.slot = (next.slot + 1) % PIECES;
      next.input += kProductWarps * kStep;
      next.from += kProductWarps * kStep * 2;
      if (++next.turn == turns) begin(next.number + gridDim.x);
    }
    commit();
  }

  // x of a lane: answer lane/4 of each eight, inputs lane%4 · 8 and the next seven of a half step.
  __device__ inline uint4 x_of(int step, int half, int n) const {
    return KEPT ? kept[((step * 2 + half) * TILES + n) * 32 + lane()] : x_in_memory(step, half, n);
  }
  __device__ inline uint4 x_in_memory(int step, int half, int n) const {
    const int answer = n * 8 + lane() / 4, input = (steps.first + step) * kStep + half * 32 + lane() % 4 * 8;
    if (answer >= all.answers || input >= all.inputs) return make_uint4(0, 0, 0, 0);
    return __ldcg(reinterpret_cast<const uint4*>(in(all.x_ai) + static_cast<int64>(answer) * all.inputs + input));
  }

  // The warp's share of x to shared memory.
  __device__ inline void keep_x(uint4* to) const {
    constexpr int kTogether = 8 / TILES;
    for (int first = 0; first < turns; first += kTogether) {
      uint4 x[kTogether][2][TILES];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int n = 0; n < TILES; ++n) x[i][half][n] = x_in_memory(warp + (first + i) * kProductWarps, half, n);
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int step = warp + (first + i) * kProductWarps;
        if (step >= steps.count) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int n = 0; n < TILES; ++n) to[((step * 2 + half) * TILES + n) * 32 + lane()] = x[i][half][n];
        }
      }
    }
    __syncwarp();
  }

  // Adds the pieces of COUNT turns to the sums, those of the two halves of a step apart.
  template <int COUNT>
  __device__ inline void add(float (&c)[2][TILES][4], int turn, int& slot) {
    await_copies<PIECES - COUNT>();
    __syncwarp();
    uint4 a[COUNT][2][2];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const byte* piece = shared + (ring - shared_address(shared)) + slot * kPiece;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int rows = 0; rows < 2; ++rows) {
          a[i][half][rows] =
              *reinterpret_cast<const uint4*>(piece + half * (kPiece / 2) + rows * 512 + (lane() ^ (4 * half)) * 16);
        }
      }
      slot = (slot + 1) % PIECES;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) supply();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 x = x_of(warp + (turn + i) * kProductWarps, half, n);
          const uint4 &u = a[i][half][0], &v = a[i][half][1];
          multiply(c[half][n], u.x, v.x, u.y, v.y, x.x, x.y);
          multiply(c[half][n], u.z, v.z, u.w, v.w, x.z, x.w);
        }
      }
    }
  }

  // Sums of one tile over the warp's steps.
  __device__ inline void take(float (&c)[2][TILES][4], int& slot) {
    constexpr int kTogether = TILES <= 2 ? 2 : 1;
    int turn = 0;
#pragma unroll 1
    for (; turn + kTogether <= turns; turn += kTogether) add<kTogether>(c, turn, slot);
    if (turn < turns) add<1>(c, turn, slot);
  }
};

template <int TILES, int PIECES, bool KEPT>
__device__ inline void product_of(const Product& all) {
  constexpr int kSums = TILES * 8 * kLine;                 // floats of a warp
  constexpr int kBuffers = TILES <= 2 ? 2 : 1;
  float* sums = reinterpret_cast<float*>(shared);
  byte* ring = shared + kBuffers * kProductWarps * kSums * 4;
  byte* kept = ring + kProductWarps * PIECES * kPiece;
  const int warp = threadIdx.x / 32, first = blockIdx.x;
  const Steps steps = steps_of(all);
  const int turns = (steps.count - warp + kProductWarps - 1) / kProductWarps;
  Stream<TILES, PIECES, KEPT> stream{all,
                                     steps,
                                     tiles_of(all),
                                     warp,
                                     max(turns, 0),
                                     shared_address(ring) + warp * PIECES * kPiece,
                                     reinterpret_cast<const uint4*>(kept),
                                     {}};
  stream.begin(first);
#pragma unroll 1
  for (int piece = 0; piece < PIECES; ++piece) {
    stream.supply();
    await_copies<kPace>();  // few at once: the kernel that computes x shall not queue behind these
  }
  await_previous();
  if (KEPT) stream.keep_x(reinterpret_cast<uint4*>(kept));
  int slot = 0, buffer = 0;
  for (int number = first; number < stream.tiles; number += gridDim.x) {
    float c[2][TILES][4] = {};
    stream.take(c, slot);
    float* own = sums + (buffer * kProductWarps + warp) * kSums;
    if (kBuffers == 1) __syncthreads();
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int answer = n * 8 + lane() % 4 * 2 + e % 2, row = lane() / 4 + e / 2 * 8;
        own[answer * kLine + row] = c[0][n][e] + c[1][n][e];
      }
    }
    __syncthreads();
    const Tile tile = tile_of(all, number);
    const float* from = sums + buffer * kProductWarps * kSums;
    for (int at = threadIdx.x; at < all.answers * kTileRows; at += kProductThreads) {
      const int answer = at / kTileRows, row = at % kTileRows;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kProductWarps; ++w) sum += from[w * kSums + answer * kLine + row];
      if (row >= tile.rows) continue;
      const int64 line = static_cast<int64>(blockIdx.y) * all.answers + answer;
      all.raw.sums[line * all.raw.width + tile.column + row] = sum;
    }
    buffer = (buffer + 1) % kBuffers;
  }
}

template <int TILES>
__device__ inline void product_for(const Product& all) {
  const int steps = (all.inputs + kStep - 1) / kStep, splits = gridDim.y;
  const int bytes = (steps + splits - 1) / splits * TILES * 1024;  // of the largest split
  if (bytes <= kXBytesMax && TILES <= 2) {
    product_of<TILES, kPiecesMany, true>(all);
  } else if (bytes <= kXBytesMost && TILES <= 2) {
    product_of<TILES, kPiecesFew, true>(all);
  } else {
    product_of<TILES, kPiecesMany, false>(all);
  }
}

// raw.splits = gridDim.y.
extern "C" __global__ void __launch_bounds__(kProductThreads, 2) product(const __grid_constant__ Product all) {
  start_next();
  if (all.answers <= 8) {
    product_for<1>(all);
  } else if (all.answers <= 16) {
    product_for<2>(all);
  } else if (all.answers <= 32) {
    product_for<4>(all);
  } else {
    product_for<8>(all);
  }
}

#else

// A warp has two rows of a tile, its lanes the inputs in turn, four at once; eight answers a pass.
extern "C" __global__ void __launch_bounds__(kProductThreads) product(const __grid_constant__ Product all) {
  constexpr int kTogether = 8;
  start_next();
  await_previous();
  const int tiles = tiles_of(all), quads = all.inputs / 4, splits = gridDim.y, split = blockIdx.y;
  const int begin = static_cast<int64>(quads) * split / splits, end = static_cast<int64>(quads) * (split + 1) / splits;
  for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile = tile_of(all, number);
    for (int row = threadIdx.x / 32; row < tile.rows; row += kProductWarps) {
      const float4* weight = reinterpret_cast<const float4*>(tile.weight + static_cast<int64>(row) * all.inputs);
      for (int first = 0; first < all.answers; first += kTogether) {
        float sums[kTogether] = {};
        for (int quad = begin + lane(); quad < end; quad += 32) {
          const float4 w = weight[quad];
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const int answer = min(first + i, all.answers - 1);
            const T* x_i = in(all.x_ai) + static_cast<int64>(answer) * all.inputs;
            const float4 x = *reinterpret_cast<const float4*>(x_i + 4 * quad);
            sums[i] = fmaf(w.x, x.x, fmaf(w.y, x.y, fmaf(w.z, x.z, fmaf(w.w, x.w, sums[i]))));
          }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const float sum = warp_sum(sums[i]);
          if (lane() != 0 || first + i >= all.answers) continue;
          const int64 line = static_cast<int64>(split) * all.answers + first + i;
          all.raw.sums[line * all.raw.width + tile.column + row] = sum;
        }
      }
    }
  }
}

#endif
