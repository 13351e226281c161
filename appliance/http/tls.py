"""Load the TLS certificate, and set the allowed versions.

Invariant: a context has a certificate with its own key; versions before 1.2 are refused.
"""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

from engine.errors import ConfigError

_PEM = "name PEM files that the daemon may read: --tls-cert CHAIN.pem --tls-key KEY.pem"


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Make a server's TLS context from the present files.

    Args:
        certificate: PEM; the server's own first, then its chain to a root.
        key: PEM, without a passphrase.

    Raises:
        ConfigError: a file cannot be read, or the key does not fit the certificate.
    """
    for path, name in ((certificate, "tls_cert"), (key, "tls_key")):
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
                raise ConfigError(f"{path} is no file", where=name, hint=_PEM)
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}", where=name, hint=_PEM
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"{certificate} and {key} are no certificate with its key: {reason}",
            where="tls_cert",
            hint="both are PEM; the server's own certificate comes first; no passphrase",
        ) from error
    return context
