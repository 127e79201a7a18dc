"""Names of full KV blocks: two blocks have one name only if they hold K and V of the same tokens at the same place.

A name is the SHA-256 of the name before it and of the block's token ids, so it stands for all tokens up to the block's
end. The chain begins at a secret of the process and the request's ``cache_salt``. So nobody outside can compute a name,
or find two texts with one, and requests with different salts never share a block. Weights and formats of the tiers
are those of one engine, which has a secret of its own. Where the CPU tier is int8, blocks of one name may differ in the
bits that its codes lose: one that comes back from there holds elements made of codes.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import sha256

from swiftllm.core.request import Request


class BlockHashes:
    """Makes the names of one engine's blocks of ``block_size`` tokens. :meth:`extend` may be called on any thread."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._secret = secrets.token_bytes(32)

    def _root(self, salt: str | None) -> bytes:
        return sha256(self._secret + (b"" if salt is None else b"\0" + salt.encode("utf-8", "surrogatepass"))).digest()

    def extend(self, request: Request, num_blocks: int) -> None:
        """Add to ``request.block_hashes`` until there are so many. All tokens of these blocks must be known."""
        names, size = request.block_hashes, self._block_size
        assert names is not None, "a request that has no part in the cache"
        first = len(names)
        if first >= num_blocks:
            return
        tokens = memoryview(array("i", request.token_ids(first * size, num_blocks * size)).tobytes())
        num_bytes = 4 * size
        name = names[-1] if names else self._root(request.cache_salt)
        for start in range(0, len(tokens), num_bytes):
            name = sha256(name + tokens[start : start + num_bytes]).digest()
            names.append(name)
