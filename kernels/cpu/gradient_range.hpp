// What a gradient is known by, written once for every instruction set; see update_range.hpp for
// the lanes, and why everything here has internal linkage and uses no standard templates.
//
// The order of the additions, and the fingerprint, are those of dos.kernels.reference. A wide
// lane type has for this, beside what an update needs:
//   I        fp32's width of 32-bit words
//   D, U     half that width of float64, of 64-bit words
#pragma once

#include "gradient.hpp"
#include "update_range.hpp"

namespace dos {
namespace {

// Adds the upper half to the lower until one is left.
template <std::size_t N>
inline double folded(double* sums) {
  if constexpr (N > 1) {
    for (std::size_t j = 0; j < N / 2; ++j) sums[j] += sums[j + N / 2];
    return folded<N / 2>(sums);
  }
  return sums[0];
}

template <DType G>
inline const void* element_at(const void* g, std::size_t i) {
  if constexpr (G == DType::fp32) return static_cast<const float*>(g) + i;
  return static_cast<const std::uint16_t*>(g) + i;
}

// Source format to target format, streamed past the cache. The arrays do not overlap.
template <class L, DType G, DType W>
void convert_range(const void* source, void* target, std::size_t n) {
  const auto one = [&](std::size_t i) {
    store_weight<W>(target, i, load_gradient<ScalarLane, G>(source, i));
  };
  std::size_t i = 0;
  if constexpr (L::width > 1) {
    const std::size_t head = elements_to_line<W>(target);
    for (; i < head && i < n; ++i) one(i);
    for (; i + 2 * L::width <= n; i += 2 * L::width) {
      stream_weights<L, W>(target, i, load_gradient<L, G>(source, i),
                           load_gradient<L, G>(source, i + L::width));
    }
  }
  for (; i < n; ++i) one(i);
}

// One element at a time: baseline machines, and the last row of a gradient.
struct ScalarFigures {
  explicit ScalarFigures(std::size_t begin) : key(kFingerprintStep * begin) {}

  // At most a row. Sums of the lanes that it does not reach stay 0.
  template <DType G>
  double row(const void* g, std::size_t begin, std::size_t n) {
    double sums[kSumLanes] = {};
    for (std::size_t i = 0; i < n; ++i) {
      const float value = load_gradient<ScalarLane, G>(g, begin + i);
      const double wide = value;
      sums[i % kSumLanes] += wide * wide;
      const std::uint32_t magnitude = bits_of(value) & 0x7FFFFFFFu;
      max_bits = magnitude > max_bits ? magnitude : max_bits;
      key += kFingerprintStep;
      const std::uint64_t low = word<G>(g, begin + i) ^ static_cast<std::uint32_t>(key);
      const std::uint64_t mixed = low * (key >> 32 | 1u);
      fingerprint += mixed ^ mixed >> 32;
    }
    return folded<kSumLanes>(sums);
  }

  template <DType G>
  static std::uint32_t word(const void* g, std::size_t i) {
    if constexpr (G == DType::fp32) return bits_of(static_cast<const float*>(g)[i]);
    return static_cast<const std::uint16_t*>(g)[i];
  }

  void finish(BlockFigures& figures) const {
    figures.fingerprint += fingerprint;
    if (max_bits > figures.max_bits) figures.max_bits = max_bits;
  }

  std::uint64_t key;  // of the element before the next one
  std::uint64_t fingerprint = 0;
  std::uint32_t max_bits = 0;
};

// L::width elements at a time; whole rows only.
template <class L>
struct WideFigures {
  using D = typename L::D;
  static constexpr std::size_t n_sums = kSumLanes / (L::width / 2);

  // A pair of neighbouring words lies in one 64-bit word, the even one in its lower half.
  explicit WideFigures(std::size_t begin)
      : even_keys(L::keys(kFingerprintStep * (begin + 1), 2 * kFingerprintStep)),
        odd_keys(L::keys(kFingerprintStep * (begin + 2), 2 * kFingerprintStep)) {}

  template <DType G>
  double row(const void* g, std::size_t begin) {
    D sums[n_sums];
    for (std::size_t k = 0; k < n_sums; ++k) sums[k] = L::zero_doubles();
    for (std::size_t i = begin; i < begin + kRowElements; i += kSumLanes) {
#pragma GCC unroll 8
      for (std::size_t k = 0; k < n_sums / 2; ++k) {
        const std::size_t at = i + k * L::width;
        const typename L::F values = load_gradient<L, G>(g, at);
        sums[2 * k] = L::add_square(sums[2 * k], L::lower(values));
        sums[2 * k + 1] = L::add_square(sums[2 * k + 1], L::upper(values));
        max_bits = L::max_words(max_bits, L::magnitude(values));
        add_words(words<G>(g, at));
      }
    }
    alignas(64) double in_memory[kSumLanes];
    for (std::size_t k = 0; k < n_sums; ++k) {
      L::store_doubles(in_memory + k * (L::width / 2), sums[k]);
    }
    return folded<kSumLanes>(in_memory);
  }

  template <DType G>
  static typename L::I words(const void* g, std::size_t i) {
    if constexpr (G == DType::fp32) {
      return L::words_of(L::load_fp32(static_cast<const float*>(g) + i));
    }
    return L::load_widened(static_cast<const std::uint16_t*>(g) + i);
  }

  void add_words(typename L::I words) {
    fingerprint = L::add_words64(fingerprint, L::mixed(words, even_keys));
    fingerprint = L::add_words64(fingerprint, L::mixed(L::upper_halves(words), odd_keys));
    even_keys = L::add_words64(even_keys, L::all_words64(L::width * kFingerprintStep));
    odd_keys = L::add_words64(odd_keys, L::all_words64(L::width * kFingerprintStep));
  }

  void finish(BlockFigures& figures) const {
    std::uint64_t parts[L::width / 2];
    L::store_words64(parts, fingerprint);
    for (const std::uint64_t part : parts) figures.fingerprint += part;
    std::uint32_t maxima[L::width];
    L::store_words(maxima, max_bits);
    for (const std::uint32_t bits : maxima) {
      if (bits > figures.max_bits) figures.max_bits = bits;
    }
  }

  typename L::U even_keys, odd_keys;
  typename L::U fingerprint = L::all_words64(0);
  typename L::I max_bits = L::zero_words();
};

template <class L, DType G>
BlockFigures examine_block(const void* g, std::size_t begin, std::size_t end, float* out) {
  double rows[kBlockElements / kRowElements] = {};
  BlockFigures figures{};
  std::size_t i = begin, row = 0;
  // What was just read is still in the nearest cache; a pass of its own can stream to any address.
  const auto cast = [g, out](std::size_t from, std::size_t n) {
    if (out) convert_range<L, G, DType::fp32>(element_at<G>(g, from), out + from, n);
  };
  if constexpr (L::width > 1) {
    WideFigures<L> wide(begin);
    for (; i + kRowElements <= end; i += kRowElements) {
      rows[row++] = wide.template row<G>(g, i);
      cast(i, kRowElements);
    }
    wide.finish(figures);
  }
  ScalarFigures scalar(i);
  while (i < end) {
    const std::size_t n = end - i < kRowElements ? end - i : kRowElements;
    rows[row++] = scalar.row<G>(g, i, n);
    cast(i, n);
    i += n;
  }
  scalar.finish(figures);
  figures.squares = folded<kBlockElements / kRowElements>(rows);
  return figures;
}

template <class L>
ExamineKernel examine_for(DType g) {
  switch (g) {
    case DType::bf16: return &examine_block<L, DType::bf16>;
    case DType::fp16: return &examine_block<L, DType::fp16>;
    default: return &examine_block<L, DType::fp32>;
  }
}

template <class L, DType W>
void downscale_range(const float* source, void* target, std::size_t n) {
  convert_range<L, DType::fp32, W>(source, target, n);
}

template <class L>
DownscaleKernel downscale_for(DType w) {
  return w == DType::bf16 ? &downscale_range<L, DType::bf16> : &downscale_range<L, DType::fp16>;
}

}  // namespace
}  // namespace dos
