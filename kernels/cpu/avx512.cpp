// AVX-512 kernels: sixteen elements at a time.
#include <immintrin.h>

#include "gradient_range.hpp"

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

  static void store_fp32(float* x, F a) { _mm512_storeu_ps(x, a); }
  static void stream_fp32(float* x, F a) { _mm512_stream_ps(x, a); }
  static void stream_line(std::uint16_t* x, __m512i line) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(x), line);
  }
  // bf16 in the high half of each element. By hand: VCVTNEPS2BF16 flushes subnormals
  // whatever the floating-point mode.
  static __m512i round_to_bf16(F a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_set1_epi32(0x400000);
    return _mm512_mask_or_epi32(_mm512_add_epi32(bits, bias), is_nan, bits, quiet);
  }
  static void stream_bf16(std::uint16_t* x, F a, F b) {
    const __m512i high_halves =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    stream_line(x, _mm512_permutex2var_epi16(round_to_bf16(a), high_halves, round_to_bf16(b)));
  }
  static void stream_fp16(std::uint16_t* x, F a, F b) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(a, nearest));
    stream_line(x, _mm512_inserti64x4(low, _mm512_cvtps_ph(b, nearest), 1));
  }

  using I = __m512i;
  using U = __m512i;
  using D = __m512d;

  static D zero_doubles() { return _mm512_setzero_pd(); }
  static D lower(F a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a)); }
  static D upper(F a) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)); }
  // The square of a widened fp32 value is exact, so this rounds once as the others do.
  static D add_square(D sum, D a) { return _mm512_fmadd_pd(a, a, sum); }
  static void store_doubles(double* x, D a) { _mm512_storeu_pd(x, a); }

  static I zero_words() { return _mm512_setzero_si512(); }
  static I words_of(F a) { return _mm512_castps_si512(a); }
  static I load_widened(const std::uint16_t* x) { return _mm512_cvtepu16_epi32(load_words(x)); }
  static I magnitude(F a) {
    return _mm512_and_si512(words_of(a), _mm512_set1_epi32(0x7FFFFFFF));
  }
  static I max_words(I a, I b) { return _mm512_max_epu32(a, b); }
  static void store_words(std::uint32_t* x, I a) { _mm512_storeu_si512(x, a); }

  static U all_words64(std::uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
  static U add_words64(U a, U b) { return _mm512_add_epi64(a, b); }
  static U upper_halves(U a) { return _mm512_srli_epi64(a, 32); }
  static U mixed(U words, U keys) {
    const U odd = _mm512_or_si512(upper_halves(keys), _mm512_set1_epi64(1));
    const U product = _mm512_mul_epu32(_mm512_xor_si512(words, keys), odd);
    return _mm512_xor_si512(product, upper_halves(product));
  }
  static U keys(std::uint64_t first, std::uint64_t step) {
    alignas(64) std::uint64_t each[8];
    for (std::uint64_t j = 0; j < 8; ++j) each[j] = first + j * step;
    return _mm512_load_si512(each);
  }
  static void store_words64(std::uint64_t* x, U a) { _mm512_storeu_si512(x, a); }
};

}  // namespace

RangeKernel avx512_kernel(DType g, DType w, bool decoupled) {
  return kernel_for<Avx512Lane>(g, w, decoupled);
}

ExamineKernel avx512_examine(DType g) { return examine_for<Avx512Lane>(g); }

DownscaleKernel avx512_downscale(DType w) { return downscale_for<Avx512Lane>(w); }

}  // namespace dos
