#include "kernels.h"

#include <type_traits>

namespace zoo {
namespace {

constexpr int64_t stretch = 65536;  // number of values that a walk to the beginning reads forwards
constexpr int64_t block = 4096;     // number of values summed in the compute type before the sum is added in double

// A coefficient that is the same for all elements of a cell, read like an array.
template <typename A> struct Uniform {
  A value;
  ALWAYS_INLINE A operator[](int64_t) const { return value; }
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
  else if (job.activation == Activation::elu) with(ELU<Compute<T>>(job.parameter, epsilon));
  else with(Identity<Compute<T>>(job.parameter, epsilon));
}

// Calls body with an activation whose gradient is taken at y.
template <typename T, typename F> ALWAYS_INLINE void with_activation_at(Activation activation, const F& body) {
  using A = Compute<T>;
  if (activation == Activation::relu) body(ReLU<A>(0, 0));
  else if (activation == Activation::silu) body(SiLU<A>(0, 0));
  else if (activation == Activation::hardswish) body(Hardswish<A>(0, 0));
  else body(Identity<A>(0, 0));
}

// Adds term(i, a, b) over first <= i < last to two sums.
template <typename A, typename F> ALWAYS_INLINE void sum(int64_t first, int64_t last, Sums& sums, const F& term) {
  for (; first < last; first += block) {
    const int64_t end = std::min(last, first + block);
    A a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
    for (int64_t i = first; i < end; ++i) term(i, a, b);
    sums.first += double(a);
    sums.second += double(b);
  }
}

// Adds term(i, j, a, b) over the range to the sums of each channel, for cells of whole periods; j is the index of the
// coefficient.
template <typename A, typename F>
ALWAYS_INLINE void sum_periods(const Layout& layout, Range range, Sums* sums, const F& term) {
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
#pragma omp simd
    for (int64_t j = 0; j < last - first; ++j) term(first + j, j, a[j], b[j]);
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
  sum_periods<A>(layout, range, sums.data(), [=](int64_t i, int64_t j, A& a, A& b) INLINED {
    const A deviation = load(x[i]) - shift[j];
    a += deviation;
    b += deviation * deviation;
  });
  const double count = double(range.end - range.begin) / layout.channels;
  for (int64_t channel = 0; channel < layout.channels; ++channel)
    moments[channel] = moments_of(count, shift[channel * layout.inner], sums[channel]);
}

template <typename T> CLONES void planes_statistics(const Layout& layout, const T* x, Range range, Moments* moments) {
  using A = Compute<T>;
  std::vector<A> shifts(layout.channels);
  std::vector<Sums> sums(layout.channels);
  walk(layout, range, [&](int64_t first, int64_t last, int64_t channel) INLINED {
    if (moments[channel].count == 0) {  // the mean of the channel's first plane is near the mean
      Sums plane;
      sum<A>(first, last, plane, [=](int64_t i, A& a, A&) INLINED { a += load(x[i]); });
      shifts[channel] = A(plane.first / (last - first));
    }
    const A shift = shifts[channel];
    sum<A>(first, last, sums[channel], [=](int64_t i, A& a, A& b) INLINED {
      const A deviation = load(x[i]) - shift;
      a += deviation;
      b += deviation * deviation;
    });
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
    const auto term = [=](int64_t i, A& a, A& b) INLINED {
      const A zi = load(z[i]), dzi = load(dz[i]), dy = activation.gradient(zi, dzi);
      a += dy;
      b += activation.product(zi, dzi);
      if constexpr (has_shortcut) b -= dy * load(shortcut[i]);
    };
    if (job.layout.planes) {
      walk(job.layout, range, [&](int64_t first, int64_t last, int64_t channel) INLINED {
        sum<A>(first, last, sums[channel], term);
      });
    } else {
      sum_periods<A>(job.layout, range, sums, [=](int64_t i, int64_t, A& a, A& b) INLINED { term(i, a, b); });
    }
  });
}

template <typename T> CLONES void apply_part(const Forward<T>& job, Range range) {
  using A = Compute<T>;
  const T *x = job.x, *shortcut = job.shortcut;
  T* z = job.z;
  const auto sweep = [&](const auto& activation, auto has_shortcut) INLINED {
    const auto run = [=](int64_t first, int64_t last, auto mean, auto slope, auto bias) INLINED {
#pragma omp simd
      for (int64_t j = 0; j < last - first; ++j) {
        A y = (load(x[first + j]) - mean[j]) * slope[j] + bias[j];
        if constexpr (has_shortcut) y += load(shortcut[first + j]);
        store(z[first + j], activation.activate(y));
      }
    };
    walk_back(job.layout, range, [&](int64_t first, int64_t last, int64_t c) INLINED {
      if (job.layout.planes)
        run(first, last, Uniform<A>{job.mean[c]}, Uniform<A>{job.slope[c]}, Uniform<A>{job.bias[c]});
      else
        run(first, last, job.mean, job.slope, job.bias);
    });
  };
  if (job.activation < Activation::relu) specialised<T>(job, sweep);
  else with_activation_at<T>(job.activation, [&](const auto& activation) INLINED { sweep(activation, std::false_type()); });
}

template <typename T> CLONES void gradient_part(const Backward<T>& job, Range range) {
  using A = Compute<T>;
  const T *z = job.z, *dz = job.dz, *shortcut = job.shortcut;
  T *dx = job.dx, *dshortcut = job.dshortcut;
  specialised<T>(job, [&](const auto& activation, auto has_shortcut) INLINED {
    const auto run = [=](int64_t first, int64_t last, auto of_dy, auto of_y, auto constant) INLINED {
#pragma omp simd
      for (int64_t j = 0; j < last - first; ++j) {
        const A zj = load(z[first + j]), dy = activation.gradient(zj, load(dz[first + j]));
        A y = activation.invert(zj);
        if constexpr (has_shortcut) {
          y -= load(shortcut[first + j]);
          store(dshortcut[first + j], dy);
        }
        store(dx[first + j], of_dy[j] * dy + (of_y[j] * y + constant[j]));
      }
    };
    walk_back(job.layout, range, [&](int64_t first, int64_t last, int64_t c) INLINED {
      if (job.layout.planes)
        run(first, last, Uniform<A>{job.of_dy[c]}, Uniform<A>{job.of_y[c]}, Uniform<A>{job.constant[c]});
      else
        run(first, last, job.of_dy, job.of_y, job.constant);
    });
  });
}

template <typename T> CLONES void reduce_part(const BackwardFromInput<T>& job, Range range, Sums* sums) {
  using A = Compute<T>;
  const T *x = job.x, *dz = job.dz;
  T* kept = job.dx;
  with_activation_at<T>(job.activation, [&](const auto& activation) INLINED {
    constexpr bool is_costly = std::decay_t<decltype(activation)>::is_costly;
    const auto term = [=](int64_t i, A mean, A slope, A bias, A& a, A& b) INLINED {
      const A deviation = load(x[i]) - mean, dy = activation.gradient_at(deviation * slope + bias, load(dz[i]));
      if constexpr (is_costly) store(kept[i], dy);
      a += dy;
      b += dy * deviation;
    };
    const A *mean = job.mean, *slope = job.slope, *bias = job.bias;
    if (job.layout.planes) {
      walk(job.layout, range, [&](int64_t first, int64_t last, int64_t c) INLINED {
        const A m = mean[c], s = slope[c], o = bias[c];
        sum<A>(first, last, sums[c], [=](int64_t i, A& a, A& b) INLINED { term(i, m, s, o, a, b); });
      });
    } else {
      sum_periods<A>(job.layout, range, sums, [=](int64_t i, int64_t j, A& a, A& b) INLINED {
        term(i, mean[j], slope[j], bias[j], a, b);
      });
    }
  });
}

template <typename T> CLONES void gradient_part(const BackwardFromInput<T>& job, Range range) {
  using A = Compute<T>;
  const T *x = job.x, *dz = job.dz;
  T* dx = job.dx;
  with_activation_at<T>(job.activation, [&](const auto& activation) INLINED {
    constexpr bool is_costly = std::decay_t<decltype(activation)>::is_costly;
    const auto run = [=](int64_t first, int64_t last, auto mean, auto slope, auto bias, auto of_deviation,
                         auto constant) INLINED {
#pragma omp simd
      for (int64_t j = 0; j < last - first; ++j) {
        const A deviation = load(x[first + j]) - mean[j];
        A dy;
        if constexpr (is_costly) dy = load(dx[first + j]);
        else dy = activation.gradient_at(deviation * slope[j] + bias[j], load(dz[first + j]));
        store(dx[first + j], slope[j] * dy + (of_deviation[j] * deviation + constant[j]));
      }
    };
    walk_back(job.layout, range, [&](int64_t first, int64_t last, int64_t c) INLINED {
      if (job.layout.planes)
        run(first, last, Uniform<A>{job.mean[c]}, Uniform<A>{job.slope[c]}, Uniform<A>{job.bias[c]},
            Uniform<A>{job.of_deviation[c]}, Uniform<A>{job.constant[c]});
      else
        run(first, last, job.mean, job.slope, job.bias, job.of_deviation, job.constant);
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

#define INSTANTIATE(T)                                                                   \
  template void statistics_part(const Layout&, const T*, Range, Moments*);               \
  template void reduce_part(const Backward<T>&, Range, Sums*);                           \
  template void apply_part(const Forward<T>&, Range);                                    \
  template void gradient_part(const Backward<T>&, Range);                                \
  template void reduce_part(const BackwardFromInput<T>&, Range, Sums*);                  \
  template void gradient_part(const BackwardFromInput<T>&, Range);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
template void line_part(const LineJob<float>&, Range);
template void line_part(const LineJob<double>&, Range);

}  // namespace zoo
