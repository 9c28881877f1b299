// The loops of kernels.h, as templates over the dtype.
#pragma once

#include "kernels.h"

#include <type_traits>

namespace zoo {
namespace {

constexpr int64_t half_run = 512;   // number of float16 that are converted at once, few enough for the first cache
constexpr int64_t stretch = 65536;  // number of values that a walk to the beginning reads forwards
constexpr int64_t block = 4096;     // number of values summed in the compute type before the sum is added in double

CLONES void widen_by_integers(const float16* from, float* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = load(from[i]);
}

CLONES void narrow_by_integers(const float* from, float16* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(to[i], from[i]);
}

#ifdef AVX2
// Both convert by eights. What remains is converted with the numbers before it once more, or, if there are fewer than
// eight, in eights of its own, so that nothing is touched beyond the arrays.
AVX2 void widen_by_f16c(const float16* from, float* to, int64_t count) {
  const auto convert = [](const float16* eight, float* wide) AVX2 {
    _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(eight))));
  };
  const bool enough = count > 8;
#pragma GCC unroll 4
  for (; count >= 8; count -= 8, from += 8, to += 8) convert(from, to);
  if (count == 0) return;
  if (enough) return convert(from + count - 8, to + count - 8);
  float16 rest[8] = {};
  float wide[8];
  std::memcpy(rest, from, count * sizeof(float16));
  convert(rest, wide);
  std::memcpy(to, wide, count * sizeof(float));
}

AVX2 void narrow_by_f16c(const float* from, float16* to, int64_t count) {
  const auto convert = [](const float* wide, float16* eight) AVX2 {
    const __m128i rounded = _mm256_cvtps_ph(_mm256_loadu_ps(wide), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(eight), rounded);
  };
  const bool enough = count > 8;
#pragma GCC unroll 4
  for (; count >= 8; count -= 8, from += 8, to += 8) convert(from, to);
  if (count == 0) return;
  if (enough) return convert(from + count - 8, to + count - 8);
  float wide[8] = {};
  float16 rest[8];
  std::memcpy(wide, from, count * sizeof(float));
  convert(wide, rest);
  std::memcpy(to, rest, count * sizeof(float16));
}

void widen(const float16* from, float* to, int64_t count) {
  (has_avx2 ? widen_by_f16c : widen_by_integers)(from, to, count);
}

void narrow(const float* from, float16* to, int64_t count) {
  (has_avx2 ? narrow_by_f16c : narrow_by_integers)(from, to, count);
}
#else
void widen(const float16* from, float* to, int64_t count) { widen_by_integers(from, to, count); }
void narrow(const float* from, float16* to, int64_t count) { narrow_by_integers(from, to, count); }
#endif

// Where an element of a run is: for most types a number. Two neighbors of bfloat16 are read and written as one word,
// which moves nothing between the lanes of a vector: an element is the first or the second of pair i, counted from the
// beginning of the run or in the last pairs of it, or alone at i.
struct First { int64_t i; };
struct Second { int64_t i; };
struct LastFirst { int64_t i; };
struct LastSecond { int64_t i; };
struct Alone { int64_t i; };
constexpr int64_t some_pairs = 8;  // a vector of AVX2

// A coefficient that is the same for all elements of a cell, read like an array.
template <typename A> struct Uniform {
  A value;
  ALWAYS_INLINE A operator[](int64_t) const { return value; }
};
template <typename Coefficients> constexpr bool in_planes = !std::is_pointer_v<Coefficients>;

// Values that are read or written in the compute type. Those of float16, at most half_run of them, pass through a buffer:
// the instructions that convert many at once cannot be named in a function that is compiled for older processors, too.
template <typename T> struct Input {
  const T* values;
  ALWAYS_INLINE Input(const T* values, int64_t) : values(values) {}
  ALWAYS_INLINE Compute<T> operator[](int64_t i) const { return load(values[i]); }
};
template <> struct Input<bfloat16> {
  const bfloat16* values;
  uint32_t last[some_pairs];  // as they are before anything is written
  ALWAYS_INLINE Input(const bfloat16* values, int64_t count) : values(values) {
    if (count >= 2 * some_pairs) std::memcpy(last, values + count - 2 * some_pairs, sizeof(last));
  }
  ALWAYS_INLINE float operator[](First at) const { return first(reinterpret_cast<const Pair*>(values)[at.i]); }
  ALWAYS_INLINE float operator[](Second at) const { return second(reinterpret_cast<const Pair*>(values)[at.i]); }
  ALWAYS_INLINE float operator[](LastFirst at) const { return first(last[at.i]); }
  ALWAYS_INLINE float operator[](LastSecond at) const { return second(last[at.i]); }
  ALWAYS_INLINE float operator[](Alone at) const { return load(values[at.i]); }
};
template <> struct Input<float16> {
  alignas(64) float buffer[half_run];
  ALWAYS_INLINE Input(const float16* values, int64_t count) { widen(values, buffer, count); }
  ALWAYS_INLINE float operator[](int64_t i) const { return buffer[i]; }
};

template <typename T> struct Output {
  T* values;
  ALWAYS_INLINE Output(T* values, int64_t) : values(values) {}
  ALWAYS_INLINE void set(int64_t i, Compute<T> value) { store(values[i], value); }
};
template <> struct Output<bfloat16> {
  bfloat16* values;
  int64_t count;
  float before = 0;  // the first of a pair, which is written with the second
  ALWAYS_INLINE Output(bfloat16* values, int64_t count) : values(values), count(count) {}
  ALWAYS_INLINE void set(First, float value) { before = value; }
  ALWAYS_INLINE void set(Second at, float value) { reinterpret_cast<Pair*>(values)[at.i] = pair(before, value); }
  ALWAYS_INLINE void set(LastFirst, float value) { before = value; }
  ALWAYS_INLINE void set(LastSecond at, float value) {
    reinterpret_cast<Pair*>(values + count - 2 * some_pairs)[at.i] = pair(before, value);
  }
  ALWAYS_INLINE void set(Alone at, float value) { store(values[at.i], value); }
};
template <> struct Output<float16> {
  float16* values;
  int64_t count;
  alignas(64) float buffer[half_run];
  ALWAYS_INLINE Output(float16* values, int64_t count) : values(values), count(count) {}
  ALWAYS_INLINE ~Output() { narrow(buffer, values, count); }
  ALWAYS_INLINE void set(int64_t i, float value) { buffer[i] = value; }
};

// Calls body(first, last, channel) for each cell of the range. The channel is 0 for cells that are not planes.
template <typename F> ALWAYS_INLINE void walk(const Layout& layout, Range range, const F& body) {
  const int64_t channels = layout.planes ? layout.channels : 1;
  int64_t cell = range.begin / layout.cell, channel = cell % channels;
  for (int64_t first = range.begin; first < range.end; ++cell) {
    const int64_t last = std::min(range.end, (cell + 1) * layout.cell);
    body(first, last, channel);
    if (++channel == channels) channel = 0;
    first = last;
  }
}

// As `walk`, but from the end to the beginning, in stretches that are read forwards and long enough for the prefetcher.
template <typename F> ALWAYS_INLINE void walk_back(const Layout& layout, Range range, const F& body) {
  const int64_t stride = std::max<int64_t>(1, stretch / layout.cell) * layout.cell;
  for (int64_t end = range.end; end > range.begin;) {
    const int64_t begin = std::max(range.begin, (end - 1) / stride * stride);
    walk(layout, {begin, end}, body);
    end = begin;
  }
}

// Calls body with the activation and with a type that says whether there is a shortcut, so that each case is compiled
// on its own.
template <typename T, typename Job, typename F> ALWAYS_INLINE void specialised(const Job& job, const F& body) {
  const Compute<T> epsilon = Storage<T>::epsilon;
  const auto with = [&](const auto& activation) INLINED {
    if (job.shortcut) body(activation, std::true_type());
    else body(activation, std::false_type());
  };
  if (job.activation == Activation::leaky_relu) with(LeakyReLU<Compute<T>>(job.parameter, epsilon));
  else if (job.activation == Activation::elu) with(ELU<T>(job.parameter, epsilon));
  else with(Identity<Compute<T>>(job.parameter, epsilon));
}

// Calls body(first, last) for runs of elements that are converted together.
template <typename T, typename F> ALWAYS_INLINE void each_run(int64_t first, int64_t last, const F& body) {
  if constexpr (std::is_same_v<T, float16>) {
    for (; first < last; first += half_run) body(first, std::min(last, first + half_run));
  } else {
    body(first, last);
  }
}

// Calls body(at, j) for each element of a run that begins `start` elements after its cell; j is the index of its
// coefficient. The calls may overlap, but for the first element of a pair and the second one, which follows it.
//
// In planes, which may be short, what no vector holds at the end of a run of bfloat16 is computed with the elements
// before it once more, because single elements take as long as many vectors.
template <typename T, bool planes = false, typename F>
ALWAYS_INLINE void each_element(const Layout& layout, int64_t start, int64_t count, const F& body) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    const int64_t seconds = layout.seconds();
    const auto first_pairs = [&](int64_t pairs) INLINED {
#pragma omp simd
      for (int64_t i = 0; i < pairs; ++i) {
        body(First{i}, i);
        body(Second{i}, seconds + i);
      }
    };
    if constexpr (planes) {
      if (count >= 2 * some_pairs && count % (2 * some_pairs) > 1) {
        first_pairs(count / (2 * some_pairs) * some_pairs);
#pragma omp simd
        for (int64_t i = 0; i < some_pairs; ++i) {
          body(LastFirst{i}, i);
          body(LastSecond{i}, seconds + i);
        }
        return;
      }
    }
    first_pairs(count / 2);
    if (count % 2 != 0) body(Alone{count - 1}, count / 2);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) body(i, start + i);
  }
}

// Adds term(at, a, b) over the elements of a run to two sums.
template <typename T, typename F, typename A = Compute<T>>
ALWAYS_INLINE void sum_run(int64_t count, A& a, A& b, const F& term) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    // Some pairs have sums of their own, which are added in the order of their elements.
    float a_first[some_pairs] = {}, a_second[some_pairs] = {}, b_first[some_pairs] = {}, b_second[some_pairs] = {};
    const int64_t pairs = count / (2 * some_pairs) * some_pairs;
    for (int64_t i = 0; i < pairs; i += some_pairs) {
#pragma omp simd
      for (int64_t k = 0; k < some_pairs; ++k) {
        term(First{i + k}, a_first[k], b_first[k]);
        term(Second{i + k}, a_second[k], b_second[k]);
      }
    }
    for (int64_t i = 2 * pairs; i < count; ++i) term(Alone{i}, a_first[0], b_first[0]);
    for (int64_t k = 0; k < some_pairs; ++k) {
      a = a + a_first[k] + a_second[k];
      b = b + b_first[k] + b_second[k];
    }
  } else {
#pragma omp simd reduction(+ : a, b)
    for (int64_t i = 0; i < count; ++i) term(i, a, b);
  }
}

// Adds term(a, b, values...) over first <= i < last to two sums; the values are those at i of the given arrays.
template <typename T, typename F, typename... Arrays>
ALWAYS_INLINE void sum(int64_t first, int64_t last, Sums& sums, const F& term, const Arrays*... arrays) {
  using A = Compute<T>;
  for (; first < last; first += block) {
    A a = 0, b = 0;
    each_run<T>(first, std::min(last, first + block), [&](int64_t begin, int64_t end) INLINED {
      const auto add = [&](const auto&... values) INLINED {
        sum_run<T>(end - begin, a, b, [&](auto at, A& a, A& b) INLINED { term(a, b, values[at]...); });
      };
      add(Input<T>(arrays + begin, end - begin)...);
    });
    sums.first += double(a);
    sums.second += double(b);
  }
}

// Adds term(j, a, b, values...) over the range to the sums of each channel, for cells of whole periods; j is the index
// of the coefficient, and the values are those of the given arrays.
template <typename T, typename F, typename... Arrays>
ALWAYS_INLINE void sum_periods(const Layout& layout, Range range, Sums* sums, const F& term, const Arrays*... arrays) {
  using A = Compute<T>;
  Line<A> first_sums(layout.cell), second_sums(layout.cell);
  A *a = first_sums.data(), *b = second_sums.data();
  const auto flush = [&] {
    layout.each_coefficient([&](int64_t j, int64_t channel) {
      sums[channel].first += double(a[j]);
      sums[channel].second += double(b[j]);
      a[j] = b[j] = 0;
    });
  };
  int64_t pending = 0;
  walk(layout, range, [&](int64_t first, int64_t last, int64_t) INLINED {
    each_run<T>(first, last, [&](int64_t begin, int64_t end) INLINED {
      const auto add = [&](const auto&... values) INLINED {
        each_element<T>(layout, begin - first, end - begin, [&](auto at, int64_t j) INLINED {
          term(j, a[j], b[j], values[at]...);
        });
      };
      add(Input<T>(arrays + begin, end - begin)...);
    });
    if (++pending % 128 == 0) flush();
  });
  flush();
}

// Fills `shift` with the mean of a sample of the values: sums of x - shift and of its square lose no precision as long
// as the shift is near the mean.
template <typename T>
ALWAYS_INLINE void sample_means(const Layout& layout, const T* x, Range range, Line<Compute<T>>& shift) {
  const int64_t period = layout.channels * layout.inner, periods = (range.end - range.begin) / period;
  const int64_t samples = std::min<int64_t>(periods, 32);
  std::vector<Compute<T>> mean(layout.channels);
  for (int64_t s = 0; s < samples; ++s) {
    // The same position of every image could be its corner; so each sample lies further into its stretch of periods.
    const T* row = x + range.begin + (periods * s / samples + periods / samples * s / samples) * period;
    for (int64_t channel = 0; channel < layout.channels; ++channel)  // one of the positions is enough
      mean[channel] += load(row[channel * layout.inner]);
  }
  layout.each_coefficient([&](int64_t j, int64_t channel) { shift[j] = mean[channel] / samples; });
}

Moments moments_of(double count, double shift, const Sums& sums) {
  const double offset = sums.first / count, squares = sums.second - sums.first * offset;
  return {count, shift + offset, squares < 0 ? 0 : squares};
}

template <typename T> CLONES void periods_statistics(const Layout& layout, const T* x, Range range, Moments* moments) {
  using A = Compute<T>;
  Line<A> shifts(layout.cell);
  sample_means(layout, x, range, shifts);
  std::vector<Sums> sums(layout.channels);
  const A* shift = shifts.data();
  const auto term = [=](int64_t j, A& a, A& b, A xi) INLINED {
    const A deviation = xi - shift[j];
    a += deviation;
    b += deviation * deviation;
  };
  sum_periods<T>(layout, range, sums.data(), term, x);
  const double count = double(range.end - range.begin) / layout.channels;
  for (int64_t channel = 0; channel < layout.channels; ++channel)
    moments[channel] = moments_of(count, shift[layout.place(channel * layout.inner)], sums[channel]);
}

template <typename T> CLONES void planes_statistics(const Layout& layout, const T* x, Range range, Moments* moments) {
  using A = Compute<T>;
  std::vector<A> shifts(layout.channels);
  std::vector<Sums> sums(layout.channels);
  walk(layout, range, [&](int64_t first, int64_t last, int64_t channel) INLINED {
    if (moments[channel].count == 0) {  // the mean of the channel's first plane is near the mean
      Sums plane;
      sum<T>(first, last, plane, [=](A& a, A&, A xi) INLINED { a += xi; }, x);
      shifts[channel] = A(plane.first / (last - first));
    }
    const A shift = shifts[channel];
    const auto term = [=](A& a, A& b, A xi) INLINED {
      const A deviation = xi - shift;
      a += deviation;
      b += deviation * deviation;
    };
    sum<T>(first, last, sums[channel], term, x);
    moments[channel].count += last - first;
  });
  for (int64_t channel = 0; channel < layout.channels; ++channel)
    if (moments[channel].count != 0)
      moments[channel] = moments_of(moments[channel].count, shifts[channel], sums[channel]);
}

}  // namespace

template <typename T> void statistics_part(const Layout& layout, const T* x, Range range, Moments* moments) {
  (layout.planes ? planes_statistics<T> : periods_statistics<T>)(layout, x, range, moments);
}

template <typename T> CLONES void reduce_part(const Backward<T>& job, Range range, Sums* sums) {
  using A = Compute<T>;
  const T *z = job.z, *dz = job.dz, *shortcut = job.shortcut;
  specialised<T>(job, [&](const auto& activation, auto has_shortcut) INLINED {
    const auto term = [=](A& a, A& b, A zi, A dzi, auto... si) INLINED {
      const A dy = activation.gradient(zi, dzi);
      a += dy;
      b += activation.product(zi, dzi);
      if constexpr (has_shortcut) b -= dy * (si, ...);
    };
    const auto with = [&](const auto*... arrays) INLINED {
      if (job.layout.planes) {
        walk(job.layout, range, [&](int64_t first, int64_t last, int64_t channel) INLINED {
          sum<T>(first, last, sums[channel], term, arrays...);
        });
      } else {
        const auto in_period = [=](int64_t, auto&&... rest) INLINED { term(rest...); };
        sum_periods<T>(job.layout, range, sums, in_period, arrays...);
      }
    };
    if constexpr (has_shortcut) with(z, dz, shortcut);
    else with(z, dz);
  });
}

template <typename T> CLONES void apply_part(const Forward<T>& job, Range range) {
  using A = Compute<T>;
  const T *x = job.x, *shortcut = job.shortcut;
  T* z = job.z;
  specialised<T>(job, [&](const auto& activation, auto has_shortcut) INLINED {
    const auto run = [=, &job](int64_t first, int64_t last, auto mean, auto slope, auto bias) INLINED {
      each_run<T>(first, last, [&](int64_t begin, int64_t end) INLINED {
        const int64_t count = end - begin;
        const Input<T> xs(x + begin, count), shortcuts(has_shortcut ? shortcut + begin : x, has_shortcut ? count : 0);
        Output<T> zs(z + begin, count);
        each_element<T, in_planes<decltype(mean)>>(job.layout, begin - first, count, [&](auto at, int64_t j) INLINED {
          A y = (xs[at] - mean[j]) * slope[j] + bias[j];
          if constexpr (has_shortcut) y += shortcuts[at];
          zs.set(at, activation.activate(y));
        });
      });
    };
    walk_back(job.layout, range, [&](int64_t first, int64_t last, int64_t c) INLINED {
      if (job.layout.planes)
        run(first, last, Uniform<A>{job.mean[c]}, Uniform<A>{job.slope[c]}, Uniform<A>{job.bias[c]});
      else
        run(first, last, job.mean, job.slope, job.bias);
    });
  });
}

template <typename T> CLONES void gradient_part(const Backward<T>& job, Range range) {
  using A = Compute<T>;
  const T *z = job.z, *dz = job.dz, *shortcut = job.shortcut;
  T *dx = job.dx, *dshortcut = job.dshortcut;
  specialised<T>(job, [&](const auto& activation, auto has_shortcut) INLINED {
    const auto run = [=, &job](int64_t first, int64_t last, auto of_dy, auto of_y, auto constant) INLINED {
      each_run<T>(first, last, [&](int64_t begin, int64_t end) INLINED {
        const int64_t count = end - begin, some = has_shortcut ? count : 0;
        const Input<T> zs(z + begin, count), dzs(dz + begin, count), shortcuts(some ? shortcut + begin : z, some);
        Output<T> dxs(dx + begin, count), dshortcuts(some ? dshortcut + begin : dx, some);
        each_element<T, in_planes<decltype(of_dy)>>(job.layout, begin - first, count, [&](auto at, int64_t j) INLINED {
          const A zi = zs[at], dy = activation.gradient(zi, dzs[at]);
          A y = activation.invert(zi);
          if constexpr (has_shortcut) {
            y -= shortcuts[at];
            dshortcuts.set(at, dy);
          }
          dxs.set(at, of_dy[j] * dy + (of_y[j] * y + constant[j]));
        });
      });
    };
    walk_back(job.layout, range, [&](int64_t first, int64_t last, int64_t c) INLINED {
      if (job.layout.planes)
        run(first, last, Uniform<A>{job.of_dy[c]}, Uniform<A>{job.of_y[c]}, Uniform<A>{job.constant[c]});
      else
        run(first, last, job.of_dy, job.of_y, job.constant);
    });
  });
}

template <typename T> CLONES void line_part(const LineJob<T>& job, Range range) {
  const T *x = job.x, *shortcut = job.shortcut;
  T* z = job.z;
  const auto with = [&](auto has_shortcut, auto is_rectified) INLINED {
    const auto run = [=](int64_t first, int64_t last, auto alpha, auto beta) INLINED {
#pragma omp simd
      for (int64_t j = 0; j < last - first; ++j) {
        T y = std::fma(x[first + j], alpha[j], beta[j]);
        if constexpr (has_shortcut) y += shortcut[first + j];
        if constexpr (is_rectified) y = y < 0 ? 0 : y;  // leaves NaN and -0, as torch does
        z[first + j] = y;
      }
    };
    walk(job.layout, range, [&](int64_t first, int64_t last, int64_t c) INLINED {
      if (job.layout.planes) run(first, last, Uniform<T>{job.alpha[c]}, Uniform<T>{job.beta[c]});
      else run(first, last, job.alpha, job.beta);
    });
  };
  const auto with_shortcut = [&](auto has_shortcut) INLINED {
    if (job.rectified) with(has_shortcut, std::true_type());
    else with(has_shortcut, std::false_type());
  };
  if (shortcut) with_shortcut(std::true_type());
  else with_shortcut(std::false_type());
}

// Compiles the loops for one dtype. Each group of dtypes has a file, so that several compilers work at once.
#define INSTANTIATE(T)                                                                   \
  template void statistics_part(const Layout&, const T*, Range, Moments*);               \
  template void reduce_part(const Backward<T>&, Range, Sums*);                           \
  template void apply_part(const Forward<T>&, Range);                                    \
  template void gradient_part(const Backward<T>&, Range);

}  // namespace zoo
