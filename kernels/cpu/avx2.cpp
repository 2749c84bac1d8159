// AVX2 and F16C kernels: eight elements at a time.
#include <immintrin.h>

#include "gradient_range.hpp"

namespace dos {
namespace {

struct Avx2Lane {
  using F = __m256;
  static constexpr std::size_t width = 8;

  static F broadcast(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }

  static __m128i load_words(const std::uint16_t* x) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  }
  static F load_fp32(const float* x) { return _mm256_loadu_ps(x); }
  static F load_bf16(const std::uint16_t* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(x)), 16));
  }
  static F load_fp16(const std::uint16_t* x) { return _mm256_cvtph_ps(load_words(x)); }

  static void store_fp32(float* x, F a) { _mm256_storeu_ps(x, a); }
  static void stream_fp32(float* x, F a) { _mm256_stream_ps(x, a); }
  static void stream_words(std::uint16_t* x, __m256i words) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(x), words);
  }
  // bf16 in the low half of each 32-bit element.
  static __m256i bf16_of(F a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i top = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
  }
  static __m128i fp16_of(F a) {
    return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static void stream_bf16(std::uint16_t* x, F a, F b) {
    // Packing works within 128-bit halves: put its four quarters back in order.
    const __m256i words = _mm256_packus_epi32(bf16_of(a), bf16_of(b));
    stream_words(x, _mm256_permute4x64_epi64(words, 0b11'01'10'00));
  }
  static void stream_fp16(std::uint16_t* x, F a, F b) {
    stream_words(x, _mm256_set_m128i(fp16_of(b), fp16_of(a)));
  }

  using I = __m256i;
  using U = __m256i;
  using D = __m256d;

  static D zero_doubles() { return _mm256_setzero_pd(); }
  static D lower(F a) { return _mm256_cvtps_pd(_mm256_castps256_ps128(a)); }
  static D upper(F a) { return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)); }
  static D add_square(D sum, D a) { return _mm256_add_pd(sum, _mm256_mul_pd(a, a)); }
  static void store_doubles(double* x, D a) { _mm256_storeu_pd(x, a); }

  static I zero_words() { return _mm256_setzero_si256(); }
  static I words_of(F a) { return _mm256_castps_si256(a); }
  static I load_widened(const std::uint16_t* x) { return _mm256_cvtepu16_epi32(load_words(x)); }
  static I magnitude(F a) {
    return _mm256_and_si256(words_of(a), _mm256_set1_epi32(0x7FFFFFFF));
  }
  static I max_words(I a, I b) { return _mm256_max_epu32(a, b); }
  static void store_words(std::uint32_t* x, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), a);
  }

  static U all_words64(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
  static U add_words64(U a, U b) { return _mm256_add_epi64(a, b); }
  static U upper_halves(U a) { return _mm256_srli_epi64(a, 32); }
  static U mixed(U words, U keys) {
    const U odd = _mm256_or_si256(upper_halves(keys), _mm256_set1_epi64x(1));
    const U product = _mm256_mul_epu32(_mm256_xor_si256(words, keys), odd);
    return _mm256_xor_si256(product, upper_halves(product));
  }
  static U keys(std::uint64_t first, std::uint64_t step) {
    alignas(32) std::uint64_t each[4];
    for (std::uint64_t j = 0; j < 4; ++j) each[j] = first + j * step;
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(each));
  }
  static void store_words64(std::uint64_t* x, U a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), a);
  }
};

}  // namespace

RangeKernel avx2_kernel(DType g, DType w, bool decoupled) {
  return kernel_for<Avx2Lane>(g, w, decoupled);
}

ExamineKernel avx2_examine(DType g) { return examine_for<Avx2Lane>(g); }

DownscaleKernel avx2_downscale(DType w) { return downscale_for<Avx2Lane>(w); }

}  // namespace dos
