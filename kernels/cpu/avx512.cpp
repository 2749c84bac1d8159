// AVX-512 kernels: sixteen elements at a time.
#include <immintrin.h>

#include "update_range.hpp"

namespace dos {
namespace {

struct Avx512Lane {
  using F = __m512;
  static constexpr std::size_t width = 16;

  static F broadcast(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }

  static __m256i load_words(const std::uint16_t* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  static F load_fp32(const float* x) { return _mm512_loadu_ps(x); }
  static F load_bf16(const std::uint16_t* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(x)), 16));
  }
  static F load_fp16(const std::uint16_t* x) { return _mm512_cvtph_ps(load_words(x)); }

  static void stream_words(std::uint16_t* x, __m256i words) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(x), words);
  }
  static void store_fp32(float* x, F a) { _mm512_storeu_ps(x, a); }
  static void stream_fp32(float* x, F a) { _mm512_stream_ps(x, a); }
  // By hand: VCVTNEPS2BF16 flushes subnormals whatever the floating-point mode.
  static void stream_bf16(std::uint16_t* x, F a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i words = _mm512_mask_or_epi32(rounded, is_nan, top, _mm512_set1_epi32(0x40));
    stream_words(x, _mm512_cvtepi32_epi16(words));
  }
  static void stream_fp16(std::uint16_t* x, F a) {
    stream_words(x, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

}  // namespace

RangeKernel avx512_kernel(DType g, DType w, bool decoupled) {
  return kernel_for<Avx512Lane>(g, w, decoupled);
}

}  // namespace dos
