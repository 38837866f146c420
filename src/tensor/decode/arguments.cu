// One decode step on a GPU: one new row of each answer of a group through all layers. Arguments of its kernels; their
// counterparts in Rust have the same fields in the same order (repr(C)).
//
// Kernels are compiled at run time, for one dtype T of the model (DTYPE: 0 float, 1 bfloat16, 2 float16) and one head
// width HEAD. `answers` rows, a, are computed together, at most 64. Sums are float32.

typedef unsigned char byte;
typedef long long int64;
typedef unsigned long long uint64;

// Where all answers stand; on the device, changed by the last kernel of a token only.
struct Step {
  int64 row;  // index of the row that is computed, counted from the prompt's end: its position is prompt_end + row
};

// Partial sums of products: [splits, answers, width] float32; a value is the sum over splits in their order.
struct Raw {
  float* sums;
  int splits;
  int width;
};

// The up projection of an adapter, [outputs, rank] in T with the adapter's scale in it. The products of the down
// projection stand in columns `column` to `column + rank` of the raw sums, and are rounded to T before they are used.
struct Adapter {
  const void* b_or;
  int rank;    // 0: none
  int column;
};

// One linear layer's share of a product: rows of a weight, [outputs, inputs] in T, contiguous.
struct Rows {
  const void* weight;
  int outputs;
  int column;  // of the first output in the raw sums
};

// raw = x · weightᵀ for several weights with the same input; down projections of adapters are weights too.
struct Product {
  const void* x_ai;  // [answers, inputs]
  Raw raw;
  int answers;
  int inputs;
  int parts;
  Rows rows[8];
};

// x = embedding[token] (· scale).
struct Embed {
  const int64* tokens_a;
  const void* embedding_vw;
  void* x_aw;
  float scale;  // rounded to T; 1: none
  int answers;
  int width;
};

struct Norm {
  const void* weight_w;  // null: none
  float eps;
  int one_plus;  // whether the factor is 1 + weight; else weight
};

// y = sums + bias + adapter, rounded to T; x = x + norm_out(y); h = norm(x). Without raw sums (null) x stays.
struct Residual {
  Raw raw;
  Adapter adapter;
  const void* bias_w;  // null: none
  void* x_aw;
  void* h_aw;
  Norm norm_out;
  Norm norm;
  int answers;
  int width;
};

// Queries, keys and values of the raw sums: bias and adapter added, rounded to T; queries and keys normed by head and rotated,
// rounded once
// (half split: the first rotary/2 dimensions with the next rotary/2). Queries go to q_ahd, keys and values to row
// `(row − first) / step` of the answers' own planes, where `row mod step = first`.
struct Heads {
  Raw raw;
  int columns[3];        // where queries, keys and values begin
  Adapter adapters[3];
  const void* biases[3];
  Norm norms[2];         // of queries and keys
  const float* frequencies;  // inverse, [rotary / 2] float32
  float gain;            // on cosine and sine
  int rotary;
  void* q_ahd;
  void* own_k;           // [answers, room, groups, HEAD]
  void* own_v;
  int64 room;
  int64 first, step;
  int64 prompt_end;
  const Step* at;
  int answers, heads, groups;
};

// Consecutive prompt rows of this rank.
struct Run {
  const void* k_sgd;
  const void* v_sgd;
  int64 start;  // position of the first
  int64 rows;
};

// Partial attention of the answers' queries. Parts 0 to prompt_parts share out the prompt's keys of this rank, read once for
// all answers; the next own_parts share out each answer's own rows, `room` at most, of which (row − first) / step + 1 are
// filled. Every part is written, for all answers and heads; a part without a visible key is −infinity and 0.
struct Attend {
  const void* q_ahd;
  Run runs[2];
  int64 prompt_parts, own_parts;
  const void* own_k;
  const void* own_v;
  int64 room;
  int64 first, step;
  int64 prompt_end;
  int64 window;  // keys that a row sees, itself included; 0: all
  const Step* at;
  float scale;
  int answers, heads, groups;
  float* out_pahd;  // [parts, answers, heads, HEAD]
  float* lse_pah;   // [parts, answers, heads], natural logarithm
};

// Merges parts in their order. With `whole` the output in T, [answers, heads · HEAD]; else out [answers, heads, HEAD]
// and lse [answers, heads] in float32.
struct Merge {
  const float* out_pahd;
  const float* lse_pah;
  int64 parts;
  void* whole_an;
  float* out_ahd;
  float* lse_ah;
  int answers, heads;
};

// h = activation(gate) · up; gate and up are the raw sums with their adapters, rounded to T. What comes of them is rounded once,
// as the kernels of the score pass round (tensor/fused).
struct Activate {
  Raw raw;
  int columns[2];
  Adapter adapters[2];
  void* h_af;
  int gelu;  // tanh form; else silu
  int answers, width;
};
