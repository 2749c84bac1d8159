// NEON kernels: four elements at a time. Every AArch64 has what they need, so this file takes
// no flags of its own and is empty elsewhere.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "gradient_range.hpp"

namespace dos {
namespace {

struct NeonLane {
  using F = float32x4_t;
  static constexpr std::size_t width = 4;

  static F broadcast(float x) { return vdupq_n_f32(x); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F sqrt(F a) { return vsqrtq_f32(a); }

  static F load_fp32(const float* x) { return vld1q_f32(x); }
  static F load_bf16(const std::uint16_t* x) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x), 16));
  }
  static F load_fp16(const std::uint16_t* x) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
  }

  // The streams are plain stores: STNP has no intrinsic, and its hint little effect.
  static void store_fp32(float* x, F a) { vst1q_f32(x, a); }
  static void stream_fp32(float* x, F a) { vst1q_f32(x, a); }
  static uint16x4_t bf16_of(F a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t top = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(top, vdupq_n_u32(1));
    const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7FFF));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
    const uint32x4_t quiet = vorrq_u32(top, vdupq_n_u32(0x40));
    const uint32x4_t is_number = vceqq_f32(a, a);
    return vmovn_u32(vbslq_u32(is_number, rounded, quiet));
  }
  static uint16x4_t fp16_of(F a) { return vreinterpret_u16_f16(vcvt_f16_f32(a)); }
  static void stream_bf16(std::uint16_t* x, F a, F b) {
    vst1q_u16(x, vcombine_u16(bf16_of(a), bf16_of(b)));
  }
  static void stream_fp16(std::uint16_t* x, F a, F b) {
    vst1q_u16(x, vcombine_u16(fp16_of(a), fp16_of(b)));
  }

  // One type for both: words are looked at by pairs, too.
  using I = uint64x2_t;
  using U = uint64x2_t;
  using D = float64x2_t;

  static D zero_doubles() { return vdupq_n_f64(0); }
  static D lower(F a) { return vcvt_f64_f32(vget_low_f32(a)); }
  static D upper(F a) { return vcvt_high_f64_f32(a); }
  static D add_square(D sum, D a) { return vaddq_f64(sum, vmulq_f64(a, a)); }
  static void store_doubles(double* x, D a) { vst1q_f64(x, a); }

  static I zero_words() { return vdupq_n_u64(0); }
  static I words_of(F a) { return vreinterpretq_u64_f32(a); }
  static I load_widened(const std::uint16_t* x) {
    return vreinterpretq_u64_u32(vmovl_u16(vld1_u16(x)));
  }
  static I magnitude(F a) { return words_of(vabsq_f32(a)); }
  static I max_words(I a, I b) {
    return vreinterpretq_u64_u32(vmaxq_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b)));
  }
  static void store_words(std::uint32_t* x, I a) { vst1q_u32(x, vreinterpretq_u32_u64(a)); }

  static U all_words64(std::uint64_t x) { return vdupq_n_u64(x); }
  static U add_words64(U a, U b) { return vaddq_u64(a, b); }
  static U upper_halves(U a) { return vshrq_n_u64(a, 32); }
  static U mixed(U words, U keys) {
    const uint32x2_t odd = vorr_u32(vshrn_n_u64(keys, 32), vdup_n_u32(1));
    const U product = vmull_u32(vmovn_u64(veorq_u64(words, keys)), odd);
    return veorq_u64(product, upper_halves(product));
  }
  static U keys(std::uint64_t first, std::uint64_t step) {
    return vcombine_u64(vcreate_u64(first), vcreate_u64(first + step));
  }
  static void store_words64(std::uint64_t* x, U a) { vst1q_u64(x, a); }
};

}  // namespace

RangeKernel neon_kernel(DType g, DType w, bool decoupled) {
  return kernel_for<NeonLane>(g, w, decoupled);
}

ExamineKernel neon_examine(DType g) { return examine_for<NeonLane>(g); }

DownscaleKernel neon_downscale(DType w) { return downscale_for<NeonLane>(w); }

}  // namespace dos
#endif
