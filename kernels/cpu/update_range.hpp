// The arithmetic of one Adam update, written once for every instruction set.
//
// A lane type L is one vector of fp32 numbers, and provides
//   F, width          the vector, and its length: 4, 8 or 16
//   broadcast         a vector of one number
//   add sub mul div sqrt   each rounded once to fp32
//   load_fp32 load_bf16 load_fp16   `width` numbers from any address, widened exactly
//   store_fp32(x, a)  to any address
//   stream_fp32(x, a)  to a multiple of the vector's size; past the caches, if that can be had
//   stream_bf16(x, a, b) stream_fp16(x, a, b)   two vectors, rounded, to neighbouring places;
//                     x is a multiple of their size together
// ScalarLane is the one without the streams: it does one number at a time.
//
// Everything here has internal linkage, so that each instruction set keeps its own copy; and
// no standard library template is used, because those would be emitted with external linkage
// under the flags of whoever came first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adam.hpp"

namespace dos {
namespace {

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Rounded to nearest even; NaN stays NaN.
inline std::uint16_t bf16_of(float x) {
  const std::uint32_t bits = bits_of(x);
  // Half a unit less one, and one more when the kept part is odd: carries into the kept
  // part exactly when nearest-even rounds up. It could carry a NaN to infinity or zero.
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>(x != x ? bits >> 16 | 0x40u : rounded);
}

inline std::uint16_t fp16_of(float x) {
  const std::uint32_t sign = bits_of(x) >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits_of(x) & 0x7FFFFFFFu;
  std::uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude >= 0x47800000u) {  // 2^16 and up; from 65520 the carry does it
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5, whose unit is that of fp16's subnormals, rounds for us.
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(half | sign);
}

// One number at a time, with conversions in software: runs anywhere.
struct ScalarLane {
  using F = float;
  static constexpr std::size_t width = 1;

  static F broadcast(float x) { return x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return __builtin_sqrtf(a); }

  static F load_fp32(const float* x) { return *x; }
  static F load_bf16(const std::uint16_t* x) { return float_of(std::uint32_t{*x} << 16); }
  static F load_fp16(const std::uint16_t* x) {
    // Read as fp32 the exponent is 112 too small; the product is exact, also for subnormals.
    const float scaled = float_of((*x & 0x7FFFu) << 13) * 0x1p112f;
    const std::uint32_t special = (*x & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
    return float_of(bits_of(scaled) | special | (*x & 0x8000u) << 16);
  }

  static void store_fp32(float* x, F a) { *x = a; }
};

template <class L, DType G>
inline typename L::F load_gradient(const void* g, std::size_t i) {
  if constexpr (G == DType::fp32) return L::load_fp32(static_cast<const float*>(g) + i);
  if constexpr (G == DType::bf16) return L::load_bf16(static_cast<const std::uint16_t*>(g) + i);
  if constexpr (G == DType::fp16) return L::load_fp16(static_cast<const std::uint16_t*>(g) + i);
}

// Updates the L::width elements from i on, all but w, and returns the new p.
template <class L, DType G, bool Decoupled>
inline typename L::F update_lanes(const Segment& s, std::size_t i) {
  using F = typename L::F;
  const auto scalar = [](float x) { return L::broadcast(x); };
  F p = L::load_fp32(s.p + i);
  F g = L::mul(load_gradient<L, G>(s.g, i), scalar(s.scalars.scale));
  if constexpr (Decoupled) {
    p = L::mul(p, scalar(s.scalars.decay));
  } else {
    g = L::add(g, L::mul(scalar(s.scalars.weight_decay), p));
  }
  const F m = L::add(L::mul(L::load_fp32(s.m + i), scalar(s.scalars.c1)),
                     L::mul(g, scalar(s.scalars.d1)));
  const F v = L::add(L::mul(L::load_fp32(s.v + i), scalar(s.scalars.c2)),
                     L::mul(L::mul(g, g), scalar(s.scalars.d2)));
  const F denominator =
      L::add(L::mul(L::sqrt(v), scalar(s.scalars.inv_sqrt_bc2)), scalar(s.scalars.eps));
  p = L::sub(p, L::mul(scalar(s.scalars.step_size), L::div(m, denominator)));
  L::store_fp32(s.m + i, m);
  L::store_fp32(s.v + i, v);
  L::store_fp32(s.p + i, p);
  return p;
}

// Elements done at a time: one cache line of 16-bit weights. A line that is streamed in
// pieces, with other stores between, may go to memory in pieces.
constexpr std::size_t kGroup = 32;

// Two vectors of weights, rounded, to where a line or half of one begins; a and b are neighbours.
template <class L, DType W>
inline void stream_weights(void* w, std::size_t i, typename L::F a, typename L::F b) {
  if constexpr (W == DType::fp32) {
    L::stream_fp32(static_cast<float*>(w) + i, a);
    L::stream_fp32(static_cast<float*>(w) + i + L::width, b);
  }
  if constexpr (W == DType::bf16) L::stream_bf16(static_cast<std::uint16_t*>(w) + i, a, b);
  if constexpr (W == DType::fp16) L::stream_fp16(static_cast<std::uint16_t*>(w) + i, a, b);
}

template <class L, DType G, DType W, bool Decoupled>
inline void update_group(const Segment& s, std::size_t i) {
  constexpr std::size_t vectors = kGroup / L::width;
  typename L::F p[vectors];
  for (std::size_t k = 0; k < vectors; ++k) {
    p[k] = update_lanes<L, G, Decoupled>(s, i + k * L::width);
  }
  for (std::size_t k = 0; k < vectors; k += 2) {
    stream_weights<L, W>(s.w, i + k * L::width, p[k], p[k + 1]);
  }
}

template <DType W>
inline void store_weight(void* w, std::size_t i, float p) {
  if constexpr (W == DType::fp32) static_cast<float*>(w)[i] = p;
  if constexpr (W == DType::bf16) static_cast<std::uint16_t*>(w)[i] = bf16_of(p);
  if constexpr (W == DType::fp16) static_cast<std::uint16_t*>(w)[i] = fp16_of(p);
}

// Updates the n < kGroup elements from i on in a copy that is filled up with zeros: one by
// one, the two ends of a small segment would take longer than all that lies between.
template <class L, DType G, DType W, bool Decoupled>
void update_part(const Segment& s, std::size_t i, std::size_t n) {
  constexpr std::size_t itemsize = G == DType::fp32 ? 4 : 2;
  float p[kGroup] = {}, m[kGroup] = {}, v[kGroup] = {};
  unsigned char g[kGroup * itemsize] = {};
  std::memcpy(p, s.p + i, n * sizeof *p);
  std::memcpy(m, s.m + i, n * sizeof *m);
  std::memcpy(v, s.v + i, n * sizeof *v);
  std::memcpy(g, static_cast<const unsigned char*>(s.g) + i * itemsize, n * itemsize);
  const Segment copy{p, m, v, g, nullptr, n, G, DType::none, s.scalars};
  for (std::size_t k = 0; k < n; k += L::width) update_lanes<L, G, Decoupled>(copy, k);
  std::memcpy(s.p + i, p, n * sizeof *p);
  std::memcpy(s.m + i, m, n * sizeof *m);
  std::memcpy(s.v + i, v, n * sizeof *v);
  for (std::size_t k = 0; k < n; ++k) store_weight<W>(s.w, i + k, p[k]);
}

// Elements before an array of them is on a cache line, which streaming stores need.
template <DType W>
inline std::size_t elements_to_line(const void* array) {
  constexpr std::size_t itemsize = W == DType::bf16 || W == DType::fp16 ? 2 : 4;
  return (-reinterpret_cast<std::uintptr_t>(array) & 63u) / itemsize;
}

// Before w, or p if there is no w, is: plain stores, too, are faster for it. Less than kGroup.
template <DType W>
inline std::size_t head_length(const Segment& s, std::size_t begin) {
  constexpr std::size_t itemsize = W == DType::bf16 || W == DType::fp16 ? 2 : 4;
  const void* base = W == DType::none ? s.p : s.w;
  return elements_to_line<W>(static_cast<const char*>(base) + begin * itemsize);
}

template <class L, DType G, DType W, bool Decoupled>
void update_range(const Segment& segment, std::size_t begin, std::size_t end) {
  // A local copy, whose pointers and scalars no store below can be suspected to change.
  const Segment s = segment;
  std::size_t i = begin;
  if constexpr (L::width == 1) {
    for (; i < end; ++i) store_weight<W>(s.w, i, update_lanes<L, G, Decoupled>(s, i));
  } else {
    const std::size_t head = head_length<W>(s, begin);
    i = head < end - begin ? begin + head : end;
    if (begin < i) update_part<L, G, W, Decoupled>(s, begin, i - begin);
    for (; i + kGroup <= end; i += kGroup) update_group<L, G, W, Decoupled>(s, i);
    if (i < end) update_part<L, G, W, Decoupled>(s, i, end - i);
  }
}

template <class L, DType G, DType W>
RangeKernel kernel_for(bool decoupled) {
  return decoupled ? &update_range<L, G, W, true> : &update_range<L, G, W, false>;
}

template <class L, DType G>
RangeKernel kernel_for(DType w, bool decoupled) {
  switch (w) {
    case DType::fp32: return kernel_for<L, G, DType::fp32>(decoupled);
    case DType::bf16: return kernel_for<L, G, DType::bf16>(decoupled);
    case DType::fp16: return kernel_for<L, G, DType::fp16>(decoupled);
    default: return kernel_for<L, G, DType::none>(decoupled);
  }
}

template <class L>
RangeKernel kernel_for(DType g, DType w, bool decoupled) {
  switch (g) {
    case DType::bf16: return kernel_for<L, DType::bf16>(w, decoupled);
    case DType::fp16: return kernel_for<L, DType::fp16>(w, decoupled);
    default: return kernel_for<L, DType::fp32>(w, decoupled);
  }
}

}  // namespace
}  // namespace dos
