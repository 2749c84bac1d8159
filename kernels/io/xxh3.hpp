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

// The bytes that xxhash calls canonical. Throws std::invalid_argument for less than the shortest.
Digest xxh3_128(const char* data, std::size_t n_bytes, std::uint64_t seed);

}  // namespace dos::io
