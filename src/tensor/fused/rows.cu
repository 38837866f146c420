// --- norms of wide rows ------------------------------------------------------------------------------------------

// y = x r w with r = 1 / √(mean(x²) + eps) and w the weight, or 1 + the weight. Where `other` is given, x is the rounded
// sum of `x` and `other`, which is written to `sum`. A block takes a row, a thread at most kHeld times eight columns.
//
//   dx = r (g - x r² mean(g x)) + dsum      with g = dy w
struct Norm {
  const u16 *x, *other, *weight, *dy, *dsum;
  u16 *sum, *out;
  i64 x_step, other_step, dy_step, dsum_step;
  int width, one_plus;
  float eps;
};

constexpr int kHeld = 4;

// Sums of two values over the block, for every thread. `meeting` has room for 64 values.
__device__ inline void total(float& a, float& b, float* meeting) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    a += __shfl_xor_sync(kAll, a, step);
    b += __shfl_xor_sync(kAll, b, step);
  }
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
    meeting[threadIdx.x / 32] = a;
    meeting[32 + threadIdx.x / 32] = b;
  }
  __syncthreads();
  a = lane < warps ? meeting[lane] : 0.0f;
  b = lane < warps ? meeting[32 + lane] : 0.0f;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    a += __shfl_xor_sync(kAll, a, step);
    b += __shfl_xor_sync(kAll, b, step);
  }
}

__device__ inline float factor(const Eight& weight, int i, int one_plus) {
  return one_plus != 0 ? 1.0f + weight[i] : weight[i];
}

extern "C" __global__ void __launch_bounds__(1024) norm_forward(const Norm a) {
  __shared__ float meeting[64];
  const i64 row = blockIdx.x;
  Eight held[kHeld];
  float squares = 0.0f, nothing = 0.0f;
#pragma unroll
  for (int part = 0; part < kHeld; ++part) {
    const int column = (part * blockDim.x + threadIdx.x) * 8;
    if (column >= a.width) continue;
    Eight x = load(a.x + row * a.x_step + column);
    if (a.other != nullptr) {
      const Eight other = load(a.other + row * a.other_step + column);
      float both[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) both[i] = x[i] + other[i];
      x = rounded(both);
      store(a.sum + row * a.width + column, x);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    held[part] = x;
  }
  total(squares, nothing, meeting);
  const float r = rsqrtf(squares / static_cast<float>(a.width) + a.eps);
#pragma unroll
  for (int part = 0; part < kHeld; ++part) {
    const int column = (part * blockDim.x + threadIdx.x) * 8;
    if (column >= a.width) continue;
    const Eight weight = load(a.weight + column);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = held[part][i] * r * factor(weight, i, a.one_plus);
    store(a.out + row * a.width + column, rounded(y));
  }
}

extern "C" __global__ void __launch_bounds__(1024) norm_backward(const Norm a) {
  __shared__ float meeting[64];
  const i64 row = blockIdx.x;
  Eight held[kHeld], gradient[kHeld];
  float squares = 0.0f, along = 0.0f;
#pragma unroll
  for (int part = 0; part < kHeld; ++part) {
    const int column = (part * blockDim.x + threadIdx.x) * 8;
    if (column >= a.width) continue;
    held[part] = load(a.x + row * a.x_step + column);
    gradient[part] = load(a.dy + row * a.dy_step + column);
    const Eight weight = load(a.weight + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = held[part][i];
      squares += x * x;
      along += gradient[part][i] * factor(weight, i, a.one_plus) * x;
    }
  }
  total(squares, along, meeting);
  const float width = static_cast<float>(a.width);
  const float r = rsqrtf(squares / width + a.eps);
  const float mean_product = r * r * (along / width);
#pragma unroll
  for (int part = 0; part < kHeld; ++part) {
    const int column = (part * blockDim.x + threadIdx.x) * 8;
    if (column >= a.width) continue;
    const Eight weight = load(a.weight + column);
    float dx[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dx[i] = r * (gradient[part][i] * factor(weight, i, a.one_plus) - held[part][i] * mean_product);
    }
    if (a.dsum != nullptr) {
      const Eight dsum = load(a.dsum + row * a.dsum_step + column);
#pragma unroll
      for (int i = 0; i < 8; ++i) dx[i] += dsum[i];
    }
    store(a.out + row * a.width + column, rounded(dx));
  }
}

// --- norm and rotation by head -----------------------------------------------------------------------------------

// Heads of one or two tensors [t, heads, d], each normed with its own weight where it has one, then pairs (j, j + n) of its
// first 2n dimensions rotated by the angles of its row; n may be 0. `lanes` threads take a head, each of them sixteen
// dimensions: eight and their partners.
struct Part {
  const u16 *x, *weight, *dy;
  u16* out;
  i64 x_step, x_head, dy_step, dy_head;
  int heads;
};
struct Heads {
  Part part[2];
  const u16 *cosine, *sine;
  i64 rows;
  int dim, pairs, lanes, one_plus;
  float eps;
};

// What a thread has of a head.
struct Share {
  i64 row;
  int part, head, first, second, angle;
  bool real, turns;
};

__device__ inline Share share_of(const Heads& a) {
  const int heads = a.part[0].heads + a.part[1].heads;
  const i64 all = a.rows * heads;
  const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / a.lanes;
  const i64 item = at < all ? at : all - 1;
  const int slot = threadIdx.x % a.lanes, half = a.pairs / 8;
  Share mine;
  mine.row = item / heads;
  mine.head = static_cast<int>(item - mine.row * heads);
  mine.part = mine.head < a.part[0].heads ? 0 : 1;
  if (mine.part == 1) mine.head -= a.part[0].heads;
  mine.real = at < all && slot * 16 < a.dim;
  mine.turns = slot < half;
  mine.angle = slot * 8;
  mine.first = mine.turns ? slot * 8 : slot * 16;
  mine.second = mine.turns ? a.pairs + slot * 8 : slot * 16 + 8;
  return mine;
}

__device__ inline float total_of_head(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

extern "C" __global__ void heads_forward(const Heads a) {
  const Share mine = share_of(a);
  const Part& part = a.part[mine.part];
  float x[8] = {}, y[8] = {};
  if (mine.real) {
    const u16* from = part.x + mine.row * part.x_step + mine.head * part.x_head;
    const Eight first = load(from + mine.first), second = load(from + mine.second);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = first[i];
      y[i] = second[i];
    }
  }
  if (a.part[0].weight != nullptr) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i] + y[i] * y[i];
    const float r = rsqrtf(total_of_head(squares, a.lanes) / static_cast<float>(a.dim) + a.eps);
    if (mine.real) {
      const Eight first = load(part.weight + mine.first), second = load(part.weight + mine.second);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] *= r * factor(first, i, a.one_plus);
        y[i] *= r * factor(second, i, a.one_plus);
      }
    }
  }
  if (!mine.real) return;
  if (mine.turns) {
    const Eight cosine = load(a.cosine + mine.row * a.pairs + mine.angle);
    const Eight sine = load(a.sine + mine.row * a.pairs + mine.angle);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float turned = x[i] * cosine[i] - y[i] * sine[i];
      y[i] = y[i] * cosine[i] + x[i] * sine[i];
      x[i] = turned;
    }
  }
  u16* to = part.out + (mine.row * part.heads + mine.head) * a.dim;
  store(to + mine.first, rounded(x));
  store(to + mine.second, rounded(y));
}

extern "C" __global__ void heads_backward(const Heads a) {
  const Share mine = share_of(a);
  const Part& part = a.part[mine.part];
  float dx[8] = {}, dy[8] = {};
  if (mine.real) {
    const u16* from = part.dy + mine.row * part.dy_step + mine.head * part.dy_head;
    const Eight first = load(from + mine.first), second = load(from + mine.second);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dx[i] = first[i];
      dy[i] = second[i];
    }
    if (mine.turns) {
      const Eight cosine = load(a.cosine + mine.row * a.pairs + mine.angle);
      const Eight sine = load(a.sine + mine.row * a.pairs + mine.angle);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float turned = dx[i] * cosine[i] + dy[i] * sine[i];
        dy[i] = dy[i] * cosine[i] - dx[i] * sine[i];
        dx[i] = turned;
      }
    }
  }
  if (a.part[0].weight != nullptr) {
    Eight first = {}, second = {};
    float squares = 0.0f, along = 0.0f;
    if (mine.real) {
      const u16* from = part.x + mine.row * part.x_step + mine.head * part.x_head;
      first = load(from + mine.first);
      second = load(from + mine.second);
      const Eight left = load(part.weight + mine.first), right = load(part.weight + mine.second);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        dx[i] *= factor(left, i, a.one_plus);
        dy[i] *= factor(right, i, a.one_plus);
        squares += first[i] * first[i] + second[i] * second[i];
        along += dx[i] * first[i] + dy[i] * second[i];
      }
    }
    squares = total_of_head(squares, a.lanes);
    along = total_of_head(along, a.lanes);
    const float dim = static_cast<float>(a.dim);
    const float r = rsqrtf(squares / dim + a.eps);
    const float mean_product = r * r * (along / dim);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dx[i] = r * (dx[i] - first[i] * mean_product);
      dy[i] = r * (dy[i] - second[i] * mean_product);
    }
  }
  if (!mine.real) return;
  u16* to = part.out + (mine.row * part.heads + mine.head) * a.dim;
  store(to + mine.first, rounded(dx));
  store(to + mine.second, rounded(dy));
}
