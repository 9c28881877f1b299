// The operators zoo::max_pool2d_into and zoo::max_pool2d_backward_into: the maximum of each window and its place there.
#include <torch/csrc/stable/library.h>

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace zoo {
namespace {

// The window along one axis of the map. Tap k of output o is element at(o) + k dilation, which may lie outside.
struct Axis {
  int64_t length, outputs, size, stride, padding, dilation;

  int64_t at(int64_t output) const { return output * stride - padding; }
  bool holds(int64_t element) const { return 0 <= element && element < length; }
};

// The values of a row of outputs at one tap. `place` is the number of the tap in its window.
template <typename Value> struct Tap {
  const Value* values;
  int place;
};

// The gradients of a row of outputs, which flow to an element where the place of the maximum is this one.
template <typename T> struct Source {
  const T* gradients;
  const uint8_t* places;
  int place;
};

// How values are compared. Numbers of 16 bits are compared as integers that are ordered as they are; their lanes are
// half as wide as those of floats, which they need not become.
template <typename T> struct Order {
  using Value = T;
  using Key = T;
  using Lane = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  static constexpr Value lowest = -std::numeric_limits<T>::infinity();
  static ALWAYS_INLINE Key key(Value value) { return value; }
  static ALWAYS_INLINE bool is_nan(Key key) { return key != key; }
};

template <int16_t infinity> struct OrderOf16Bits {
  using Value = int16_t;
  using Key = int16_t;
  using Lane = int16_t;
  static constexpr Value lowest = int16_t(infinity | 0x8000);
  static constexpr Key nan = 0x7FFF;
  static ALWAYS_INLINE Key key(Value value) {
    const int16_t magnitude = int16_t(value & 0x7FFF), number = int16_t(value < 0 ? -magnitude : magnitude);
    return magnitude > infinity ? nan : number;  // 0 and -0 are equal
  }
  static ALWAYS_INLINE bool is_nan(Key key) { return key == nan; }
};
template <> struct Order<bfloat16> : OrderOf16Bits<0x7F80> {};
template <> struct Order<float16> : OrderOf16Bits<0x7C00> {};

// Calls body with 0, 1, ... up to below Count, each known when it is compiled: the compiler would keep a long loop.
template <typename F, int... I> ALWAYS_INLINE void unrolled(const F& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int Count, typename F> ALWAYS_INLINE void unrolled(const F& body) {
  unrolled(body, std::make_integer_sequence<int, Count>());
}

constexpr int64_t block = 128;  // lanes whose places are kept in lanes as wide as the values, and narrowed together

// Makes `value`, its key and `place` those of the tap where it is larger. As in torch the first of equal ones is taken,
// and the last NaN.
template <typename T, typename Value, typename Key, typename Lane>
ALWAYS_INLINE void take_larger(Value other, Lane other_place, Value& value, Key& key, Lane& place) {
  const Key other_key = Order<T>::key(other);
  const bool is_larger = (other_key > key) | Order<T>::is_nan(other_key);
  value = is_larger ? other : value;
  key = is_larger ? other_key : key;
  place = is_larger ? other_place : place;
}

// Writes the largest of the taps' values and its place, for a number of taps that is known, or any (0).
template <typename T, int Taps, typename Value = typename Order<T>::Value>
ALWAYS_INLINE void largest_of(const std::vector<Tap<Value>>& taps, int64_t length, Value* out, uint8_t* places) {
  using Lane = typename Order<T>::Lane;
  alignas(64) Lane kept[block];
  for (int64_t first = 0; first < length; first += block, out += block, places += block) {
    const int64_t count = std::min(block, length - first);
    if constexpr (Taps > 0) {
      const Value* values[Taps];
      Lane numbers[Taps];
      unrolled<Taps>([&](auto t) INLINED { values[t] = taps[t].values + first, numbers[t] = Lane(taps[t].place); });
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        Value value = values[0][i];
        auto key = Order<T>::key(value);
        Lane place = numbers[0];
        unrolled<Taps - 1>([&](auto t) INLINED {
          take_larger<T>(values[t + 1][i], numbers[t + 1], value, key, place);
        });
        out[i] = value;
        kept[i] = place;
      }
    } else {
      alignas(64) typename Order<T>::Key keys[block];
      std::copy_n(taps[0].values + first, count, out);
      std::fill_n(kept, count, Lane(taps[0].place));
      for (int64_t i = 0; i < count; ++i) keys[i] = Order<T>::key(out[i]);
      for (size_t t = 1; t < taps.size(); ++t) {
        const Value* values = taps[t].values + first;
        const Lane place = Lane(taps[t].place);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) take_larger<T>(values[i], place, out[i], keys[i], kept[i]);
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) places[i] = uint8_t(kept[i]);
  }
}

template <typename T, typename Value = typename Order<T>::Value>
ALWAYS_INLINE void largest(const std::vector<Tap<Value>>& taps, int64_t length, Value* out, uint8_t* places) {
  switch (taps.size()) {
    case 0:
      std::fill_n(out, length, Order<T>::lowest);
      std::fill_n(places, length, uint8_t(0));
      break;
    case 4: largest_of<T, 4>(taps, length, out, places); break;
    case 6: largest_of<T, 6>(taps, length, out, places); break;
    case 9: largest_of<T, 9>(taps, length, out, places); break;
    default: largest_of<T, 0>(taps, length, out, places);
  }
}

template <typename T> ALWAYS_INLINE Compute<T> rounded(Compute<T> value) {
  T stored;
  store(stored, value);
  return load(stored);
}

// Writes the sum of the gradients that flow to each element, rounded after each addition, as torch's are.
template <typename T, int Sources> ALWAYS_INLINE void sum_of(const std::vector<Source<T>>& given, int64_t length, T* out) {
  const T* gradients[Sources];
  const uint8_t* places[Sources];
  int numbers[Sources];
  unrolled<Sources>([&](auto s) INLINED {
    gradients[s] = given[s].gradients, places[s] = given[s].places, numbers[s] = given[s].place;
  });
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) {
    Compute<T> total = 0;
    unrolled<Sources>([&](auto s) INLINED {
      const Compute<T> gradient = load(gradients[s][i]), before = s > 1 ? rounded<T>(total) : total;
      total = before + (places[s][i] == numbers[s] ? gradient : Compute<T>(0));
    });
    store(out[i], total);
  }
}

template <typename T> ALWAYS_INLINE void sum(const std::vector<Source<T>>& sources, int64_t length, T* out) {
  switch (sources.size()) {
    case 0: std::memset(static_cast<void*>(out), 0, length * sizeof(T)); return;
    case 2: return sum_of<T, 2>(sources, length, out);
    case 4: return sum_of<T, 4>(sources, length, out);
  }
  sum_of<T, 1>(sources, length, out);
  for (size_t s = 1; s < sources.size(); ++s) {
    const Source<T> source = sources[s];
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) {
      const Compute<T> gradient = load(source.gradients[i]);
      store(out[i], load(out[i]) + (source.places[i] == source.place ? gradient : Compute<T>(0)));
    }
  }
}

// One row of outputs, (columns, channels) in memory, of a map (rows, columns, channels).
template <typename T, typename Value = typename Order<T>::Value>
CLONES void channels_last_row(const Value* map, int64_t channels, const Axis& rows, const Axis& columns, int64_t row,
                              Value* out, uint8_t* places) {
  std::vector<Tap<Value>> taps;
  taps.reserve(rows.size * columns.size);
  for (int64_t o = 0; o < columns.outputs; ++o, out += channels, places += channels) {
    taps.clear();
    for (int64_t k = 0, y = rows.at(row); k < rows.size; ++k, y += rows.dilation) {
      if (!rows.holds(y)) continue;
      for (int64_t l = 0, x = columns.at(o); l < columns.size; ++l, x += columns.dilation)
        if (columns.holds(x)) taps.push_back({map + (y * columns.length + x) * channels, int(k * columns.size + l)});
    }
    largest<T>(taps, channels, out, places);
  }
}

// Rows of a plane, with minus infinity around them, in `stride` pieces each: every stride-th value from the first on,
// from the second on, and so on. So the values of a row of outputs at one tap lie side by side.
template <typename T> class PaddedRows {
 public:
  using Value = typename Order<T>::Value;

  explicit PaddedRows(const Axis& axis, int64_t count)
      : axis_(axis), lanes_((axis.outputs + 15) / 16 * 16),
        piece_(lanes_ + (axis.size - 1) * axis.dilation / axis.stride),
        memory_(count * axis.stride * piece_, Order<T>::lowest), values_(lanes_), places_(lanes_) {}

  // How many values of a row of outputs are computed: whole vectors. The last ones may mean nothing.
  int64_t lanes() const { return lanes_; }
  Value* values() { return values_.data(); }
  uint8_t* places() { return places_.data(); }

  ALWAYS_INLINE void read(int64_t slot, const Value* row) {
    for (int64_t first = 0; first < std::min(axis_.stride, reach()); ++first) {
      Value* piece = &memory_[(slot * axis_.stride + first) * piece_];
      const int64_t start = first - axis_.padding;  // in the row; where it is negative, some values of the piece stay
      const int64_t begin = start < 0 ? (-start + axis_.stride - 1) / axis_.stride : 0;
      const int64_t end = std::min(piece_, (axis_.length - start + axis_.stride - 1) / axis_.stride);
      const Value* source = row + start;
      if (axis_.stride == 1) {
#pragma omp simd
        for (int64_t q = begin; q < end; ++q) piece[q] = source[q];
      } else if (axis_.stride == 2) {
#pragma omp simd
        for (int64_t q = begin; q < end; ++q) piece[q] = source[2 * q];
      } else {
        for (int64_t q = begin; q < end; ++q) piece[q] = source[axis_.stride * q];
      }
    }
  }

  const Value* tap(int64_t slot, int64_t k) const {
    const int64_t distance = k * axis_.dilation;
    return &memory_[(slot * axis_.stride + distance % axis_.stride) * piece_ + distance / axis_.stride];
  }

 private:
  int64_t reach() const { return (axis_.size - 1) * axis_.dilation + 1; }

  const Axis& axis_;
  int64_t lanes_, piece_;
  Line<Value> memory_, values_;
  Line<uint8_t> places_;
};

// Rows `begin` to `end` of outputs of a plane.
template <typename T, typename Value = typename Order<T>::Value>
CLONES void plane_rows(const Value* plane, const Axis& rows, const Axis& columns, PaddedRows<T>& padded, int64_t begin,
                       int64_t end, Value* out, uint8_t* places) {
  std::vector<Tap<Value>> taps;
  taps.reserve(rows.size * columns.size);
  for (int64_t o = begin; o < end; ++o) {
    taps.clear();
    for (int64_t k = 0, y = rows.at(o); k < rows.size; ++k, y += rows.dilation) {
      if (!rows.holds(y)) continue;
      padded.read(k, plane + y * columns.length);
      for (int64_t l = 0; l < columns.size; ++l) taps.push_back({padded.tap(k, l), int(k * columns.size + l)});
    }
    uint8_t* row = padded.places();
    largest<T>(taps, padded.lanes(), padded.values(), row);
    // The first tap, which is taken if no value is larger than minus infinity, lies outside in windows at the left edge:
    // torch takes the first one inside.
    for (int64_t i = 0; i < columns.outputs && columns.at(i) < 0 && !taps.empty(); ++i) {
      int64_t inside = 0;
      while (inside < columns.size && !columns.holds(columns.at(i) + inside * columns.dilation)) ++inside;
      if (inside < columns.size) row[i] = std::max(row[i], uint8_t(taps[0].place + inside));
    }
    std::copy_n(padded.values(), columns.outputs, out + o * columns.outputs);
    std::copy_n(row, columns.outputs, places + o * columns.outputs);
  }
}

// One row of the gradient of a map (rows, columns, channels): each element adds what flows to it.
template <typename T>
CLONES void channels_last_gradient(const T* dz, const uint8_t* places, int64_t channels, const Axis& rows,
                                   const Axis& columns, int64_t y, T* dx) {
  // Calls body(output, tap) for each output that has an element at one of its taps, from the first output on.
  const auto each_window = [](const Axis& axis, int64_t element, const auto& body) INLINED {
    const int64_t reach = (axis.size - 1) * axis.dilation, from = element + axis.padding - reach;
    for (int64_t o = from <= 0 ? 0 : (from + axis.stride - 1) / axis.stride; o < axis.outputs; ++o) {
      const int64_t distance = element - axis.at(o);
      if (distance < 0) break;
      if (distance % axis.dilation == 0) body(o, distance / axis.dilation);
    }
  };
  std::vector<std::array<int64_t, 2>> above;
  each_window(rows, y, [&](int64_t o, int64_t k) { above.push_back({o, k}); });
  std::vector<Source<T>> sources;
  sources.reserve(rows.size * columns.size);
  for (int64_t x = 0; x < columns.length; ++x) {
    sources.clear();
    for (const auto& [row, k] : above)
      each_window(columns, x, [&, row = row, k = k](int64_t o, int64_t l) INLINED {
        const int64_t offset = (row * columns.outputs + o) * channels;
        sources.push_back({dz + offset, places + offset, int(k * columns.size + l)});
      });
    sum<T>(sources, channels, dx + x * channels);
  }
}

// The gradient of a plane: each output adds to the element that its maximum came from.
template <typename T>
CLONES void plane_gradient(const T* dz, const uint8_t* places, const Axis& rows, const Axis& columns, T* dx) {
  std::memset(static_cast<void*>(dx), 0, rows.length * columns.length * sizeof(T));
  int64_t below[256] = {}, right[256] = {};
  for (int64_t place = 0; place < rows.size * columns.size; ++place) {
    below[place] = place / columns.size * rows.dilation;
    right[place] = place % columns.size * columns.dilation;
  }
  for (int64_t row = 0; row < rows.outputs; ++row) {
    for (int64_t o = 0; o < columns.outputs; ++o, ++dz, ++places) {
      const int64_t y = rows.at(row) + below[*places], x = columns.at(o) + right[*places];
      if (!(rows.holds(y) && columns.holds(x))) continue;  // of a window without any element
      T& target = dx[y * columns.length + x];
      store(target, load(target) + load(*dz));
    }
  }
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
  STD_TORCH_CHECK(size[0] <= 256 && size[1] <= 256 && size[0] * size[1] <= 256,
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
    using Value = typename Order<T>::Value;
    const Value* values = read_pointer<Value>(x);
    Value* out = write_pointer<Value>(z);
    const int64_t grain = std::max<int64_t>(1, 16384 / (row * rows.size));
    torch::stable::parallel_for(0, planes * rows.outputs, grain, [&](int64_t begin, int64_t end) {
      if (channels_last) {
        for (int64_t i = begin; i < end; ++i)
          channels_last_row<T>(values + i / rows.outputs * map, channels, rows, columns, i % rows.outputs,
                               out + i * row, places + i * row);
        return;
      }
      PaddedRows<T> padded(columns, rows.size);
      for (int64_t i = begin; i < end;) {
        const int64_t plane = i / rows.outputs, first = plane * rows.outputs;
        const int64_t last = std::min(end, first + rows.outputs);
        plane_rows<T>(values + plane * map, rows, columns, padded, i - first, last - first, out + first * row,
                      places + first * row);
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
          channels_last_gradient<T>(gradients + image, places + image, channels, rows, columns, i % rows.length,
                                    out + i * row);
        }
      });
    } else {
      const int64_t grain = std::max<int64_t>(1, 16384 / elements);
      torch::stable::parallel_for(0, batch * channels, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          plane_gradient<T>(gradients + i * outputs, places + i * outputs, rows, columns, out + i * elements);
      });
    }
  });
}

}  // namespace

// The schemas are in zoo/ops/abn/native.py.
STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, library) {
  library.impl("max_pool2d_into", TORCH_BOX(&max_pool2d_into));
  library.impl("max_pool2d_backward_into", TORCH_BOX(&max_pool2d_backward_into));
}

}  // namespace zoo
