"""Keys inside a namespace."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..secret import NONE, JobSecret
from .records import KeyValue


class Keyspace:
    """Translates between keys relative to ``namespace`` and etcd's absolute ones.

    Args:
        secret: tags every value; a tag holds for its key only.
    """

    def __init__(self, namespace: str, secret: JobSecret = NONE) -> None:
        if not namespace.startswith("/") or not namespace.endswith("/") or len(namespace) < 3:
            raise ConfigError(f"store namespace {namespace!r} must look like /bamboo/<job>/, with both slashes")
        self.namespace = namespace
        self._secret = secret
        self._skip = len(namespace.encode())

    def absolute(self, key: str) -> bytes:
        """etcd's name of ``key``; raises ``ValueError`` for an empty one."""
        if not key:
            raise ValueError("a key of the store must not be empty")
        return (self.namespace + key).encode()

    def value(self, key: str, text: str) -> bytes:
        """Value in etcd under ``key`` for ``text``."""
        return self._secret.seal(text, self.namespace, key).encode()

    def bounds(self, prefix: str) -> dict[str, bytes]:
        """``key`` and ``range_end`` of all keys that start with ``prefix`` (empty: the whole namespace)."""
        start = (self.namespace + prefix).encode()
        # UTF-8 has no byte 0xff, so the last one can always be counted up.
        return {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])}

    def key_value(self, kv: Any) -> KeyValue:
        """A key and value as etcd sends them."""
        key = kv.key[self._skip :].decode(errors="replace")
        value = kv.value.decode(errors="replace")
        text, genuine = self._secret.unseal(value, self.namespace, key)
        return KeyValue(
            key=key,
            value=text,
            mod_revision=kv.mod_revision,
            create_revision=kv.create_revision,
            lease=kv.lease or None,
            genuine=genuine,
            sealed=text != value,
        )
