// NEON kernels: four elements at a time. Every AArch64 has what they need, so this file takes
// no flags of its own and is empty elsewhere.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "update_range.hpp"

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
  static void stream_bf16(std::uint16_t* x, F a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t top = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(top, vdupq_n_u32(1));
    const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7FFF));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
    const uint32x4_t quiet = vorrq_u32(top, vdupq_n_u32(0x40));
    const uint32x4_t is_number = vceqq_f32(a, a);
    vst1_u16(x, vmovn_u32(vbslq_u32(is_number, rounded, quiet)));
  }
  static void stream_fp16(std::uint16_t* x, F a) {
    vst1_u16(x, vreinterpret_u16_f16(vcvt_f16_f32(a)));
  }
};

}  // namespace

RangeKernel neon_kernel(DType g, DType w, bool decoupled) {
  return kernel_for<NeonLane>(g, w, decoupled);
}

}  // namespace dos
#endif
