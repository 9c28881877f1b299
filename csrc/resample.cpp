// The operator zoo::resize_into: part of an 8-bit RGB image, resized with the bits of PIL's bilinear Image.resize.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "kernels.h"

namespace zoo {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int precision = 22;  // bits of the weights, as in PIL: 32 less 8 of the values and 2 to spare
constexpr int32_t half = 1 << (precision - 1);

// Calls body with the number of taps, known when it is compiled, or with 0 for more than 4.
template <typename F> void specialised(int64_t taps, const F& body) {
  if (taps == 1) body(std::integral_constant<int, 1>());
  else if (taps == 2) body(std::integral_constant<int, 2>());
  else if (taps == 3) body(std::integral_constant<int, 3>());
  else if (taps == 4) body(std::integral_constant<int, 4>());
  else body(std::integral_constant<int, 0>());
}

ALWAYS_INLINE uint8_t rounded(int32_t sum) {  // `sum` includes `half`
  return uint8_t(std::min(std::max(sum >> precision, 0), 255));
}

// The pixels of one axis of the result: pixel i is the rounded sum of weights[i * taps + t] times source pixel
// first[i] + t, with t from 0 to taps - 1. Weights that are 0 may stand beyond the end of the source.
struct Axis {
  int64_t taps = 1;            // of the pixel that has most of them
  int64_t begin = 0, end = 0;  // the source pixels that are used, and up to taps - 1 more
  std::vector<int32_t> first;
  std::vector<int32_t> weights;

  // For the pixels `start` to `start + count` of `size` that the source's interval from `low` to `high` is resized to.
  // The arithmetic is PIL's, operation by operation: another order gives other weights.
  Axis(int64_t source, float low, float high, int64_t size, int64_t start, int64_t count) : first(count) {
    const double scale = double(high - low) / double(size), support = std::max(scale, 1.0), inverse = 1.0 / support;
    const int64_t room = std::min(source, int64_t(std::ceil(2 * support)) + 1);
    std::vector<double> centers(count), totals(count), values(room * count);
    std::vector<int32_t> ends(count);
    for (int64_t i = 0; i < count; ++i) {
      centers[i] = low + (double(start + i) + 0.5) * scale;
      first[i] = std::clamp<int32_t>(int32_t(centers[i] - support + 0.5), 0, source);
      ends[i] = std::min<int32_t>(int32_t(centers[i] + support + 0.5), source);
    }
    for (int32_t t = 0; t < room; ++t) {
      double* value = &values[t * count];
      for (int64_t i = 0; i < count; ++i) {
        const double distance = std::abs((double(first[i] + t) - centers[i] + 0.5) * inverse);
        value[i] = (distance < 1) & (first[i] + t < ends[i]) ? 1 - distance : 0;
        totals[i] += value[i];
      }
    }
    for (double& total : totals) total = total == 0 ? 1 : total;
    std::vector<int32_t> all(room * count);
    for (int64_t t = 0; t < room; ++t) {
      int32_t* weight = &all[t * count];
      int32_t largest = 0;
      for (int64_t i = 0; i < count; ++i) {
        weight[i] = int32_t(0.5 + values[t * count + i] / totals[i] * (1 << precision));
        largest = std::max(largest, weight[i]);
      }
      if (largest > 0) taps = t + 1;
    }
    weights.resize(count * taps);
    for (int64_t t = 0; t < taps; ++t)
      for (int64_t i = 0; i < count; ++i) weights[i * taps + t] = all[t * count + i];
    const auto [least, most] = std::minmax_element(first.begin(), first.end());
    begin = *least, end = *most + taps;
  }
};

// The horizontal pass: a row of interleaved pixels becomes a row of each of three planes.
class Columns {
 public:
  explicit Columns(const Axis& axis) : axis_(axis), size_(axis.first.size()), padded_((size_ + 7) / 8 * 8) {
#ifdef AVX2
    if (has_avx2) pack();
#endif
  }

  int64_t padded() const { return padded_; }  // the number of values that are written of each plane
  // How many bytes of a row are read. The values of those that belong to no pixel of the axis do not matter.
  int64_t reach() const { return 3 * (axis_.end + 8); }

  // Writes a value for each pixel of the axis, and some more, at planes, planes + padded() and planes + 2 * padded().
  void run(const uint8_t* row, uint8_t* planes) const {
#ifdef AVX2
    if (has_avx2) return specialised(taps_, [&](auto taps) { run_vectors<taps()>(row, planes); });
#endif
    for (int64_t x = 0; x < size_; ++x) {
      const uint8_t* pixel = row + 3 * axis_.first[x];
      const int32_t* weight = &axis_.weights[x * axis_.taps];
      int32_t sums[3] = {half, half, half};
      for (int64_t t = 0; t < axis_.taps; ++t)
        for (int64_t channel = 0; channel < 3; ++channel) sums[channel] += weight[t] * pixel[3 * t + channel];
      for (int64_t channel = 0; channel < 3; ++channel) planes[channel * padded_ + x] = rounded(sums[channel]);
    }
  }

 private:
  const Axis& axis_;
  int64_t size_, padded_;

#ifdef AVX2
  // Sums are vectors of eight numbers: red, green, blue and nothing of one pixel, and the same of the next. For each of
  // these pairs and each tap there are the two weights, four times each. More than 4 taps are taken in groups of 4,
  // because the 16 bytes that are read at once hold 4 whole pixels.
  int64_t taps_ = 0;
  Line<std::array<int32_t, 4>> weights_;
  std::vector<int64_t> offsets_;

  void pack() {
    taps_ = axis_.taps <= 4 ? axis_.taps : (axis_.taps + 3) / 4 * 4;
    weights_.resize(padded_ * taps_);
    offsets_.resize(padded_);
    for (int64_t x = 0; x < size_; ++x) {
      offsets_[x] = 3 * axis_.first[x];
      for (int64_t t = 0; t < axis_.taps; ++t)
        weights_[x / 2 * taps_ * 2 + t * 2 + x % 2].fill(axis_.weights[x * axis_.taps + t]);
    }
  }

  // The results of two pixels, not yet limited to 255. `weights` is moved to the weights of the next two.
  template <int Taps>
  AVX2 static ALWAYS_INLINE __m256i two_pixels(const uint8_t* one, const uint8_t* two, int64_t taps,
                                               const __m256i*& weights) {
    __m256i sums = _mm256_set1_epi32(half);
    for (int64_t group = 0; group < (Taps == 0 ? taps : 1); group += 4) {
      const __m256i bytes = _mm256_inserti128_si256(
          _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(one + 3 * group))),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(two + 3 * group)), 1);
      for (int tap = 0; tap < (Taps == 0 ? 4 : Taps); ++tap) {
        const int at = 3 * tap, none = -1;  // none leaves a byte 0
        const __m256i values = _mm256_shuffle_epi8(
            bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(at, none, none, none, at + 1, none, none, none, at + 2,
                                                             none, none, none, none, none, none, none)));
        sums = _mm256_add_epi32(sums, _mm256_mullo_epi32(values, _mm256_load_si256(weights++)));
      }
    }
    return _mm256_srai_epi32(sums, precision);
  }

  template <int Taps> AVX2 void run_vectors(const uint8_t* row, uint8_t* planes) const {
    const __m256i by_channel = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const int64_t padded = padded_, taps = taps_;
    const int64_t* offsets = offsets_.data();
    const auto* weights = reinterpret_cast<const __m256i*>(weights_.data());
    for (int64_t x = 0; x < padded; x += 8) {
      __m256i pixels[4];
      for (int k = 0; k < 4; ++k)
        pixels[k] = two_pixels<Taps>(row + offsets[x + 2 * k], row + offsets[x + 2 * k + 1], taps, weights);
      // The packing limits the values to 0 to 255. The first half of the vector gets the pixels 0, 2, 4 and 6.
      const __m256i packed =
          _mm256_packus_epi16(_mm256_packs_epi32(pixels[0], pixels[1]), _mm256_packs_epi32(pixels[2], pixels[3]));
      const __m256i planar = _mm256_shuffle_epi8(packed, by_channel);
      const __m128i even = _mm256_castsi256_si128(planar), odd = _mm256_extracti128_si256(planar, 1);
      const __m128i first = _mm_unpacklo_epi8(even, odd), second = _mm_unpackhi_epi8(even, odd);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(planes + x), first);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(planes + padded + x), _mm_unpackhi_epi64(first, first));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(planes + 2 * padded + x), second);
    }
  }
#endif
};

#ifdef AVX2
template <int Taps>
AVX2 ALWAYS_INLINE void blend_32(const uint8_t* const* rows, const int32_t* weights, int64_t taps, int64_t i,
                                 uint8_t* out) {
  __m256i sums[4];
  for (__m256i& eight : sums) eight = _mm256_set1_epi32(half);
  for (int64_t t = 0; t < (Taps == 0 ? taps : Taps); ++t) {
    const __m256i weight = _mm256_set1_epi32(weights[t]);
    for (int k = 0; k < 4; ++k) {
      const auto* bytes = reinterpret_cast<const __m128i*>(rows[t] + i + 8 * k);
      sums[k] = _mm256_add_epi32(sums[k], _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)), weight));
    }
  }
  for (__m256i& eight : sums) eight = _mm256_srai_epi32(eight, precision);
  const __m256i packed =
      _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
  const __m256i in_order = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), in_order);
}

// For 32 values or more.
template <int Taps>
AVX2 void blend_vectors(const uint8_t* const* rows, const int32_t* weights, int64_t taps, int64_t size, uint8_t* out) {
  for (int64_t i = 0; i < size - 32; i += 32) blend_32<Taps>(rows, weights, taps, i, out);
  blend_32<Taps>(rows, weights, taps, size - 32, out);  // the last ones; some may be there already
}
#endif

// The vertical pass for one row: out[i] is the rounded sum of weights[t] rows[t][i].
void blend_rows(const uint8_t* const* rows, const int32_t* weights, int64_t taps, int64_t size, uint8_t* out) {
#ifdef AVX2
  if (has_avx2 && size >= 32)
    return specialised(taps, [&](auto known) { blend_vectors<known()>(rows, weights, taps, size, out); });
#endif
  for (int64_t i = 0; i < size; ++i) {
    int32_t sum = half;
    for (int64_t t = 0; t < taps; ++t) sum += weights[t] * rows[t][i];
    out[i] = rounded(sum);
  }
}

// Pixels in memory: red, green and blue of a pixel side by side, then the next pixel of the row.
struct Source {
  const uint8_t* data;
  int64_t height, width, stride;

  const uint8_t* row(int64_t y) const { return data + y * stride; }
  const uint8_t* end() const { return row(height - 1) + 3 * width; }
};

// Writes the columns of the source's row y into `planes`. Where they would read behind the image, they read a copy. The
// row after the next is fetched meanwhile, because a decoder leaves little of an image in the nearest caches.
void run_columns(const Columns& columns, const Source& source, int64_t y, std::vector<uint8_t>& copy, uint8_t* planes) {
  const uint8_t* row = source.row(y);
  if (source.end() - row < columns.reach()) {
    std::copy_n(row, 3 * source.width, copy.begin());
    row = copy.data();
  }
  for (int64_t i = 0; i < 3 * source.width; i += 64) __builtin_prefetch(row + 2 * source.stride + i);
  columns.run(row, planes);
}

void resize_into(Tensor out, Tensor image, int64_t height, int64_t width, double left, double top, double right,
                 double bottom, int64_t first_row, int64_t first_column, bool vertical_first) {
  for (const Tensor& tensor : {out, image})
    STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) == 3 && tensor.numel() > 0 &&
                        tensor.size(1) < 1 << 30 && tensor.size(2) < 1 << 30 &&
                        tensor.scalar_type() == ScalarType::Byte,
                    "expected uint8 tensors (3, H, W) that are not empty");
  STD_TORCH_CHECK(image.stride(0) == 1 && (image.stride(2) == 3 || image.size(2) == 1), "expected interleaved pixels");
  STD_TORCH_CHECK(out.stride(2) == 1 || out.size(2) == 1, "expected rows without gaps in the result");
  const Source source{static_cast<const uint8_t*>(image.const_data_ptr()), image.size(1), image.size(2),
                      image.stride(1)};
  const int64_t rows = out.size(1), size = out.size(2);
  STD_TORCH_CHECK(0 <= first_row && first_row <= height - rows && 0 <= first_column && first_column <= width - size,
                  "the result lies outside of the resized image");
  STD_TORCH_CHECK(0 <= left && left < right && right <= source.width && 0 <= top && top < bottom &&
                      bottom <= source.height, "the box lies outside of the image");
  const Axis vertical(source.height, float(top), float(bottom), height, first_row, rows);
  const Axis horizontal(source.width, float(left), float(right), width, first_column, size);
  const Columns columns(horizontal);

  const int64_t padded = columns.padded();
  std::vector<uint8_t> line(3 * source.width + columns.reach());
  std::vector<const uint8_t*> taps(vertical.taps);
  uint8_t* result = static_cast<uint8_t*>(out.mutable_data_ptr());
  const auto result_row = [&](int64_t channel, int64_t y) {
    return result + channel * out.stride(0) + y * out.stride(1);
  };
  const auto source_row = [&](int64_t y, int64_t tap) {  // taps beyond the last row have a weight of 0
    return std::min(vertical.first[y] + tap, source.height - 1);
  };
  if (vertical_first) {
    std::vector<uint8_t> planes(3 * padded);
    const int64_t begin = 3 * horizontal.begin, end = 3 * std::min(horizontal.end, source.width);
    for (int64_t y = 0; y < rows; ++y) {
      for (int64_t tap = 0; tap < vertical.taps; ++tap) taps[tap] = source.row(source_row(y, tap)) + begin;
      blend_rows(taps.data(), &vertical.weights[y * vertical.taps], vertical.taps, end - begin, &line[begin]);
      columns.run(line.data(), planes.data());
      for (int64_t channel = 0; channel < 3; ++channel)
        std::copy_n(&planes[channel * padded], size, result_row(channel, y));
    }
    return;
  }
  // A row of the source is resized when it is first needed, and overwrites one that is needed no more, so that the rows
  // stay in the first cache.
  int64_t slots = 1;
  while (slots < vertical.taps) slots *= 2;
  std::vector<uint8_t> planes(slots * 3 * padded);
  std::vector<int64_t> held(slots, -1);
  for (int64_t y = 0; y < rows; ++y) {
    for (int64_t tap = 0; tap < vertical.taps; ++tap) {
      const int64_t row = source_row(y, tap), slot = row & (slots - 1);
      uint8_t* place = &planes[slot * 3 * padded];
      if (held[slot] != row) run_columns(columns, source, row, line, place);
      held[slot] = row;
      taps[tap] = place;
    }
    for (int64_t channel = 0; channel < 3; ++channel) {
      blend_rows(taps.data(), &vertical.weights[y * vertical.taps], vertical.taps, size, result_row(channel, y));
      for (const uint8_t*& tap : taps) tap += padded;
    }
  }
}

}  // namespace

// The schema is in zoo/ops/native.py.
STABLE_TORCH_LIBRARY_IMPL(zoo, CPU, library) { library.impl("resize_into", TORCH_BOX(&resize_into)); }

}  // namespace zoo
