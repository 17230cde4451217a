"""AWS Signature Version 4 of a GET without a body, as headers.

Source: "Signature Calculations for the Authorization Header" of the S3 API Reference. Pure: the time comes in.
"""

import hashlib
import hmac
from datetime import UTC, datetime
from typing import NamedTuple

import httpx

_NO_BODY = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


class S3Key(NamedTuple):
    """Credentials for an S3 store."""

    access_key: str
    secret_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"S3Key({self.access_key})"


def sign(url: httpx.URL, key: S3Key, region: str, now: float) -> dict[str, str]:
    """Headers for a GET of the URL, whose path and query are encoded as S3 wants them. now: Unix time."""
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    signed = {"host": url.netloc.decode("ascii"), "x-amz-content-sha256": _NO_BODY, "x-amz-date": stamp}
    if key.session_token is not None:
        signed["x-amz-security-token"] = key.session_token
    names = ";".join(sorted(signed))
    path, _, query = url.raw_path.decode("ascii").partition("?")
    lines = [f"{name}:{signed[name]}" for name in sorted(signed)]
    request = "\n".join(["GET", path, query, *lines, "", names, _NO_BODY])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join([_ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    signature = hmac.new(_signing_key(key.secret_key, scope), text.encode(), hashlib.sha256).hexdigest()
    del signed["host"]
    return signed | {
        "authorization": f"{_ALGORITHM} Credential={key.access_key}/{scope},SignedHeaders={names},Signature={signature}"
    }


def _signing_key(secret: str, scope: str) -> bytes:
    found = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        found = hmac.new(found, part.encode(), hashlib.sha256).digest()
    return found
