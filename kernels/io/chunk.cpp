#include "chunk.hpp"

#include <cstring>
#include <stdexcept>

namespace dos::io {

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
  std::size_t end = 0;
  for (const Piece& piece : pieces) {
    char* const to = target.address + piece.offset;
    if (piece.offset > end) std::memset(target.address + end, 0, piece.offset - end);
    if (to != piece.address && piece.n_bytes > 0) std::memcpy(to, piece.address, piece.n_bytes);
    end = piece.offset + piece.n_bytes;
  }
  if (target.n_bytes > end) std::memset(target.address + end, 0, target.n_bytes - end);
}

std::vector<Digest> fill(const std::vector<Chunk>& chunks) {
  for (const Chunk& chunk : chunks) {
    check_pieces(chunk.pieces, chunk.memory.n_bytes);
    if (chunk.memory.n_bytes < kShortestHashed) throw std::invalid_argument("a chunk is too short");
  }
  std::vector<Digest> digests;
  for (const Chunk& chunk : chunks) {
    gather(chunk.memory, chunk.pieces);
    digests.push_back(xxh3_128(chunk.memory.address, chunk.memory.n_bytes, chunk.seed));
  }
  return digests;
}

}  // namespace dos::io
