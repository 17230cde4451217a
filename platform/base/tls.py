"""TLS contexts made of files, and made anew when the files change: certificates are rotated under running processes.

Not who needs TLS, nor which names count: the callers say. What the files hold is read at the next connection after a
change, at most once in CHECK_S; open connections stay as they are. Files that can't be read, or don't belong together
(a rotation half written), leave what was there, and the log says so. Invariant: a certificate is asked of the other
side and checked wherever a CA is named, at every connection: a server that asks for one speaks TLS 1.3 only.

Decisions: docs/decisions/secrets.md
"""

import logging
import os
import ssl
import time
from collections.abc import Callable

import msgspec

from penstock.base.errors import ConfigError

CHECK_S = 1.0
"""Shortest time between two looks at the files."""

log = logging.getLogger(__name__)


class TlsFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Paths of PEM files."""

    certificate: str
    """Own certificate, with the chain behind it."""
    key: str
    ca: str | None = None
    """CAs by which the other side's certificate is checked. None: for a server, none is asked for; for a client, the
    system's CAs."""


class TlsContexts:
    """The contexts of one set of files. Raises ConfigError for files that can't be used at the start.

    clock: monotonic seconds.
    """

    def __init__(self, files: TlsFiles, *, is_server: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._is_server = is_server
        self._clock = clock
        self._checked_s = clock()
        self._signature = self._sign()
        try:
            self._context = self._make()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(f"TLS can't be had with {_names(files)}: {error}") from error

    @property
    def newest(self) -> ssl.SSLContext:
        """The context of the files as they are now. A server's takes itself to the newest at each handshake, so one
        that was given away stays good."""
        now = self._clock()
        if now - self._checked_s >= CHECK_S:
            self._checked_s = now
            self._reload()
        return self._context

    def _reload(self) -> None:
        signature = self._sign()
        if signature == self._signature:
            return
        try:
            self._context = self._make()
        except (OSError, ValueError) as error:
            log.warning("tls files can't be used", extra={"files": _names(self._files), "error": str(error)})
            return  # looked at again at the next check
        self._signature = signature
        log.info("tls files read", extra={"files": _names(self._files)})

    def _make(self) -> ssl.SSLContext:
        files, oldest = self._files, ssl.TLSVersion.TLSv1_2
        if self._is_server:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.sni_callback = self._switch
            if files.ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                # who resumes a session is not checked again; by TLS 1.2 that can't be turned off from here
                oldest, context.num_tickets = ssl.TLSVersion.TLSv1_3, 0
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if files.ca is None:
                context.load_default_certs()
        if files.ca is not None:
            context.load_verify_locations(files.ca)
        context.minimum_version = oldest
        context.load_cert_chain(files.certificate, files.key)
        return context

    def _switch(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Go on with the newest context; called by OpenSSL at the beginning of each handshake of a server."""
        connection.context = self.newest

    def _sign(self) -> tuple[object, ...]:
        """What changes when a file does, or a link on the way to it."""
        found: list[object] = []
        for path in (self._files.certificate, self._files.key, self._files.ca):
            try:
                status = None if path is None else os.stat(path)
            except OSError:
                status = None
            found.append(status and (status.st_mtime_ns, status.st_ino, status.st_size))
        return tuple(found)


def _names(files: TlsFiles) -> str:
    return ", ".join(path for path in (files.certificate, files.key, files.ca) if path is not None)
