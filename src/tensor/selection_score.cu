// Index scores on a GPU. NVRTC compiles this file and selection_choice.cu together at run time, for HEADS index heads of
// WIDTH. A key's score for a query: the sum over the heads j of weight[j] * relu(q[j] . k).
//
// A warp scores one query. The query's heads are the rows of the left matrix and stay in registers; keys are the columns
// of the right matrix, in shared memory, where all warps of a block read them. No score is written unless it beats the
// row's threshold, the worst of the best n so far. Candidates go to a buffer of the row as 64-bit numbers: the ordered
// bits of the score above, the complement of the position below. So a larger number is a better candidate, no two are
// equal, and the order in which they arrive does not matter. Between segments of keys `compact` reduces full buffers to
// the best n and raises the threshold. Sums have one order, so results have the same bits on every run.
//
// Two kernels score: `score` on any GPU with bfloat16 matrix units, `score_wgmma` on Hopper (HOPPER is 1).

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kAll = 0xffffffffu;
constexpr int kRowTiles = HEADS / 16;  // matrix tiles of 16 heads
constexpr int kSteps = WIDTH / 16;     // products of 16 elements
constexpr int kTileKeys = 64;          // keys that a block holds in one stage
constexpr int kGroup = 32;             // keys whose scores a warp finishes together, one a lane
constexpr int kStaged = 64;            // candidates that a warp keeps back
constexpr int kRowBytes = WIDTH * 2;
constexpr int kTileBytes = kTileKeys * kRowBytes;

static_assert(HEADS % 16 == 0 && (WIDTH == 64 || WIDTH == 128));

// What a score kernel reads and where candidates go. The host fills it field by field (selection.cpp).
struct Segment {
  const u32* query;         // [rows, HEADS, WIDTH] bfloat16, two in a word
  const float* weight;      // [rows, HEADS]
  const long long* position;  // [rows]
  const char* key;          // [keys, WIDTH] bfloat16
  u64* candidates;          // [rows, capacity]
  int* counts;              // [rows]
  const u64* thresholds;    // [rows]
  long long first, step;    // position of key 0, and from one key to the next
  int rows, begin, end;     // keys begin .. end are scored
  int span;                 // keys of one block; a multiple of kTileKeys
  int capacity;
  int fresh;  // nothing has been chosen yet: every key is a candidate
};

__device__ inline float relu(float x) {
  float y;
  // A value that is not a number stays one, as in the plain version.
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Monotone in the score; adding zero makes -0 equal to 0.
__device__ inline u32 ordered(float score) {
  const u32 bits = __float_as_uint(score + 0.0f);
  return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ inline float score_of(u32 order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// One query in the registers of its warp.
struct Query {
  u32 a[kRowTiles][kSteps][4];  // as the matrix units take it: rows lane/4 and lane/4 + 8 of a tile
  float weight[kRowTiles][2];   // of these rows
  u64 threshold;
  float bar;  // the score in `threshold`; not a number before there is one
  u64* candidates;
  int* count;
  int visible;  // it sees the keys before this one
  u64* staged;  // in shared memory, kStaged candidates in a ring: one atomic addition makes room for 32 of them
  int sent, held;
};

__device__ inline int visible_keys(const Segment& segment, int row) {
  if (row >= segment.rows) return 0;
  const long long behind = segment.position[row] - segment.first;
  if (behind < 0) return 0;
  const long long seen = behind / segment.step + 1;
  return seen < segment.end ? static_cast<int>(seen) : segment.end;
}

__device__ inline void load_query(Query& query, const Segment& segment, int row, u64* staged, int lane) {
  query.visible = visible_keys(segment, row);
  query.staged = staged;
  query.sent = 0;
  query.held = 0;
  const long long at = row < segment.rows ? row : segment.rows - 1;
  const u32* q = segment.query + at * (HEADS * WIDTH / 2) + (lane / 4) * (WIDTH / 2) + lane % 4;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const u32* tile = q + m * 16 * (WIDTH / 2) + k * 8;
      query.a[m][k][0] = tile[0];
      query.a[m][k][1] = tile[8 * (WIDTH / 2)];
      query.a[m][k][2] = tile[4];
      query.a[m][k][3] = tile[8 * (WIDTH / 2) + 4];
    }
    query.weight[m][0] = segment.weight[at * HEADS + m * 16 + lane / 4];
    query.weight[m][1] = segment.weight[at * HEADS + m * 16 + lane / 4 + 8];
  }
  query.threshold = segment.thresholds[at];
  query.bar = score_of(static_cast<u32>(query.threshold >> 32));
  query.candidates = segment.candidates + at * segment.capacity;
  query.count = segment.counts + at;
  if (segment.fresh && blockIdx.y == 0 && lane == 0 && row < segment.rows) {
    *query.count = max(query.visible - segment.begin, 0);
  }
}

// Adds the products of a tile of heads to the scores of N keys, two of each 8 keys in a lane: relu, then head weight.
template <int N>
__device__ inline void add_heads(float (&sum)[N], const float (&product)[2 * N], const float (&weight)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int at = (i / 2) * 4 + i % 2;
    sum[i] = fmaf(relu(product[at]), weight[0], sum[i]);
    sum[i] = fmaf(relu(product[at + 2]), weight[1], sum[i]);
  }
}

// The score of one of kGroup keys, key_of(lane) of the group, from the sums FROM .. FROM + 8 over a lane's own heads.
// Sums over all heads cross the 8 lanes with the same lane % 4; each step hands half of the keys to the partner.
template <int FROM, int N>
__device__ inline float score_across(const float (&own)[N], int lane) {
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = own[FROM + i];
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = lane & (half * 4);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? sum[i + half] : sum[i];
      const float given = upper ? sum[i] : sum[i + half];
      sum[i] = kept + __shfl_xor_sync(kAll, given, half * 4);
    }
  }
  return sum[0];
}

__device__ inline int key_of(int lane) { return (lane / 8) * 8 + (lane % 4) * 2 + (lane / 4) % 2; }

// Moves the oldest `count` staged candidates, at most 32, to the row's buffer.
__device__ inline void send(Query& query, int count, int lane) {
  __syncwarp();
  int slot = 0;
  if (lane == 0) slot = atomicAdd(query.count, count);
  slot = __shfl_sync(kAll, slot, 0);
  if (lane < count) query.candidates[slot + lane] = query.staged[(query.sent + lane) % kStaged];
  query.sent += count;
  query.held -= count;
  __syncwarp();
}

// Whether a score may beat the threshold; so may one that is not a number.
__device__ inline bool may_beat(float score, const Query& query) { return !(score < query.bar); }

// Takes the score of a key of each lane.
__device__ inline void offer(float score, int index, Query& query, const Segment& segment, int lane) {
  if (!__any_sync(kAll, may_beat(score, query))) return;
  const u32 place = ~static_cast<u32>(segment.first + index * segment.step);
  const u64 candidate = static_cast<u64>(ordered(score)) << 32 | place;
  if (segment.fresh) {
    if (index < query.visible) query.candidates[index - segment.begin] = candidate;
    return;
  }
  const bool better = index < query.visible && candidate > query.threshold;
  const u32 takers = __ballot_sync(kAll, better);
  const int rank = __popc(takers & ((1u << lane) - 1));
  if (better) query.staged[(query.sent + query.held + rank) % kStaged] = candidate;
  query.held += __popc(takers);
  if (query.held >= 32) send(query, 32, lane);
}

// Keys of this block: from the start of its span to the last one that a row of the block sees.
struct Span {
  int begin, end;
};

__device__ inline Span block_span(const Segment& segment, int rows_of_block) {
  __shared__ int last;
  if (threadIdx.x == 0) last = 0;
  __syncthreads();
  if (threadIdx.x < rows_of_block) {
    atomicMax(&last, visible_keys(segment, blockIdx.x * rows_of_block + threadIdx.x));
  }
  __syncthreads();
  const int begin = segment.begin + blockIdx.y * segment.span;
  const int end = min(min(begin + segment.span, segment.end), last);
  return {begin, end};
}

__device__ inline u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// --- any GPU with bfloat16 matrix units ---------------------------------------------------------------------------

constexpr int kStages = 3;

// Copies a tile of keys to shared memory. 16-byte chunks of a key are permuted by the key's number, so that the same
// chunk of 8 neighbouring keys lies in 8 different groups of banks.
__device__ inline void copy_tile(u32 stage, const Segment& segment, int tile, int end) {
  constexpr int chunks = kRowBytes / 16;
#pragma unroll
  for (int i = threadIdx.x; i < kTileKeys * chunks; i += WARPS * 32) {
    const int key = i / chunks, chunk = i % chunks;
    const u32 to = stage + key * kRowBytes + ((chunk ^ (key & 7)) * 16);
    const int held = tile + key < end ? 16 : 0;  // beyond the end zeros
    const char* from = segment.key + (held ? static_cast<long long>(tile + key) * kRowBytes + chunk * 16 : 0);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(held));
  }
}

__device__ inline void load_keys(u32 (&b)[4], u32 stage, int key, int step, int lane) {
  const int row = key + (lane / 16) * 8 + lane % 8;
  const int chunk = step * 2 + (lane / 8) % 2;
  const u32 at = stage + row * kRowBytes + ((chunk ^ (row & 7)) * 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(at));
}

__device__ inline void multiply(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void score_group(u32 stage, int group, int tile, Query& query, const Segment& segment, int lane) {
  float product[kRowTiles][16] = {};
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      u32 b[4];
      load_keys(b, stage, group + pair * 16, k, lane);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply(&product[m][pair * 8], query.a[m][k], b[0], b[1]);
        multiply(&product[m][pair * 8 + 4], query.a[m][k], b[2], b[3]);
      }
    }
  }
  float sum[8] = {};
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) add_heads(sum, product[m], query.weight[m]);
  offer(score_across<0>(sum, lane), tile + group + key_of(lane), query, segment, lane);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) score(const __grid_constant__ Segment segment) {
  extern __shared__ __align__(1024) char stages[];
  __shared__ u64 staged[WARPS][kStaged];
  const Span span = block_span(segment, WARPS);
  if (span.begin >= span.end) return;
  const int lane = threadIdx.x % 32;
  const u32 base = shared_address(stages);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    const int tile = span.begin + stage * kTileKeys;
    if (tile < span.end) copy_tile(base + stage * kTileBytes, segment, tile, span.end);
    asm volatile("cp.async.commit_group;");
  }
  Query query;
  load_query(query, segment, blockIdx.x * WARPS + threadIdx.x / 32, staged[threadIdx.x / 32], lane);
  int stage = 0;
  for (int tile = span.begin; tile < span.end; tile += kTileKeys) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncthreads();
    const int next = tile + (kStages - 1) * kTileKeys;
    const int free = stage == 0 ? kStages - 1 : stage - 1;
    if (next < span.end) copy_tile(base + free * kTileBytes, segment, next, span.end);
    asm volatile("cp.async.commit_group;");
#pragma unroll 1
    for (int group = 0; group < kTileKeys; group += kGroup) {
      if (tile + group < query.visible) score_group(base + stage * kTileBytes, group, tile, query, segment, lane);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  if (query.held > 0) send(query, query.held, lane);
}

// --- Hopper -------------------------------------------------------------------------------------------------------

#if HOPPER

constexpr int kHopperWarps = 12;  // three groups of four warps
constexpr int kHopperStages = 6;
constexpr int kHalfBytes = kTileKeys * 128;  // the copy engine permutes rows of 128 bytes

struct __align__(64) TensorMap {
  char opaque[128];
};

__device__ inline void start_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ inline void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// One thread: the copy engine brings kTileKeys keys from `tile` on, zeros beyond the last key, and then arrives.
__device__ inline void bring_tile(u32 stage, u32 barrier, const TensorMap& keys, int tile) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kTileBytes) : "memory");
#pragma unroll
  for (int half = 0; half < kTileBytes / kHalfBytes; ++half) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(stage + half * kHalfBytes),
        "l"(&keys), "r"(half * 64), "r"(tile), "r"(barrier)
        : "memory");
  }
}

// Products of 64 rows, 16 of each warp of the group, with 64 keys: c is replaced at the first step and added to later.
__device__ inline void multiply_wide(float (&c)[32], const u32 (&a)[4], u64 keys, int step) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]),
        "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]),
        "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]),
        "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
        "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),
        "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(keys), "r"(step));
}

// Rows of 128 bytes, permuted within 8 rows; 1024 bytes from 8 rows to the next 8.
__device__ inline u64 matrix_at(u32 address) {
  return (static_cast<u64>(address >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// Waits until at most LEFT tiles of heads are still being multiplied, and `product` is not among them.
template <int LEFT>
__device__ inline void await_products(float (&product)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
  // The values change during the wait: nothing that reads them may be moved before.
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(product[i])::"memory");
}

// Sums over a lane's own heads for the kTileKeys keys of a stage, which is free afterwards. While the second tile of
// heads is multiplied, the first is added up.
__device__ inline void score_tile(float (&sum)[16], const Query& query, u32 stage, u32 freed, int lane) {
  float product[kRowTiles][32];
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i] = 0.0f;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const u64 keys = matrix_at(stage + (k / 4) * kHalfBytes + (k % 4) * 32);
      multiply_wide(product[m], query.a[m][k], keys, k);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  if (kRowTiles == 2) {
    await_products<1>(product[0]);
    add_heads(sum, product[0], query.weight[0]);
  }
  await_products<0>(product[kRowTiles - 1]);
  if (lane == 0) arrive(freed);
  add_heads(sum, product[kRowTiles - 1], query.weight[kRowTiles - 1]);
}

extern "C" __global__ void __launch_bounds__(kHopperWarps * 32, 1)
    score_wgmma(const __grid_constant__ Segment segment, const __grid_constant__ TensorMap keys) {
  extern __shared__ __align__(1024) char stages[];
  __shared__ __align__(8) u64 barriers[2 * kHopperStages];
  __shared__ u64 staged[kHopperWarps][kStaged];
  const Span span = block_span(segment, kHopperWarps);
  if (span.begin >= span.end) return;
  const int tiles = (span.end - span.begin + kTileKeys - 1) / kTileKeys;
  const int lane = threadIdx.x % 32;
  const u32 base = (shared_address(stages) + 1023) & ~1023u;
  const u32 arrived = shared_address(barriers), freed = arrived + kHopperStages * 8;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kHopperStages; ++stage) {
      start_barrier(arrived + stage * 8, 1);
      start_barrier(freed + stage * 8, kHopperWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int tile = 0; tile < min(tiles, kHopperStages - 1); ++tile) {
      bring_tile(base + tile * kTileBytes, arrived + tile * 8, keys, span.begin + tile * kTileKeys);
    }
  }
  Query query;
  load_query(query, segment, blockIdx.x * kHopperWarps + threadIdx.x / 32, staged[threadIdx.x / 32], lane);
  __syncthreads();
  int stage = 0;
  u32 turn = 0;  // parity of the visits to this stage
  for (int tile = 0; tile < tiles; ++tile) {
    if (threadIdx.x == 0 && tile + kHopperStages - 1 < tiles) {
      // The stage of the tile before this one: in its last visit before this turn.
      const int free = stage == 0 ? kHopperStages - 1 : stage - 1;
      if (tile > 0) wait(freed + free * 8, stage == 0 ? turn ^ 1 : turn);
      bring_tile(base + free * kTileBytes, arrived + free * 8, keys,
                 span.begin + (tile + kHopperStages - 1) * kTileKeys);
    }
    __syncwarp();
    wait(arrived + stage * 8, turn);
    float sum[16];
    score_tile(sum, query, base + stage * kTileBytes, freed + stage * 8, lane);
    const int index = span.begin + tile * kTileKeys + key_of(lane);
    const float score = score_across<0>(sum, lane);
    const float other = score_across<8>(sum, lane);
    if (__any_sync(kAll, may_beat(score, query) || may_beat(other, query))) {
      offer(score, index, query, segment, lane);
      offer(other, index + kGroup, query, segment, lane);
    }
    if (++stage == kHopperStages) {
      stage = 0;
      turn ^= 1;
    }
  }
  if (query.held > 0) send(query, query.held, lane);
}

#endif
