"""TLS between a job's own etcd and its clients: certificates that every process makes of the job's secret.

All derive the same authority from the secret and trust no other, so each end of a connection knows that the other one
knows the secret. Neither the authority's key nor a client's certificate is ever in a file. Certificates do not expire:
the secret does not either, jobs run for weeks, and clocks of hosts differ.
"""

from __future__ import annotations

from datetime import datetime, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..secret import JobSecret
from .endpoints import Certificates

#: The name in all certificates. What is checked is the authority: a job's etcd may be reached at any address.
_NAME = "etcd.bamboo"
_BEGIN = datetime(2000, 1, 1, tzinfo=timezone.utc)
_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)  # never, says RFC 5280
_USAGE = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_PEM = serialization.Encoding.PEM


def certificates_of(secret: JobSecret, namespace: str) -> Certificates:
    """The authority of the job with ``namespace`` and ``secret``, and a fresh certificate of it for either end."""
    # Between 1 and the order of the curve, for every tag.
    number = 1 + (int.from_bytes(secret.tag("etcd", namespace), "big") >> 1)
    authority = _Authority(ec.derive_private_key(number, ec.SECP256R1()))
    key = ec.generate_private_key(ec.SECP256R1())
    return Certificates(
        ca=authority.own(),
        cert=authority.certify(key.public_key()),
        key=key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        name=_NAME,
    )


class _Authority:
    """Signs with ``key``, by which it is named, too."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        self._name = _common_name(f"bamboo {self._id.digest.hex()}")

    def own(self) -> bytes:
        """Its own certificate."""
        only_certificates = dict.fromkeys(
            (
                *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
                *("key_agreement", "crl_sign", "encipher_only", "decipher_only"),
            ),
            False,
        )
        return self._signed(
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(key_cert_sign=True, **only_certificates), critical=True)
            .add_extension(self._id, critical=False)
        )

    def certify(self, key: ec.EllipticCurvePublicKey) -> bytes:
        """A certificate of an end of a connection."""
        return self._signed(
            self._builder(_common_name(_NAME), key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(_USAGE), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier(self._id.digest, None, None), critical=False)
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .issuer_name(self._name)
            .subject_name(subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_END)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
