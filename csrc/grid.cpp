// The operator zoo::grid_sum_into: a sum on the grid of multiples of 1 / scale, with its summary, in one pass.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "tensors.h"

namespace zoo {
namespace {

constexpr int64_t piece = 1 << 15;  // elements of one part

struct GridSum {
  const float *x, *r;
  float* out;
  float scale;
  bool subtracts;
};

struct Summary { uint32_t digest = 0, largest = 0; };

ALWAYS_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

template <bool subtracts> ALWAYS_INLINE Summary sum_elements(const GridSum& job, int64_t begin, int64_t end) {
  const float *xs = job.x, *rs = job.r, scale = job.scale, step = 1 / scale;
  float* outs = job.out;
  uint32_t digest = 0, largest = 0;
#pragma omp simd reduction(+ : digest) reduction(max : largest)
  for (int64_t i = begin; i < end; ++i) {
    const float x = xs[i], rounded = std::nearbyint(rs[i] * scale) * step;
    const float out = subtracts ? x - rounded : x + rounded;
    outs[i] = out;
    const uint32_t b = bits_of(subtracts ? out : x), magnitude = bits_of(out) & 0x7fffffff;
    digest += b * (2 * b + 1);
    largest = std::max(largest, magnitude);
  }
  return {digest, largest};
}

CLONES Summary sum_part(const GridSum& job, int64_t begin, int64_t end) {
  return job.subtracts ? sum_elements<true>(job, begin, end) : sum_elements<false>(job, begin, end);
}

void grid_sum_into(Tensor out, Tensor summary, Tensor x, Tensor r, double scale, bool subtracts) {
  const int64_t count = x.numel();
  for (const Tensor& t : {x, r, out})
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.numel() == count, "expected float32 tensors of one shape");
  const GridSum job{read_pointer<float>(x), read_pointer<float>(r), write_pointer<float>(out), float(scale), subtracts};
  std::atomic<uint32_t> digest{0}, largest{0};  // neither depends on the order of the parts
  torch::stable::parallel_for(0, (count + piece - 1) / piece, 1, [&](int64_t begin, int64_t end) {
    const Summary found = sum_part(job, begin * piece, std::min(end * piece, count));
    digest += found.digest;
    uint32_t before = largest;
    while (before < found.largest && !largest.compare_exchange_weak(before, found.largest)) {}
  });
  uint32_t* result = write_pointer<uint32_t>(summary);
  result[0] = digest, result[1] = largest;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, library) { library.impl("grid_sum_into", TORCH_BOX(&grid_sum_into)); }

}  // namespace zoo
