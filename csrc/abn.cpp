// The operators zoo::abn_*: checks, layouts, coefficients per channel and the split into parts; without autograd.
// Written against the stable ABI of libtorch: one build serves torch 2.11 and later.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace zoo {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Runs body with a value of the storage type of x.
template <typename F> void with_storage(const Tensor& x, const F& body) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return body(float());
    case ScalarType::Double: return body(double());
    case ScalarType::BFloat16: return body(bfloat16());
    case ScalarType::Half: return body(float16());
    default: STD_TORCH_CHECK(false, "expected float32, float64, bfloat16 or float16");
  }
}

bool is_channels_last(const Tensor& x) {
  int64_t expected = 1;
  const auto follows = [&](int64_t dim) {
    const bool right = x.size(dim) == 1 || x.stride(dim) == expected;
    expected *= x.size(dim);
    return right;
  };
  bool right = follows(1);
  for (int64_t dim = x.dim() - 1; dim >= 2; --dim) right = follows(dim) && right;
  return follows(0) && right;
}

// x itself where the kernels know its layout, contiguous or channels_last; otherwise a contiguous copy.
Tensor native(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 2, "expected a tensor (N, C, ...), got ", x.dim(), " dimensions");
  return x.is_contiguous() || is_channels_last(x) ? x : torch::stable::contiguous(x);
}

// t itself where its memory is laid out like that of x, which is native; otherwise a copy that is.
Tensor like(const Tensor& t, const Tensor& x) {
  STD_TORCH_CHECK(t.dim() == x.dim(), "expected ", x.dim(), " dimensions, got ", t.dim());
  for (int64_t dim = 0; dim < x.dim(); ++dim)
    STD_TORCH_CHECK(t.size(dim) == x.size(dim), "expected size ", x.size(dim), " at dimension ", dim, ", got ",
                    t.size(dim));
  const bool same = x.is_contiguous() ? t.is_contiguous() : is_channels_last(t);
  if (same && t.scalar_type() == x.scalar_type()) return t;
  Tensor copy = torch::stable::empty_like(x);
  return torch::stable::copy_(copy, t);
}

std::optional<Tensor> like(const MaybeTensor& t, const Tensor& x) {
  return t ? std::optional<Tensor>(like(*t, x)) : std::nullopt;
}

Layout layout_of(const Tensor& x) {
  const int64_t channels = x.size(1), numel = x.numel();
  const int64_t positions = numel == 0 ? 1 : numel / x.size(0) / channels;
  return Layout(channels, x.is_contiguous() ? positions : 1, numel);
}

template <typename T> const T* read_pointer(const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
template <typename T> T* write_pointer(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }
template <typename T> const T* read_pointer(const MaybeTensor& t) { return t ? read_pointer<T>(*t) : nullptr; }

// A vector with a number per channel, of any floating dtype and stride; the same number everywhere where there is none.
template <typename A> std::vector<A> read_vector(const MaybeTensor& vector, const Layout& layout, A missing) {
  std::vector<A> values(layout.channels, missing);
  if (!vector) return values;
  STD_TORCH_CHECK(vector->numel() == layout.channels, "expected ", layout.channels, " numbers, got ", vector->numel());
  if (layout.channels == 0) return values;
  const int64_t stride = vector->stride(vector->dim() - 1);
  with_storage(*vector, [&](auto tag) {
    const auto* numbers = read_pointer<decltype(tag)>(*vector);
    for (int64_t channel = 0; channel < layout.channels; ++channel)
      values[channel] = quiet(A(load(numbers[channel * stride])));
  });
  return values;
}

template <typename A> std::vector<A> read_scale(const MaybeTensor& weight, const Layout& layout, double eps) {
  std::vector<A> scale = read_vector<A>(weight, layout, 1);
  if (weight)
    for (A& value : scale) value = std::abs(value) + A(eps);
  return scale;
}

template <typename A> Tensor new_vector(const Tensor& like, const std::vector<A>& values) {
  const int64_t size = values.size(), stride = 1;
  const int32_t dtype = sizeof(A) == 8 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      1, &size, &stride, dtype, aoti_torch_device_type_cpu(), like.get_device_index(), &handle));
  Tensor vector(handle);
  std::copy(values.begin(), values.end(), write_pointer<A>(vector));
  return vector;
}

// A coefficient for each channel, repeated as the layout wants it.
template <typename A> Line<A> spread(const std::vector<A>& values, const Layout& layout) {
  Line<A> result(layout.coefficients());
  layout.each_coefficient([&](int64_t j, int64_t channel) { result[j] = values[channel]; });
  return result;
}

// The split of a tensor between threads.  It depends on the shape and the number of threads alone: results repeat.
struct Parts {
  Layout layout;
  int64_t splits, count;  // pieces per cell, parts

  explicit Parts(const Layout& layout) : layout(layout), splits(1), count(1) {
    const int64_t threads = torch::stable::get_num_threads(), cells = layout.cells();
    count = std::min(threads, layout.numel / 16384);
    if (count > 1 && layout.planes && cells < 4 * count) splits = (4 * count + cells - 1) / cells;
    count = std::max<int64_t>(1, std::min(count, cells * splits));
  }

  int64_t boundary(int64_t part) const {
    const int64_t piece = layout.cells() * splits * part / count;
    return std::min(layout.numel, piece / splits * layout.cell + layout.cell * (piece % splits) / splits);
  }

  // Calls body(part, range) for each part, in parallel.
  template <typename F> void run(const F& body) const {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) body(part, Range{boundary(part), boundary(part + 1)});
    });
  }
};

// Chan, Golub, LeVeque 1979: the moments of the union of two sets.
Moments merged(const Moments& a, const Moments& b) {
  const double count = a.count + b.count;
  if (count == 0) return a;
  const double delta = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share};
}

std::tuple<Tensor, Tensor> statistics(Tensor x) {
  x = native(x);
  const Parts parts(layout_of(x));
  const int64_t channels = parts.layout.channels;
  std::vector<Moments> moments(parts.count * channels);
  std::tuple<Tensor, Tensor> result;
  with_storage(x, [&](auto tag) {
    using T = decltype(tag);
    const T* data = read_pointer<T>(x);
    if (parts.layout.numel != 0)
      parts.run([&](int64_t part, Range range) {
        statistics_part(parts.layout, data, range, &moments[part * channels]);
      });
    std::vector<Compute<T>> mean(channels), var(channels);
    for (int64_t channel = 0; channel < channels; ++channel) {
      Moments all = moments[channel];
      for (int64_t part = 1; part < parts.count; ++part) all = merged(all, moments[part * channels + channel]);
      mean[channel] = all.mean;
      var[channel] = all.count == 0 ? 0 : all.squares / all.count;
    }
    result = {new_vector(x, mean), new_vector(x, var)};
  });
  return result;
}

// x and z are native and of one layout; they may be the same tensor.
void run_apply(const Tensor& x, const Tensor& z, const Tensor& mean, const Tensor& var, const MaybeTensor& weight,
               const MaybeTensor& bias, double eps, int64_t activation, double parameter, const MaybeTensor& shortcut) {
  const Parts parts(layout_of(x));
  const Layout& layout = parts.layout;
  if (layout.numel == 0) return;
  const auto addend = like(shortcut, x);
  with_storage(x, [&](auto tag) {
    using T = decltype(tag);
    using A = Compute<T>;
    std::vector<A> slope = read_scale<A>(weight, layout, eps);
    const std::vector<A> variances = read_vector<A>(var, layout, 0);
    for (int64_t channel = 0; channel < layout.channels; ++channel)
      slope[channel] /= std::sqrt(variances[channel] + A(eps));
    const auto means = spread(read_vector<A>(mean, layout, 0), layout), slopes = spread(slope, layout);
    const auto biases = spread(read_vector<A>(bias, layout, 0), layout);
    const Forward<T> job{layout, read_pointer<T>(x), read_pointer<T>(addend), write_pointer<T>(z), means.data(),
                         slopes.data(), biases.data(), Activation(activation), A(parameter)};
    parts.run([&](int64_t, Range range) { apply_part(job, range); });
  });
}

void apply_(Tensor x, Tensor mean, Tensor var, MaybeTensor weight, MaybeTensor bias, double eps, int64_t activation,
            double parameter, MaybeTensor shortcut) {
  const Tensor target = native(x);
  run_apply(target, target, mean, var, weight, bias, eps, activation, parameter, shortcut);
  if (target.get() != x.get()) torch::stable::copy_(x, target);
}

Tensor apply(Tensor x, Tensor mean, Tensor var, MaybeTensor weight, MaybeTensor bias, double eps, int64_t activation,
             double parameter, MaybeTensor shortcut) {
  const Tensor source = native(x);
  const Tensor z = source.get() == x.get() ? torch::stable::empty_like(x) : source;
  run_apply(source, z, mean, var, weight, bias, eps, activation, parameter, shortcut);
  return z;
}

std::tuple<Tensor, Tensor> backward_reduce(Tensor z, Tensor dz, MaybeTensor weight, MaybeTensor bias, double eps,
                                           int64_t activation, double parameter, MaybeTensor shortcut) {
  z = native(z);
  const Parts parts(layout_of(z));
  const Layout& layout = parts.layout;
  const int64_t channels = layout.channels;
  const Tensor gradient = like(dz, z);
  const auto addend = like(shortcut, z);
  std::vector<Sums> sums(parts.count * channels);
  std::tuple<Tensor, Tensor> result;
  with_storage(z, [&](auto tag) {
    using T = decltype(tag);
    using A = Compute<T>;
    const Backward<T> job{layout,  read_pointer<T>(z), read_pointer<T>(gradient), read_pointer<T>(addend),
                          nullptr, nullptr,            nullptr,                   nullptr,
                          nullptr, Activation(activation), A(parameter)};
    if (layout.numel != 0)
      parts.run([&](int64_t part, Range range) { reduce_part(job, range, &sums[part * channels]); });
    const std::vector<A> scale = read_scale<A>(weight, layout, eps), shift = read_vector<A>(bias, layout, 0);
    std::vector<A> sum_dy(channels), sum_dy_xhat(channels);
    for (int64_t channel = 0; channel < channels; ++channel) {
      Sums all;
      for (int64_t part = 0; part < parts.count; ++part) {
        all.first += sums[part * channels + channel].first;
        all.second += sums[part * channels + channel].second;
      }
      sum_dy[channel] = all.first;
      sum_dy_xhat[channel] = (all.second - shift[channel] * all.first) / scale[channel];
    }
    result = {new_vector(z, sum_dy), new_vector(z, sum_dy_xhat)};
  });
  return result;
}

// All tensors are native and of one layout; dx may be dz itself.
void run_gradient(const Tensor& z, const Tensor& dz, const Tensor& dx, const Tensor& var, const MaybeTensor& mean_dy,
                  const MaybeTensor& mean_dy_xhat, const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                  int64_t activation, double parameter, const MaybeTensor& shortcut, const MaybeTensor& dshortcut) {
  const Parts parts(layout_of(z));
  const Layout& layout = parts.layout;
  if (layout.numel == 0) return;
  with_storage(z, [&](auto tag) {
    using T = decltype(tag);
    using A = Compute<T>;
    std::vector<A> of_dy = read_scale<A>(weight, layout, eps), of_y = read_vector<A>(mean_dy_xhat, layout, 0);
    std::vector<A> constant = read_vector<A>(mean_dy, layout, 0);
    const auto variances = read_vector<A>(var, layout, 0), shift = read_vector<A>(bias, layout, 0);
    // g / std (dy - mean_dy - (y - b) / g mean_dy_xhat), sorted by dy and y
    for (int64_t channel = 0; channel < layout.channels; ++channel) {
      const A inverse_std = 1 / std::sqrt(variances[channel] + A(eps));
      of_dy[channel] *= inverse_std;
      of_y[channel] *= -inverse_std;
      constant[channel] = -(of_y[channel] * shift[channel] + of_dy[channel] * constant[channel]);
    }
    const auto dys = spread(of_dy, layout), ys = spread(of_y, layout), constants = spread(constant, layout);
    const Backward<T> job{layout, read_pointer<T>(z), read_pointer<T>(dz), read_pointer<T>(shortcut),
                          write_pointer<T>(dx), dshortcut ? write_pointer<T>(*dshortcut) : nullptr,
                          dys.data(), ys.data(), constants.data(), Activation(activation), A(parameter)};
    parts.run([&](int64_t, Range range) { gradient_part(job, range); });
  });
}

Tensor backward_apply(Tensor z, Tensor dz, Tensor var, MaybeTensor mean_dy, MaybeTensor mean_dy_xhat,
                      MaybeTensor weight, MaybeTensor bias, double eps, int64_t activation, double parameter) {
  z = native(z);
  const Tensor dx = torch::stable::empty_like(z);
  run_gradient(z, like(dz, z), dx, var, mean_dy, mean_dy_xhat, weight, bias, eps, activation, parameter, {}, {});
  return dx;
}

std::tuple<Tensor, Tensor> backward_apply_shortcut(
    Tensor z, Tensor dz, Tensor var, MaybeTensor mean_dy, MaybeTensor mean_dy_xhat, MaybeTensor weight,
    MaybeTensor bias, double eps, int64_t activation, double parameter, Tensor shortcut) {
  z = native(z);
  const Tensor dx = torch::stable::empty_like(z), dshortcut = torch::stable::empty_like(z);
  run_gradient(z, like(dz, z), dx, var, mean_dy, mean_dy_xhat, weight, bias, eps, activation, parameter,
               like(shortcut, z), dshortcut);
  return {dx, dshortcut};
}

void backward_apply_(Tensor z, Tensor dz, Tensor var, MaybeTensor mean_dy, MaybeTensor mean_dy_xhat,
                     MaybeTensor weight, MaybeTensor bias, double eps, int64_t activation, double parameter) {
  z = native(z);
  const Tensor gradient = like(dz, z);
  run_gradient(z, gradient, gradient, var, mean_dy, mean_dy_xhat, weight, bias, eps, activation, parameter, {}, {});
  if (gradient.get() != dz.get()) torch::stable::copy_(dz, gradient);
}

}  // namespace

#define FORM "Tensor? weight, Tensor? bias, float eps, int activation, float activation_param"
#define GRADIENTS "Tensor z, Tensor dz, Tensor var, Tensor? mean_dy, Tensor? mean_dy_xhat, " FORM

STABLE_TORCH_LIBRARY(zoo, library) {
  library.def("abn_statistics(Tensor x) -> (Tensor, Tensor)");
  library.def("abn_apply(Tensor x, Tensor mean, Tensor var, " FORM ", Tensor? shortcut) -> Tensor");
  library.def("abn_apply_(Tensor(a!) x, Tensor mean, Tensor var, " FORM ", Tensor? shortcut) -> ()");
  library.def("abn_backward_reduce(Tensor z, Tensor dz, " FORM ", Tensor? shortcut) -> (Tensor, Tensor)");
  library.def("abn_backward_apply(" GRADIENTS ") -> Tensor");
  library.def("abn_backward_apply_shortcut(" GRADIENTS ", Tensor shortcut) -> (Tensor, Tensor)");
  // Overwrites dz with dx: only for a caller that owns dz.
  library.def("abn_backward_apply_(Tensor z, Tensor(a!) dz, Tensor var, Tensor? mean_dy, Tensor? mean_dy_xhat, " FORM
              ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, library) {
  library.impl("abn_statistics", TORCH_BOX(&statistics));
  library.impl("abn_apply", TORCH_BOX(&apply));
  library.impl("abn_apply_", TORCH_BOX(&apply_));
  library.impl("abn_backward_reduce", TORCH_BOX(&backward_reduce));
  library.impl("abn_backward_apply", TORCH_BOX(&backward_apply));
  library.impl("abn_backward_apply_shortcut", TORCH_BOX(&backward_apply_shortcut));
  library.impl("abn_backward_apply_", TORCH_BOX(&backward_apply_));
}

}  // namespace zoo
