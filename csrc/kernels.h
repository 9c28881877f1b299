// The loops over one part of a tensor: kernels-inl.h implements them, abn.cpp calls them in parallel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "numbers.h"

// Functions marked CLONES are compiled for several generations of processors. The loader picks the newest that the
// processor supports.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // older compilers do not know the names of the generations
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define CLONES
#endif
#define INLINED __attribute__((always_inline))

// Functions marked AVX2 name its instructions and F16C, which every processor with AVX2 has. They may only be
// called where has_avx2 is true.
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace zoo {

#ifdef AVX2
inline const bool has_avx2 = __builtin_cpu_supports("avx2");
#endif

// How the elements of a tensor lie in memory. Element i of the flat memory belongs to channel (i / inner) % channels,
// where inner is 1 for channels_last and the number of spatial positions for a contiguous tensor.
//
// Memory is walked in cells. Where planes (the positions of one channel) are long, a cell is one plane. Otherwise it is
// a run of whole periods (all channels once), with a coefficient for each of its elements. Where elements are read in
// pairs, the coefficients of all first elements come before the coefficients of the second ones.
struct Layout {
  int64_t channels, inner, numel;
  bool pairs, planes;
  int64_t cell;

  Layout(int64_t channels, int64_t inner, int64_t numel, bool pairs)
      : channels(channels), inner(inner), numel(numel), pairs(pairs), planes(inner >= 16) {
    const int64_t period = std::max<int64_t>(1, channels * inner);
    cell = planes ? inner : period * std::max<int64_t>(1, 512 / period);
  }
  int64_t cells() const { return (numel + cell - 1) / cell; }
  int64_t coefficients() const { return planes ? channels : cell; }

  // The index of the coefficient of the first second element, and of element j of a cell.
  int64_t seconds() const { return (cell + 1) / 2; }
  int64_t place(int64_t j) const { return pairs && !planes ? j / 2 + j % 2 * seconds() : j; }

  // Calls body(coefficient, channel) for each coefficient, in the order of the elements.
  template <typename F> void each_coefficient(const F& body) const {
    const int64_t repeat = planes ? 1 : inner;
    for (int64_t j = 0; j < coefficients();)
      for (int64_t channel = 0; channel < channels; ++channel)
        for (int64_t k = 0; k < repeat; ++k) body(place(j++), channel);
  }
};

// The elements of one part: whole cells, or large pieces of planes where there are few planes.
struct Range { int64_t begin, end; };

// Allocates memory that starts at a cache line, so that no vector load or store crosses one.
template <typename A> struct LineAllocator {
  using value_type = A;
  LineAllocator() = default;
  template <typename B> LineAllocator(const LineAllocator<B>&) {}
  A* allocate(size_t size) { return static_cast<A*>(::operator new(size * sizeof(A), std::align_val_t(64))); }
  void deallocate(A* memory, size_t) { ::operator delete(memory, std::align_val_t(64)); }
  friend bool operator==(const LineAllocator&, const LineAllocator&) { return true; }
  friend bool operator!=(const LineAllocator&, const LineAllocator&) { return false; }
};
template <typename A> using Line = std::vector<A, LineAllocator<A>>;

// Results for the values of one channel within a part.
struct Moments { double count = 0, mean = 0, squares = 0; };  // squares: sum of squared deviations from the mean
struct Sums { double first = 0, second = 0; };                // in backward: of dy and of dy (y - shortcut)

template <typename T> struct Forward {
  Layout layout;
  const T *x, *shortcut;
  T* z;
  const Compute<T> *mean, *slope, *bias;
  Activation activation;
  Compute<T> parameter;
};

template <typename T> struct Backward {
  Layout layout;
  const T *z, *dz, *shortcut;
  T *dx, *dshortcut;
  const Compute<T> *of_dy, *of_y, *constant;  // dx = of_dy dy + of_y (y - shortcut) + constant
  Activation activation;
  Compute<T> parameter;
};

// z = alpha x + beta (+ shortcut), rounded once for the product and the first sum, and with ReLU where it is rectified.
template <typename T> struct LineJob {
  Layout layout;
  const T *x, *shortcut;
  T* z;
  const T *alpha, *beta;
  bool rectified;
};

// Statistics and reductions write the moments of all channels and add to their sums. Sweeps that follow them walk from the
// end to the beginning, because what the sweep before them read last is still in the cache.
template <typename T> void statistics_part(const Layout& layout, const T* x, Range range, Moments* moments);
template <typename T> void reduce_part(const Backward<T>& job, Range range, Sums* sums);
template <typename T> void apply_part(const Forward<T>& job, Range range);
template <typename T> void gradient_part(const Backward<T>& job, Range range);
template <typename T> void line_part(const LineJob<T>& job, Range range);

}  // namespace zoo
