
// --- products from chunk to chunk --------------------------------------------------------------------------------
//
// Left operands are in registers, 16 rows a warp: 64 rows of four warps. Right operands are tiles in shared memory. On Hopper
// (HOPPER is 1) the four warps multiply together and asynchronously, and read a tile once; elsewhere each warp multiplies on
// its own. Either way a product is ready after `await_products`, and its left operand must not change before.

#if HOPPER

using u64 = unsigned long long;

// Tiles of right operands: 64 rows of 128 bytes, permuted within 8 rows; 128 columns are two such tiles.
constexpr int kTileBytes = kChunk * 128;
constexpr int kWideBytes = 2 * kTileBytes, kSquareBytes = kTileBytes;

// 64 rows of COLUMNS elements, of which `real` exist.
template <int COLUMNS, int THREADS>
__device__ inline void bring_operand(u32 to, const u16* from, i64 step, int real) {
  constexpr int kPieces = COLUMNS / 8;
#pragma unroll
  for (int at = threadIdx.x % THREADS; at < kChunk * kPieces; at += THREADS) {
    const int row = at / kPieces, piece = at % kPieces;
    const bool exists = row < real;
    bring(to + piece / 8 * kTileBytes + row * 128 + ((piece ^ row) & 7) * 16, from + (exists ? row * step : 0) + piece * 8,
          exists);
  }
}

// What this thread brought can be read by products of others after the next barrier.
__device__ inline void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 1024 bytes from 8 rows to the next 8; from 64 columns to the next 64 a whole tile.
__device__ inline u64 matrix_at(u32 address) {
  return (static_cast<u64>(address >> 4) & 0x3fff) | (static_cast<u64>(kTileBytes >> 4) << 16) | (64ull << 32) |
         (1ull << 62);
}

// c [64, 64] (+)= a [64, 16] times the columns of a tile: its rows, TRANSPOSED its columns.
template <int TRANSPOSED>
__device__ inline void multiply_64(float (&c)[8][4], const u32 (&a)[4], u64 tile, int adds) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
        "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
        "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]),
        "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
        "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "r"(adds), "n"(TRANSPOSED));
}

// The same for s [64, 128].
template <int TRANSPOSED>
__device__ inline void multiply_128(float (&s)[16][4], const u32 (&a)[4], u64 tile, int adds) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]), "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]),
        "+f"(s[1][3]), "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]), "+f"(s[3][0]), "+f"(s[3][1]),
        "+f"(s[3][2]), "+f"(s[3][3]), "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]), "+f"(s[5][0]),
        "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3]), "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]),
        "+f"(s[7][0]), "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3]), "+f"(s[8][0]), "+f"(s[8][1]), "+f"(s[8][2]),
        "+f"(s[8][3]), "+f"(s[9][0]), "+f"(s[9][1]), "+f"(s[9][2]), "+f"(s[9][3]), "+f"(s[10][0]), "+f"(s[10][1]),
        "+f"(s[10][2]), "+f"(s[10][3]), "+f"(s[11][0]), "+f"(s[11][1]), "+f"(s[11][2]), "+f"(s[11][3]),
        "+f"(s[12][0]), "+f"(s[12][1]), "+f"(s[12][2]), "+f"(s[12][3]), "+f"(s[13][0]), "+f"(s[13][1]),
        "+f"(s[13][2]), "+f"(s[13][3]), "+f"(s[14][0]), "+f"(s[14][1]), "+f"(s[14][2]), "+f"(s[14][3]),
        "+f"(s[15][0]), "+f"(s[15][1]), "+f"(s[15][2]), "+f"(s[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "r"(adds), "n"(TRANSPOSED));
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT batches of products are under way, and c is not among them.
template <int LEFT, int N>
__device__ inline void await_products(float (&c)[N][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
  // The values change during the wait: nothing that reads them may be moved before.
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[n][e])::"memory");
  }
}

// c [64, 64] = a [64, 128] times the transpose of a tile [64, 128].
__device__ inline void multiply_rows(float (&c)[8][4], const u32 (&a)[8][4], u32 wide) {
  begin_products();
#pragma unroll
  for (int k = 0; k < 8; ++k) multiply_64<0>(c, a[k], matrix_at(wide + k / 4 * kTileBytes + k % 4 * 32), k);
  end_products();
}

// s [64, 128] += a [64, 64] times a tile [64, 128].
__device__ inline void add_outer(float (&s)[16][4], const u32 (&a)[4][4], u32 wide) {
  begin_products();
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_128<1>(s, a[k], matrix_at(wide + k * 2048), 1);
  end_products();
}

// c [64, 64] = or += a [64, 64] times a lower [64, 64] tile (UPPER: its transpose).
template <bool UPPER, bool ADDS>
__device__ inline void multiply_triangle(float (&c)[8][4], const u32 (&a)[4][4], u32 square) {
  begin_products();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    multiply_64<UPPER ? 0 : 1>(c, a[k], matrix_at(square + (UPPER ? k * 32 : k * 2048)), ADDS || k > 0);
  }
  end_products();
}

#else

constexpr int kWideBytes = kChunk * kWide * 2, kSquareBytes = kChunk * kNarrow * 2;

template <int COLUMNS, int THREADS>
__device__ inline void bring_operand(u32 to, const u16* from, i64 step, int real) {
  bring_tile<kChunk, COLUMNS, COLUMNS + 8, THREADS>(to, from, step, real);
}
__device__ inline void publish() {}

template <int LEFT, int N>
__device__ inline void await_products(float (&)[N][4]) {}

__device__ inline void multiply_rows(float (&c)[8][4], const u32 (&a)[8][4], u32 wide) {
  clear(c);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      u32 b[4];
      right_transposed<kWide>(b, wide, 16 * k, 16 * n);
      multiply(c[2 * n], a[k], b[0], b[1]);
      multiply(c[2 * n + 1], a[k], b[2], b[3]);
    }
  }
}

__device__ inline void add_outer(float (&s)[16][4], const u32 (&a)[4][4], u32 wide) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      u32 b[4];
      right<kWide>(b, wide, 16 * k, 16 * n);
      multiply(s[2 * n], a[k], b[0], b[1]);
      multiply(s[2 * n + 1], a[k], b[2], b[3]);
    }
  }
}

// Blocks of zeros are left out.
template <bool UPPER, bool ADDS>
__device__ inline void multiply_triangle(float (&c)[8][4], const u32 (&a)[4][4], u32 square) {
  if (!ADDS) clear(c);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (UPPER ? n < k : n > k) continue;
      u32 b[4];
      if (UPPER) {
        right_transposed<kNarrow>(b, square, 16 * k, 16 * n);
      } else {
        right<kNarrow>(b, square, 16 * k, 16 * n);
      }
      multiply(c[2 * n], a[k], b[0], b[1]);
      multiply(c[2 * n + 1], a[k], b[2], b[3]);
    }
  }
}

#endif
