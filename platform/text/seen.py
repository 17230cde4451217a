"""Token ids of texts that were read before, so that the earlier turns of a conversation are not tokenized again. Pure.

Not the cut of a prompt into texts (`draft`). A text is known by a keyed hash of it, never by itself. Invariants: what a
tenant finds, and how fast, depends on nothing that another one sent: each has texts, and room for them, of its own, and
whose rooms are kept depends on who asked lately (`MAX_TENANTS`), not on what they asked; and no more bytes are held
than the bounds say.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

MAX_TENANT_BYTES = 4 * 2**20
"""Room of one tenant: a million token ids or so."""
MAX_TENANTS = 16
"""Tenants that have room at the same time; the one that has asked least recently gives way as a whole."""
ENTRY_BYTES = 200
"""What an entry takes beside its token ids: key, dictionary and object headers."""
_KEY_BYTES = 16


@dataclass(slots=True)
class _Room:
    """Texts of one tenant, the one used least recently first: packed token ids by key."""

    texts: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class SeenTexts:
    """Token ids by tenant and text. Any thread may use it. max_tenant_bytes, max_tenants: the bounds, which together
    bound all that is held."""

    def __init__(self, max_tenant_bytes: int = MAX_TENANT_BYTES, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenant_bytes = max_tenant_bytes
        self._max_tenants = max_tenants
        self._secret = os.urandom(32)
        self._rooms: OrderedDict[str, _Room] = OrderedDict()
        self._lock = threading.Lock()

    def scope(self, tenant: str, salt: bytes) -> "SeenScope":
        """What one request may find and leave. salt: of the part of its tenant's KV cache that it is confined to, at
        most 64 bytes; others of the tenant find nothing of it."""
        key = hashlib.blake2b(salt, key=self._secret, digest_size=32).digest()
        return SeenScope(self, tenant, key)

    @property
    def num_bytes(self) -> int:
        """Bytes that are held, about."""
        with self._lock:
            return sum(room.num_bytes for room in self._rooms.values())

    def find(self, tenant: str, key: bytes) -> bytes | None:
        """Packed token ids. None if they are not there."""
        with self._lock:
            room = self._rooms.get(tenant)
            if room is None:
                return None
            found = room.texts.get(key)
            if found is not None:
                room.texts.move_to_end(key)
                self._rooms.move_to_end(tenant)
            return found

    def keep(self, tenant: str, key: bytes, packed_token_ids: bytes) -> None:
        """Remember a text; one that alone is more than a tenant's room is not."""
        size = len(packed_token_ids) + ENTRY_BYTES
        if size > self._max_tenant_bytes:
            return
        with self._lock:
            room = self._rooms.get(tenant)
            if room is None:
                room = self._rooms[tenant] = _Room()
                if len(self._rooms) > self._max_tenants:
                    self._rooms.popitem(last=False)
            self._rooms.move_to_end(tenant)
            before = room.texts.pop(key, None)
            room.num_bytes += size - (0 if before is None else len(before) + ENTRY_BYTES)
            room.texts[key] = packed_token_ids
            while room.num_bytes > self._max_tenant_bytes:
                _, oldest = room.texts.popitem(last=False)
                room.num_bytes -= len(oldest) + ENTRY_BYTES


class SeenScope:
    """The part of `SeenTexts` that one request may use."""

    __slots__ = ("_key", "_seen", "_tenant")

    def __init__(self, seen: SeenTexts, tenant: str, key: bytes) -> None:
        """key: of the hash, 32 bytes."""
        self._seen, self._tenant, self._key = seen, tenant, key

    def key(self, tokenizer: bytes, text: str) -> bytes:
        """The key of a text. tokenizer: what its token ids depend on beside it, at most 16 bytes."""
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._key, salt=tokenizer, digest_size=_KEY_BYTES).digest()

    def find(self, key: bytes) -> bytes | None:
        """Packed token ids of the text with this key. None if it is not known."""
        return self._seen.find(self._tenant, key)

    def keep(self, key: bytes, packed_token_ids: bytes) -> None:
        """Remember the token ids of the text with this key."""
        self._seen.keep(self._tenant, key, packed_token_ids)
