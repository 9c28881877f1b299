// The operators zoo::max_pool2d_into and zoo::max_pool2d_backward_into: the maximum of each window and its place there.
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"
#include "tensors.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC warns of vectors that it takes apart for older processors
#endif

namespace zoo {
namespace {

constexpr int most_places = 256;  // in a window, so that a byte names them

// The window along one axis of the map. Tap k of output o is element at(o) + k dilation, which may lie outside.
struct Axis {
  int64_t length, outputs, size, stride, padding, dilation;

  int64_t at(int64_t output) const { return output * stride - padding; }
  bool holds(int64_t element) const { return 0 <= element && element < length; }
  int64_t reach() const { return (size - 1) * dilation + 1; }
  // The first tap of an output within the map; `size` if there is none.
  int64_t first_inside(int64_t output) const {
    int64_t k = 0;
    while (k < size && !holds(at(output) + k * dilation)) ++k;
    return k;
  }
};

// For each element of an axis the outputs whose windows hold it, from the first on, and at which tap they do.
class Holders {
 public:
  struct Holder { int64_t output, tap; };

  explicit Holders(const Axis& axis) : first_(axis.length + 1) {
    for (int64_t element = 0; element < axis.length; ++element) {
      const int64_t from = element + axis.padding - axis.reach() + 1;
      for (int64_t o = from <= 0 ? 0 : (from + axis.stride - 1) / axis.stride; o < axis.outputs; ++o) {
        const int64_t distance = element - axis.at(o);
        if (distance < 0) break;
        if (distance % axis.dilation == 0) holders_.push_back({o, distance / axis.dilation});
      }
      first_[element + 1] = holders_.size();
    }
  }

  struct Range {
    const Holder *first, *last;
    const Holder* begin() const { return first; }
    const Holder* end() const { return last; }
  };
  Range operator[](int64_t element) const {
    return {holders_.data() + first_[element], holders_.data() + first_[element + 1]};
  }

 private:
  std::vector<Holder> holders_;
  std::vector<int64_t> first_;
};

// Calls body with 0, 1, ... up to below Count, each known when it is compiled.
template <typename F, int... I> ALWAYS_INLINE void unrolled(const F& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int Count, typename F> ALWAYS_INLINE void unrolled(const F& body) {
  unrolled(body, std::make_integer_sequence<int, Count>());
}

// N numbers side by side, which the compiler turns into the vectors that a processor has. They are passed by
// reference, because how values are passed differs between processors.
template <typename A, int N> struct VectorOf { typedef A Type __attribute__((vector_size(N * sizeof(A)))); };
template <typename A, int N> using Vector = typename VectorOf<A, N>::Type;

template <typename V> ALWAYS_INLINE void read(V& vector, const void* memory) {
  std::memcpy(&vector, memory, sizeof(V));
}
template <typename V> ALWAYS_INLINE void write(void* memory, const V& vector) {
  std::memcpy(memory, &vector, sizeof(V));
}

// Writes integers as bytes, by halving their width step by step, for which processors have instructions.
template <int N, typename A> ALWAYS_INLINE void write_bytes(uint8_t* memory, const Vector<A, N>& vector) {
  if constexpr (sizeof(A) == 1) {
    write(memory, vector);
  } else {
    using Half = std::conditional_t<sizeof(A) == 8, uint32_t, std::conditional_t<sizeof(A) == 4, uint16_t, uint8_t>>;
    const Vector<Half, N> half = __builtin_convertvector(vector, Vector<Half, N>);
    write_bytes<N, Half>(memory, half);
  }
}

// How many values of T fit into a vector of AVX2, the integers as wide as they, and what they are compared as.
template <typename T> constexpr int lanes = 32 / sizeof(T);
template <typename T> using Lane =
    std::conditional_t<sizeof(T) == 8, int64_t, std::conditional_t<sizeof(T) == 4, int32_t, int16_t>>;
template <typename T> using Value = std::conditional_t<sizeof(T) == 2, int16_t, T>;

// A tap of a window: how far its values lie from a common address, and its place, the number of the tap.
struct Tap { int64_t offset; int place; };

// The largest of N windows' values so far, with their places. As in torch the first of equal ones is taken, and the
// last NaN.
template <typename T, int N> class Largest {
 public:
  static constexpr T lowest = -std::numeric_limits<T>::infinity();

  ALWAYS_INLINE void start(const T* values, int place) {
    read(value_, values);
    place_ = Vector<Lane<T>, N>{} + Lane<T>(place);
  }
  ALWAYS_INLINE void take(const T* values, int place) {
    Vector<T, N> other;
    read(other, values);
    const Vector<Lane<T>, N> larger = (other > value_) | (other != other);
    const Vector<Lane<T>, N> number = Vector<Lane<T>, N>{} + Lane<T>(place);
    value_ = larger ? other : value_;
    place_ = larger ? number : place_;
  }
  ALWAYS_INLINE void finish(T* out, uint8_t* places) const {
    write(out, value_);
    write_bytes<N, Lane<T>>(places, place_);
  }

 private:
  Vector<T, N> value_ = {};
  Vector<Lane<T>, N> place_ = {};
};

// Numbers of 16 bits are compared as integers that are ordered as they are. 0 and -0 are equal.
template <int16_t infinity, int N> class LargestOf16Bits {
 public:
  static constexpr int16_t lowest = int16_t(infinity | 0x8000);

  ALWAYS_INLINE void start(const int16_t* values, int place) {
    Vector<int16_t, N> is_nan;
    read(value_, values);
    order(value_, key_, is_nan);
    place_ = Vector<int16_t, N>{} + int16_t(place);
  }
  ALWAYS_INLINE void take(const int16_t* values, int place) {
    Vector<int16_t, N> other, key, is_nan;
    read(other, values);
    order(other, key, is_nan);
    const Vector<int16_t, N> larger = (key > key_) | is_nan;
    const Vector<int16_t, N> number = Vector<int16_t, N>{} + int16_t(place);
    value_ = larger ? other : value_;
    key_ = larger ? key : key_;
    place_ = larger ? number : place_;
  }
  ALWAYS_INLINE void finish(int16_t* out, uint8_t* places) const {
    write(out, value_);
    write_bytes<N, int16_t>(places, place_);
  }

 private:
  using Numbers = Vector<int16_t, N>;

  static ALWAYS_INLINE void order(const Numbers& value, Numbers& key, Numbers& is_nan) {
    const Numbers magnitude = value & 0x7FFF, sign = value >> 15, most = Numbers{} + 0x7FFF;
    is_nan = magnitude > infinity;
    key = is_nan ? most : (magnitude ^ sign) - sign;
  }

  Vector<int16_t, N> value_ = {}, key_ = {}, place_ = {};
};
template <int N> class Largest<bfloat16, N> : public LargestOf16Bits<0x7F80, N> {};
template <int N> class Largest<float16, N> : public LargestOf16Bits<0x7C00, N> {};

// Writes the largest values at the taps and their places, N M of them at a time. The last ones overlap those before.
template <typename T, int N, int M>
ALWAYS_INLINE void largest_of(const Value<T>* base, const Tap* taps, int count, int64_t length, Value<T>* out,
                              uint8_t* places) {
  for (int64_t i = 0; i < length; i += N * M) {
    const int64_t first = std::min<int64_t>(i, length - N * M);
    Largest<T, N> found[M];
    unrolled<M>([&](auto m) INLINED { found[m].start(base + taps[0].offset + first + N * m, taps[0].place); });
    for (int t = 1; t < count; ++t)
      unrolled<M>([&](auto m) INLINED { found[m].take(base + taps[t].offset + first + N * m, taps[t].place); });
    unrolled<M>([&](auto m) INLINED { found[m].finish(out + first + N * m, places + first + N * m); });
  }
}

template <typename T>
ALWAYS_INLINE void largest(const Value<T>* base, const Tap* taps, int count, int64_t length, Value<T>* out,
                           uint8_t* places) {
  constexpr int N = lanes<T>;
  if (count == 0) {
    std::fill_n(out, length, Largest<T, N>::lowest);
    std::fill_n(places, length, uint8_t(0));
  } else if (length >= 2 * N) {
    largest_of<T, N, 2>(base, taps, count, length, out, places);
  } else if (length >= N) {
    largest_of<T, N, 1>(base, taps, count, length, out, places);
  } else {
    largest_of<T, 1, 1>(base, taps, count, length, out, places);
  }
}

// The gradients of a row of outputs, which flow to an element where the place of the maximum is this one.
template <typename T> struct Source {
  const T* gradients;
  const uint8_t* places;
  int place;
};

#ifdef AVX2
// Sums of gradients side by side, rounded after each addition, as torch's are. The instructions are named here, because
// compilers do not find those that widen bytes.
template <typename T> struct Sum;

template <> struct Sum<float> {
  static constexpr int64_t count = 8;
  __m256 total;
  AVX2 void start(const float* gradients, const uint8_t* places, int place) {
    total = _mm256_setzero_ps();
    add(gradients, places, place);
  }
  AVX2 void add(const float* gradients, const uint8_t* places, int place) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(places)));
    const __m256 here = _mm256_castsi256_ps(_mm256_cmpeq_epi32(wide, _mm256_set1_epi32(place)));
    total = _mm256_add_ps(total, _mm256_and_ps(_mm256_loadu_ps(gradients), here));
  }
  AVX2 void finish(float* out) const { _mm256_storeu_ps(out, total); }
};

template <> struct Sum<double> {
  static constexpr int64_t count = 4;
  __m256d total;
  AVX2 void start(const double* gradients, const uint8_t* places, int place) {
    total = _mm256_setzero_pd();
    add(gradients, places, place);
  }
  AVX2 void add(const double* gradients, const uint8_t* places, int place) {
    int32_t four;
    std::memcpy(&four, places, sizeof(four));
    const __m256i wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    const __m256d here = _mm256_castsi256_pd(_mm256_cmpeq_epi64(wide, _mm256_set1_epi64x(place)));
    total = _mm256_add_pd(total, _mm256_and_pd(_mm256_loadu_pd(gradients), here));
  }
  AVX2 void finish(double* out) const { _mm256_storeu_pd(out, total); }
};

// Returns those of eight numbers of 16 bits whose place is this one, and 0 for the others.
template <typename T> AVX2 __m128i eight_at(const T* gradients, const uint8_t* places, int place) {
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(places)));
  const __m128i here = _mm_cmpeq_epi16(wide, _mm_set1_epi16(int16_t(place)));
  return _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(gradients)), here);
}

template <> struct Sum<bfloat16> {
  static constexpr int64_t count = 8;
  __m256i bits;  // the lower half of each is to be taken for 0
  static AVX2 __m256 added(const bfloat16* gradients, const uint8_t* places, int place) {
    const __m128i eight = eight_at(gradients, places, place);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
  }
  AVX2 void start(const bfloat16* gradients, const uint8_t* places, int place) {  // 0 + -0 is 0
    bits = _mm256_castps_si256(_mm256_add_ps(_mm256_setzero_ps(), added(gradients, places, place)));
  }
  AVX2 void add(const bfloat16* gradients, const uint8_t* places, int place) {
    const __m256 before = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int32_t(0xFFFF0000))));
    const __m256i sum = _mm256_castps_si256(_mm256_add_ps(before, added(gradients, places, place)));
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(sum, _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF)));  // to the nearest, ties to even
  }
  AVX2 void finish(bfloat16* out) const {
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), packed);
  }
};

template <> struct Sum<float16> {
  static constexpr int64_t count = 8;
  __m128i total;
  AVX2 void start(const float16* gradients, const uint8_t* places, int place) {
    const __m128i eight = eight_at(gradients, places, place);
    total = _mm_andnot_si128(_mm_cmpeq_epi16(eight, _mm_set1_epi16(int16_t(0x8000))), eight);  // 0 + -0 is 0
  }
  AVX2 void add(const float16* gradients, const uint8_t* places, int place) {
    const __m256 sum = _mm256_add_ps(_mm256_cvtph_ps(total), _mm256_cvtph_ps(eight_at(gradients, places, place)));
    total = _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT);
  }
  AVX2 void finish(float16* out) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), total); }
};

// The last sums overlap those before.
template <typename T> AVX2 void sum_by_avx2(const Source<T>* sources, int count, int64_t length, T* out) {
  constexpr int64_t N = Sum<T>::count;
  const auto start = [&](Sum<T>& sum, int64_t i) AVX2 {
    sum.start(sources[0].gradients + i, sources[0].places + i, sources[0].place);
  };
  const auto add = [&](Sum<T>& sum, int s, int64_t i) AVX2 {
    sum.add(sources[s].gradients + i, sources[s].places + i, sources[s].place);
  };
  int64_t i = 0;
  for (; i + 2 * N <= length; i += 2 * N) {
    Sum<T> one, two;
    start(one, i), start(two, i + N);
    for (int s = 1; s < count; ++s) add(one, s, i), add(two, s, i + N);
    one.finish(out + i), two.finish(out + i + N);
  }
  for (; i < length; i += N) {
    const int64_t first = std::min(i, length - N);
    Sum<T> one;
    start(one, first);
    for (int s = 1; s < count; ++s) add(one, s, first);
    one.finish(out + first);
  }
}
#endif

// Writes the sums of the gradients that flow to each element.
template <typename T> ALWAYS_INLINE void sum(const Source<T>* sources, int count, int64_t length, T* out) {
#ifdef AVX2
  if (has_avx2 && count > 0 && length >= Sum<T>::count) return sum_by_avx2(sources, count, length, out);
#endif
  std::memset(static_cast<void*>(out), 0, length * sizeof(T));
  for (int s = 0; s < count; ++s) {
    const Source<T> source = sources[s];
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) {
      const Compute<T> gradient = load(source.gradients[i]);
      store(out[i], load(out[i]) + (source.places[i] == source.place ? gradient : Compute<T>(0)));
    }
  }
}

// Writes one row of outputs, (columns, channels) in memory, of a map (rows, columns, channels).
template <typename T>
CLONES void channels_last_row(const Value<T>* map, int64_t channels, const Axis& rows, const Axis& columns, int64_t row,
                              Value<T>* out, uint8_t* places) {
  Tap all[most_places], some[most_places];
  int count = 0;
  for (int64_t k = 0, y = rows.at(row); k < rows.size; ++k, y += rows.dilation)
    for (int64_t l = 0; rows.holds(y) && l < columns.size; ++l)
      all[count++] = {(y * columns.length + l * columns.dilation) * channels, int(k * columns.size + l)};
  for (int64_t o = 0; o < columns.outputs; ++o, out += channels, places += channels) {
    const int64_t left = columns.at(o);
    const Value<T>* base = map + left * channels;
    if (left >= 0 && columns.holds(left + columns.reach() - 1)) {
      largest<T>(base, all, count, channels, out, places);
      continue;
    }
    int inside = 0;
    for (int t = 0; t < count; ++t)
      if (columns.holds(left + all[t].place % columns.size * columns.dilation)) some[inside++] = all[t];
    largest<T>(base, some, inside, channels, out, places);
  }
}

// Copies what is too short for the call of a function. The last ones overlap those before.
template <typename T> ALWAYS_INLINE void copy(const T* from, int64_t count, T* to) {
  constexpr int64_t N = std::min<int64_t>(8, lanes<T>);
  if (count < N) return void(std::copy_n(from, count, to));
  for (int64_t i = 0; i < count; i += N) {
    const int64_t first = std::min(i, count - N);
    std::memcpy(static_cast<void*>(to + first), from + first, N * sizeof(T));
  }
}

constexpr int64_t whole = 16;  // rows of planes are computed in multiples of it, which are whole vectors
inline int64_t in_wholes(int64_t count) { return (count + whole - 1) / whole * whole; }

// The elements of an axis with its padding before it, those that lie `stride` apart from each other being one phase of
// them. Tap k of output o is element o + its `ahead` of its phase.
struct Phases {
  struct Kind { int64_t phase, ahead; };

  std::vector<Kind> taps;
  int64_t most_ahead;

  explicit Phases(const Axis& axis) : most_ahead((axis.reach() - 1) / axis.stride) {
    for (int64_t distance = 0; distance < axis.reach(); distance += axis.dilation)
      taps.push_back({distance % axis.stride, distance / axis.stride});
  }
};

// How many numbers of a phase are computed at once: few enough for the first cache.
template <typename T> constexpr int64_t band_size = 4096 / sizeof(T);

// The pooling of a plane, in bands of rows. They are copied with minus infinity around them and taken apart into the
// phases of rows and columns. Then the values of all outputs at one tap lie side by side.
template <typename T> class PlanePool {
 public:
  PlanePool(const Axis& rows, const Axis& columns)
      : rows_(rows), columns_(columns), by_row_(rows), by_column_(columns),
        pitch_(columns.outputs + by_column_.most_ahead),
        band_(std::min(rows.outputs, std::max<int64_t>(1, band_size<T> / pitch_))), run_(in_wholes(band_ * pitch_)),
        piece_(run_ + by_row_.most_ahead * pitch_ + by_column_.most_ahead + whole),
        row_(columns.stride * in_wholes(pitch_), lowest),
        pieces_(rows.stride * columns.stride * piece_, lowest), values_(run_), places_(run_) {
    for (const auto& row : by_row_.taps)
      for (const auto& column : by_column_.taps) {
        const int64_t piece = (row.phase * columns.stride + column.phase) * piece_;
        taps_.push_back({piece + row.ahead * pitch_ + column.ahead, int(taps_.size())});
      }
  }

  // Writes rows `begin` to `end` of outputs.
  ALWAYS_INLINE void write(const Value<T>* plane, int64_t begin, int64_t end, Value<T>* out, uint8_t* places) {
    const int64_t outputs = columns_.outputs;
    for (; begin < end; begin += band_) {
      const int64_t count = std::min(band_, end - begin);
      read(plane, begin, count + by_row_.most_ahead);
      largest<T>(pieces_.data(), taps_.data(), int(taps_.size()), in_wholes(count * pitch_), values_.data(),
                 places_.data());
      for (int64_t i = 0; i < count; ++i) {
        copy(values_.data() + i * pitch_, outputs, out + (begin + i) * outputs);
        copy(places_.data() + i * pitch_, outputs, places + (begin + i) * outputs);
        step_inside(begin + i, places + (begin + i) * outputs);
      }
    }
  }

 private:
  static constexpr Value<T> lowest = Largest<T, lanes<T>>::lowest;

  ALWAYS_INLINE void read(const Value<T>* plane, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t phase = 0; phase < std::min(rows_.stride, rows_.reach()); ++phase) {
        const int64_t y = (begin + i) * rows_.stride + phase - rows_.padding;
        split(rows_.holds(y) ? plane + y * columns_.length : nullptr,
              pieces_.data() + phase * columns_.stride * piece_ + i * pitch_);
      }
  }

  // Takes a row apart, or one of minus infinity. More is written than belongs to it, which the next row overwrites.
  ALWAYS_INLINE void split(const Value<T>* values, Value<T>* piece) {
    const int64_t stride = columns_.stride, count = row_.size() / stride;
    if (values == nullptr) {
      for (int64_t r = 0; r < stride; ++r) std::fill_n(piece + r * piece_, pitch_, lowest);
      return;
    }
    Value<T>* row = row_.data();
    copy(values, std::min<int64_t>(columns_.length, row_.size() - columns_.padding), row + columns_.padding);
    if (stride == 1) {
      copy(row, count, piece);
    } else if (stride == 2) {
#pragma omp simd
      for (int64_t q = 0; q < count; ++q) piece[q] = row[2 * q], piece[piece_ + q] = row[2 * q + 1];
    } else {
      for (int64_t r = 0; r < std::min(stride, columns_.reach()); ++r)
        for (int64_t q = 0; q < pitch_; ++q) piece[r * piece_ + q] = row[stride * q + r];
    }
  }

  // The first tap, which is taken if no value is larger than minus infinity, lies outside in windows at the upper and
  // left edge: torch takes the first one inside.
  ALWAYS_INLINE void step_inside(int64_t output, uint8_t* places) const {
    const int64_t above = rows_.first_inside(output);
    if (above == rows_.size) return;
    for (int64_t o = 0; o < columns_.outputs && (above > 0 || columns_.at(o) < 0); ++o) {
      const int64_t before = columns_.first_inside(o);
      if (before < columns_.size) places[o] = std::max(places[o], uint8_t(above * columns_.size + before));
    }
  }

  const Axis &rows_, &columns_;
  Phases by_row_, by_column_;
  int64_t pitch_, band_, run_, piece_;
  Line<Value<T>> row_, pieces_, values_;
  Line<uint8_t> places_;
  std::vector<Tap> taps_;
};

template <typename T>
CLONES void plane_rows(const Value<T>* plane, PlanePool<T>& pool, int64_t begin, int64_t end, Value<T>* out,
                       uint8_t* places) {
  pool.write(plane, begin, end, out, places);
}

// Writes one row of the gradient of a map (rows, columns, channels): each element adds what flows to it.
template <typename T>
CLONES void channels_last_gradient(const T* dz, const uint8_t* places, int64_t channels, const Axis& columns,
                                   const Holders& above, const Holders& beside, int64_t y, T* dx) {
  Source<T> sources[most_places];
  for (int64_t x = 0; x < columns.length; ++x) {
    int count = 0;
    for (const auto& row : above[y])
      for (const auto& column : beside[x]) {
        const int64_t offset = (row.output * columns.outputs + column.output) * channels;
        sources[count++] = {dz + offset, places + offset, int(row.tap * columns.size + column.tap)};
      }
    sum<T>(sources, count, channels, dx + x * channels);
  }
}

// The gradient of a plane, in bands of rows. The gradients of the outputs are copied with zeros around them. Then those
// that flow to an element from one place lie equally far from it for all elements of a phase: one run sums them.
template <typename T> class PlaneGradient {
 public:
  PlaneGradient(const Axis& rows, const Axis& columns)
      : rows_(rows), columns_(columns), by_row_(rows), by_column_(columns),
        height_(number(rows)), width_(number(columns)),
        pitch_(width_ + by_column_.most_ahead), band_(std::min(height_, std::max<int64_t>(1, band_size<T> / pitch_))),
        run_(in_wholes(band_ * pitch_)), gradients_(run_ + by_row_.most_ahead * pitch_ + by_column_.most_ahead),
        places_(gradients_.size()), pieces_(rows.stride * columns.stride * run_ + whole),
        row_(columns.stride * in_wholes(width_)) {}

  ALWAYS_INLINE void write(const T* dz, const uint8_t* places, T* dx) {
    for (int64_t first = 0; first < height_; first += band_) {
      read(dz, places, first);
      const int64_t last = std::min(first + band_, height_);
      for (int64_t phase = 0; phase < rows_.stride; ++phase)
        for (int64_t r = 0; r < columns_.stride; ++r) sum_phase(phase, r);
      for (int64_t i = first; i < last; ++i)
        for (int64_t phase = 0; phase < rows_.stride; ++phase) {
          const int64_t y = i * rows_.stride + phase - rows_.padding;
          if (!rows_.holds(y)) continue;
          const T* piece = pieces_.data() + phase * columns_.stride * run_ + (i - first) * pitch_;
          join(reinterpret_cast<const Value<T>*>(piece), reinterpret_cast<Value<T>*>(dx) + y * columns_.length);
        }
    }
  }

 private:
  // How many elements a phase has at most.
  static int64_t number(const Axis& axis) { return (axis.length + axis.padding - 1) / axis.stride + 1; }

  // Copies the outputs that the band of rows from `first` on has to do with.
  ALWAYS_INLINE void read(const T* dz, const uint8_t* places, int64_t first) {
    const int64_t outputs = columns_.outputs, kept = std::min(outputs, width_);
    for (int64_t i = 0; i < band_ + by_row_.most_ahead; ++i) {
      const int64_t o = first - by_row_.most_ahead + i, start = i * pitch_ + by_column_.most_ahead;
      if (0 <= o && o < rows_.outputs) {
        copy(dz + o * outputs, kept, gradients_.data() + start);
        copy(places + o * outputs, kept, places_.data() + start);
      } else {
        std::fill_n(gradients_.data() + start, kept, T());
      }
    }
  }

  ALWAYS_INLINE void sum_phase(int64_t row_phase, int64_t column_phase) {
    Source<T> sources[most_places];
    int count = 0;
    for (int64_t k = rows_.size - 1; k >= 0; --k)  // the last tap is that of the first output
      for (int64_t l = columns_.size - 1; l >= 0; --l) {
        const auto &row = by_row_.taps[k], &column = by_column_.taps[l];
        if (row.phase != row_phase || column.phase != column_phase) continue;
        const int64_t start = (by_row_.most_ahead - row.ahead) * pitch_ + by_column_.most_ahead - column.ahead;
        sources[count++] = {&gradients_[start], &places_[start], int(k * columns_.size + l)};
      }
    sum<T>(sources, count, run_, pieces_.data() + (row_phase * columns_.stride + column_phase) * run_);
  }

  // Writes a row whose phases begin at `piece`, and run_ elements further each.
  ALWAYS_INLINE void join(const Value<T>* piece, Value<T>* dx) {
    const int64_t stride = columns_.stride, count = row_.size() / stride;
    Value<T>* row = row_.data();
    if (stride == 2) {
#pragma omp simd
      for (int64_t q = 0; q < count; ++q) row[2 * q] = piece[q], row[2 * q + 1] = piece[run_ + q];
    } else if (stride > 2) {
      for (int64_t r = 0; r < stride; ++r)
        for (int64_t q = 0; q < width_; ++q) row[stride * q + r] = piece[r * run_ + q];
    }
    copy((stride == 1 ? piece : row) + columns_.padding, columns_.length, dx);
  }

  const Axis &rows_, &columns_;
  Phases by_row_, by_column_;
  int64_t height_, width_, pitch_, band_, run_;
  Line<T> gradients_;
  Line<uint8_t> places_;
  Line<T> pieces_;
  Line<Value<T>> row_;
};

template <typename T> CLONES void plane_gradient(const T* dz, const uint8_t* places, PlaneGradient<T>& plane, T* dx) {
  plane.write(dz, places, dx);
}

std::array<Axis, 2> axes_of(const Tensor& map, const Tensor& output, const std::vector<int64_t>& size,
                            const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                            const std::vector<int64_t>& dilation) {
  for (const auto* pair : {&size, &stride, &padding, &dilation})
    STD_TORCH_CHECK(pair->size() == 2, "expected two numbers, for rows and columns, got ", pair->size());
  std::array<Axis, 2> axes;
  for (int64_t i : {0, 1}) {
    STD_TORCH_CHECK(size[i] >= 1 && stride[i] >= 1 && padding[i] >= 0 && dilation[i] >= 1,
                    "expected a window of a positive size, stride and dilation, and no negative padding");
    axes[i] = {map.size(2 + i), output.size(2 + i), size[i], stride[i], padding[i], dilation[i]};
  }
  STD_TORCH_CHECK(size[0] <= most_places && size[1] <= most_places && size[0] * size[1] <= most_places,
                  "expected a window of at most 256 places");
  return axes;
}

// Checks a map, and values and places of one shape, all of one layout; returns whether it is channels_last.
bool check_layout(const Tensor& map, const Tensor& values, const Tensor& places) {
  STD_TORCH_CHECK(map.dim() == 4 && values.dim() == 4 && places.dim() == 4, "expected tensors (N, C, H, W)");
  for (int64_t dim : {0, 1, 2, 3})
    STD_TORCH_CHECK(values.size(dim) == places.size(dim) && (dim >= 2 || map.size(dim) == places.size(dim)),
                    "the sizes of dimension ", dim, " do not belong together");
  STD_TORCH_CHECK(map.scalar_type() == values.scalar_type(), "expected one dtype");
  STD_TORCH_CHECK(places.scalar_type() == ScalarType::Byte, "expected places of uint8");
  if (map.is_contiguous() && values.is_contiguous() && places.is_contiguous()) return false;
  STD_TORCH_CHECK(is_channels_last(map) && is_channels_last(values) && is_channels_last(places),
                  "expected tensors that all are contiguous, or channels_last");
  return true;
}

void max_pool2d_into(Tensor z, Tensor place, Tensor x, std::vector<int64_t> size, std::vector<int64_t> stride,
                     std::vector<int64_t> padding, std::vector<int64_t> dilation) {
  const bool channels_last = check_layout(x, z, place);
  const auto [rows, columns] = axes_of(x, z, size, stride, padding, dilation);
  const int64_t batch = x.size(0), channels = x.size(1), planes = channels_last ? batch : batch * channels;
  if (z.numel() == 0) return;
  const int64_t depth = channels_last ? channels : 1;
  const int64_t map = rows.length * columns.length * depth, row = columns.outputs * depth;
  uint8_t* places = write_pointer<uint8_t>(place);
  with_storage(x, [&, rows = rows, columns = columns](auto tag) {
    using T = decltype(tag);
    const Value<T>* values = read_pointer<Value<T>>(x);
    Value<T>* out = write_pointer<Value<T>>(z);
    const int64_t grain = std::max<int64_t>(1, 16384 / (row * rows.size));
    torch::stable::parallel_for(0, planes * rows.outputs, grain, [&](int64_t begin, int64_t end) {
      if (channels_last) {
        for (int64_t i = begin; i < end; ++i)
          channels_last_row<T>(values + i / rows.outputs * map, channels, rows, columns, i % rows.outputs,
                               out + i * row, places + i * row);
        return;
      }
      PlanePool<T> pool(rows, columns);
      for (int64_t i = begin; i < end;) {
        const int64_t plane = i / rows.outputs, first = plane * rows.outputs;
        const int64_t last = std::min(end, first + rows.outputs);
        plane_rows<T>(values + plane * map, pool, i - first, last - first, out + first * row, places + first * row);
        i = last;
      }
    });
  });
}

void max_pool2d_backward_into(Tensor dx, Tensor dz, Tensor place, std::vector<int64_t> size,
                              std::vector<int64_t> stride, std::vector<int64_t> padding,
                              std::vector<int64_t> dilation) {
  const bool channels_last = check_layout(dx, dz, place);
  const auto [rows, columns] = axes_of(dx, dz, size, stride, padding, dilation);
  const int64_t batch = dx.size(0), channels = dx.size(1);
  if (dx.numel() == 0) return;
  const Holders above(rows), beside(columns);
  const uint8_t* places = read_pointer<uint8_t>(place);
  with_storage(dx, [&, rows = rows, columns = columns](auto tag) {
    using T = decltype(tag);
    const T* gradients = read_pointer<T>(dz);
    T* out = write_pointer<T>(dx);
    const int64_t elements = rows.length * columns.length, outputs = rows.outputs * columns.outputs;
    if (channels_last) {
      const int64_t row = columns.length * channels, grain = std::max<int64_t>(1, 16384 / row);
      torch::stable::parallel_for(0, batch * rows.length, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t image = i / rows.length * outputs * channels;
          channels_last_gradient<T>(gradients + image, places + image, channels, columns, above, beside,
                                    i % rows.length, out + i * row);
        }
      });
    } else {
      const int64_t grain = std::max<int64_t>(1, 16384 / elements);
      torch::stable::parallel_for(0, batch * channels, grain, [&](int64_t begin, int64_t end) {
        PlaneGradient<T> plane(rows, columns);
        for (int64_t i = begin; i < end; ++i)
          plane_gradient<T>(gradients + i * outputs, places + i * outputs, plane, out + i * elements);
      });
    }
  });
}

}  // namespace

// The schemas are in zoo/ops/native.py.
STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, library) {
  library.impl("max_pool2d_into", TORCH_BOX(&max_pool2d_into));
  library.impl("max_pool2d_backward_into", TORCH_BOX(&max_pool2d_backward_into));
}

}  // namespace zoo
