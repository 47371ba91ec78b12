"""The TLS files of a server, read before anything else starts."""

from __future__ import annotations

import ssl

from nanocore.http.server_settings import ServerSettings
from nanocore.protocol.errors import ConfigError


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Read the TLS files; None without any.

    Raises:
        ConfigError: the files are invalid.
    """
    if settings.ssl_certfile is None:
        return None
    files = {
        f"--{name.replace('_', '-')}": path
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        if (path := getattr(settings, name)) is not None
    }
    for flag, path in files.items():  # OpenSSL's error does not say which file it is about
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password
        )
        context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        given = " ".join(f"{flag} {path}" for flag, path in files.items())
        raise ConfigError(
            f"{given}: {reason}: TLS needs PEM files, and a key that belongs to the certificate"
        ) from None
    return context
