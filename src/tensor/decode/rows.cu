
// --- embedding ---------------------------------------------------------------------------------------------------

constexpr int kEmbedThreads = 256;

// Block x: columns; block y: an answer.
extern "C" __global__ void __launch_bounds__(kEmbedThreads) embed(const __grid_constant__ Embed all) {
  start_next();
  await_previous();
  const int column = blockIdx.x * kEmbedThreads + threadIdx.x;
  if (column >= all.width) return;
  const int64 token = __ldcg(all.tokens_a + blockIdx.y);
  const T value = in(all.embedding_vw)[token * all.width + column];
  const int64 to = static_cast<int64>(blockIdx.y) * all.width + column;
  out(all.x_aw)[to] = all.scale == 1.0f ? value : narrow(wide(value) * all.scale);
}

// --- norms -------------------------------------------------------------------------------------------------------

// A normed value times the weight, not rounded yet: `root` is 1 / √(mean of squares + eps).
__device__ inline float normed(const Norm& norm, float weight, float x, float root) {
  return x * root * (norm.one_plus ? 1.0f + weight : weight);
}

// --- residual: a row by the blocks of a cluster ------------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
constexpr int kRowBlocks = 8, kRowThreads = 256;
#define ROW_CLUSTER __cluster_dims__(8, 1, 1)
#else
constexpr int kRowBlocks = 1, kRowThreads = 1024;
#define ROW_CLUSTER
#endif
constexpr int kRowWarps = kRowThreads / 32;
constexpr int kColumns = 8;  // of a thread at most: rows of up to 16,384 elements on one cluster, 8,192 on one block

__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes x to *to of the cluster's block `block`.
__device__ inline void send(float* to, int block, float x) {
#if __CUDA_ARCH__ >= 900
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(to)), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
#else
  *to = x;
#endif
}

// Sum over the row: over warps, then over blocks, in their order. All blocks of the cluster have started. `sums` are
// not used twice by a kernel.
__device__ inline float row_sum(float x, float (&warps)[kRowWarps], float (&sums)[kRowBlocks]) {
  const float warp = warp_sum(x);
  if (lane() == 0) warps[threadIdx.x / 32] = warp;
  __syncthreads();
  if (threadIdx.x < kRowBlocks) {
    float whole = 0.0f;
#pragma unroll
    for (int i = 0; i < kRowWarps; ++i) whole += warps[i];
    send(&sums[blockIdx.x], threadIdx.x, whole);
  }
  if (kRowBlocks == 1) __syncthreads();
  cluster_arrive();
  cluster_wait();
  float row = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) row += sums[i];
  return row;
}

// Block x: a share of the columns; block y: an answer.
extern "C" __global__ void ROW_CLUSTER __launch_bounds__(kRowThreads) residual(const __grid_constant__ Residual all) {
  __shared__ float low[kRankMax], warps[2][kRowWarps], sums[2][kRowBlocks];
  start_next();
  cluster_arrive();
  const int answer = blockIdx.y, span = (all.width + kRowBlocks - 1) / kRowBlocks, first = blockIdx.x * span;
  const int end = min(first + span, all.width), start = first + threadIdx.x, last = max(end - 1, 0);
  const bool adds = all.raw.sums != nullptr, norms = all.norm.weight_w != nullptr;
  const bool norms_out = adds && all.norm_out.weight_w != nullptr;
  float weights[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = start + i * kRowThreads;
    weights[i] = norms && column < end ? wide(in(all.norm.weight_w)[column]) : 0.0f;
  }
  Up ups[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) ups[i] = up_of(all.adapter, min(start + i * kRowThreads, last));
  await_previous();
  T* x_row = out(all.x_aw) + static_cast<int64>(answer) * all.width;
  float x[kColumns], y[kColumns] = {}, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    if (first + i * kRowThreads >= end) break;  // the same for all threads
    const int columns[2] = {start + i * kRowThreads, start + (i + 1) * kRowThreads}, line = answer * all.raw.width;
    T olds[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (columns[j] < end) olds[j] = __ldcg(x_row + columns[j]);
    }
    if (adds) {
      const Request<2> request(all.raw, all.answers, {line + min(columns[0], last), line + min(columns[1], last)});
      if (i == 0) {
        for (int r = threadIdx.x; r < all.adapter.rank; r += kRowThreads) {
          low[r] = low_of(low_request(all.raw, all.answers, answer, all.adapter, r), all.raw, all.answers);
        }
        __syncthreads();
      }
      float raw[2];
      request.add(raw, all.raw, all.answers);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = columns[j];
        if (column >= end) continue;
        if (all.bias_w != nullptr) raw[j] += wide(in(all.bias_w)[column]);
        const Up up = i == 0 ? ups[j] : up_of(all.adapter, column);
        if (all.adapter.rank > 0) raw[j] += adapted(all.adapter, column, up, low);
        y[i + j] = rounded(raw[j]);
        squares = fmaf(y[i + j], y[i + j], squares);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) x[i + j] = wide(olds[j]);
  }
  cluster_wait();
  float root = 0.0f;
  if (norms_out) {
    root = rsqrtf(row_sum(squares, warps[0], sums[0]) / static_cast<float>(all.width) + all.norm_out.eps);
  }
  squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = start + i * kRowThreads;
    if (column >= end) break;
    if (adds) {
      if (norms_out) y[i] = rounded(normed(all.norm_out, wide(in(all.norm_out.weight_w)[column]), y[i], root));
      x[i] = rounded(x[i] + y[i]);
    }
    squares = fmaf(x[i], x[i], squares);
  }
  T* h_row = out(all.h_aw) + static_cast<int64>(answer) * all.width;
  if (norms) root = rsqrtf(row_sum(squares, warps[1], sums[1]) / static_cast<float>(all.width) + all.norm.eps);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = start + i * kRowThreads;
    if (column >= end) break;
    if (adds) x_row[column] = narrow(x[i]);  // now, since a cluster's barrier waits for what was written before
    h_row[column] = narrow(norms ? normed(all.norm, weights[i], x[i], root) : x[i]);
  }
}

// --- heads: a warp a head ----------------------------------------------------------------------------------------

constexpr int kHeadThreads = 128;
constexpr int kHeadWarps = kHeadThreads / 32;
constexpr int kDims = (HEAD + 31) / 32;  // of a lane


// Cosine and sine of a dimension's angle.
struct Turn {
  float cosine, sine;
};
__device__ inline Turn turn_of(const Heads& all, int d, float position) {
  const int pairs = all.rotary / 2;
  if (d >= 2 * pairs) return {1.0f, 0.0f};
  float sine, cosine;
  sincosf(__fmul_rn(position, all.frequencies[d < pairs ? d : d - pairs]), &sine, &cosine);
  return {rounded(__fmul_rn(cosine, all.gain)), rounded(__fmul_rn(sine, all.gain))};
}

// Dimension d of a row in shared memory, rotated and not rounded yet.
__device__ inline float rotated(const Heads& all, const float* row, int d, const Turn& turn) {
  const int pairs = all.rotary / 2;
  if (d >= 2 * pairs) return row[d];
  const float straight = __fmul_rn(row[d], turn.cosine);
  if (d < pairs) return straight - __fmul_rn(row[d + pairs], turn.sine);
  return straight + __fmul_rn(row[d - pairs], turn.sine);
}

// Warps count the query heads, then the key heads, then the value heads of the first answer, then of the next.
extern "C" __global__ void __launch_bounds__(kHeadThreads) heads(const __grid_constant__ Heads all) {
  __shared__ float lows[kHeadWarps][kRankMax], rows[kHeadWarps][HEAD];
  start_next();
  const int warp = threadIdx.x / 32, count = all.heads + 2 * all.groups, number = blockIdx.x * kHeadWarps + warp;
  if (number >= all.answers * count) {
    await_previous();
    return;
  }
  const int answer = number / count, slot = number % count;
  const int which = slot < all.heads ? 0 : slot < all.heads + all.groups ? 1 : 2;
  const int head = slot - (which == 0 ? 0 : which == 1 ? all.heads : all.heads + all.groups);
  const Adapter& adapter = all.adapters[which];
  const bool norms = which < 2 && all.norms[which].weight_w != nullptr;
  const int last = HEAD - 1;
  Up ups[kDims];
  float weights[kDims];
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int d = min(lane() + 32 * i, last);
    ups[i] = up_of(adapter, head * HEAD + d);
    weights[i] = norms ? wide(in(all.norms[which].weight_w)[d]) : 0.0f;
  }
  await_previous();
  const int64 at = __ldcg(&all.at->row);
  float* low = lows[warp];
  float* row = rows[warp];
  int from[kDims];
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    from[i] = answer * all.raw.width + all.columns[which] + head * HEAD + min(lane() + 32 * i, last);
  }
  const Request<kDims> request(all.raw, all.answers, from);
  for (int r = lane(); r < adapter.rank; r += 32) {
    low[r] = low_of(low_request(all.raw, all.answers, answer, adapter, r), all.raw, all.answers);
  }
  float x[kDims], squares = 0.0f;
  request.add(x, all.raw, all.answers);
  Turn turns[kDims];
  if (which < 2) {
    const float position = static_cast<float>(all.prompt_end + at);
    constexpr int kHalf = kDims / 2;
    const bool twice = HEAD % 64 == 0 && all.rotary == HEAD;  // the second half turns as the first
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      turns[i] = twice && i >= kHalf ? turns[i >= kHalf ? i - kHalf : 0] : turn_of(all, lane() + 32 * i, position);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int d = lane() + 32 * i, output = head * HEAD + min(d, last);
    if (all.biases[which] != nullptr) x[i] += wide(in(all.biases[which])[output]);
    if (adapter.rank > 0) x[i] += adapted(adapter, output, ups[i], low);
    x[i] = d < HEAD ? rounded(x[i]) : 0.0f;
    squares = fmaf(x[i], x[i], squares);
  }
  if (norms) {
    const float root = rsqrtf(warp_sum(squares) / static_cast<float>(HEAD) + all.norms[which].eps);
#pragma unroll
    for (int i = 0; i < kDims; ++i) x[i] = normed(all.norms[which], weights[i], x[i], root);
  }
  if (which < 2) {
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      if (lane() + 32 * i < HEAD) row[lane() + 32 * i] = x[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      if (lane() + 32 * i < HEAD) x[i] = rotated(all, row, lane() + 32 * i, turns[i]);
    }
  }
  T* to;
  if (which == 0) {
    to = out(all.q_ahd) + (static_cast<int64>(answer) * all.heads + head) * HEAD;
  } else {
    const int behind = static_cast<int>(at - all.first), step = static_cast<int>(all.step);
    if (behind < 0 || behind % step != 0) return;
    const int64 line = answer * all.room + behind / step;
    to = out(which == 1 ? all.own_k : all.own_v) + (line * all.groups + head) * HEAD;
  }
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    if (lane() + 32 * i < HEAD) to[lane() + 32 * i] = narrow(x[i]);
  }
}

// --- activation of the feed-forward ------------------------------------------------------------------------------

constexpr int kActivateThreads = 128;
constexpr int kActivateAnswers = 4;  // of a block

__device__ inline float activated(float x, bool gelu) {
  if (!gelu) return x / (1.0f + expf(-x));
  const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

// Block x: columns; block y: answers.
extern "C" __global__ void __launch_bounds__(kActivateThreads) activate(const __grid_constant__ Activate all) {
  __shared__ float low[kActivateAnswers][2][kRankMax];
  start_next();
  const int column = blockIdx.x * kActivateThreads + threadIdx.x, first = blockIdx.y * kActivateAnswers;
  const int answers = min(kActivateAnswers, all.answers - first), real = min(column, all.width - 1);
  const Up ups[2] = {up_of(all.adapters[0], real), up_of(all.adapters[1], real)};
  await_previous();
  int from[2 * kActivateAnswers];
#pragma unroll
  for (int i = 0; i < 2 * kActivateAnswers; ++i) {
    from[i] = (first + min(i / 2, answers - 1)) * all.raw.width + all.columns[i % 2] + real;
  }
  const Request<2 * kActivateAnswers> request(all.raw, all.answers, from);
  const int ranks[2] = {all.adapters[0].rank, all.adapters[1].rank}, both = ranks[0] + ranks[1];
  for (int at = threadIdx.x; at < answers * both; at += kActivateThreads) {
    const int answer = at / both, r = at % both, which = r < ranks[0] ? 0 : 1;
    const int of = which == 0 ? r : r - ranks[0];
    low[answer][which][of] =
        low_of(low_request(all.raw, all.answers, first + answer, all.adapters[which], of), all.raw, all.answers);
  }
  float sums[2 * kActivateAnswers];
  request.add(sums, all.raw, all.answers);
  __syncthreads();
  if (column >= all.width) return;
#pragma unroll
  for (int i = 0; i < kActivateAnswers; ++i) {
    if (i >= answers) break;
    float parts[2];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const Adapter& adapter = all.adapters[which];
      parts[which] = sums[2 * i + which];
      if (adapter.rank > 0) parts[which] += adapted(adapter, column, ups[which], low[i][which]);
      parts[which] = rounded(parts[which]);
    }
    const float h = activated(parts[0], all.gelu != 0) * parts[1];
    out(all.h_af)[static_cast<int64>(first + i) * all.width + column] = narrow(h);
  }
}
