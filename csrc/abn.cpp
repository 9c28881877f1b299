// The operators zoo::abn_* and zoo::line, without autograd: checks, layouts, coefficients per channel and the split into parts.
// They are written against the stable ABI of libtorch, so that one build serves torch 2.11 and later.
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace zoo {
namespace {

Layout layout_of(const Tensor& x) {
  const int64_t channels = x.size(1), numel = x.numel();
  const int64_t positions = numel == 0 ? 1 : numel / x.size(0) / channels;
  return Layout(channels, x.is_contiguous() ? positions : 1, numel, x.scalar_type() == ScalarType::BFloat16);
}

// Reads a vector with a number per channel, of any floating dtype and stride; without a vector they all are `missing`.
template <typename A> std::vector<A> read_vector(const MaybeTensor& vector, const Layout& layout, A missing) {
  std::vector<A> values(layout.channels, missing);
  if (!vector) return values;
  STD_TORCH_CHECK(vector->dim() == 1 && vector->numel() == layout.channels, "expected ", layout.channels,
                  " numbers, got ", vector->numel(), " in ", vector->dim(), " dimensions");
  if (layout.channels == 0) return values;
  const int64_t stride = vector->stride(0);
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

// Repeats the number of each channel for all coefficients of the layout that belong to the channel.
template <typename A> Line<A> spread(const std::vector<A>& values, const Layout& layout) {
  Line<A> result(layout.coefficients());
  layout.each_coefficient([&](int64_t j, int64_t channel) { result[j] = values[channel]; });
  return result;
}

// The split of a tensor between threads. It depends on nothing but the shape and the number of threads, so that results
// repeat bit for bit.
struct Parts {
  Layout layout;
  int64_t splits, count;  // number of pieces per cell, number of parts

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

  // Calls body(channel) for each channel, to merge what the parts have found. Many parts of many channels take so long
  // that the threads share them.
  template <typename F> void each_channel(const F& body) const {
    torch::stable::parallel_for(0, layout.channels, std::max<int64_t>(1, 4096 / count), [&](int64_t begin, int64_t end) {
      for (int64_t channel = begin; channel < end; ++channel) body(channel);
    });
  }
};

// What the parts find, an R per channel and part. Each part clears its own, because clearing them all in one thread would
// take as long as the sweep where there are many threads and channels.
template <typename R> class Findings {
 public:
  explicit Findings(const Parts& parts)
      : channels(parts.layout.channels), memory(new std::byte[parts.count * channels * sizeof(R)]) {}
  R* of(int64_t part) const { return reinterpret_cast<R*>(memory.get()) + part * channels; }
  R* cleared(int64_t part) const {
    std::uninitialized_value_construct_n(of(part), channels);
    return of(part);
  }

 private:
  int64_t channels;
  std::unique_ptr<std::byte[]> memory;
};

// The moments of the union of two sets of values (Chan, Golub, LeVeque 1979).
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
  const Findings<Moments> moments(parts);
  std::tuple<Tensor, Tensor> result;
  with_storage(x, [&](auto tag) {
    using T = decltype(tag);
    const T* data = read_pointer<T>(x);
    parts.run([&](int64_t part, Range range) {
      Moments* cleared = moments.cleared(part);
      if (parts.layout.numel != 0) statistics_part(parts.layout, data, range, cleared);
    });
    std::vector<Compute<T>> mean(channels), var(channels);
    parts.each_channel([&](int64_t channel) {
      Moments all = moments.of(0)[channel];
      for (int64_t part = 1; part < parts.count; ++part) all = merged(all, moments.of(part)[channel]);
      mean[channel] = all.mean;
      var[channel] = all.count == 0 ? 0 : all.squares / all.count;
    });
    result = {new_vector(x, mean), new_vector(x, var)};
  });
  return result;
}

// Writes the output for x into z. Both are native and of one layout; they may be the same tensor.
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

// Returns a job without dx, dshortcut and coefficients, which the caller fills in.
template <typename T>
Backward<T> backward_job(const Layout& layout, const Tensor& z, const Tensor& dz, const MaybeTensor& shortcut,
                         int64_t activation, double parameter) {
  return {layout,  read_pointer<T>(z), read_pointer<T>(dz), read_pointer<T>(shortcut), nullptr, nullptr, nullptr,
          nullptr, nullptr,            Activation(activation), Compute<T>(parameter)};
}

template <typename T> std::vector<Sums> reduced(const Parts& parts, const Backward<T>& job) {
  const Findings<Sums> found(parts);
  std::vector<Sums> sums(parts.layout.channels);
  parts.run([&](int64_t part, Range range) {
    Sums* cleared = found.cleared(part);
    if (parts.layout.numel != 0) reduce_part(job, range, cleared);
  });
  parts.each_channel([&](int64_t channel) {
    for (int64_t part = 0; part < parts.count; ++part) {
      sums[channel].first += found.of(part)[channel].first;
      sums[channel].second += found.of(part)[channel].second;
    }
  });
  return sums;
}

// Half the distance from 1 to the next larger T. Rounding a number to T changes it by at most this fraction.
template <typename T> constexpr double rounding = Storage<T>::epsilon / 2;

// Per channel: scale and shift of y = scale x_hat + shift, and the coefficients of dx (kernels.h).
template <typename A> struct Channels {
  std::vector<A> scale, divisor, shift, of_dy, of_y, constant;  // x_hat is (y - shift) / divisor

  // `rounding` is the rounding of the type of z.
  Channels(const Layout& layout, const MaybeTensor& weight, const MaybeTensor& bias, double eps, int64_t activation,
           double rounding)
      : scale(read_scale<A>(weight, layout, eps)), divisor(scale), shift(read_vector<A>(bias, layout, 0)),
        of_dy(layout.channels), of_y(layout.channels), constant(layout.channels) {
    // Where the scale is smaller than the error with which z holds y near the shift, x_hat is taken to be 0 by an
    // infinite divisor. For an ELU the error is larger below 0, where its inverse is steep.
    for (int64_t channel = 0; channel < layout.channels; ++channel) {
      const A g = scale[channel], b = shift[channel];
      A error = std::abs(b);
      if (Activation(activation) == Activation::elu && b < 0) error = -b > 2 * g ? std::expm1(-b - 2 * g) : 0;
      if (g < A(rounding) * error) divisor[channel] = std::numeric_limits<A>::infinity();
    }
  }

  A sum_dy_xhat(int64_t channel, const Sums& sums) const {
    return A((sums.second - shift[channel] * sums.first) / divisor[channel]);
  }

  // Sets the coefficients of dx = g / std (dy - mean_dy - (y - b) / g mean_dy_xhat): factors of dy, of y, and the rest.
  void set(int64_t channel, A inverse_std, A mean_dy, A mean_dy_xhat) {
    of_dy[channel] = scale[channel] * inverse_std;
    of_y[channel] = -mean_dy_xhat * inverse_std * A(divisor[channel] == scale[channel]);  // NaN stays NaN
    constant[channel] = -(of_y[channel] * shift[channel] + of_dy[channel] * mean_dy);
  }
};

template <typename T> void run_gradient(const Parts& parts, Backward<T> job, const Channels<Compute<T>>& channels) {
  if (parts.layout.numel == 0) return;
  const auto dys = spread(channels.of_dy, parts.layout), ys = spread(channels.of_y, parts.layout);
  const auto constants = spread(channels.constant, parts.layout);
  job.of_dy = dys.data(), job.of_y = ys.data(), job.constant = constants.data();
  parts.run([&](int64_t, Range range) { gradient_part(job, range); });
}

std::tuple<Tensor, Tensor> backward_reduce(Tensor z, Tensor dz, MaybeTensor weight, MaybeTensor bias, double eps,
                                           int64_t activation, double parameter, MaybeTensor shortcut) {
  z = native(z);
  const Parts parts(layout_of(z));
  const Tensor gradient = like(dz, z);
  const auto addend = like(shortcut, z);
  std::tuple<Tensor, Tensor> result;
  with_storage(z, [&](auto tag) {
    using T = decltype(tag);
    using A = Compute<T>;
    const auto sums = reduced(parts, backward_job<T>(parts.layout, z, gradient, addend, activation, parameter));
    const Channels<A> channels(parts.layout, weight, bias, eps, activation, rounding<T>);
    std::vector<A> sum_dy(parts.layout.channels), sum_dy_xhat(parts.layout.channels);
    for (int64_t channel = 0; channel < parts.layout.channels; ++channel) {
      sum_dy[channel] = A(sums[channel].first);
      sum_dy_xhat[channel] = channels.sum_dy_xhat(channel, sums[channel]);
    }
    result = {new_vector(z, sum_dy), new_vector(z, sum_dy_xhat)};
  });
  return result;
}

// Writes dx and, where there is one, dshortcut. All tensors are native and of one layout.
void write_gradient(const Tensor& z, const Tensor& dz, const Tensor& dx, const Tensor& var, const MaybeTensor& mean_dy,
                    const MaybeTensor& mean_dy_xhat, const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                    int64_t activation, double parameter, const MaybeTensor& shortcut, const MaybeTensor& dshortcut) {
  const Parts parts(layout_of(z));
  const Layout& layout = parts.layout;
  with_storage(z, [&](auto tag) {
    using T = decltype(tag);
    using A = Compute<T>;
    Channels<A> channels(layout, weight, bias, eps, activation, rounding<T>);
    const auto variances = read_vector<A>(var, layout, 0), dy = read_vector<A>(mean_dy, layout, 0);
    const auto dy_xhat = read_vector<A>(mean_dy_xhat, layout, 0);
    for (int64_t channel = 0; channel < layout.channels; ++channel)
      channels.set(channel, 1 / std::sqrt(variances[channel] + A(eps)), dy[channel], dy_xhat[channel]);
    auto job = backward_job<T>(layout, z, dz, shortcut, activation, parameter);
    job.dx = write_pointer<T>(dx);
    if (dshortcut) job.dshortcut = write_pointer<T>(*dshortcut);
    run_gradient(parts, job, channels);
  });
}

Tensor backward_apply(Tensor z, Tensor dz, Tensor var, MaybeTensor mean_dy, MaybeTensor mean_dy_xhat,
                      MaybeTensor weight, MaybeTensor bias, double eps, int64_t activation, double parameter) {
  z = native(z);
  const Tensor dx = torch::stable::empty_like(z);
  write_gradient(z, like(dz, z), dx, var, mean_dy, mean_dy_xhat, weight, bias, eps, activation, parameter, {}, {});
  return dx;
}

std::tuple<Tensor, Tensor> backward_apply_shortcut(
    Tensor z, Tensor dz, Tensor var, MaybeTensor mean_dy, MaybeTensor mean_dy_xhat, MaybeTensor weight,
    MaybeTensor bias, double eps, int64_t activation, double parameter, Tensor shortcut) {
  z = native(z);
  const Tensor dx = torch::stable::empty_like(z), dshortcut = torch::stable::empty_like(z);
  write_gradient(z, like(dz, z), dx, var, mean_dy, mean_dy_xhat, weight, bias, eps, activation, parameter,
                 like(shortcut, z), dshortcut);
  return {dx, dshortcut};
}

// Returns whether both sweeps are done channel by channel, so that the second reads from the cache. Only large planes
// are worth it.
bool by_channel(const Layout& layout, size_t bytes) {
  const bool large = layout.planes && layout.inner * int64_t(bytes) >= 32768;
  return large && layout.channels >= 4 * torch::stable::get_num_threads();
}

// Reduces each channel, calls finish(channel, sums) and computes the gradient of the channel; channels run in parallel.
template <typename T, typename F> void run_channels(const Backward<T>& job, const F& finish) {
  const Layout& layout = job.layout;
  const int64_t channels = layout.channels, planes = layout.numel / layout.inner;
  std::vector<Sums> sums(channels);
  torch::stable::parallel_for(0, channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; ++channel) {
      const auto plane = [&](int64_t i) { return Range{i * layout.inner, (i + 1) * layout.inner}; };
      for (int64_t i = channel; i < planes; i += channels) reduce_part(job, plane(i), sums.data());
      finish(channel, sums[channel]);
      for (int64_t i = planes - channels + channel; i >= 0; i -= channels) gradient_part(job, plane(i));
    }
  });
}

// Returns dx, dweight and dbias for statistics of this process: of the batch, or, without `batch`, constants.
std::tuple<Tensor, Tensor, Tensor> backward(Tensor z, Tensor dz, Tensor var, bool batch, MaybeTensor weight,
                                            MaybeTensor bias, double eps, int64_t activation, double parameter) {
  z = native(z);
  const Parts parts(layout_of(z));
  const Layout& layout = parts.layout;
  const Tensor gradient = like(dz, z), dx = torch::stable::empty_like(z);
  std::tuple<Tensor, Tensor, Tensor> result;
  with_storage(z, [&](auto tag) {
    using T = decltype(tag);
    using A = Compute<T>;
    Channels<A> channels(layout, weight, bias, eps, activation, rounding<T>);
    const auto variances = read_vector<A>(var, layout, 0), signs = read_vector<A>(weight, layout, 1);
    std::vector<A> dweight(layout.channels), dbias(layout.channels);
    const A count = layout.channels == 0 ? 0 : A(layout.numel / layout.channels);
    const auto finish = [&](int64_t channel, const Sums& sums) {
      const A sum_dy = A(sums.first), sum_dy_xhat = channels.sum_dy_xhat(channel, sums);
      const A inverse_std = 1 / std::sqrt(variances[channel] + A(eps));
      channels.set(channel, inverse_std, batch ? sum_dy / count : 0, batch ? sum_dy_xhat / count : 0);
      dweight[channel] = signs[channel] < 0 ? -sum_dy_xhat : sum_dy_xhat;
      dbias[channel] = sum_dy;
    };
    auto job = backward_job<T>(layout, z, gradient, {}, activation, parameter);
    job.dx = write_pointer<T>(dx);
    if (by_channel(layout, sizeof(T))) {
      job.of_dy = channels.of_dy.data(), job.of_y = channels.of_y.data(), job.constant = channels.constant.data();
      run_channels(job, finish);
    } else {
      const auto sums = reduced(parts, job);
      for (int64_t channel = 0; channel < layout.channels; ++channel) finish(channel, sums[channel]);
      run_gradient(parts, job, channels);
    }
    result = {dx, new_vector(z, dweight), new_vector(z, dbias)};
  });
  return result;
}

// Moves running statistics towards value(channel), in place and in their own dtype, as torch's lerp does.
template <typename F> void move_towards(const Tensor& running, int64_t channels, double momentum, const F& value) {
  const int64_t stride = running.stride(running.dim() - 1);
  with_storage(running, [&](auto tag) {
    using T = decltype(tag);
    using A = Compute<T>;
    T* numbers = write_pointer<T>(running);
    const A weight = A(momentum);
    for (int64_t channel = 0; channel < channels; ++channel) {
      T& number = numbers[channel * stride];
      const A from = load(number), to = A(value(channel));
      store(number, quiet(weight < A(0.5) ? from + weight * (to - from) : to - (to - from) * (1 - weight)));
    }
  });
}

Tensor line(Tensor x, Tensor alpha, Tensor beta, MaybeTensor shortcut, bool rectified) {
  STD_TORCH_CHECK(x.dim() >= 2 && (x.is_contiguous() || is_channels_last(x)), "expected a dense tensor (N, C, ...)");
  for (const Tensor& vector : {alpha, beta})
    STD_TORCH_CHECK(vector.scalar_type() == x.scalar_type(), "expected coefficients of the dtype of x");
  const Parts parts(layout_of(x));
  const Layout& layout = parts.layout;
  const auto addend = like(shortcut, x);
  const Tensor z = torch::stable::empty_like(x);
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    const auto slopes = spread(read_vector<T>(alpha, layout, 0), layout);
    const auto constants = spread(read_vector<T>(beta, layout, 0), layout);
    const LineJob<T> job{layout,           read_pointer<T>(x), read_pointer<T>(addend), write_pointer<T>(z),
                         slopes.data(), constants.data(),   rectified};
    if (layout.numel != 0) parts.run([&](int64_t, Range range) { line_part(job, range); });
  };
  switch (x.scalar_type()) {
    case ScalarType::Float: run(float()); break;
    case ScalarType::Double: run(double()); break;
    default: STD_TORCH_CHECK(false, "expected float32 or float64");
  }
  return z;
}

std::tuple<Tensor, Tensor> track_statistics(Tensor x, Tensor running_mean, Tensor running_var, double momentum) {
  const int64_t channels = x.size(1);
  const double count = channels == 0 ? 0 : double(x.numel() / channels);
  for (const Tensor& running : {running_mean, running_var})
    STD_TORCH_CHECK(running.numel() == channels, "expected ", channels, " numbers, got ", running.numel());
  const auto result = statistics(x);
  const auto [mean, var] = result;
  const Layout layout = layout_of(x);
  const auto means = read_vector<double>(mean, layout, 0), variances = read_vector<double>(var, layout, 0);
  if (channels == 0) return result;
  move_towards(running_mean, channels, momentum, [&](int64_t channel) { return means[channel]; });
  move_towards(running_var, channels, momentum,
               [&](int64_t channel) { return variances[channel] * (count / (count - 1)); });
  return result;
}

}  // namespace

// The schemas are in zoo/ops/native.py, because only Python can tag them for the compiler.
STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, library) {
  library.impl("abn_statistics", TORCH_BOX(&statistics));
  library.impl("abn_apply", TORCH_BOX(&apply));
  library.impl("abn_apply_", TORCH_BOX(&apply_));
  library.impl("abn_backward_reduce", TORCH_BOX(&backward_reduce));
  library.impl("abn_backward_apply", TORCH_BOX(&backward_apply));
  library.impl("abn_backward_apply_shortcut", TORCH_BOX(&backward_apply_shortcut));
  library.impl("abn_backward", TORCH_BOX(&backward));
  library.impl("abn_track_statistics", TORCH_BOX(&track_statistics));
  library.impl("line", TORCH_BOX(&line));
}

}  // namespace zoo
