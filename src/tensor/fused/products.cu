// --- the second product of an adapter ----------------------------------------------------------------------------

// y = low · upᵀ, or y += it, for y [t, columns] without gaps, low [t, rank], up [columns, rank]: sums in float32, rounded once. A
// warp takes 16 rows by 64 columns; the rank is a multiple of 16, columns are multiples of 32.
//
// The columns of a group of 32 are dealt so that a thread holds eight neighbours: tile j of four has, for its columns 2 t and
// 2 t + 1, columns 8 t + 2 j and 8 t + 2 j + 1 of the group.
struct Raise {
  u16* y;
  const u16 *low, *up;
  i64 rows, low_step;
  int columns, rank, adds;
};

constexpr int kRows = 16, kGroup = 32, kGroups = 2;

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

extern "C" __global__ void __launch_bounds__(256) raise(const Raise a) {
  const int lane = threadIdx.x % 32, row_of = lane / 4, pair_of = lane % 4;
  const i64 first = (static_cast<i64>(blockIdx.y) * (blockDim.x / 32) + threadIdx.x / 32) * kRows;
  if (first >= a.rows) return;
  const i64 upper = first + row_of, lower = upper + 8;
  const bool has_upper = upper < a.rows, has_lower = lower < a.rows;
  const int column = blockIdx.x * kGroup * kGroups;
  float sum[kGroups][4][4] = {};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int at = column + group * kGroup + pair_of * 8;
    if (at >= a.columns) continue;
    Eight above = {}, below = {};
    if (has_upper && a.adds) above = load(a.y + upper * a.columns + at);
    if (has_lower && a.adds) below = load(a.y + lower * a.columns + at);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[group][j][0] = above[2 * j];
      sum[group][j][1] = above[2 * j + 1];
      sum[group][j][2] = below[2 * j];
      sum[group][j][3] = below[2 * j + 1];
    }
  }
  const i64 last = a.rows - 1;
  const u16* low_upper = a.low + (has_upper ? upper : last) * a.low_step + pair_of * 2;
  const u16* low_lower = a.low + (has_lower ? lower : last) * a.low_step + pair_of * 2;
  for (int k = 0; k < a.rank; k += 16) {
    const u32 left[4] = {two(low_upper + k), two(low_lower + k), two(low_upper + k + 8), two(low_lower + k + 8)};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (column + group * kGroup >= a.columns) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const i64 from = column + group * kGroup + row_of / 2 * 8 + 2 * j + row_of % 2;
        const u16* up = a.up + from * a.rank + k + pair_of * 2;
        multiply(sum[group][j], left, two(up), two(up + 8));
      }
    }
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
