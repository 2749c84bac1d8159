// XXH3-128, the checksum of a checkpoint's chunks, of what is longer than 240 bytes: to be had
// without Python's lock, and for many chunks by one call.
// https://github.com/Cyan4973/xxHash/blob/v0.8.3/doc/xxhash_spec.md specifies it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dos::io {

constexpr std::size_t kShortestHashed = 241;

using Digest = std::array<unsigned char, 16>;

// The checksum of data that come to be while it is taken, so that they are still in the cache.
class Xxh3 {
 public:
  // Throws std::invalid_argument for less than the shortest.
  Xxh3(const char* data, std::size_t n_bytes, std::uint64_t seed);

  // Takes in what is new of the first bytes, so many of which are there.
  void advance(std::size_t n_there);

  // Of all the data; the bytes that xxhash calls canonical. Once.
  Digest digest();

 private:
  static constexpr std::size_t kLanes = 8, kSecretBytes = 192;

  const char* const data_;
  const std::size_t n_bytes_;
  std::array<char, kSecretBytes> secret_;
  alignas(32) std::array<std::uint64_t, kLanes> lanes_;
  std::size_t n_taken_ = 0;  // whole blocks
};

}  // namespace dos::io
