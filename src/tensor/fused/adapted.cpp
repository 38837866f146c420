// Linear layers of one input with their LoRA adapters, y = W x + bias + scale · B (A x), as one node of autograd on a GPU:
// one product with all A, and gradients of the input that add up inside the products.
#include "kernels.h"

#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <vector>

namespace {

using namespace longstraw;
using namespace longstraw::fused;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// What carries no gradient. A layer without an adapter has rank 0.
struct Frozen {
  std::vector<at::Tensor> weights, biases;
  std::vector<int64_t> ranks;
  double scale;
  // Whether the output of a layer is read, or a gradient alone goes through it.
  std::vector<bool> valued;
};

// Casts of several tensors by one launch.
struct Several {
  Casts argument{};
  size_t count = 0;
  int64_t most = 0;

  void add(const void* from, void* to, int64_t elements, double factor) {
    TORCH_CHECK(count < kTensors, "too many adapters of one input");
    argument.from[count] = from;
    argument.to[count] = to;
    argument.count[count] = elements;
    argument.factor[count++] = static_cast<float>(factor);
    most = std::max(most, elements);
  }
  void start(Which which) { start_raw(which, blocks_of(most), static_cast<int64_t>(count), kThreads, &argument); }
};

// All A beside each other [sum of ranks, inputs], and each scale · B, in the dtype of the rows.
struct Pairs {
  at::Tensor down;
  std::vector<at::Tensor> up;
};

Pairs pairs_of(at::TensorList tensors, at::ScalarType kind, double scale) {
  Pairs made;
  if (tensors.empty()) return made;
  if (tensors[0].scalar_type() == kind) {
    std::vector<at::Tensor> down;
    for (size_t at = 0; at < tensors.size(); at += 2) {
      down.push_back(tensors[at]);
      made.up.push_back(tensors[at + 1]);
    }
    made.down = down.size() == 1 ? down[0] : at::cat(down);
    return made;
  }
  int64_t rank = 0;
  for (size_t at = 0; at < tensors.size(); at += 2) rank += tensors[at].size(0);
  const auto options = tensors[0].options().dtype(kind);
  made.down = at::empty({rank, tensors[0].size(1)}, options);
  Several several;
  std::vector<at::Tensor> held;
  int64_t row = 0;
  for (size_t at = 0; at < tensors.size(); at += 2) {
    const at::Tensor a = tensors[at].contiguous(), b = tensors[at + 1].contiguous();
    held.insert(held.end(), {a, b});
    made.up.push_back(at::empty(b.sizes(), options));
    several.add(a.data_ptr(), made.down.narrow(0, row, a.size(0)).data_ptr(), a.numel(), 1.0);
    several.add(b.data_ptr(), made.up.back().data_ptr(), b.numel(), scale);
    row += a.size(0);
  }
  several.start(kRound);
  return made;
}

// As in products.cu.
struct Raise {
  void* y;
  const void *low, *up;
  long long rows, low_step;
  int columns, rank, adds;
};

// Whether the kernel takes y [t, columns] = low · upᵀ. That does not depend on the number of rows.
bool fits(const at::Tensor& y, const at::Tensor& low, const at::Tensor& up) {
  const auto aligned = [](const at::Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0; };
  const bool sizes = up.size(1) % 16 == 0 && up.size(0) % 32 == 0 && low.stride(1) == 1 && low.stride(0) % 8 == 0;
  return sizes && y.is_contiguous() && up.is_contiguous() && aligned(y) && aligned(low) && aligned(up);
}

// y = low · upᵀ, or y += it, at the memory's rate.
void raise(at::Tensor& y, const at::Tensor& low, const at::Tensor& up, bool adds) {
  const int64_t rank = up.size(1), columns = up.size(0);
  Raise argument{y.data_ptr(), low.data_ptr(), up.data_ptr(), y.size(0), low.stride(0), static_cast<int>(columns),
                 static_cast<int>(rank), adds ? 1 : 0};
  // As in products.cu: 64 columns a block, 64 rows a warp.
  start_raw(kRaise, parts(columns, 64), parts(y.size(0), 64 * kThreads / 32), kThreads, &argument);
}

// x · weightᵀ + bias + low · upᵀ. Without a bias the product of full width adds to the other one, whose result is so written
// once and never read by a pass of its own.
at::Tensor sum_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& low,
                  const at::Tensor& up) {
  if (!bias.defined()) {
    at::Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
    if (fits(y, low, up)) {
      raise(y, low, up, false);
      return y.addmm_(x, weight.t());
    }
  }
  at::Tensor y = at::linear(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
  if (fits(y, low, up)) raise(y, low, up, true);
  else y.addmm_(low, up.t());
  return y;
}

// What stands for rows that nobody reads: NaN, in memory of one element.
at::Tensor unread(const at::Tensor& x, int64_t columns) {
  at::Tensor y = at::full({1}, std::numeric_limits<double>::quiet_NaN(), x.options());
  const int64_t sizes[] = {x.size(0), columns}, steps[] = {0, 0};
  y.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(sizes), at::IntArrayRef(steps));
  return y;
}

struct Adapted : Function<Adapted> {
  // `tensors`: A and B of each layer that has an adapter.
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::TensorList& tensors,
                               const Frozen& frozen) {
    context->set_materialize_grads(false);
    const Pairs pairs = pairs_of(tensors, x.scalar_type(), frozen.scale);
    const at::Tensor low = pairs.down.defined() ? at::mm(x, pairs.down.t()) : at::Tensor();
    variable_list outputs;
    int64_t column = 0;
    size_t pair = 0;
    for (size_t layer = 0; layer < frozen.weights.size(); ++layer) {
      const at::Tensor &weight = frozen.weights[layer], &bias = frozen.biases[layer];
      const int64_t rank = frozen.ranks[layer];
      if (!frozen.valued[layer]) {
        outputs.push_back(unread(x, weight.size(0)));
      } else if (rank > 0) {
        outputs.push_back(sum_of(x, weight, bias, low.narrow(1, column, rank), pairs.up[pair]));
      } else {
        outputs.push_back(at::linear(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt));
      }
      column += rank;
      pair += rank > 0;
    }
    variable_list saved = {x, low, pairs.down};
    saved.insert(saved.end(), frozen.weights.begin(), frozen.weights.end());
    saved.insert(saved.end(), pairs.up.begin(), pairs.up.end());
    context->save_for_backward(saved);
    context->saved_data["ranks"] = frozen.ranks;
    context->saved_data["scale"] = frozen.scale;
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &low = saved[1], &down = saved[2];
    const std::vector<int64_t> ranks = context->saved_data["ranks"].toIntVector();
    const size_t layers = ranks.size();
    const bool wanted = context->needs_input_grad(0);
    at::Tensor dx;
    const auto add = [&](const at::Tensor& left, const at::Tensor& right) {
      if (!wanted) return;
      if (dx.defined()) dx.addmm_(left, right);
      else dx = at::mm(left, right);
    };
    for (size_t layer = 0; layer < layers; ++layer) {
      if (gradients[layer].defined()) add(gradients[layer], saved[3 + layer]);
    }
    variable_list found = {dx};
    if (down.defined()) {
      const variable_list of_pairs = backward_pairs(saved, gradients, ranks, context->saved_data["scale"].toDouble(), add);
      found.insert(found.end(), of_pairs.begin(), of_pairs.end());
    }
    found[0] = dx;
    found.emplace_back();
    return found;
  }

  // Gradients of all A and B in float32; adds what goes through them to the gradient of the input.
  template <typename Add>
  static variable_list backward_pairs(const variable_list& saved, const variable_list& gradients,
                                  const std::vector<int64_t>& ranks, double scale, const Add& add) {
    const at::Tensor &x = saved[0], &low = saved[1], &down = saved[2];
    const size_t layers = ranks.size();
    const at::Tensor dlow = at::empty_like(low);
    variable_list up_gradients, found;
    int64_t column = 0;
    size_t pair = 0;
    for (size_t layer = 0; layer < layers; ++layer) {
      if (ranks[layer] == 0) continue;
      const at::Tensor &up = saved[3 + layers + pair++], &dy = gradients[layer];
      at::Tensor part = dlow.narrow(1, column, ranks[layer]);
      if (dy.defined()) {
        at::mm_out(part, dy, up);
        up_gradients.push_back(at::mm(dy.t(), low.narrow(1, column, ranks[layer])));
      } else {
        part.zero_();
        up_gradients.push_back(at::zeros_like(up));
      }
      column += ranks[layer];
    }
    add(dlow, down);
    const at::Tensor ddown = at::mm(dlow.t(), x);
    Several several;
    int64_t row = 0;
    pair = 0;
    for (size_t layer = 0; layer < layers; ++layer) {
      if (ranks[layer] == 0) continue;
      const auto options = ddown.options().dtype(at::kFloat);
      const at::Tensor &db = up_gradients[pair++], da = ddown.narrow(0, row, ranks[layer]);
      found.push_back(at::empty(da.sizes(), options));
      several.add(da.data_ptr(), found.back().data_ptr(), da.numel(), 1.0);
      found.push_back(at::empty(db.sizes(), options));
      several.add(db.data_ptr(), found.back().data_ptr(), db.numel(), scale);
      row += ranks[layer];
    }
    several.start(kWiden);
    return found;
  }
};

}  // namespace

extern "C" {

// Outputs of `layers` linear layers over x [t, w]. A layer without a bias or an adapter has null pointers there; one that is not
// `valued` gives NaN, through which gradients go as through its output.
int longstraw_fused_adapted(at::Tensor* x, size_t layers, at::Tensor** weights, at::Tensor** biases, at::Tensor** down,
                            at::Tensor** up, const unsigned char* valued, double scale, at::Tensor** outputs,
                            char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    Frozen frozen{{}, {}, {}, scale, {}};
    std::vector<at::Tensor> pairs;
    for (size_t layer = 0; layer < layers; ++layer) {
      frozen.weights.push_back(*weights[layer]);
      frozen.biases.push_back(biases[layer] == nullptr ? at::Tensor() : *biases[layer]);
      frozen.valued.push_back(valued[layer] != 0);
      frozen.ranks.push_back(down[layer] == nullptr ? 0 : down[layer]->size(0));
      if (down[layer] != nullptr) pairs.insert(pairs.end(), {*down[layer], *up[layer]});
    }
    const at::TensorList list(pairs);
    const variable_list made = Adapted::apply(*x, list, frozen);
    for (size_t layer = 0; layer < layers; ++layer) outputs[layer] = new at::Tensor(made[layer]);
  });
}
}
