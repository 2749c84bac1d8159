"""Free space as sorted, never adjacent ranges."""

from __future__ import annotations

from bisect import bisect_left


class FreeExtents:
    """First fit with coalescing over ``[0, capacity_bytes)``. Not thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self._extents = [(0, capacity_bytes)] if capacity_bytes else []

    @property
    def total_bytes(self) -> int:
        """All that is free."""
        return sum(n_bytes for _, n_bytes in self._extents)

    @property
    def largest_bytes(self) -> int:
        """The largest piece that `take` can give now."""
        return max((n_bytes for _, n_bytes in self._extents), default=0)

    def take(self, n_bytes: int) -> int:
        """Offset of the first range that holds ``n_bytes``; `largest_bytes` says if there is."""
        for i, (start, length) in enumerate(self._extents):
            if length >= n_bytes:
                self._extents[i : i + 1] = (
                    [(start + n_bytes, length - n_bytes)] if length > n_bytes else []
                )
                return start
        raise AssertionError(f"no free range of {n_bytes} bytes")

    def give_back(self, start: int, n_bytes: int) -> None:
        """Free ``[start, start + n_bytes)``, merged with the free ranges that it touches."""
        end = start + n_bytes
        first = last = bisect_left(self._extents, (start, 0))
        if first and sum(self._extents[first - 1]) >= start:
            assert sum(self._extents[first - 1]) == start, "freed twice"
            first -= 1
            start = self._extents[first][0]
        if last < len(self._extents) and self._extents[last][0] <= end:
            assert self._extents[last][0] == end, "freed twice"
            end = sum(self._extents[last])
            last += 1
        self._extents[first:last] = [(start, end - start)]
