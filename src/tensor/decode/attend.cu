
// --- partial attention -------------------------------------------------------------------------------------------
//
// Rows of a block: the query heads of one key head, of all answers for the prompt's keys, of one answer for its own; 16
// or 32 rows a block at most. Blocks: parts, blocks of rows and key heads of the prompt, key heads innermost; then own
// parts, answers with their blocks of rows, and key heads. A part has consecutive visible keys; those outside a window
// are not read. The order of a row's sums does not depend on the other rows.

constexpr int kAttendRows = HEAD > 128 ? 16 : 32;

// Keys of a block: `count` rows of a run from `head` on, then those of another run.
struct Keys {
  const T *k, *v;    // of visible key 0 of the first run
  const T *k2, *v2;  // of visible key `count`, less `count` rows
  int count;         // of the first run
  int begin, end;    // the part's share
};

// What a block computes.
struct Unit {
  bool own;
  int part;    // among all
  int share, shares;
  int group;
  int answer;  // whose own keys
  int row;     // first of the rectangle
  int rows;    // of the block
};
__device__ inline int per_group(const Attend& all) { return all.heads / all.groups; }
__device__ inline Unit unit_of(const Attend& all) {
  const int rows = all.answers * per_group(all), blocks = (rows + kAttendRows - 1) / kAttendRows;
  const int prompt = static_cast<int>(all.prompt_parts);
  int at = blockIdx.x;
  Unit unit;
  unit.own = at >= prompt * blocks * all.groups;
  if (unit.own) at -= prompt * blocks * all.groups;
  unit.group = at % all.groups;
  at /= all.groups;
  const int own_blocks = (per_group(all) + kAttendRows - 1) / kAttendRows;
  const int lines = unit.own ? all.answers * own_blocks : blocks, line = at % lines;
  unit.share = at / lines;
  unit.shares = unit.own ? static_cast<int>(all.own_parts) : prompt;
  unit.part = unit.share + (unit.own ? prompt : 0);
  unit.answer = unit.own ? line / own_blocks : 0;
  const int before = (unit.own ? line % own_blocks : line) * kAttendRows;
  unit.row = unit.answer * per_group(all) + before;
  unit.rows = min(kAttendRows, (unit.own ? per_group(all) : rows) - before);
  return unit;
}

__device__ inline int64 between(int64 x, int64 low, int64 high) { return x < low ? low : x > high ? high : x; }

// Where share `share` of `visible` keys begins: a multiple of 16.
__device__ inline int border(u32 visible, u32 share, u32 shares) {
  return (visible / shares * share + min(visible % shares, share)) & ~15u;
}

// `row` counts only for own keys and windows.
__device__ inline Keys keys_of(const Attend& all, const Unit& unit, int64 row) {
  const int64 width = static_cast<int64>(all.groups) * HEAD, head = static_cast<int64>(unit.group) * HEAD;
  const int64 lowest = all.window > 0 ? all.prompt_end + row - all.window + 1 : 0;  // position
  Keys keys;
  int64 visible;
  if (unit.own) {
    const u32 step = static_cast<u32>(all.step);
    const int64 filled = row < all.first ? 0 : between(static_cast<u32>(row - all.first) / step + 1, 0, all.room);
    const int64 before = lowest - all.prompt_end - all.first;  // position from own row 0 on
    const int64 hidden = before <= 0 ? 0 : between((static_cast<u32>(before) + step - 1) / step, 0, filled);
    const int64 from = (unit.answer * all.room + hidden) * width + head;
    keys.k = in(all.own_k) + from;
    keys.v = in(all.own_v) + from;
    keys.k2 = keys.k;
    keys.v2 = keys.v;
    visible = filled - hidden;
    keys.count = static_cast<int>(visible);
  } else {
    const Run &one = all.runs[0], &two = all.runs[1];
    const int64 hidden = between(lowest - one.start, 0, one.rows), hidden2 = between(lowest - two.start, 0, two.rows);
    const int64 count = one.rows - hidden;
    keys.count = static_cast<int>(count);
    keys.k = in(one.k_sgd) + hidden * width + head;
    keys.v = in(one.v_sgd) + hidden * width + head;
    keys.k2 = in(two.k_sgd) + (hidden2 - count) * width + head;
    keys.v2 = in(two.v_sgd) + (hidden2 - count) * width + head;
    visible = count + two.rows - hidden2;
  }
  keys.begin = border(static_cast<u32>(visible), unit.share, unit.shares);
  const bool last = unit.share + 1 == unit.shares;
  keys.end = last ? static_cast<int>(visible) : border(static_cast<u32>(visible), unit.share + 1, unit.shares);
  return keys;
}

// Where a row of the block goes: [answers, heads].
__device__ inline int64 line_of(const Attend& all, const Unit& unit, int row) {
  const int at = unit.row + row, per = per_group(all);
  return static_cast<int64>(at / per) * all.heads + unit.group * per + at % per;
}

#if DTYPE != 0

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kStage = 64;                      // keys that are brought at once
constexpr int kSplit = 4;                       // warps that share them: 16 keys each, all rows
constexpr int kPitch = HEAD + 8;                // elements from row to row in shared memory: no bank conflicts
constexpr int kSteps = HEAD / 16;
constexpr int kHeld = HEAD > 64 ? kSteps / 2 : kSteps;  // steps of 16 whose queries stay in registers
constexpr int kStages = 3;
constexpr int kQueries = kAttendRows * kPitch * 2;  // bytes, before the stages
constexpr int kPlane = kStage * kPitch * 2;     // bytes of a stage's keys, or values
constexpr int kAttendThreads = kSplit * 32;

// Of 16 rows: queries, running maximum (base 2) and sum of the weights of rows lane/4 and lane/4 + 8, weighed values.
struct Weighed {
  u32 queries[kHeld][4];
  float most[2], sum[2];
  float values[2 * kSteps][4];
};

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Turns scores of 16 keys, of which those before `real` exist, into weights. `scale` is for powers of two.
__device__ inline void weigh(Weighed& all, float (&scores)[2][4], int real, float scale) {
  if (real < 16) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n * 8 + lane() % 4 * 2 + e % 2 >= real) scores[n][e] = nothing();
      }
    }
  }
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int e = 2 * half;
    float most = fmaxf(fmaxf(scores[0][e], scores[0][e + 1]), fmaxf(scores[1][e], scores[1][e + 1]));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
    most = fmaxf(all.most[half], most * scale);
    factor[half] = power_of_two(all.most[half] - most);
    all.most[half] = most;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      scores[n][e] = power_of_two(fmaf(scores[n][e], scale, -most));
      scores[n][e + 1] = power_of_two(fmaf(scores[n][e + 1], scale, -most));
    }
    const float sum = (scores[0][e] + scores[0][e + 1]) + (scores[1][e] + scores[1][e + 1]);
    all.sum[half] = fmaf(all.sum[half], factor[half], sum);
  }
  if (__any_sync(kAll, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) all.values[n][e] *= factor[e / 2];
    }
  }
}

// Adds 16 keys, of which those before `real` exist, to ROWS times 16 rows.
template <int ROWS>
__device__ inline void add_keys(Weighed (&all)[ROWS], u32 q, u32 k, u32 v, int real, float scale) {
  float scores[ROWS][2][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 b[4];
    load_matrices(b, k + step * 32);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      u32 a[4];
      if (step < kHeld) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = all[m].queries[step < kHeld ? step : 0][i];
      } else {
        load_matrices(a, q + m * 16 * kPitch * 2 + step * 32);
      }
      multiply(scores[m][0], a[0], a[1], a[2], a[3], b[0], b[1]);
      multiply(scores[m][1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
  u32 a[ROWS][4];
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    weigh(all[m], scores[m], real, scale);
    a[m][0] = pack(scores[m][0][0], scores[m][0][1]);
    a[m][1] = pack(scores[m][0][2], scores[m][0][3]);
    a[m][2] = pack(scores[m][1][0], scores[m][1][1]);
    a[m][3] = pack(scores[m][1][2], scores[m][1][3]);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 b[4];
    load_transposed(b, v + step * 32);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      multiply(all[m].values[2 * step], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
      multiply(all[m].values[2 * step + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
    }
  }
}

// Brings the keys and values of a stage; an empty group of copies behind the last.
__device__ inline void bring_stage(const Attend& all, const Keys& keys, int first, u32 to) {
  constexpr int kPieces = HEAD / 8;
  const int width = all.groups * HEAD;
  const bool whole = first + kStage <= keys.end && (first + kStage <= keys.count || first >= keys.count);
  if (whole) {
    const int64 before = static_cast<int64>(first) * width;
    const T* k = (first < keys.count ? keys.k : keys.k2) + before;
    const T* v = (first < keys.count ? keys.v : keys.v2) + before;
#pragma unroll
    for (int round = 0; round < (kStage * kPieces + kAttendThreads - 1) / kAttendThreads; ++round) {
      const int at = threadIdx.x + round * kAttendThreads, key = at / kPieces, piece = at % kPieces;
      if (kStage * kPieces % kAttendThreads != 0 && at >= kStage * kPieces) break;
      const int from = key * width + piece * 8;
      const u32 there = to + key * kPitch * 2 + piece * 16;
      bring(there, k + from, true);
      bring(there + kPlane, v + from, true);
    }
  } else if (first < keys.end) {
#pragma unroll 1
    for (int at = threadIdx.x; at < kStage * kPieces; at += kAttendThreads) {
      const int key = at / kPieces, piece = at % kPieces;
      const int index = first + key;
      const bool real = index < keys.end, one = index < keys.count;
      const int64 from = real ? static_cast<int64>(index) * width + piece * 8 : 0;
      const u32 there = to + key * kPitch * 2 + piece * 16;
      bring(there, real ? (one ? keys.k : keys.k2) + from : in(all.q_ahd), real);
      bring(there + kPlane, real ? (one ? keys.v : keys.v2) + from : in(all.q_ahd), real);
    }
  }
  commit();
}

// Queries of ROWS times 16 rows to shared memory; zeros behind those that exist.
template <int ROWS>
__device__ inline void bring_queries(const Attend& all, const Unit& unit, T* to) {
  constexpr int kPieces = HEAD / 8, kCount = ROWS * 16 * kPieces;
#pragma unroll
  for (int round = 0; round < (kCount + kAttendThreads - 1) / kAttendThreads; ++round) {
    const int at = threadIdx.x + round * kAttendThreads, row = at / kPieces, piece = at % kPieces;
    if (at >= kCount) break;
    uint4 q = make_uint4(0, 0, 0, 0);
    if (row < unit.rows) {
      q = __ldcg(reinterpret_cast<const uint4*>(in(all.q_ahd) + line_of(all, unit, row) * HEAD + piece * 8));
    }
    *reinterpret_cast<uint4*>(to + row * kPitch + piece * 8) = q;
  }
}

// Merges what the warps have, in their order, and writes it.
template <int ROWS>
__device__ inline void finish(const Attend& all, const Unit& unit, Weighed (&own)[ROWS], float* values) {
  constexpr int kWidth = HEAD + 8;  // floats from row to row: no bank conflicts
  constexpr int kQuads = HEAD / 4, kRows = ROWS * 16;
  float* most_of = values + kSplit * kRows * kWidth;  // [warps, rows]
  float* sum_of_warp = most_of + kSplit * kRows;
  float* factors = sum_of_warp + kSplit * kRows;      // [rows, warps]
  const int warp = threadIdx.x / 32;
  __syncthreads();  // nobody reads keys or values any more
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = own[m].sum[half];
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      const int row = warp * kRows + m * 16 + lane() / 4 + 8 * half;
      if (lane() % 4 == 0) {
        most_of[row] = own[m].most[half];
        sum_of_warp[row] = sum;
      }
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        float* to = values + row * kWidth + n * 8 + lane() % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(own[m].values[n][2 * half], own[m].values[n][2 * half + 1]);
      }
    }
  }
  __syncthreads();
  const int64 part = static_cast<int64>(unit.part) * all.answers * all.heads;
  if (threadIdx.x < unit.rows) {
    const int row = threadIdx.x;
    float most = most_of[row], whole = 0.0f;
#pragma unroll
    for (int i = 1; i < kSplit; ++i) most = fmaxf(most, most_of[row + i * kRows]);
    float factor[kSplit];
#pragma unroll
    for (int i = 0; i < kSplit; ++i) {
      factor[i] = power_of_two(most_of[row + i * kRows] - most);
      whole = fmaf(factor[i], sum_of_warp[row + i * kRows], whole);
    }
    // Only no weight at all means that no key was visible; a NaN stays.
    const float scale = whole == 0.0f ? 0.0f : 1.0f / whole;
#pragma unroll
    for (int i = 0; i < kSplit; ++i) factors[row * kSplit + i] = factor[i] * scale;
    all.lse_pah[part + line_of(all, unit, row)] = whole == 0.0f ? nothing() : (most + log2f(whole)) * kLn2;
  }
  __syncthreads();
  for (int row = warp; row < unit.rows; row += kSplit) {
    const float4 factor = *reinterpret_cast<const float4*>(factors + row * kSplit);
    const float weights[kSplit] = {factor.x, factor.y, factor.z, factor.w};
    float* to = all.out_pahd + (part + line_of(all, unit, row)) * HEAD;
    for (int quad = lane(); quad < kQuads; quad += 32) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kSplit; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(values + (row + i * kRows) * kWidth + quad * 4);
        sum.x = fmaf(weights[i], x.x, sum.x);
        sum.y = fmaf(weights[i], x.y, sum.y);
        sum.z = fmaf(weights[i], x.z, sum.z);
        sum.w = fmaf(weights[i], x.w, sum.w);
      }
      *reinterpret_cast<float4*>(to + quad * 4) = sum;
    }
  }
}

template <int ROWS>
__device__ inline void attend_rows(const Attend& all, const Unit& unit, const Keys& keys, int next, bool waits) {
  __shared__ Unit unit_kept;  // not in registers while keys are added
  __shared__ Keys keys_kept;
  T* q = reinterpret_cast<T*>(shared);
  const u32 stages = shared_address(shared) + kQueries;
  if (threadIdx.x == 0) {
    unit_kept = unit;
    keys_kept = keys;
  }
  if (waits) await_previous();
  bring_queries<ROWS>(all, unit, q);
  __syncthreads();
  const u32 rows = shared_address(q) + ((lane() & 15) * kPitch + (lane() >> 4) * 8) * 2;
  Weighed own[ROWS];
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
#pragma unroll
    for (int step = 0; step < kHeld; ++step) {
      load_matrices(own[m].queries[step], rows + m * 16 * kPitch * 2 + step * 32);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own[m].most[half] = -1e30f;
      own[m].sum[half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) own[m].values[n][e] = 0.0f;
    }
  }
  const int key = threadIdx.x / 32 * 16;
  // What a lane reads of an operand, from the stage's beginning.
  const u32 of_keys = ((key + (lane() & 7) + (lane() >> 4) * 8) * kPitch + ((lane() >> 3) & 1) * 8) * 2;
  const u32 of_values = ((key + (lane() & 15)) * kPitch + (lane() >> 4) * 8) * 2 + kPlane;
  const float scale = all.scale * kLog2E;
  const u32 last = stages + (kStages - 1) * 2 * kPlane;
  u32 stage = stages, free = last;
#pragma unroll 1
  for (int first = keys.begin, end = keys.end; first < end; first += kStage, next += kStage) {
    await_copies<kStages - 2>();
    __syncthreads();  // the stage has come for all, and all have done with the one before
    bring_stage(all, keys_kept, next, free);
    const int real = min(end - first, kStage) - key;
    if (real > 0) add_keys(own, rows, stage + of_keys, stage + of_values, real, scale);
    stage = stage == last ? stages : stage + 2 * kPlane;
    free = free == last ? stages : free + 2 * kPlane;
  }
  await_copies<0>();
  finish(all, unit_kept, own, reinterpret_cast<float*>(shared + kQueries));
}

extern "C" __global__ void __launch_bounds__(kAttendThreads) attend(const __grid_constant__ Attend all) {
  start_next();
  const Unit unit = unit_of(all);
  const bool early = !unit.own && all.window == 0;  // keys that no kernel of this token writes or chooses
  if (!early) await_previous();
  const Keys keys = keys_of(all, unit, early ? 0 : __ldcg(&all.at->row));
  int next = keys.begin;
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage, next += kStage) {
    bring_stage(all, keys, next, shared_address(shared) + kQueries + stage * 2 * kPlane);
  }
  if (kAttendRows > 16 && unit.rows > 16) {
    attend_rows<kAttendRows / 16>(all, unit, keys, next, early);
  } else {
    attend_rows<1>(all, unit, keys, next, early);
  }
}

#else

constexpr int kAttendThreads = 128;
constexpr int kDimsOf = (HEAD + 31) / 32;  // of a lane

// A warp has rows in turn. 32 keys at once: each lane one score, then each lane its dimensions of the values.
extern "C" __global__ void __launch_bounds__(kAttendThreads) attend(const __grid_constant__ Attend all) {
  __shared__ __align__(16) float queries[kAttendThreads / 32][HEAD];
  start_next();
  await_previous();
  const Unit unit = unit_of(all);
  const Keys keys = keys_of(all, unit, __ldcg(&all.at->row));
  const int64 width = static_cast<int64>(all.groups) * HEAD, lines = static_cast<int64>(all.answers) * all.heads;
  float* q = queries[threadIdx.x / 32];
  for (int row = threadIdx.x / 32; row < unit.rows; row += kAttendThreads / 32) {
    const int64 line = line_of(all, unit, row);
    __syncwarp();
    for (int d = lane(); d < HEAD; d += 32) q[d] = __ldcg(in(all.q_ahd) + line * HEAD + d);
    __syncwarp();
    float most = nothing(), whole = 0.0f, values[kDimsOf] = {};
    for (int first = keys.begin; first < keys.end; first += 32) {
      const int index = min(first + lane(), keys.end - 1);
      const float4* k = reinterpret_cast<const float4*>((index < keys.count ? keys.k : keys.k2) + index * width);
      float score = 0.0f;
#pragma unroll 8
      for (int d = 0; d < HEAD / 4; ++d) {
        const float4 x = k[d], y = *reinterpret_cast<const float4*>(q + 4 * d);
        score = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, score))));
      }
      score = first + lane() < keys.end ? score * all.scale : nothing();
      float now = fmaxf(most, score);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) now = fmaxf(now, __shfl_xor_sync(kAll, now, step));
      const float factor = expf(most - now), weight = expf(score - now);
      most = now;
      whole = fmaf(whole, factor, warp_sum(weight));
      float sums[kDimsOf] = {};
      const int count = min(keys.end - first, 32);
      for (int i = 0; i < count; ++i) {
        const float w = __shfl_sync(kAll, weight, i);
        const float* v = (first + i < keys.count ? keys.v : keys.v2) + (first + i) * width;
#pragma unroll
        for (int j = 0; j < kDimsOf; ++j) {
          if (lane() + 32 * j < HEAD) sums[j] = fmaf(w, v[lane() + 32 * j], sums[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kDimsOf; ++j) values[j] = fmaf(values[j], factor, sums[j]);
    }
    const int64 to = unit.part * lines + line;
#pragma unroll
    for (int j = 0; j < kDimsOf; ++j) {
      if (lane() + 32 * j < HEAD) all.out_pahd[to * HEAD + lane() + 32 * j] = whole == 0.0f ? 0.0f : values[j] / whole;
    }
    if (lane() == 0) all.lse_pah[to] = whole == 0.0f ? nothing() : most + logf(whole);
  }
}

#endif
