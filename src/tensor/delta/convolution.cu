
// --- the causal convolution of each channel, and its gradient ----------------------------------------------------
//
//   c_t = sum over j < TAPS of weight[j] u[t + j]        y = c sigmoid(c)        du[e] = sum over j of weight[j] dc[e - j]

constexpr int kConvolutionThreads = 128;
constexpr int kConvolutionRows = 32;  // rows of a block

struct Convolution {
  const u16* u;         // [taps - 1 + rows, channels]
  const float* weight;  // [channels, taps]
  u16* y;               // [rows, channels]
  const u16* dy;        // [rows, channels]
  float* du;            // [taps - 1 + rows, channels]
  i64 channels;
  i64 u_step, dy_step;
  int rows;
};

// Channels 2 c and 2 c + 1 of a thread.
struct Taps {
  float weight[2][TAPS];
};
__device__ inline Taps taps_of(const Convolution& all, i64 channel) {
  Taps of;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int j = 0; j < TAPS; ++j) of.weight[e][j] = all.weight[(channel + e) * TAPS + j];
  }
  return of;
}

// Moves a window of TAPS rows on by one.
__device__ inline void push(float (&window)[2][TAPS], u32 both) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int j = 0; j + 1 < TAPS; ++j) window[e][j] = window[e][j + 1];
  }
  window[0][TAPS - 1] = low(both);
  window[1][TAPS - 1] = high(both);
}

__device__ inline float weighed(const Taps& taps, const float (&window)[2][TAPS], int e) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < TAPS; ++j) sum = fmaf(taps.weight[e][j], window[e][j], sum);
  return sum;
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// Block x: rows; block y: channels.
extern "C" __global__ void __launch_bounds__(kConvolutionThreads) convolve(const __grid_constant__ Convolution all) {
  const i64 channel = 2 * (static_cast<i64>(blockIdx.y) * kConvolutionThreads + threadIdx.x);
  if (channel >= all.channels) return;
  const Taps taps = taps_of(all, channel);
  const int first = blockIdx.x * kConvolutionRows, end = min(first + kConvolutionRows, all.rows);
  const u16* u = all.u + channel;
  float window[2][TAPS] = {};
#pragma unroll
  for (int j = 0; j < TAPS - 1; ++j) push(window, *reinterpret_cast<const u32*>(u + (first + j) * all.u_step));
#pragma unroll 8
  for (int t = first; t < end; ++t) {
    push(window, *reinterpret_cast<const u32*>(u + (t + TAPS - 1) * all.u_step));
    float y[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float c = weighed(taps, window, e);
      y[e] = c * sigmoid(c);
    }
    *reinterpret_cast<u32*>(all.y + t * all.channels + channel) = pack(y[0], y[1]);
  }
}

// Block x: rows of du; block y: channels.
extern "C" __global__ void __launch_bounds__(kConvolutionThreads) convolve_gradient(
    const __grid_constant__ Convolution all) {
  const i64 channel = 2 * (static_cast<i64>(blockIdx.y) * kConvolutionThreads + threadIdx.x);
  if (channel >= all.channels) return;
  const Taps taps = taps_of(all, channel);
  const int before = TAPS - 1, first = blockIdx.x * kConvolutionRows;
  const int end = min(first + kConvolutionRows, all.rows + before);
  const u16* u = all.u + channel;
  const u16* dy = all.dy + channel;
  float window[2][TAPS] = {}, sums[2][TAPS] = {};  // of u; of dc, row t last
  // Row e of du takes dc of the rows e - TAPS + 1 .. e; dc of row t needs u of the rows t .. t + TAPS - 1.
#pragma unroll
  for (int j = 0; j < TAPS - 1; ++j) {
    const int row = first - before + j;
    push(window, row >= 0 ? *reinterpret_cast<const u32*>(u + row * all.u_step) : 0);
  }
  const int start = first - before;
#pragma unroll 4
  for (int t = start; t < end; ++t) {
    const bool real = t >= 0 && t < all.rows;
    const int row = t + before;
    push(window, row >= 0 && row < all.rows + before ? *reinterpret_cast<const u32*>(u + row * all.u_step) : 0);
    const u32 both = real ? *reinterpret_cast<const u32*>(dy + t * all.dy_step) : 0;
    float du[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float c = weighed(taps, window, e), s = sigmoid(c);
      const float dc = real ? (e == 0 ? low(both) : high(both)) * s * (1.0f + c * (1.0f - s)) : 0.0f;
#pragma unroll
      for (int j = 0; j + 1 < TAPS; ++j) sums[e][j] = sums[e][j + 1];
      sums[e][TAPS - 1] = dc;
      du[e] = 0.0f;
#pragma unroll
      for (int j = 0; j < TAPS; ++j) du[e] = fmaf(taps.weight[e][j], sums[e][TAPS - 1 - j], du[e]);
    }
    if (t >= first) *reinterpret_cast<float2*>(all.du + t * all.channels + channel) = make_float2(du[0], du[1]);
  }
}
