// --- the second product of an adapter ----------------------------------------------------------------------------

// y = low · upᵀ, or y += it, for y [t, columns] without gaps, low [t, rank], up [columns, rank]: sums in float32, rounded once. A
// warp takes kParts times 16 rows by 64 columns, and holds `up` of the first 16 ranks; the rank is a multiple of 16, columns are
// multiples of 32.
//
// The columns of a group of 32 are dealt so that a thread holds eight neighbours: tile j of four has, for its columns 2 t and
// 2 t + 1, columns 8 t + 2 j and 8 t + 2 j + 1 of the group.
struct Raise {
  u16* y;
  const u16 *low, *up;
  i64 rows, low_step;
  int columns, rank, adds;
};

constexpr int kRows = 16, kParts = 4, kGroup = 32, kGroups = 2;

__device__ inline void multiply(float (&sum)[4], const u32 (&left)[4], u32 right_low, u32 right_high) {
#if DTYPE == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
}

__device__ inline u32 two(const u16* from) { return *reinterpret_cast<const u32*>(from); }

// Columns of `up` of a warp, 16 ranks from k on.
struct Right {
  u32 word[kGroups][4][2];
};

__device__ inline Right right_of(const Raise& a, int column, int k, int lane) {
  const int row_of = lane / 4, pair_of = lane % 4;
  Right right = {};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (column + group * kGroup >= a.columns) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const i64 from = column + group * kGroup + row_of / 2 * 8 + 2 * j + row_of % 2;
      const u16* up = a.up + from * a.rank + k + pair_of * 2;
      right.word[group][j][0] = two(up);
      right.word[group][j][1] = two(up + 8);
    }
  }
  return right;
}

__device__ inline void multiply_all(float (&sum)[kGroups][4][4], const u32 (&left)[4], const Right& right) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int j = 0; j < 4; ++j) multiply(sum[group][j], left, right.word[group][j][0], right.word[group][j][1]);
  }
}

extern "C" __global__ void __launch_bounds__(256) raise(const Raise a) {
  const int lane = threadIdx.x % 32, row_of = lane / 4, pair_of = lane % 4;
  const i64 start = (static_cast<i64>(blockIdx.y) * (blockDim.x / 32) + threadIdx.x / 32) * kRows * kParts;
  const int column = blockIdx.x * kGroup * kGroups;
  const Right right = right_of(a, column, 0, lane);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const i64 first = start + part * kRows, last = a.rows - 1;
    if (first > last) return;
    const i64 upper = first + row_of, lower = upper + 8;
    const bool has_upper = upper <= last, has_lower = lower <= last;
    const u16* low_upper = a.low + (has_upper ? upper : last) * a.low_step + pair_of * 2;
    const u16* low_lower = a.low + (has_lower ? lower : last) * a.low_step + pair_of * 2;
    float sum[kGroups][4][4] = {};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int at = column + group * kGroup + pair_of * 8;
      if (a.adds == 0 || at >= a.columns) continue;
      Eight above = {}, below = {};
      if (has_upper) above = load(a.y + upper * a.columns + at);
      if (has_lower) below = load(a.y + lower * a.columns + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[group][j][0] = above[2 * j];
        sum[group][j][1] = above[2 * j + 1];
        sum[group][j][2] = below[2 * j];
        sum[group][j][3] = below[2 * j + 1];
      }
    }
    for (int k = 0; k < a.rank; k += 16) {
      const u32 left[4] = {two(low_upper + k), two(low_lower + k), two(low_upper + k + 8), two(low_lower + k + 8)};
      if (k == 0) multiply_all(sum, left, right);
      else multiply_all(sum, left, right_of(a, column, k, lane));
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int at = column + group * kGroup + pair_of * 8;
      if (at >= a.columns) continue;
      Eight above, below;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        above.word[j] = pack(sum[group][j][0], sum[group][j][1]);
        below.word[j] = pack(sum[group][j][2], sum[group][j][3]);
      }
      if (has_upper) store(a.y + upper * a.columns + at, above);
      if (has_lower) store(a.y + lower * a.columns + at, below);
    }
  }
}
