// One token of each answer from the raw sums of the head: temperature, top-k, top-p, seeded Gumbel noise, log-probability and
// entropy. What it computes is that of src/step/rollout/sampling.rs; the noise is that of noise.rs.

// Arguments of the kernels below.
struct Sample {
  Raw raw;                // the head's, [splits, answers, width]
  float cap;              // logits z become cap · tanh(z / cap); 0: they stay
  float temperature;
  double top_p;           // 1: all
  int64 top_k;            // 0: all
  const uint64* roots;    // [tokens, answers] the noise of each token
  const byte* greedy_a;   // 1: the most probable token
  float* logits_av;       // scratch
  double* parts;          // scratch, [answers, chunks, PARTS]
  double* best;           // scratch, [answers, 2]: candidate and its id
  int64* tokens_a;        // out: what the answers read next
  double* drawn;          // out, [tokens, answers, 3]: id as bits, log-probability, entropy
  Step* at;
  int answers, vocabulary, chunks;
};

// Entries of a chunk, and what is known of one: maximum, sum of exp(z − maximum), sum of (z − maximum) exp(z − maximum),
// best candidate and its id.
constexpr int CHUNK_ENTRIES = 2048, PARTS = 5;

static __device__ double minus_infinity() { return __longlong_as_double(0xfff0000000000000LL); }

static __device__ float logit(const Sample& s, int answer, int entry) {
  float sum = 0;
  for (int split = 0; split < s.raw.splits; ++split) {
    sum += s.raw.sums[(int64(split) * s.answers + answer) * s.raw.width + entry];
  }
  float z = rounded(sum);
  if (s.cap != 0) z = rounded(rounded(tanhf(rounded(z / s.cap))) * s.cap);
  return s.temperature != 1 ? z / s.temperature : z;
}

static __device__ double gumbel(uint64 root, int entry) {
  uint64 x = (uint64(entry) + 1) * 0x9e3779b97f4a7c15ULL + root;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  x ^= x >> 31;
  const double u = (double(x >> 12) + 0.5) * (1.0 / 4503599627370496.0);
  return -log(-log(u));
}

// The better of two candidates; of equal ones that with the lower id.
static __device__ void better(double& value, double& id, double other, double other_id) {
  if (other > value || (other == value && other_id < id)) {
    value = other;
    id = other_id;
  }
}

// All threads of a block get the best candidate of all.
static __device__ void best_of_block(double& value, double& id) {
  __shared__ double values[32], ids[32];
  for (int step = 16; step > 0; step /= 2) {
    const double other = __shfl_xor_sync(~0u, value, step), other_id = __shfl_xor_sync(~0u, id, step);
    better(value, id, other, other_id);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    values[threadIdx.x / 32] = value;
    ids[threadIdx.x / 32] = id;
  }
  __syncthreads();
  for (int warp = 0; warp < blockDim.x / 32; ++warp) better(value, id, values[warp], ids[warp]);
}

// All threads of a block get the sum of all, always in the same order.
static __device__ double sum_of_block(double x) {
  __shared__ double sums[32];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  double all = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) all += sums[warp];
  return all;
}

static __device__ float max_of_block(float x) {
  __shared__ float most[32];
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, x, step);
    x = other > x || other != other ? other : x;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = x;
  __syncthreads();
  for (int warp = 0; warp < blockDim.x / 32; ++warp) x = most[warp] > x || most[warp] != most[warp] ? most[warp] : x;
  return x;
}

// A chunk of one answer's entries. Grid (chunks, answers), 256 threads.
extern "C" __global__ void __launch_bounds__(256) sample_scan(const __grid_constant__ Sample s) {
  start_next();
  await_previous();
  const int answer = blockIdx.y, first = blockIdx.x * CHUNK_ENTRIES;
  const int last = min(first + CHUNK_ENTRIES, s.vocabulary);
  constexpr int EACH = CHUNK_ENTRIES / 256;
  float z[EACH];
  float most = nothing();
  for (int i = 0; i < EACH; ++i) {
    const int entry = first + i * 256 + threadIdx.x;
    z[i] = entry < last ? logit(s, answer, entry) : nothing();
    if (entry < last) s.logits_av[int64(answer) * s.vocabulary + entry] = z[i];
    most = z[i] > most || z[i] != z[i] ? z[i] : most;
  }
  most = max_of_block(most);
  double sum = 0, weighted = 0, value = minus_infinity(), id = s.vocabulary;
  const bool greedy = s.greedy_a[answer] != 0;
  const bool restricted = !greedy && (s.top_p < 1 || s.top_k > 0);
  const uint64 root = s.roots[(s.at->row + 1) * s.answers + answer];
  for (int i = 0; i < EACH; ++i) {
    const int entry = first + i * 256 + threadIdx.x;
    // An infinite maximum gives NaN here, which shows itself; −infinity beside a finite one is no probability.
    if (entry >= last || (isinf(z[i]) && z[i] < 0 && most > z[i])) continue;
    const float away = z[i] - most;
    const double weight = exp(double(away));
    sum += weight;
    weighted += weight * away;
    if (!restricted) better(value, id, greedy ? double(z[i]) : double(z[i]) + gumbel(root, entry), entry);
  }
  sum = sum_of_block(sum);
  weighted = sum_of_block(weighted);
  if (!restricted) best_of_block(value, id);
  if (threadIdx.x == 0) {
    double* part = s.parts + (int64(answer) * s.chunks + blockIdx.x) * PARTS;
    part[0] = most;
    part[1] = sum;
    part[2] = weighted;
    part[3] = value;
    part[4] = id;
  }
}

// Order of floats as unsigned numbers.
static __device__ unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Entries that may be chosen: those with a key above `key`, and of those with this key the ones below `before`.
struct Kept {
  unsigned key;
  int before;
  __device__ bool has(unsigned other, int entry) const { return other > key || (other == key && entry < before); }
};

// Weight of an entry: 1 where counted, else its probability up to a factor.
static __device__ double weight_of(bool counted, float z, float most) {
  return counted ? 1 : exp(double(z - most));
}

// The fewest entries of `kept`, the largest first and of equal ones the lowest ids, that together weigh `target`.
static __device__ Kept fewest(const float* z, int count, const Kept& kept, bool counted, float most, double target) {
  // 1. The key of the last one, two bits at a time.
  unsigned key = 0;
  for (int shift = 30; shift >= 0; shift -= 2) {
    double sums[3] = {0, 0, 0};
    for (int entry = threadIdx.x; entry < count; entry += blockDim.x) {
      const unsigned own = key_of(z[entry]);
      if (own < (key | (1u << shift)) || !kept.has(own, entry)) continue;
      const double weight = weight_of(counted, z[entry], most);
      for (int digit = 1; digit <= 3; ++digit) {
        if (own >= (key | (unsigned(digit) << shift))) sums[digit - 1] += weight;
      }
    }
    int digits = 0;
    for (int digit = 1; digit <= 3; ++digit) {
      if (sum_of_block(sums[digit - 1]) >= target) digits = digit;
    }
    key |= unsigned(digits) << shift;
  }
  // 2. How many of those with this key.
  const int each = (count + blockDim.x - 1) / blockDim.x;
  const int first = min(int(threadIdx.x) * each, count), last = min(first + each, count);
  double above = 0;
  int equal = 0;
  float z_equal = 0;
  for (int entry = first; entry < last; ++entry) {
    const unsigned own = key_of(z[entry]);
    if (own < key || !kept.has(own, entry)) continue;
    if (own == key) {
      ++equal;
      z_equal = z[entry];
    } else {
      above += weight_of(counted, z[entry], most);
    }
  }
  above = sum_of_block(above);
  z_equal = max_of_block(equal > 0 ? z_equal : nothing());
  const double missing = (target - above) / weight_of(counted, z_equal, most);
  const int wanted = missing < 1 ? 1 : missing > count ? count : int(ceil(missing));
  // 3. The id of the last of them: counts of the threads before, then the thread that has it.
  __shared__ int counts[1024], cut;
  __syncthreads();
  counts[threadIdx.x] = equal;
  if (threadIdx.x == 0) cut = count;
  __syncthreads();
  int before = 0;
  for (int thread = 0; thread < int(threadIdx.x); ++thread) before += counts[thread];
  if (before < wanted && before + equal >= wanted) {
    int left = wanted - before;
    for (int entry = first; entry < last; ++entry) {
      if (key_of(z[entry]) == key && kept.has(key, entry) && --left == 0) {
        cut = entry + 1;
        break;
      }
    }
  }
  __syncthreads();
  return Kept{key, cut};
}

// The best candidate of the entries that top-k and top-p leave. Grid (answers), 1,024 threads.
extern "C" __global__ void __launch_bounds__(1024) sample_restricted(const __grid_constant__ Sample s) {
  start_next();
  await_previous();
  const int answer = blockIdx.x, count = s.vocabulary;
  if (s.greedy_a[answer] != 0) return;
  const float* z = s.logits_av + int64(answer) * count;
  float most = nothing();
  for (int chunk = 0; chunk < s.chunks; ++chunk) {
    const float other = float(s.parts[(int64(answer) * s.chunks + chunk) * PARTS]);
    most = other > most || other != other ? other : most;
  }
  Kept kept = {0, count};
  if (s.top_k > 0 && s.top_k < count) kept = fewest(z, count, kept, true, most, double(s.top_k));
  if (s.top_p < 1) {
    double all = 0;
    for (int entry = threadIdx.x; entry < count; entry += blockDim.x) {
      if (kept.has(key_of(z[entry]), entry)) all += exp(double(z[entry] - most));
    }
    kept = fewest(z, count, kept, false, most, s.top_p * sum_of_block(all));
  }
  const uint64 root = s.roots[(s.at->row + 1) * s.answers + answer];
  double value = minus_infinity(), id = count;
  for (int entry = threadIdx.x; entry < count; entry += blockDim.x) {
    if (kept.has(key_of(z[entry]), entry)) better(value, id, double(z[entry]) + gumbel(root, entry), entry);
  }
  best_of_block(value, id);
  if (threadIdx.x == 0) {
    s.best[2 * answer] = value;
    s.best[2 * answer + 1] = id;
  }
}

// Writes the token of each answer, and goes to the next row. One block of 1,024 threads, a warp an answer.
extern "C" __global__ void __launch_bounds__(1024) sample_choose(const __grid_constant__ Sample s) {
  start_next();
  await_previous();
  const int64 row = s.at->row;
  for (int answer = threadIdx.x / 32; answer < s.answers; answer += 32) {
    const double* parts = s.parts + int64(answer) * s.chunks * PARTS;
    double most = minus_infinity(), sum = 0, weighted = 0, value = minus_infinity(), id = s.vocabulary;
    for (int chunk = lane(); chunk < s.chunks; chunk += 32) {
      const double other = parts[chunk * PARTS];
      most = other > most || other != other ? other : most;
      better(value, id, parts[chunk * PARTS + 3], parts[chunk * PARTS + 4]);
    }
    for (int step = 16; step > 0; step /= 2) {
      const double other = __shfl_xor_sync(~0u, most, step);
      most = other > most || other != other ? other : most;
      const double other_value = __shfl_xor_sync(~0u, value, step), other_id = __shfl_xor_sync(~0u, id, step);
      better(value, id, other_value, other_id);
    }
    for (int chunk = lane(); chunk < s.chunks; chunk += 32) {
      // A chunk's numbers are relative to its own maximum.
      const double away = parts[chunk * PARTS] - most;
      if (away == minus_infinity()) continue;
      const double factor = exp(away);
      sum += factor * parts[chunk * PARTS + 1];
      weighted += factor * (parts[chunk * PARTS + 2] + away * parts[chunk * PARTS + 1]);
    }
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      weighted += __shfl_xor_sync(~0u, weighted, step);
    }
    if (lane() != 0) continue;
    if (s.greedy_a[answer] == 0 && (s.top_p < 1 || s.top_k > 0)) id = s.best[2 * answer + 1];
    // Without a candidate no number is finite either, and the host says so.
    const int64 token = id < s.vocabulary ? int64(id) : 0;
    const float z = s.logits_av[int64(answer) * s.vocabulary + token];
    double* drawn = s.drawn + ((row + 1) * s.answers + answer) * 3;
    drawn[0] = __longlong_as_double(token);
    drawn[1] = double(z) - most - log(sum);
    drawn[2] = log(sum) - weighted / sum;
    s.tokens_a[answer] = token;
  }
  __syncthreads();
  if (threadIdx.x == 0) s.at->row = row + 1;
}
