
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

// A normed value times the weight: `root` is 1 / √(mean of squares + eps).
__device__ inline float normed(const Norm& norm, float x, float root, int column) {
  const float weight = wide(in(norm.weight_w)[column]);
  if (norm.one_plus) return rounded(x * root * (1.0f + weight));
  return rounded(rounded(x * root) * weight);
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

// Sum over the row: over warps, then over blocks, in their order. All blocks of the cluster have started. `sums` are not
// used twice by a kernel.
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
  const int end = min(first + span, all.width), start = first + threadIdx.x;
  const bool adds = all.raw.sums != nullptr;
  for (int column = start; column < end; column += kRowThreads) {
    if (adds) prefetch_row(all.adapter, column);
    if (threadIdx.x % 16 != 0) continue;
    if (all.norm.weight_w != nullptr) prefetch(in(all.norm.weight_w) + column);
    if (all.norm_out.weight_w != nullptr) prefetch(in(all.norm_out.weight_w) + column);
    if (all.bias_w != nullptr) prefetch(in(all.bias_w) + column);
  }
  await_previous();
  if (adds) {
    for (int r = threadIdx.x; r < all.adapter.rank; r += kRowThreads) {
      low[r] = low_of(all.raw, all.answers, answer, all.adapter, r);
    }
    __syncthreads();
  }
  T* x_row = out(all.x_aw) + static_cast<int64>(answer) * all.width;
  float x[kColumns], y[kColumns];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = start + i * kRowThreads;
    if (column >= end) break;
    x[i] = wide(x_row[column]);
    if (!adds) continue;
    float sum = sum_of(all.raw, all.answers, answer, column);
    if (all.bias_w != nullptr) sum += wide(in(all.bias_w)[column]);
    if (all.adapter.rank > 0) sum += adapted(all.adapter, column, low);
    y[i] = rounded(sum);
    squares = fmaf(y[i], y[i], squares);
  }
  cluster_wait();
  float root = 0.0f;
  if (adds && all.norm_out.weight_w != nullptr) {
    root = rsqrtf(row_sum(squares, warps[0], sums[0]) / static_cast<float>(all.width) + all.norm_out.eps);
  }
  squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = start + i * kRowThreads;
    if (column >= end) break;
    if (adds) {
      x[i] = rounded(x[i] + (all.norm_out.weight_w != nullptr ? normed(all.norm_out, y[i], root, column) : y[i]));
      x_row[column] = narrow(x[i]);
    }
    squares = fmaf(x[i], x[i], squares);
  }
  if (all.h_aw == nullptr) return;
  T* h_row = out(all.h_aw) + static_cast<int64>(answer) * all.width;
  const bool norms = all.norm.weight_w != nullptr;
  if (norms) root = rsqrtf(row_sum(squares, warps[1], sums[1]) / static_cast<float>(all.width) + all.norm.eps);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = start + i * kRowThreads;
    if (column >= end) break;
    h_row[column] = narrow(norms ? normed(all.norm, x[i], root, column) : x[i]);
  }
}

// --- heads: a warp a head ----------------------------------------------------------------------------------------

constexpr int kHeadThreads = 128;
constexpr int kHeadWarps = kHeadThreads / 32;
constexpr int kDims = (HEAD + 31) / 32;  // of a lane


// Rotates dimension d of a row in shared memory.
__device__ inline float rotated(const Heads& all, const float* row, int d, float position) {
  const int pairs = all.rotary / 2;
  if (d >= 2 * pairs) return row[d];
  const int pair = d < pairs ? d : d - pairs;
  const float angle = __fmul_rn(position, all.frequencies[pair]);
  const float cosine = rounded(__fmul_rn(cosf(angle), all.gain)), sine = rounded(__fmul_rn(sinf(angle), all.gain));
  const float straight = rounded(__fmul_rn(row[d], cosine));
  if (d < pairs) return rounded(straight - rounded(__fmul_rn(row[d + pairs], sine)));
  return rounded(straight + rounded(__fmul_rn(row[pair], sine)));
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
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    if (lane() + 32 * i < HEAD) prefetch_row(adapter, head * HEAD + lane() + 32 * i);
  }
  await_previous();
  const int64 at = __ldcg(&all.at->row);
  float* low = lows[warp];
  float* row = rows[warp];
  for (int r = lane(); r < adapter.rank; r += 32) low[r] = low_of(all.raw, all.answers, answer, adapter, r);
  __syncwarp();
  float x[kDims], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int d = lane() + 32 * i, output = head * HEAD + d;
    x[i] = 0.0f;
    if (d >= HEAD) continue;
    float sum = sum_of(all.raw, all.answers, answer, all.columns[which] + output);
    if (all.biases[which] != nullptr) sum += wide(in(all.biases[which])[output]);
    if (adapter.rank > 0) sum += adapted(adapter, output, low);
    x[i] = rounded(sum);
    squares = fmaf(x[i], x[i], squares);
  }
  if (which < 2 && all.norms[which].weight_w != nullptr) {
    const float root = rsqrtf(warp_sum(squares) / static_cast<float>(HEAD) + all.norms[which].eps);
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      if (lane() + 32 * i < HEAD) x[i] = normed(all.norms[which], x[i], root, lane() + 32 * i);
    }
  }
  if (which < 2) {
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      if (lane() + 32 * i < HEAD) row[lane() + 32 * i] = x[i];
    }
    __syncwarp();
    const float position = static_cast<float>(all.prompt_end + at);
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      if (lane() + 32 * i < HEAD) x[i] = rotated(all, row, lane() + 32 * i, position);
    }
  }
  T* to;
  if (which == 0) {
    to = out(all.q_ahd) + (static_cast<int64>(answer) * all.heads + head) * HEAD;
  } else {
    if (at < all.first || (at - all.first) % all.step != 0) return;
    const int64 line = answer * all.room + (at - all.first) / all.step;
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
  const int answers = min(kActivateAnswers, all.answers - first);
  if (column < all.width) {
    prefetch_row(all.adapters[0], column);
    prefetch_row(all.adapters[1], column);
  }
  await_previous();
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const Adapter& adapter = all.adapters[which];
    for (int at = threadIdx.x; at < answers * adapter.rank; at += kActivateThreads) {
      const int answer = at / adapter.rank, r = at % adapter.rank;
      low[answer][which][r] = low_of(all.raw, all.answers, first + answer, adapter, r);
    }
  }
  float sums[2][kActivateAnswers] = {};
  if (column < all.width) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int i = 0; i < kActivateAnswers; ++i) {
        if (i < answers) sums[which][i] = sum_of(all.raw, all.answers, first + i, all.columns[which] + column);
      }
    }
  }
  __syncthreads();
  if (column >= all.width) return;
#pragma unroll
  for (int i = 0; i < kActivateAnswers; ++i) {
    if (i >= answers) break;
    float parts[2];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const Adapter& adapter = all.adapters[which];
      parts[which] = sums[which][i];
      if (adapter.rank > 0) parts[which] += adapted(adapter, column, low[i][which]);
      parts[which] = rounded(parts[which]);
    }
    const float h = rounded(activated(parts[0], all.gelu != 0)) * parts[1];
    out(all.h_af)[static_cast<int64>(first + i) * all.width + column] = narrow(h);
  }
}
