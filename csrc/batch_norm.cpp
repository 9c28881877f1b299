// The operator zoo::batch_norm: torch's batch norm of contiguous float32 tensors in training mode, with its bits.
// torch sums each channel in double, one value after another, so that each addition waits for the one before it. Here
// several channels are summed side by side.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace zoo {
namespace {

constexpr int64_t lanes = 8;  // channels that are summed side by side

struct Batch {
  const float* x;
  int64_t images, channels, inner;
};

// Adds value(x, lane) of all elements of `lanes` channels, each channel in the order of its memory.
template <typename F> ALWAYS_INLINE void sum_channels(const Batch& batch, int64_t channel, double* sums, const F& value) {
  double sum[lanes] = {};
  for (int64_t image = 0; image < batch.images; ++image) {
    const float* plane = batch.x + (image * batch.channels + channel) * batch.inner;
    for (int64_t i = 0; i < batch.inner; ++i)
#pragma GCC unroll 8
      for (int64_t lane = 0; lane < lanes; ++lane) sum[lane] += value(plane[lane * batch.inner + i], lane);
  }
  for (int64_t lane = 0; lane < lanes; ++lane) sums[lane] = sum[lane];
}

// Writes mean and sum of squared deviations of the channels from `begin` to `end`, which are at least `lanes`.
CLONES void sum_group(const Batch& batch, int64_t channel, float* mean, float* squares) {
  double sums[lanes];
  const double count = double(batch.images * batch.inner);
  sum_channels(batch, channel, sums, [](float x, int64_t) INLINED { return double(x); });
  float means[lanes];
  for (int64_t lane = 0; lane < lanes; ++lane) means[lane] = mean[lane] = float(sums[lane] / count);
  sum_channels(batch, channel, sums, [&](float x, int64_t lane) INLINED {
    const float deviation = x - means[lane];
    return double(deviation * deviation);
  });
  for (int64_t lane = 0; lane < lanes; ++lane) squares[lane] = float(sums[lane]);
}

Tensor vector_like(const Tensor& x, int64_t size) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_float32(),
                                                  aoti_torch_device_type_cpu(), x.get_device_index(), &handle));
  return Tensor(handle);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(Tensor x, MaybeTensor weight, MaybeTensor bias, MaybeTensor running_mean,
                                              MaybeTensor running_var, double momentum, double eps) {
  const int64_t channels = x.size(1), count = x.numel() / channels;
  const Batch batch{read_pointer<float>(x), x.size(0), channels, count / x.size(0)};
  const Tensor mean = vector_like(x, channels), invstd = vector_like(x, channels);
  float *means = write_pointer<float>(mean), *scales = write_pointer<float>(invstd);
  const float *weights = read_pointer<float>(weight), *biases = read_pointer<float>(bias);
  float* tracked_mean = running_mean ? write_pointer<float>(*running_mean) : nullptr;
  float* tracked_var = running_var ? write_pointer<float>(*running_var) : nullptr;
  const Layout layout(channels, batch.inner, x.numel(), false);
  Line<float> alpha(channels), beta(channels);
  const float share = float(momentum);
  torch::stable::parallel_for(0, channels / lanes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * lanes;
      float squares[lanes];
      sum_group(batch, first, means + first, squares);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t c = first + lane;
        scales[c] = float(1.0 / std::sqrt(double(squares[lane] / count) + eps));
        if (tracked_mean) tracked_mean[c] = share * means[c] + (1 - share) * tracked_mean[c];
        if (tracked_var)
          tracked_var[c] = float(share * double(squares[lane] / (count - 1)) + double((1 - share) * tracked_var[c]));
        alpha[c] = weights ? scales[c] * weights[c] : scales[c];
        beta[c] = std::fma(-means[c], alpha[c], biases ? biases[c] : 0.0f);
      }
    }
  });
  const Tensor z = torch::stable::empty_like(x);
  const auto write = [&](const float* alphas, const float* betas) {
    const LineJob<float> job{layout, batch.x, nullptr, write_pointer<float>(z), alphas, betas, false};
    torch::stable::parallel_for(0, layout.cells(), 4, [&](int64_t begin, int64_t end) {
      line_part(job, Range{begin * layout.cell, std::min(layout.numel, end * layout.cell)});
    });
  };
  if (layout.planes) write(alpha.data(), beta.data());
  else {
    Line<float> alphas(layout.coefficients()), betas(layout.coefficients());
    layout.each_coefficient([&](int64_t j, int64_t c) { alphas[j] = alpha[c], betas[j] = beta[c]; });
    write(alphas.data(), betas.data());
  }
  return {z, mean, invstd};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, library) { library.impl("batch_norm", TORCH_BOX(&batch_norm)); }

}  // namespace zoo
