// Elementwise work of a block on a GPU: compiles the CUDA text of this folder for the device at run time, and puts its
// kernels into autograd. What a backward needs besides the inputs is computed again.
#include "kernels.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>

namespace {

using namespace longstraw;
using namespace longstraw::fused;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// --- kernels -----------------------------------------------------------------------------------------------------

constexpr std::array<const char*, kKernels> kNames = {"gate_forward",  "gate_backward",  "norm_forward", "norm_backward",
                                                      "heads_forward", "heads_backward", "merge",        "round_all",
                                                      "widen_all",     "adam",           "raise",        "add_part"};

// Kernels of one dtype. They stay until the process ends.
struct Loaded {
  std::mutex lock;
  c10::ScalarType kind = c10::ScalarType::Undefined;
  bool usable = false;
  std::array<void*, kKernels> functions{};
};
Loaded& loaded() {
  static auto* made = new Loaded;
  return *made;
}

bool usable(c10::ScalarType kind) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  return all.usable && all.kind == kind;
}

void* function(Which which) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  TORCH_CHECK(all.functions[which] != nullptr, "the kernel ", kNames[which], " is not loaded");
  return all.functions[which];
}

// A thread of the autograd engine may have no context yet.
void enter_context() {
  thread_local bool entered = false;
  if (entered) return;
  void* context = nullptr;
  driven_well(driver<int (*)(void**)>("cuCtxGetCurrent")(&context), "cuCtxGetCurrent");
  if (context == nullptr) must(runtime<int (*)(void*)>("cudaFree")(nullptr), "cudaFree");
  entered = true;
}

template <typename Argument>
void start(Which which, int64_t x, int threads, Argument& argument) {
  start_raw(which, x, 1, threads, &argument);
}

constexpr int64_t kNarrowest = 512;         // rows up to this width are normed as heads are
constexpr int64_t kWidest = 1024 * 4 * 8;   // threads, times what one holds

// `x` with neighbouring columns, and rows and heads that begin at multiples of 16 bytes.
at::Tensor laid(const at::Tensor& x) {
  const auto aligned = [](const at::Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0; };
  bool apart = x.stride(-1) == 1;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) apart = apart && x.stride(dim) % 8 == 0;
  if (apart && aligned(x)) return x;
  const at::Tensor whole = x.contiguous();
  return aligned(whole) ? whole : whole.clone();
}

at::Tensor flat(const at::Tensor& x) { return laid(x.contiguous().view({-1})); }

void* pointer(const at::Tensor& x) { return x.defined() ? x.data_ptr() : nullptr; }

// --- the gate of a feed-forward ----------------------------------------------------------------------------------

// As in numbers.cu.
struct Gate {
  const void *gate, *up, *dy;
  void *y, *dgate, *dup;
  long long count;
  int gelu;
};

struct Gated : Function<Gated> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up, bool gelu) {
    context->save_for_backward({gate, up});
    context->saved_data["gelu"] = gelu;
    const at::Tensor y = at::empty(gate.sizes(), gate.options()), left = flat(gate), right = flat(up);
    Gate argument{left.data_ptr(), right.data_ptr(), nullptr, y.data_ptr(), nullptr, nullptr, gate.numel(), gelu};
    start(kGateForward, parts(gate.numel(), 8 * kThreads), kThreads, argument);
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor dgate = at::empty(saved[0].sizes(), saved[0].options()), dup = at::empty_like(dgate);
    const at::Tensor gate = flat(saved[0]), up = flat(saved[1]), dy = flat(gradients[0]);
    Gate argument{gate.data_ptr(),  up.data_ptr(), dy.data_ptr(), nullptr, dgate.data_ptr(), dup.data_ptr(), gate.numel(),
                  context->saved_data["gelu"].toBool()};
    start(kGateBackward, parts(gate.numel(), 8 * kThreads), kThreads, argument);
    return {dgate, dup, {}};
  }
};

// --- norms -------------------------------------------------------------------------------------------------------

// As in rows.cu.
struct Norm {
  const void *x, *other, *weight, *dy, *dsum;
  void *sum, *out;
  long long x_step, other_step, dy_step, dsum_step;
  int width, one_plus;
  float eps;
};
struct Part {
  const void *x, *weight, *dy;
  void* out;
  long long x_step, x_head, dy_step, dy_head;
  int heads;
};
struct Heads {
  Part part[2];
  const void *cosine, *sine;
  long long rows;
  int dim, pairs, lanes, one_plus;
  float eps;
};

// What a norm has besides its rows; it carries no gradient.
struct Scale {
  at::Tensor weight;
  double eps;
  bool one_plus;
};

void keep(AutogradContext* context, double eps, bool one_plus) {
  context->saved_data["eps"] = eps;
  context->saved_data["one_plus"] = one_plus;
}

// Whole warps; each thread holds one or two times eight columns where that is enough.
int threads_of(int64_t width) {
  const int64_t wanted = (parts(width, 16) + 31) / 32 * 32;
  return static_cast<int>(std::clamp<int64_t>(wanted, 32, 1024));
}

void start_heads(Which which, Heads& argument) {
  const int64_t slots = argument.dim / 16;
  argument.lanes = 1;
  while (argument.lanes < slots) argument.lanes *= 2;
  const int64_t heads = argument.part[0].heads + argument.part[1].heads;
  start(which, parts(argument.rows * heads * argument.lanes, kThreads), kThreads, argument);
}

// Rows as one head each, [n, 1, d].
at::Tensor as_heads(const at::Tensor& x) { return x.reshape({-1, 1, x.size(-1)}); }
at::Tensor as_rows(const at::Tensor& x) { return laid(x.reshape({-1, x.size(-1)})); }

Part part_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& out) {
  const at::Tensor& shape = x.defined() ? x : dy;
  return {pointer(x), pointer(weight), pointer(dy), pointer(out),
          x.defined() ? x.stride(0) : 0, x.defined() ? x.stride(1) : 0,
          dy.defined() ? dy.stride(0) : 0, dy.defined() ? dy.stride(1) : 0, static_cast<int>(shape.size(1))};
}

struct Normed : Function<Normed> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Scale& scale) {
    context->save_for_backward({x, scale.weight});
    keep(context, scale.eps, scale.one_plus);
    const at::Tensor out = at::empty(x.sizes(), x.options()), weight = laid(scale.weight);
    const int width = static_cast<int>(x.size(-1));
    if (x.numel() == 0) return out;
    if (width <= kNarrowest) {
      const at::Tensor rows = laid(as_heads(x));
      Heads argument{{part_of(rows, weight, {}, out), {}}, nullptr, nullptr, rows.size(0), width, 0, 0, scale.one_plus,
                     static_cast<float>(scale.eps)};
      start_heads(kHeadsForward, argument);
      return out;
    }
    const at::Tensor rows = as_rows(x);
    Norm argument{rows.data_ptr(), nullptr, weight.data_ptr(), nullptr, nullptr, nullptr, out.data_ptr(), rows.stride(0),
                  0, 0, 0, width, scale.one_plus, static_cast<float>(scale.eps)};
    start(kNormForward, rows.size(0), threads_of(width), argument);
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor dx = at::empty(saved[0].sizes(), saved[0].options()), weight = laid(saved[1]);
    const int width = static_cast<int>(dx.size(-1)), one_plus = context->saved_data["one_plus"].toBool();
    const auto eps = static_cast<float>(context->saved_data["eps"].toDouble());
    if (dx.numel() == 0) return {dx, {}};
    if (width <= kNarrowest) {
      const at::Tensor rows = laid(as_heads(saved[0])), dy = laid(as_heads(gradients[0]));
      Heads argument{{part_of(rows, weight, dy, dx), {}}, nullptr, nullptr, rows.size(0), width, 0, 0, one_plus, eps};
      start_heads(kHeadsBackward, argument);
      return {dx, {}};
    }
    const at::Tensor rows = as_rows(saved[0]), dy = as_rows(gradients[0]);
    Norm argument{rows.data_ptr(), nullptr, weight.data_ptr(), dy.data_ptr(), nullptr, nullptr, dx.data_ptr(),
                  rows.stride(0), 0, dy.stride(0), 0, width, one_plus, eps};
    start(kNormBackward, rows.size(0), threads_of(width), argument);
    return {dx, {}};
  }
};

// x + other, and the norm of the rounded sum.
struct SumNormed : Function<SumNormed> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& other, const Scale& scale) {
    context->set_materialize_grads(false);
    const at::Tensor sum = at::empty(x.sizes(), x.options()), out = at::empty_like(sum), weight = laid(scale.weight);
    context->save_for_backward({sum, scale.weight});
    keep(context, scale.eps, scale.one_plus);
    if (x.numel() == 0) return {sum, out};
    const at::Tensor left = as_rows(x), right = as_rows(other);
    const int width = static_cast<int>(x.size(-1));
    Norm argument{left.data_ptr(),  right.data_ptr(), weight.data_ptr(), nullptr, nullptr, sum.data_ptr(), out.data_ptr(),
                  left.stride(0), right.stride(0), 0, 0, width, scale.one_plus, static_cast<float>(scale.eps)};
    start(kNormForward, left.size(0), threads_of(width), argument);
    return {sum, out};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!gradients[1].defined()) return {gradients[0], gradients[0], {}};
    const auto saved = context->get_saved_variables();
    const at::Tensor dx = at::empty(saved[0].sizes(), saved[0].options()), weight = laid(saved[1]);
    if (dx.numel() == 0) return {dx, dx, {}};
    const at::Tensor rows = as_rows(saved[0]), dy = as_rows(gradients[1]);
    const at::Tensor dsum = gradients[0].defined() ? as_rows(gradients[0]) : at::Tensor();
    const int width = static_cast<int>(dx.size(-1));
    Norm argument{rows.data_ptr(), nullptr, weight.data_ptr(), dy.data_ptr(), pointer(dsum), nullptr, dx.data_ptr(),
                  rows.stride(0), 0, dy.stride(0), dsum.defined() ? dsum.stride(0) : 0, width,
                  context->saved_data["one_plus"].toBool(), static_cast<float>(context->saved_data["eps"].toDouble())};
    start(kNormBackward, rows.size(0), threads_of(width), argument);
    return {dx, dx, {}};
  }
};

// --- norm and rotation by head -----------------------------------------------------------------------------------

// Weights by head where queries and keys are normed, and the angles of the rows; they carry no gradient.
struct Turn {
  at::Tensor query_weight, key_weight, cosine, sine;
  double eps;
  bool one_plus;
};

struct Turned : Function<Turned> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const Turn& turn) {
    context->set_materialize_grads(false);
    const bool normed = turn.query_weight.defined();
    const at::Tensor none;
    const at::Tensor &of_queries = normed ? q : none, &of_keys = normed ? k : none;
    context->save_for_backward({of_queries, of_keys, turn.query_weight, turn.key_weight, turn.cosine, turn.sine});
    keep(context, turn.eps, turn.one_plus);
    const at::Tensor q_out = at::empty(q.sizes(), q.options()), k_out = at::empty(k.sizes(), k.options());
    const at::Tensor queries = laid(q), keys = laid(k), cosine = flat(turn.cosine), sine = flat(turn.sine);
    Heads argument{{part_of(queries, turn.query_weight, {}, q_out), part_of(keys, turn.key_weight, {}, k_out)},
                   cosine.data_ptr(), sine.data_ptr(), q.size(0), static_cast<int>(q.size(2)),
                   static_cast<int>(turn.cosine.size(-1)), 0, turn.one_plus, static_cast<float>(turn.eps)};
    start_heads(kHeadsForward, argument);
    return {q_out, k_out};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    Heads argument{};
    variable_list found(3), held;
    int used = 0;
    for (int which : {0, 1}) {
      if (!gradients[which].defined()) continue;
      const at::Tensor dy = laid(gradients[which]), x = saved[which].defined() ? laid(saved[which]) : at::Tensor();
      found[which] = at::empty(dy.sizes(), dy.options());
      argument.part[used++] = part_of(x, saved[2 + which], dy, found[which]);
      held.insert(held.end(), {dy, x});
      argument.rows = dy.size(0);
      argument.dim = static_cast<int>(dy.size(2));
    }
    const at::Tensor cosine = flat(saved[4]), sine = flat(saved[5]);
    argument.cosine = cosine.data_ptr();
    argument.sine = sine.data_ptr();
    argument.pairs = static_cast<int>(saved[4].size(-1));
    argument.one_plus = context->saved_data["one_plus"].toBool();
    argument.eps = static_cast<float>(context->saved_data["eps"].toDouble());
    if (used > 0) start_heads(kHeadsBackward, argument);
    return found;
  }
};

// --- sums --------------------------------------------------------------------------------------------------------

// As in sums.cu.
struct Merge {
  void *out, *lse;
  const void *part, *first, *part_lse, *first_lse;
  long long part_step, part_head, lse_step, lse_head, first_step, first_head, first_lse_step, first_lse_head, rows;
  int heads, dim, part_is_wide;
};

struct Add {
  void* sum;
  const void *first, *part;
  long long count;
};

struct Adam {
  void* weight[kTensors];
  const void* gradient[kTensors];
  void *mean[kTensors], *square[kTensors];
  long long count[kTensors];
  float beta_1, beta_2, rest_1, rest_2, first, second, eps, decay, rate;
};

}  // namespace

namespace longstraw::fused {

void start_raw(Which which, int64_t x, int64_t y, int threads, void* argument) {
  if (x == 0 || y == 0) return;
  TORCH_CHECK(x < (int64_t{1} << 31), "too many rows for one call of ", kNames[which]);
  enter_context();
  void* parameters[1] = {argument};
  launch(function(which), static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(threads), 0, parameters);
}

}  // namespace longstraw::fused

extern "C" {

// Compiles and loads the kernels of a dtype (1: bfloat16, 2: float16) for this process's device, in the place of those
// loaded before. They are used once they are declared usable.
int longstraw_fused_load(const char* source, int dtype, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    void* module = load_module(compile(source, "elementwise kernels",
                                       {architecture(false), "--std=c++17", "-DDTYPE=" + std::to_string(dtype)}));
    std::array<void*, kKernels> functions{};
    for (int which = 0; which < kKernels; ++which) functions[which] = function_of(module, kNames[which]);
    auto& all = loaded();
    const std::lock_guard<std::mutex> held(all.lock);
    all.functions = functions;
    all.kind = dtype == 1 ? c10::ScalarType::BFloat16 : c10::ScalarType::Half;
    all.usable = false;
  });
}

void longstraw_fused_allow(int usable) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  all.usable = usable != 0;
}

// Whether kernels for bfloat16 (1), float16 (2) or either (0) are usable.
int longstraw_fused_usable(int dtype) {
  const bool brain = usable(c10::ScalarType::BFloat16), half = usable(c10::ScalarType::Half);
  return (dtype != 2 && brain) || (dtype != 1 && half) ? 1 : 0;
}

// activation(gate) · up.
int longstraw_fused_gate(at::Tensor* gate, at::Tensor* up, int gelu, at::Tensor** out, char* message, size_t capacity) {
  return guarded(message, capacity, [&] { *out = new at::Tensor(Gated::apply(*gate, *up, gelu != 0)); });
}

// The norm of rows in the last dimension.
int longstraw_fused_norm(at::Tensor* x, at::Tensor* weight, double eps, int one_plus, at::Tensor** out, char* message,
                         size_t capacity) {
  return guarded(message, capacity, [&] { *out = new at::Tensor(Normed::apply(*x, Scale{*weight, eps, one_plus != 0})); });
}

// x + other, and its norm.
int longstraw_fused_sum_norm(at::Tensor* x, at::Tensor* other, at::Tensor* weight, double eps, int one_plus,
                             at::Tensor** sum, at::Tensor** out, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const variable_list both = SumNormed::apply(*x, *other, Scale{*weight, eps, one_plus != 0});
    *sum = new at::Tensor(both[0]);
    *out = new at::Tensor(both[1]);
  });
}

// Queries and keys by head, normed where weights are given, and rotated.
int longstraw_fused_heads(at::Tensor* q, at::Tensor* k, at::Tensor* query_weight, at::Tensor* key_weight,
                          at::Tensor* cosine, at::Tensor* sine, double eps, int one_plus, at::Tensor** q_out,
                          at::Tensor** k_out, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const auto given = [](at::Tensor* x) { return x == nullptr ? at::Tensor() : laid(*x); };
    const Turn turn{given(query_weight), given(key_weight), *cosine, *sine, eps, one_plus != 0};
    const variable_list both = Turned::apply(*q, *k, turn);
    *q_out = new at::Tensor(both[0]);
    *k_out = new at::Tensor(both[1]);
  });
}

// Merges a part over further keys into out [t, h, d] and lse [t, h], float32 without gaps. Where `first` is not null, what was
// there before is read from `first`, in the kernels' dtype, and `first_lse`.
int longstraw_fused_merge(at::Tensor* out, at::Tensor* lse, at::Tensor* first, at::Tensor* first_lse, at::Tensor* part,
                          at::Tensor* part_lse, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const at::Tensor rows = laid(*part), before = first == nullptr ? at::Tensor() : laid(*first);
    Merge argument{};
    argument.out = out->data_ptr(), argument.lse = lse->data_ptr();
    argument.part = rows.data_ptr(), argument.part_lse = part_lse->data_ptr();
    argument.part_step = rows.stride(0), argument.part_head = rows.stride(1);
    argument.lse_step = part_lse->stride(0), argument.lse_head = part_lse->stride(1);
    if (before.defined()) {
      argument.first = before.data_ptr(), argument.first_lse = first_lse->data_ptr();
      argument.first_step = before.stride(0), argument.first_head = before.stride(1);
      argument.first_lse_step = first_lse->stride(0), argument.first_lse_head = first_lse->stride(1);
    }
    argument.rows = out->size(0), argument.heads = static_cast<int>(out->size(1));
    argument.dim = static_cast<int>(out->size(2)), argument.part_is_wide = rows.scalar_type() == c10::ScalarType::Float;
    start(kMerge, parts(out->size(0) * out->size(1), kThreads / 32), kThreads, argument);
  });
}

// sum += part, or sum = first + part where `first` is not null: `sum` in float32, the others in the kernels' dtype, all without
// gaps, from a multiple of 16 bytes on and of a multiple of four elements.
int longstraw_fused_add(at::Tensor* sum, at::Tensor* first, at::Tensor* part, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    Add argument{sum->data_ptr(), first == nullptr ? nullptr : first->data_ptr(), part->data_ptr(), sum->numel()};
    start(kAddPart, parts(sum->numel(), 8 * kThreads), kThreads, argument);
  });
}

// One step of AdamW in place. `numbers`: both betas, their complements, both corrections, epsilon, what decay leaves, and the
// learning rate.
int longstraw_fused_adam(at::Tensor** weights, at::Tensor** gradients, at::Tensor** means, at::Tensor** squares,
                         size_t count, const double* numbers, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const auto number = [&](int at) { return static_cast<float>(numbers[at]); };
    for (size_t first = 0; first < count; first += kTensors) {
      Adam argument{};
      const size_t several = std::min(kTensors, count - first);
      int64_t most = 0;
      for (size_t i = 0; i < several; ++i) {
        argument.weight[i] = weights[first + i]->data_ptr();
        argument.gradient[i] = gradients[first + i]->data_ptr();
        argument.mean[i] = means[first + i]->data_ptr();
        argument.square[i] = squares[first + i]->data_ptr();
        argument.count[i] = weights[first + i]->numel();
        most = std::max<int64_t>(most, weights[first + i]->numel());
      }
      argument.beta_1 = number(0), argument.beta_2 = number(1), argument.rest_1 = number(2), argument.rest_2 = number(3);
      // As libtorch divides by a number: times its reciprocal, which is rounded to float32 once.
      argument.first = static_cast<float>(1.0 / numbers[4]), argument.second = static_cast<float>(1.0 / numbers[5]);
      argument.eps = number(6), argument.decay = number(7), argument.rate = number(8);
      start_raw(kAdam, blocks_of(most), static_cast<int64_t>(several), kThreads, &argument);
    }
  });
}
}
