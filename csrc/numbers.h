// Storage types and the activations with their inverses, written so that compilers turn them into vector instructions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace zoo {

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

enum class Activation : int64_t { leaky_relu, elu, identity };

// The type that values stored as T are computed in, and the distance from 1 to the next larger T.
template <typename T> struct Storage;
template <> struct Storage<float> { using Compute = float; static constexpr double epsilon = 0x1p-23; };
template <> struct Storage<double> { using Compute = double; static constexpr double epsilon = 0x1p-52; };
template <> struct Storage<bfloat16> { using Compute = float; static constexpr double epsilon = 0x1p-7; };
template <> struct Storage<float16> { using Compute = float; static constexpr double epsilon = 0x1p-10; };
template <typename T> using Compute = typename Storage<T>::Compute;

template <typename To, typename From> ALWAYS_INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

ALWAYS_INLINE float load(float value) { return value; }
ALWAYS_INLINE double load(double value) { return value; }
ALWAYS_INLINE float load(bfloat16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

// Without branches, after Maratyszcza's FP16: subnormal numbers by a subtraction, the others by a product.
ALWAYS_INLINE float load(float16 value) {
  const uint32_t word = uint32_t(value.bits) << 16, twice = word + word;
  const float normal = bit_cast<float>((twice >> 4) + (0xE0u << 23)) * 0x1p-112f;
  const float subnormal = bit_cast<float>((twice >> 17) | (126u << 23)) - 0.5f;
  return bit_cast<float>((word & 0x80000000u) | bit_cast<uint32_t>(twice < (1u << 27) ? subnormal : normal));
}

ALWAYS_INLINE void store(float& target, float value) { target = value; }
ALWAYS_INLINE void store(double& target, double value) { target = value; }

// Rounds to the nearest, ties to even; the upper half is the result. A NaN stays NaN only if its last bits are zero,
// which `quiet` ensures.
ALWAYS_INLINE uint32_t rounded(float value) {
  const uint32_t word = bit_cast<uint32_t>(value);
  return word + 0x7FFFu + ((word >> 16) & 1u);
}
ALWAYS_INLINE void store(bfloat16& target, float value) { target.bits = uint16_t(rounded(value) >> 16); }

// Two neighbors of bfloat16 as one word.
using Pair = uint32_t __attribute__((may_alias, aligned(2)));
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of two neighbors is the lower half of their word");
ALWAYS_INLINE float first(uint32_t pair) { return bit_cast<float>(pair << 16); }
ALWAYS_INLINE float second(uint32_t pair) { return bit_cast<float>(pair & 0xFFFF0000u); }
ALWAYS_INLINE uint32_t pair(float first, float second) {
  return (rounded(first) >> 16) | (rounded(second) & 0xFFFF0000u);
}

// Returns value, but for any NaN the one whose last bits are zero, as in every NaN that arithmetic on bfloat16 gives.
template <typename A> A quiet(A value) { return value == value ? value : std::numeric_limits<A>::quiet_NaN(); }

ALWAYS_INLINE void store(float16& target, float value) {
  const uint32_t word = bit_cast<uint32_t>(value), twice = word + word;
  const uint32_t exponent = twice & 0xFF000000u;
  const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
  // The sum moves the last bit that is kept to the place where float rounds; the products turn too large values into
  // infinity.
  const float scaled = (std::fabs(value) * 0x1p+112f) * 0x1p-110f;
  const uint32_t sum = bit_cast<uint32_t>(bit_cast<float>((bias >> 1) + 0x07800000u) + scaled);
  const uint32_t rounded = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
  target.bits = uint16_t(((word >> 16) & 0x8000u) | (twice > 0xFF000000u ? 0x7E00u : rounded));
}

// exp(x) - 1 for x <= 0, within 2 ulp, by x = n ln 2 + r and a Taylor polynomial in r.
ALWAYS_INLINE float expm1_negative(float x) {
  x = x < -30.0f ? -30.0f : x;
  const float magic = 0x1.8p23f;  // adding it rounds to an integer, which is then in the low bits
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040 * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * (r * r) + r;
  const float scale = bit_cast<float>((bit_cast<uint32_t>(shifted) << 23) + (127u << 23));
  return scale * p + (scale - 1.0f);
}
ALWAYS_INLINE double expm1_negative(double x) { return std::expm1(x); }

// log(1 + t) for -1 < t <= 0, by the method and with the coefficients of FreeBSD's log1pf.
ALWAYS_INLINE float log1p_negative(float t) {
  const float u = 1.0f + t;
  const float lost = (t - (u - 1.0f)) / u;
  const uint32_t word = bit_cast<uint32_t>(u);
  const int32_t exponent = int32_t(word - 0x3F3504F3u) >> 23;
  const float k = float(exponent), f = bit_cast<float>(word - (uint32_t(exponent) << 23)) - 1.0f;
  const float s = f / (2.0f + f), z = s * s, w = z * z, half_square = 0.5f * f * f;
  const float series = z * (0xAAAAAA.0p-24f + w * 0x91E9EE.0p-25f) + w * (0xCCCE13.0p-25f + w * 0xF89E26.0p-26f);
  return s * (half_square + series) + (k * 9.0580006145e-06f + lost) - half_square + f + k * 6.9313812256e-01f;
}
ALWAYS_INLINE double log1p_negative(double t) { return std::log1p(t); }

// The same for a t of half precision, or the quotient of one, in half the instructions: the error is at most 2^-18 of
// the result, plus 2^-24 for the rounding of 1 + t. The polynomial has the least relative error.
ALWAYS_INLINE float log1p_negative_of_half(float t) {
  const uint32_t word = bit_cast<uint32_t>(1.0f + t);
  const int32_t exponent = int32_t(word - 0x3F3504F3u) >> 23;
  const float f = bit_cast<float>(word - (uint32_t(exponent) << 23)) - 1.0f;
  float p = 0.11781917f * f - 0.18407194f;
  p = p * f + 0.20442185f;
  p = p * f - 0.24943833f;
  p = p * f + 0.33320862f;
  p = p * f - 0.5f;
  p = p * f + 1.0f;
  return p * f + float(exponent) * 0.69314718f;
}

// An activation f with its parameter: z = f(y), y = f^-1(z), and dy = dz f'(y) from z.
template <typename A> struct LeakyReLU {
  A slope, inverse_slope;
  LeakyReLU(A slope, A) : slope(slope), inverse_slope(1 / slope) {}
  ALWAYS_INLINE A activate(A y) const { return y < 0 ? y * slope : y; }
  ALWAYS_INLINE A invert(A z) const { return z < 0 ? z * inverse_slope : z; }
  ALWAYS_INLINE A gradient(A z, A dz) const { return z < 0 ? dz * slope : dz; }
  ALWAYS_INLINE A product(A z, A dz) const { return z * dz; }  // dy y needs no inversion
};

template <typename T> struct ELU {
  using A = Compute<T>;
  A alpha, inverse_alpha, lowest;
  // A saturated output is -alpha, whose pre-image is -inf. The pre-image of the next larger stored number is used
  // instead: it is multiplied by a gradient of zero, and zero times a finite number stays zero.
  ELU(A alpha, A epsilon) : alpha(alpha), inverse_alpha(1 / alpha), lowest(-1 + epsilon / 2) {}
  ALWAYS_INLINE A activate(A y) const { return y < 0 ? alpha * expm1_negative(y < 0 ? y : 0) : y; }
  ALWAYS_INLINE A invert(A z) const {
    A ratio = z < 0 ? z * inverse_alpha : 0;
    ratio = ratio < lowest ? lowest : ratio;
    if constexpr (sizeof(T) == 2) return z < 0 ? log1p_negative_of_half(ratio) : z;
    else return z < 0 ? log1p_negative(ratio) : z;
  }
  ALWAYS_INLINE A gradient(A z, A dz) const { return z < 0 ? dz * (z + alpha) : dz; }
  ALWAYS_INLINE A product(A z, A dz) const { return gradient(z, dz) * invert(z); }
};

template <typename A> struct Identity {
  Identity(A, A) {}
  ALWAYS_INLINE A activate(A y) const { return y; }
  ALWAYS_INLINE A invert(A z) const { return z; }
  ALWAYS_INLINE A gradient(A, A dz) const { return dz; }
  ALWAYS_INLINE A product(A z, A dz) const { return z * dz; }
};

}  // namespace zoo
