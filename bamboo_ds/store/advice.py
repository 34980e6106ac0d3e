"""Cures for gRPC errors that wrong TLS settings cause."""

from __future__ import annotations

import re

from ..secret import SETTING
from .variables import ADDRESSES, ENV_CA, ENV_CERT, ENV_KEY

#: What gRPC says, and what it means.
_CURES = (
    (
        # The last one is gRPC's name for such an alert that comes after the handshake.
        r"ALERT_BAD_CERTIFICATE|CERTIFICATE_REQUIRED|UNKNOWN_CA|Unwrap failed",
        f"etcd wants a client certificate that it trusts: set {ENV_CERT} and {ENV_KEY}",
    ),
    (r"CERTIFICATE_VERIFY_FAILED", f"etcd's certificate is of another authority than {ENV_CA} holds"),
    (r"Hostname Verification", f"etcd's certificate is for other names than {ADDRESSES} has"),
    (r"Handshake read failed|WRONG_VERSION_NUMBER", "etcd does not seem to use TLS: write http://"),
    (r"Socket closed", "if etcd uses TLS write https://"),
)


#: The same at the job's own etcd, whose certificates nobody chooses.
_OWN = (
    (
        r"CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER",
        f"what answers there does not know the secret that this process has of the job: check {SETTING}",
    ),
)


def advice(error: str, own: bool = False) -> str:
    """Advice for ``error``, as the end of a sentence; empty if there is none.

    Args:
        own: whether the etcd that was asked is the job's own.
    """
    return next((f"; {cure}" for pattern, cure in (_OWN if own else _CURES) if re.search(pattern, error)), "")
