// Chunks: their checksums against what xxhash's own library gives, and how they are filled.
#include "kernels/io/chunk.hpp"

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

using dos::io::Chunk;
using dos::io::Digest;
using dos::io::fill;
using dos::io::Xxh3;

struct Known {
  std::size_t n_bytes;
  std::uint64_t seed;
  const char* digest;
};

// Around the ends of stripes and blocks.
constexpr Known kKnown[] = {
    {241, 0x0, "75f4da43f23cce5a541b19226f0052e8"},
    {1024, 0x1, "7dafeca641c5d8bec07f227ad7f947e5"},
    {1025, 0x8000000000000000, "65686dcf9b1ed984f2a089cacbd4bb18"},
    {4096, 0x9E3779B185EBCA87, "ef4c7b557001ee42c1b8230f7833871a"},
    {4160, 0xFFFFFFFFFFFFFFFF, "3ea5961b85dfa11585e556a14cbe197c"},
    {70001, 0x7, "a7892566ada0135f4e155289ba84ac2b"},
    {1048576, 0x3039, "24e97b8a3e96ffa327b677479b506a17"},
};

std::vector<char> pattern(std::size_t n_bytes) {
  std::vector<char> bytes(n_bytes);  // on the heap, where one byte too many is noticed
  for (std::size_t i = 0; i < n_bytes; ++i) bytes[i] = static_cast<char>(i * 7 + (i >> 8));
  return bytes;
}

Digest xxh3_128(const char* data, std::size_t n_bytes, std::uint64_t seed) {
  return Xxh3(data, n_bytes, seed).digest();
}

std::string hex(const Digest& digest) {
  std::string text;
  for (const unsigned char byte : digest) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", byte);
    text += pair;
  }
  return text;
}

void checksums_are_those_of_xxhash() {
  for (const Known& known : kKnown) {
    const std::vector<char> bytes = pattern(known.n_bytes);
    CHECK(hex(xxh3_128(bytes.data(), bytes.size(), known.seed)) == known.digest);
  }
}

void data_may_come_bit_by_bit() {
  const std::vector<char> bytes = pattern(70001);
  Xxh3 sum(bytes.data(), bytes.size(), 7);
  for (std::size_t end = 0; end < bytes.size(); end += 777) sum.advance(end);
  CHECK(sum.digest() == xxh3_128(bytes.data(), bytes.size(), 7));
}

void an_address_needs_no_alignment() {
  const std::vector<char> bytes = pattern(5001);
  std::vector<char> moved(bytes.size() + 3);
  std::memcpy(moved.data() + 3, bytes.data(), bytes.size());
  CHECK(xxh3_128(moved.data() + 3, bytes.size(), 5) == xxh3_128(bytes.data(), bytes.size(), 5));
}

void chunks_are_filled_with_zeros_between() {
  std::vector<char> source = pattern(1000), first(2000, 'x'), second(500, 'y');
  const std::vector<Digest> digests =
      fill({{{first.data(), first.size()},
             {{10, source.data() + 1, 400}, {410, source.data(), 0}, {1000, source.data(), 1000}},
             1},
            {{second.data(), second.size()}, {{100, second.data() + 100, 300}}, 2}});
  std::vector<char> filled(2000), kept(500);
  std::memcpy(filled.data() + 10, source.data() + 1, 400);
  std::memcpy(filled.data() + 1000, source.data(), 1000);
  std::memset(kept.data() + 100, 'y', 300);
  CHECK(first == filled);
  CHECK(second == kept);
  CHECK(digests.size() == 2);
  CHECK(digests[0] == xxh3_128(filled.data(), filled.size(), 1));
  CHECK(digests[1] == xxh3_128(kept.data(), kept.size(), 2));
}

void what_does_not_fit_is_refused_before_anything_is_written() {
  std::vector<char> source = pattern(1000), good(300, 'x'), bad(300, 'x');
  const Chunk fits{{good.data(), good.size()}, {}, 0};
  const std::vector<Chunk> refused = {
      {{bad.data(), bad.size()}, {{200, source.data(), 101}}, 0},
      {{bad.data(), bad.size()}, {{301, source.data(), 0}}, 0},
      {{bad.data(), bad.size()}, {{9, source.data(), 2}, {10, source.data(), 1}}, 0},
      {{bad.data(), dos::io::kShortestHashed - 1}, {}, 0},
  };
  for (const Chunk& chunk : refused) {
    bool thrown = false;
    try {
      fill({fits, chunk});
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown);
  }
  CHECK(good == std::vector<char>(300, 'x'));
  CHECK(bad == std::vector<char>(300, 'x'));
}

}  // namespace

int main() {
  checksums_are_those_of_xxhash();
  data_may_come_bit_by_bit();
  an_address_needs_no_alignment();
  chunks_are_filled_with_zeros_between();
  what_does_not_fit_is_refused_before_anything_is_written();
}
