"""The certificate of a run with several nodes. Each start of the orchestrator makes a new one; the ranks trust it only
because the invitation contains it."""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass

CERTIFICATE = "METRONOME_CERTIFICATE"
"""Environment variable of ranks with the server's certificate (PEM); unset if the server speaks plain HTTP."""
DAYS = 3650
"""Validity of the certificate in days. It is trusted only while the orchestrator that made it runs."""


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate with its private key, both as PEM."""

    public: str
    private: str

    @staticmethod
    def make() -> Certificate:
        """Make a new certificate."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "metronome")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Certificate(made.public_bytes(serialization.Encoding.PEM).decode(), private.decode())

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context of the server that holds the private key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # mode 0600; the library can only read files
            file.write(self.private + self.public)
            file.flush()
            context.load_cert_chain(file.name)
        return context


def client_context(certificate: str) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts this certificate (PEM) and no other, whatever the server's
    name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context


def own_certificate() -> str | None:
    """Return the certificate in this process's environment; None without one."""
    return os.environ.get(CERTIFICATE) or None
