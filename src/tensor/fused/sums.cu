// --- merge of partial attention ----------------------------------------------------------------------------------

// Merges a part over further keys into `out` [t, h, d] and `lse` [t, h], float32, both without gaps. Where `first` is given,
// what was there before is in it and `first_lse`, and `out` and `lse` are written alone. A warp takes a head. Empty merged with
// empty stays empty: no NaN.
struct Merge {
  float *out, *lse;
  const void* part;
  const u16* first;
  const float *part_lse, *first_lse;
  i64 part_step, part_head, lse_step, lse_head, first_step, first_head, first_lse_step, first_lse_head, rows;
  int heads, dim, part_is_wide;
};

__device__ inline float4 four(const u16* from) {
  const uint2 read = *reinterpret_cast<const uint2*>(from);
  return make_float4(low(read.x), high(read.x), low(read.y), high(read.y));
}

extern "C" __global__ void merge(const Merge a) {
  const i64 item = static_cast<i64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (item >= a.rows * a.heads) return;
  const i64 row = item / a.heads;
  const int head = static_cast<int>(item - row * a.heads), lane = threadIdx.x % 32;
  const bool is_first = a.first != nullptr;
  const float before = is_first ? a.first_lse[row * a.first_lse_step + head * a.first_lse_head] : a.lse[item];
  const float more = a.part_lse[row * a.lse_step + head * a.lse_head];
  const float most = fmaxf(before, more), least = fminf(before, more);
  // Only two empty parts are empty: a NaN in either stays.
  const bool empty = most == __int_as_float(0xff800000), broken = before != before || more != more;
  const float after = empty ? before : broken ? before + more : most + log1pf(expf(least - most));
  const float keep = empty ? 0.0f : expf(before - after), add = empty ? 0.0f : expf(more - after);
  float* out = a.out + item * a.dim;
  const i64 from = row * a.part_step + head * a.part_head, from_first = row * a.first_step + head * a.first_head;
  for (int column = lane * 4; column < a.dim; column += 128) {
    float4 sum = is_first ? four(a.first + from_first + column) : *reinterpret_cast<const float4*>(out + column), part;
    if (a.part_is_wide != 0) {
      part = *reinterpret_cast<const float4*>(static_cast<const float*>(a.part) + from + column);
    } else {
      part = four(static_cast<const u16*>(a.part) + from + column);
    }
    sum.x = sum.x * keep + part.x * add;
    sum.y = sum.y * keep + part.y * add;
    sum.z = sum.z * keep + part.z * add;
    sum.w = sum.w * keep + part.w * add;
    *reinterpret_cast<float4*>(out + column) = sum;
  }
  __syncwarp();
  if (lane == 0) a.lse[item] = after;
}

// --- gradients in float32 ----------------------------------------------------------------------------------------

// sum += part, or sum = first + part where `first` is given; `count` elements without gaps.
struct Add {
  float* sum;
  const u16 *first, *part;
  i64 count;
};

__device__ inline void widen(const Eight& x, float4& front, float4& back) {
  front = make_float4(x[0], x[1], x[2], x[3]);
  back = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ inline float4 plus(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

extern "C" __global__ void add_part(const Add a) {
  const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 8, left = a.count - first;
  if (left <= 0) return;
  float4 part[2], before[2];
  widen(load(a.part + first, left), part[0], part[1]);
  auto* sum = reinterpret_cast<float4*>(a.sum + first);
  if (a.first != nullptr) {
    widen(load(a.first + first, left), before[0], before[1]);
  } else {
    before[0] = sum[0];
    if (left > 4) before[1] = sum[1];
  }
  sum[0] = plus(before[0], part[0]);
  if (left > 4) sum[1] = plus(before[1], part[1]);
}

// --- adapters ----------------------------------------------------------------------------------------------------

constexpr int kTensors = 32;

// Rounds `count` float32 values times a factor, or widens values and multiplies, tensor by tensor.
struct Casts {
  const void* from[kTensors];
  void* to[kTensors];
  i64 count[kTensors];
  float factor[kTensors];
};

extern "C" __global__ void round_all(const Casts a) {
  const int tensor = blockIdx.y;
  const auto* from = static_cast<const float*>(a.from[tensor]);
  auto* to = static_cast<u16*>(a.to[tensor]);
  const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (i64 at = first; at < a.count[tensor]; at += gridDim.x * blockDim.x) {
    to[at] = narrow(from[at] * a.factor[tensor]);
  }
}

extern "C" __global__ void widen_all(const Casts a) {
  const int tensor = blockIdx.y;
  const auto* from = static_cast<const u16*>(a.from[tensor]);
  auto* to = static_cast<float*>(a.to[tensor]);
  const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (i64 at = first; at < a.count[tensor]; at += gridDim.x * blockDim.x) {
    to[at] = wide(from[at]) * a.factor[tensor];
  }
}

// One step of AdamW on float32 tensors, in place, with the operations in the order of step/optimizer.rs.
struct Adam {
  float* weight[kTensors];
  const float* gradient[kTensors];
  float *mean[kTensors], *square[kTensors];
  i64 count[kTensors];
  float beta_1, beta_2, rest_1, rest_2, first, second, eps, decay, rate;
};

extern "C" __global__ void adam(const Adam a) {
  const int tensor = blockIdx.y;
  const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (i64 at = first; at < a.count[tensor]; at += gridDim.x * blockDim.x) {
    const float g = a.gradient[tensor][at];
    // Without fused multiply-adds: each operation is rounded as it is by an operator of its own.
    const float mean = __fadd_rn(__fmul_rn(a.mean[tensor][at], a.beta_1), __fmul_rn(g, a.rest_1));
    const float square = __fadd_rn(__fmul_rn(a.square[tensor][at], a.beta_2), __fmul_rn(__fmul_rn(g, g), a.rest_2));
    const float root = __fadd_rn(__fsqrt_rn(__fmul_rn(square, a.second)), a.eps);
    const float step = __fdiv_rn(__fmul_rn(mean, a.first), root);
    const float weight = __fmul_rn(a.weight[tensor][at], a.decay);
    a.mean[tensor][at] = mean;
    a.square[tensor][at] = square;
    a.weight[tensor][at] = __fsub_rn(weight, __fmul_rn(step, a.rate));
  }
}
