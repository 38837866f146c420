// The best n candidates of a row; follows selection_score.cu.

constexpr int kBins = 1024;
constexpr int kCompactThreads = 512;

struct Range {
  u64 low, high;
};

// Copies a row's candidates to shared memory, and finds the least and the largest.
__device__ Range load_candidates(u64* held, const u64* candidates, int count) {
  __shared__ u64 low, high;
  if (threadIdx.x == 0) {
    low = ~0ull;
    high = 0;
  }
  __syncthreads();
  u64 least = ~0ull, most = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kCompactThreads) {
    const u64 one = candidates[i];
    held[i] = one;
    least = min(least, one);
    most = max(most, one);
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    least = min(least, __shfl_xor_sync(kAll, least, apart));
    most = max(most, __shfl_xor_sync(kAll, most, apart));
  }
  if (threadIdx.x % 32 == 0) {
    atomicMin(&low, least);
    atomicMax(&high, most);
  }
  __syncthreads();
  return {low, high};
}

struct Bin {
  int at;     // the bin
  int count;  // its entries
  int left;   // how many of them are wanted
};

// The bin in which the `wanted`-th entry from the top lies. One warp; a lane sums kBins / 32 bins.
__device__ Bin bin_of(const int* bins, int wanted, int lane) {
  constexpr int each = kBins / 32;
  int own = 0;
  for (int i = 0; i < each; ++i) own += bins[lane * each + i];
  int from_here = own;  // entries in the bins of this lane and above
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const int more = __shfl_down_sync(kAll, from_here, apart);
    if (lane + apart < 32) from_here += more;
  }
  const u32 enough = __ballot_sync(kAll, from_here >= wanted);
  const int owner = 31 - __clz(enough);
  Bin found{0, 0, 0};
  if (lane == owner) {
    int above = from_here - own;
    for (int i = each - 1; i >= 0; --i) {
      const int here = bins[lane * each + i];
      if (above + here >= wanted) {
        found = {lane * each + i, here, wanted - above};
        break;
      }
      above += here;
    }
  }
  return {__shfl_sync(kAll, found.at, owner), __shfl_sync(kAll, found.count, owner), __shfl_sync(kAll, found.left, owner)};
}

// A bound such that exactly n of `count` different numbers of a range, count > n, are not below it.
__device__ u64 bound_of(const u64* held, int count, Range range, int n) {
  __shared__ int bins[kBins];
  __shared__ Bin bin;
  int wanted = n;
  while (true) {
    const u64 wide = range.high - range.low;
    const int shift = wide < kBins ? 0 : 54 - __clzll(wide);
    for (int i = threadIdx.x; i < kBins; i += kCompactThreads) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kCompactThreads) {
      const u64 one = held[i];
      if (one >= range.low && one <= range.high) atomicAdd(&bins[static_cast<int>((one - range.low) >> shift)], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const Bin found = bin_of(bins, wanted, threadIdx.x);
      if (threadIdx.x == 0) bin = found;
    }
    __syncthreads();
    const u64 low = range.low + (static_cast<u64>(bin.at) << shift);
    if (shift == 0 || bin.count == bin.left) return low;
    const u64 high = low + ((1ull << shift) - 1);
    range = {low, min(high, range.high)};
    wanted = bin.left;
    __syncthreads();
  }
}

struct Buffers {
  u64* candidates;  // [rows, capacity]
  int* counts;      // [rows]
  u64* thresholds;  // [rows]
  float* scores;    // [rows, n], written by `finish`
  int* positions;   // [rows, n], written by `finish`
  int capacity, n;
  int rows;
  int full;    // rows with more candidates than this are compacted
  int padded;  // n rounded up to a power of two
};

// Leaves the best n in front of a row's buffer; `held` is as long as the buffer.
__device__ void keep_best(const Buffers& buffers, int row, int count, u64* held) {
  __shared__ int kept;
  u64* candidates = buffers.candidates + static_cast<long long>(row) * buffers.capacity;
  if (threadIdx.x == 0) kept = 0;
  const Range range = load_candidates(held, candidates, count);
  const u64 bound = bound_of(held, count, range, buffers.n);
  const int lane = threadIdx.x % 32;
  for (int start = threadIdx.x - lane; start < count; start += kCompactThreads) {
    const int i = start + lane;
    const bool stays = i < count && held[i] >= bound;
    const u32 stayers = __ballot_sync(kAll, stays);
    int slot = 0;
    if (lane == 0 && stayers != 0) slot = atomicAdd(&kept, __popc(stayers));
    slot = __shfl_sync(kAll, slot, 0);
    if (stays) candidates[slot + __popc(stayers & ((1u << lane) - 1))] = held[i];
  }
  if (threadIdx.x == 0) {
    buffers.counts[row] = buffers.n;
    buffers.thresholds[row] = bound;
  }
}

// A block looks after the rows blockIdx.x, blockIdx.x + gridDim.x, …, at most kCompactThreads of them.
extern "C" __global__ void __launch_bounds__(kCompactThreads) compact(const __grid_constant__ Buffers buffers) {
  extern __shared__ u64 held[];
  __shared__ int rows[kCompactThreads];
  __shared__ int full;
  if (threadIdx.x == 0) full = 0;
  __syncthreads();
  const int own = blockIdx.x + threadIdx.x * gridDim.x;
  if (own < buffers.rows && buffers.counts[own] > buffers.full) rows[atomicAdd(&full, 1)] = own;
  __syncthreads();
  for (int i = 0; i < full; ++i) {
    keep_best(buffers, rows[i], buffers.counts[rows[i]], held);
    __syncthreads();
  }
}

// The best n of each row in ascending order of position; what is left over has score -inf and position -1.
extern "C" __global__ void __launch_bounds__(kCompactThreads) finish(const __grid_constant__ Buffers buffers) {
  extern __shared__ u64 held[];
  const int row = blockIdx.x;
  int count = buffers.counts[row];
  if (count > buffers.n) {
    keep_best(buffers, row, count, held);
    count = buffers.n;
  }
  __syncthreads();
  const u64* candidates = buffers.candidates + static_cast<long long>(row) * buffers.capacity;
  for (int i = threadIdx.x; i < buffers.padded; i += kCompactThreads) {
    const u64 one = i < count ? candidates[i] : 0;
    // Position above, score below; what is no candidate comes last.
    held[i] = i < count ? (~one << 32) | (one >> 32) : ~0ull;
  }
  __syncthreads();
  for (int size = 2; size <= buffers.padded; size *= 2) {
    for (int apart = size / 2; apart > 0; apart /= 2) {
      for (int i = threadIdx.x; i < buffers.padded / 2; i += kCompactThreads) {
        const int low = (i / apart) * apart * 2 + i % apart, high = low + apart;
        const bool rising = (low & size) == 0;
        const u64 one = held[low], other = held[high];
        if ((one > other) == rising) {
          held[low] = other;
          held[high] = one;
        }
      }
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < buffers.n; i += kCompactThreads) {
    const long long at = static_cast<long long>(row) * buffers.n + i;
    const u64 one = held[i];
    buffers.scores[at] = i < count ? score_of(static_cast<u32>(one)) : __uint_as_float(0xff800000u);
    buffers.positions[at] = i < count ? static_cast<int>(one >> 32) : -1;
  }
}
