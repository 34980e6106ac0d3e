"""Names of the environment variables with credentials for etcd; users type them, messages name them."""

from __future__ import annotations

from ..variables import ENV_STORE

#: Name and password to authenticate with, and PEM files for TLS; all optional.
ENV_USER = "BAMBOO_STORE_USER"
ENV_PASSWORD = "BAMBOO_STORE_PASSWORD"
ENV_CA = "BAMBOO_STORE_CA"
ENV_CERT = "BAMBOO_STORE_CERT"
ENV_KEY = "BAMBOO_STORE_KEY"
#: What messages call the addresses.
ADDRESSES = f"--store ({ENV_STORE})"
