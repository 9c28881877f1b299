// Tensors as the operators take them: their dtypes, layouts and memory.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "numbers.h"

namespace zoo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Calls body with a value of the type that x stores its elements in.
template <typename F> void with_storage(const Tensor& x, const F& body) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return body(float());
    case ScalarType::Double: return body(double());
    case ScalarType::BFloat16: return body(bfloat16());
    case ScalarType::Half: return body(float16());
    default: STD_TORCH_CHECK(false, "expected float32, float64, bfloat16 or float16");
  }
}

inline bool is_channels_last(const Tensor& x) {
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

// Returns x itself where it is contiguous or channels_last, the layouts that the kernels know; otherwise a contiguous
// copy. Such a tensor is called native below.
inline Tensor native(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 2, "expected a tensor (N, C, ...), got ", x.dim(), " dimensions");
  return x.is_contiguous() || is_channels_last(x) ? x : torch::stable::contiguous(x);
}

// Returns t itself where it has the layout and dtype of x, which is native; otherwise a copy that has them.
inline Tensor like(const Tensor& t, const Tensor& x) {
  STD_TORCH_CHECK(t.dim() == x.dim(), "expected ", x.dim(), " dimensions, got ", t.dim());
  for (int64_t dim = 0; dim < x.dim(); ++dim)
    STD_TORCH_CHECK(t.size(dim) == x.size(dim), "expected size ", x.size(dim), " at dimension ", dim, ", got ",
                    t.size(dim));
  const bool same = x.is_contiguous() ? t.is_contiguous() : is_channels_last(t);
  if (same && t.scalar_type() == x.scalar_type()) return t;
  Tensor copy = torch::stable::empty_like(x);
  return torch::stable::copy_(copy, t);
}

inline MaybeTensor like(const MaybeTensor& t, const Tensor& x) { return t ? MaybeTensor(like(*t, x)) : std::nullopt; }

template <typename T> const T* read_pointer(const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
template <typename T> T* write_pointer(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }
template <typename T> const T* read_pointer(const MaybeTensor& t) { return t ? read_pointer<T>(*t) : nullptr; }

}  // namespace zoo
