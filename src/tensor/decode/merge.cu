
// --- merging partial attention -----------------------------------------------------------------------------------

constexpr int kMergeThreads = (HEAD + 31) / 32 * 32;
constexpr int kPartsMax = 1024;

// Block x: a head of an answer.
__device__ inline void merge_parts(const Merge& all) {
  __shared__ float weights[kPartsMax], most_of[kMergeThreads / 32];
  start_next();
  await_previous();
  constexpr int kTogether = 32;  // parts whose values are requested before their weights are known
  const int parts = static_cast<int>(all.parts), lines = all.answers * all.heads, line = blockIdx.x, d = threadIdx.x;
  const float* from = all.out_pahd + static_cast<int64>(line) * HEAD + min(d, HEAD - 1);
  const int64 step = static_cast<int64>(lines) * HEAD;
  float values[kTogether];
#pragma unroll
  for (int part = 0; part < kTogether; ++part) values[part] = part < parts ? __ldcg(from + part * step) : 0.0f;
  float most = nothing();
  for (int part = threadIdx.x; part < parts; part += kMergeThreads) {
    const float lse = __ldcg(all.lse_pah + static_cast<int64>(part) * lines + line);
    weights[part] = lse;
    most = fmaxf(most, lse);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
  if (lane() == 0) most_of[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kMergeThreads / 32; ++warp) most = fmaxf(most, most_of[warp]);
  for (int part = threadIdx.x; part < parts; part += kMergeThreads) {
    // A part without keys weighs nothing; a NaN stays.
    weights[part] = weights[part] == nothing() ? 0.0f : expf(weights[part] - most);
  }
  __syncthreads();
  float whole = 0.0f, sum = 0.0f;
#pragma unroll
  for (int part = 0; part < kTogether; ++part) {
    if (part >= parts) break;
    whole += weights[part];
    sum = fmaf(weights[part], values[part], sum);
  }
#pragma unroll 8
  for (int part = kTogether; part < parts; ++part) {
    whole += weights[part];
    sum = fmaf(weights[part], __ldcg(from + part * step), sum);
  }
  const float merged = whole == 0.0f ? 0.0f : sum / whole;
  if (d < HEAD) {
    const int64 to = static_cast<int64>(line) * HEAD + d;
    if (all.whole_an != nullptr) {
      out(all.whole_an)[to] = narrow(merged);
    } else {
      all.out_ahd[to] = merged;
    }
  }
  if (all.whole_an == nullptr && d == 0) all.lse_ah[line] = whole == 0.0f ? nothing() : most + logf(whole);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads) merge(const __grid_constant__ Merge all) {
  merge_parts(all);
}
