// A chunk of a checkpoint: brought together from where its bytes lie, with its checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "queue.hpp"
#include "xxh3.hpp"

namespace dos::io {

// Bytes of a buffer that lie elsewhere, too.
struct Piece {
  std::size_t offset;  // in the buffer
  char* address;
  std::size_t n_bytes;
};

// Throws std::invalid_argument unless the pieces ascend, do not overlap and lie in the buffer.
void check_pieces(const std::vector<Piece>& pieces, std::size_t n_bytes);

// Fills a buffer from checked pieces, zeros between them. A piece may lie where it belongs.
void gather(const Memory& target, const std::vector<Piece>& pieces);

struct Chunk {
  Memory memory;
  std::vector<Piece> pieces;
  std::uint64_t seed;
};

// Fills the chunks, one after the other, and takes their checksums. Throws
// std::invalid_argument, before anything is written, for what check_pieces or Xxh3 refuses.
std::vector<Digest> fill(const std::vector<Chunk>& chunks);

}  // namespace dos::io
