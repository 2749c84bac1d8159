#include "xxh3.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#ifdef __x86_64__
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

namespace dos::io {
namespace {

using Word = std::uint64_t;

constexpr std::size_t kStripe = 64;
constexpr std::size_t kStripes = 16, kBlock = kStripes * kStripe;

constexpr Word kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr Word kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                             0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};
constexpr Word kAvalanche = 0x165667919E3779F9;

// What the specification calls the default secret.
constexpr unsigned char kSecret[] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

Word word_at(const void* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

using Lanes = std::array<Word, 8>;

// Adds stripes, each with the secret from eight bytes further on.
void accumulate_plainly(Lanes& lanes, const char* data, const char* secret,
                        std::size_t n_stripes) {
  for (; n_stripes > 0; --n_stripes, data += kStripe, secret += 8) {
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      const Word value = word_at(data + 8 * i);
      const Word key = value ^ word_at(secret + 8 * i);
      lanes[i ^ 1] += value;
      lanes[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
  }
}

#ifdef __x86_64__

// The compiler does not see by itself that the factors have 32 bits.
__attribute__((target("avx2"))) void accumulate_avx2(Lanes& lanes, const char* data,
                                                     const char* secret, std::size_t n_stripes) {
  auto* const at = reinterpret_cast<__m256i*>(lanes.data());
  __m256i sums[] = {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
  for (; n_stripes > 0; --n_stripes, data += kStripe, secret += 8) {
    for (std::size_t i = 0; i < 2; ++i) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + i);
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + i);
      const __m256i key = _mm256_xor_si256(value, word);
      const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
      const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
      sums[i] = _mm256_add_epi64(sums[i], _mm256_add_epi64(product, swapped));
    }
  }
  _mm256_store_si256(at, sums[0]);
  _mm256_store_si256(at + 1, sums[1]);
}

const auto accumulate = __builtin_cpu_supports("avx2") ? accumulate_avx2 : accumulate_plainly;

#else

constexpr auto accumulate = accumulate_plainly;

#endif

void scramble(Lanes& lanes, const char* secret) {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ word_at(secret + 8 * i)) * kPrime32[0];
  }
}

Word merged(const Lanes& lanes, const char* secret, Word start) {
  Word sum = start;
  for (std::size_t i = 0; i < lanes.size(); i += 2) {
    __extension__ using Product = unsigned __int128;
    const Product product = Product{lanes[i] ^ word_at(secret + 8 * i)} *
                            (lanes[i + 1] ^ word_at(secret + 8 * i + 8));
    sum += static_cast<Word>(product) ^ static_cast<Word>(product >> 64);
  }
  sum = (sum ^ (sum >> 37)) * kAvalanche;
  return sum ^ (sum >> 32);
}

}  // namespace

Xxh3::Xxh3(const char* data, std::size_t n_bytes, std::uint64_t seed)
    : data_(data),
      n_bytes_(n_bytes),
      lanes_{kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
             kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]} {
  if (n_bytes < kShortestHashed) throw std::invalid_argument("too short for this checksum");
  for (std::size_t at = 0; at < kSecretBytes; at += 8) {
    const Word word = word_at(kSecret + at) + (at % 16 == 0 ? seed : 0 - seed);
    std::memcpy(secret_.data() + at, &word, sizeof word);
  }
}

void Xxh3::advance(std::size_t n_there) {
  // The last byte is left for the end, and with it what would be the last block.
  for (; n_taken_ + kBlock <= std::min(n_there, n_bytes_ - 1); n_taken_ += kBlock) {
    accumulate(lanes_, data_ + n_taken_, secret_.data(), kStripes);
    scramble(lanes_, secret_.data() + kSecretBytes - kStripe);
  }
}

Digest Xxh3::digest() {
  advance(n_bytes_);
  const char* const last_secret = secret_.data() + kSecretBytes - kStripe;
  accumulate(lanes_, data_ + n_taken_, secret_.data(), (n_bytes_ - 1 - n_taken_) / kStripe);
  accumulate(lanes_, data_ + n_bytes_ - kStripe, last_secret - 7, 1);
  const Word halves[] = {merged(lanes_, last_secret - 11, ~(n_bytes_ * kPrime64[1])),
                         merged(lanes_, secret_.data() + 11, n_bytes_ * kPrime64[0])};
  Digest digest;
  for (std::size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<unsigned char>(halves[i / 8] >> (56 - 8 * (i % 8)));
  }
  return digest;
}

}  // namespace dos::io
