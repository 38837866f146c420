
// --- partial attention -------------------------------------------------------------------------------------------
//
// Rows of a block: the query heads of one key head, of all answers for the prompt's keys (32 or 64 rows a block at most),
// of one answer for its own. Blocks: parts, blocks of rows and key heads of the prompt, key heads innermost; then own
// parts, answers and key heads. A part has consecutive visible keys; those outside a window are not read.

constexpr int kAttendRows = HEAD > 128 ? 32 : 64;

// Keys of a block: `count` rows of a run from `head` on, then those of another run.
struct Keys {
  const T *k, *v;    // of visible key 0 of the first run
  const T *k2, *v2;  // of visible key `count`, less `count` rows
  int64 count;       // of the first run
  int64 begin, end;  // the part's share
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
  const int lines = unit.own ? all.answers : blocks, line = at % lines;
  unit.share = at / lines;
  unit.shares = unit.own ? static_cast<int>(all.own_parts) : prompt;
  unit.part = unit.share + (unit.own ? prompt : 0);
  unit.answer = unit.own ? line : 0;
  unit.row = unit.own ? line * per_group(all) : line * kAttendRows;
  unit.rows = unit.own ? per_group(all) : min(kAttendRows, rows - unit.row);
  return unit;
}

__device__ inline int64 between(int64 x, int64 low, int64 high) { return x < low ? low : x > high ? high : x; }

// `row` counts only for own keys and windows.
__device__ inline Keys keys_of(const Attend& all, const Unit& unit, int64 row) {
  const int64 width = static_cast<int64>(all.groups) * HEAD, head = static_cast<int64>(unit.group) * HEAD;
  const int64 lowest = all.window > 0 ? all.prompt_end + row - all.window + 1 : 0;  // position
  Keys keys;
  int64 visible;
  if (unit.own) {
    const int64 filled = row < all.first ? 0 : min((row - all.first) / all.step + 1, all.room);
    const int64 before = lowest - all.prompt_end - all.first;  // position from own row 0 on
    const int64 hidden = before <= 0 ? 0 : min((before + all.step - 1) / all.step, filled);
    const int64 from = (unit.answer * all.room + hidden) * width + head;
    keys.k = in(all.own_k) + from;
    keys.v = in(all.own_v) + from;
    keys.k2 = keys.k;
    keys.v2 = keys.v;
    keys.count = visible = filled - hidden;
  } else {
    const Run &one = all.runs[0], &two = all.runs[1];
    const int64 hidden = between(lowest - one.start, 0, one.rows), hidden2 = between(lowest - two.start, 0, two.rows);
    keys.count = one.rows - hidden;
    keys.k = in(one.k_sgd) + hidden * width + head;
    keys.v = in(one.v_sgd) + hidden * width + head;
    keys.k2 = in(two.k_sgd) + (hidden2 - keys.count) * width + head;
    keys.v2 = in(two.v_sgd) + (hidden2 - keys.count) * width + head;
    visible = keys.count + two.rows - hidden2;
  }
  // Shares begin at multiples of 16 keys.
  keys.begin = visible * unit.share / unit.shares & ~15ll;
  keys.end = unit.share + 1 == unit.shares ? visible : visible * (unit.share + 1) / unit.shares & ~15ll;
  return keys;
}

// Where a row of the block goes: [answers, heads].
__device__ inline int64 line_of(const Attend& all, const Unit& unit, int row) {
  const int at = unit.row + row, per = per_group(all);
  return static_cast<int64>(at / per) * all.heads + unit.group * per + at % per;
}

#if DTYPE != 0

constexpr int kStage = 64;                      // keys that are brought at once
constexpr int kSplit = 4;                       // warps that share them: 16 keys each
constexpr int kPitch = HEAD + 8;                // elements from row to row in shared memory: no bank conflicts
constexpr int kSteps = HEAD / 16;
constexpr int kPlane = kStage * kPitch * 2;     // bytes of a stage's keys, or values
constexpr int kAttendThreads = kAttendRows * 8;

// Running maximum (base 2) and sum of the weights of rows lane/4 and lane/4 + 8, and the weighed values.
struct Weighed {
  float most[2], sum[2];
  float values[2 * kSteps][4];
};

// Adds 16 keys, of which those before `real` exist.
__device__ inline void add_keys(Weighed& all, u32 q, u32 k, u32 v, int real, float scale) {
  float scores[2][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 a[4], b[4];
    load_matrices(a, q + ((lane() & 15) * kPitch + step * 16 + (lane() >> 4) * 8) * 2);
    load_matrices(b, k + (((lane() & 7) + (lane() >> 4) * 8) * kPitch + step * 16 + ((lane() >> 3) & 1) * 8) * 2);
    multiply(scores[0], a[0], a[1], a[2], a[3], b[0], b[1]);
    multiply(scores[1], a[0], a[1], a[2], a[3], b[2], b[3]);
  }
  float most[2] = {all.most[0], all.most[1]};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool exists = n * 8 + lane() % 4 * 2 + e % 2 < real;
      scores[n][e] = exists ? scores[n][e] * scale : nothing();
      most[e / 2] = fmaxf(most[e / 2], scores[n][e]);
    }
  }
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    most[half] = fmaxf(most[half], __shfl_xor_sync(kAll, most[half], 1));
    most[half] = fmaxf(most[half], __shfl_xor_sync(kAll, most[half], 2));
    factor[half] = exp2f(all.most[half] - most[half]);
    all.sum[half] *= factor[half];
  }
  if (__any_sync(kAll, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) all.values[n][e] *= factor[e / 2];
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[n][e] = exp2f(scores[n][e] - most[e / 2]);
      all.sum[e / 2] += scores[n][e];
    }
  }
  all.most[0] = most[0];
  all.most[1] = most[1];
  const u32 a0 = pack(scores[0][0], scores[0][1]), a1 = pack(scores[0][2], scores[0][3]);
  const u32 a2 = pack(scores[1][0], scores[1][1]), a3 = pack(scores[1][2], scores[1][3]);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 b[4];
    load_transposed(b, v + ((lane() & 15) * kPitch + step * 16 + (lane() >> 4) * 8) * 2);
    multiply(all.values[2 * step], a0, a1, a2, a3, b[0], b[1]);
    multiply(all.values[2 * step + 1], a0, a1, a2, a3, b[2], b[3]);
  }
}

// Brings the keys and values of a stage; an empty group of copies behind the last.
__device__ inline void bring_stage(const Attend& all, const Keys& keys, int64 first, u32 to) {
  constexpr int kPieces = HEAD / 8;
  const int64 width = static_cast<int64>(all.groups) * HEAD;
  if (first < keys.end) {
    for (int at = threadIdx.x; at < kStage * kPieces; at += blockDim.x) {
      const int key = at / kPieces, piece = at % kPieces;
      const int64 index = first + key;
      const bool real = index < keys.end, one = index < keys.count;
      const int64 from = real ? index * width + piece * 8 : 0;
      const u32 there = to + key * kPitch * 2 + piece * 16;
      const T* k = real ? (one ? keys.k : keys.k2) + from : in(all.q_ahd);
      const T* v = real ? (one ? keys.v : keys.v2) + from : in(all.q_ahd);
      bring(there, k, real);
      bring(there + kPlane, v, real);
    }
  }
  commit();
}

__device__ inline void bring_queries(const Attend& all, const Unit& unit, T* to) {
  constexpr int kPieces = HEAD / 8;
  for (int at = threadIdx.x; at < (blockDim.x / 8) * kPieces; at += blockDim.x) {
    const int row = at / kPieces, piece = at % kPieces;
    uint4 q = make_uint4(0, 0, 0, 0);
    if (row < unit.rows) {
      q = __ldcg(reinterpret_cast<const uint4*>(in(all.q_ahd) + line_of(all, unit, row) * HEAD + piece * 8));
    }
    *reinterpret_cast<uint4*>(to + row * kPitch + piece * 8) = q;
  }
}

// Merges what the warps of a row tile have, in their order, and writes it.
__device__ inline void finish(const Attend& all, const Unit& unit, Weighed& own, float* values) {
  __shared__ float most_of[kAttendRows / 16 * kSplit][16], sum_of_warp[kAttendRows / 16 * kSplit][16];
  constexpr int kWidth = HEAD + 8;  // floats from row to row: no bank conflicts
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    own.sum[half] += __shfl_xor_sync(kAll, own.sum[half], 1);
    own.sum[half] += __shfl_xor_sync(kAll, own.sum[half], 2);
    if (lane() % 4 != 0) continue;
    most_of[warp][lane() / 4 + 8 * half] = own.most[half];
    sum_of_warp[warp][lane() / 4 + 8 * half] = own.sum[half];
  }
  __syncthreads();  // nobody reads keys or values any more
#pragma unroll
  for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = values + (warp * 16 + lane() / 4 + 8 * half) * kWidth + n * 8 + lane() % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(own.values[n][2 * half], own.values[n][2 * half + 1]);
    }
  }
  __syncthreads();
  const int64 lines = static_cast<int64>(all.answers) * all.heads;
  for (int at = threadIdx.x; at < unit.rows * HEAD; at += blockDim.x) {
    const int row = at / HEAD, d = at % HEAD, first = row / 16 * kSplit;
    float most = nothing(), whole = 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSplit; ++i) most = fmaxf(most, most_of[first + i][row % 16]);
#pragma unroll
    for (int i = 0; i < kSplit; ++i) {
      const float of = most_of[first + i][row % 16], factor = of == nothing() ? 0.0f : exp2f(of - most);
      whole = fmaf(factor, sum_of_warp[first + i][row % 16], whole);
      sum = fmaf(factor, values[((first + i) * 16 + row % 16) * kWidth + d], sum);
    }
    const int64 line = unit.part * lines + line_of(all, unit, row);
    all.out_pahd[line * HEAD + d] = whole > 0.0f ? sum / whole : 0.0f;
    if (d == 0) all.lse_pah[line] = whole > 0.0f ? (most + log2f(whole)) * kLn2 : nothing();
  }
}

// Bytes of the rows' queries before the stages.
__device__ inline int query_bytes() { return blockDim.x / 8 * kPitch * 2; }

template <int STAGES>
__device__ inline void attend_with(const Attend& all) {
  const Unit unit = unit_of(all);
  T* q = reinterpret_cast<T*>(shared);
  const u32 stages = shared_address(shared) + query_bytes();
  const bool early = !unit.own && all.window == 0;  // keys that no kernel of this token writes or chooses
  if (!early) await_previous();
  const Keys keys = keys_of(all, unit, early ? 0 : __ldcg(&all.at->row));
  int64 next = keys.begin;
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage, next += kStage) {
    bring_stage(all, keys, next, stages + stage * 2 * kPlane);
  }
  if (early) await_previous();
  bring_queries(all, unit, q);
  const int warp = threadIdx.x / 32, tile = warp / kSplit, key = warp % kSplit * 16;
  const u32 rows = shared_address(q) + tile * 16 * kPitch * 2;
  Weighed own;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    own.most[half] = -1e30f;
    own.sum[half] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) own.values[n][e] = 0.0f;
  }
  int slot = 0, free = STAGES - 1;
  for (int64 first = keys.begin; first < keys.end; first += kStage, next += kStage) {
    await_copies<STAGES - 2>();
    __syncthreads();  // the stage has come for all, and all have done with the one before
    bring_stage(all, keys, next, stages + free * 2 * kPlane);
    const int real = static_cast<int>(min(keys.end - first, static_cast<int64>(kStage))) - key;
    const u32 k = stages + slot * 2 * kPlane + key * kPitch * 2;
    if (tile * 16 < unit.rows && real > 0) add_keys(own, rows, k, k + kPlane, real, all.scale * kLog2E);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    free = free + 1 == STAGES ? 0 : free + 1;
  }
  await_copies<0>();
  finish(all, unit, own, reinterpret_cast<float*>(shared + query_bytes()));
}

// blockDim.x: 128 for each 16 rows of the largest block of rows, which are 1, 2 or 4 times 16.
extern "C" __global__ void __launch_bounds__(kAttendThreads) attend(const __grid_constant__ Attend all) {
  start_next();
  if (blockDim.x > 256) {
    attend_with<5>(all);
  } else {
    attend_with<3>(all);
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
    for (int64 first = keys.begin; first < keys.end; first += 32) {
      const int64 index = min(first + lane(), keys.end - 1);
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
      const int count = static_cast<int>(min(keys.end - first, 32ll));
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
      if (lane() + 32 * j < HEAD) all.out_pahd[to * HEAD + lane() + 32 * j] = whole > 0.0f ? values[j] / whole : 0.0f;
    }
    if (lane() == 0) all.lse_pah[to] = whole > 0.0f ? most + logf(whole) : nothing();
  }
}

#endif
