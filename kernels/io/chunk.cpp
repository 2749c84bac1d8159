#include "chunk.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace dos::io {
namespace {

// What is copied at once, and still in the cache when its checksum is taken.
constexpr std::size_t kStep = std::size_t{64} << 10;

// As gather; calls `written` with how many of the first bytes are there, step by step.
template <class Written>
void gather_in_steps(const Memory& target, const std::vector<Piece>& pieces,
                     const Written& written) {
  std::size_t end = 0;
  const auto put = [&](const char* from, std::size_t until) {
    while (end < until) {
      char* const to = target.address + end;
      const std::size_t n_bytes = std::min(kStep, until - end);
      if (from == nullptr) {
        std::memset(to, 0, n_bytes);
      } else {
        if (from != to) std::memcpy(to, from, n_bytes);
        from += n_bytes;
      }
      end += n_bytes;
      written(end);
    }
  };
  for (const Piece& piece : pieces) {
    put(nullptr, piece.offset);
    put(piece.address, piece.offset + piece.n_bytes);
  }
  put(nullptr, target.n_bytes);
}

}  // namespace

void check_pieces(const std::vector<Piece>& pieces, std::size_t n_bytes) {
  std::size_t end = 0;
  for (const Piece& piece : pieces) {
    if (piece.offset < end || piece.offset > n_bytes || piece.n_bytes > n_bytes - piece.offset) {
      throw std::invalid_argument("pieces overlap, are not in order, or exceed the buffer");
    }
    end = piece.offset + piece.n_bytes;
  }
}

void gather(const Memory& target, const std::vector<Piece>& pieces) {
  gather_in_steps(target, pieces, [](std::size_t) {});
}

std::vector<Digest> fill(const std::vector<Chunk>& chunks) {
  for (const Chunk& chunk : chunks) {
    check_pieces(chunk.pieces, chunk.memory.n_bytes);
    if (chunk.memory.n_bytes < kShortestHashed) throw std::invalid_argument("a chunk is too short");
  }
  std::vector<Digest> digests;
  for (const Chunk& chunk : chunks) {
    Xxh3 sum(chunk.memory.address, chunk.memory.n_bytes, chunk.seed);
    gather_in_steps(chunk.memory, chunk.pieces, [&sum](std::size_t end) { sum.advance(end); });
    digests.push_back(sum.digest());
  }
  return digests;
}

}  // namespace dos::io
