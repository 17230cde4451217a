"""AWS Signature Version 4, by the example in AWS' documentation."""

from datetime import UTC, datetime

import httpx

from penstock.adapters.sources.signature import S3Key, sign

KEY = S3Key("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
NOW = datetime(2013, 5, 24, tzinfo=UTC).timestamp()


def test_the_documents_example_has_its_signature() -> None:
    """ "Examples: Signature Calculations", GET Bucket Lifecycle, of the S3 API Reference."""
    headers = sign(httpx.URL("https://examplebucket.s3.amazonaws.com/?lifecycle="), KEY, "us-east-1", NOW)

    assert headers == {
        "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "x-amz-date": "20130524T000000Z",
        "authorization": (
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
            "SignedHeaders=host;x-amz-content-sha256;x-amz-date,"
            "Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
        ),
    }


def test_a_session_token_is_signed_and_sent() -> None:
    plain = sign(httpx.URL("https://s3.test/b/k"), KEY, "us-east-1", NOW)
    temporary = sign(httpx.URL("https://s3.test/b/k"), KEY._replace(session_token="token"), "us-east-1", NOW)

    assert temporary["x-amz-security-token"] == "token"
    assert "x-amz-date;x-amz-security-token" in temporary["authorization"]
    assert temporary["authorization"] != plain["authorization"]


def test_a_key_is_shown_without_its_secret() -> None:
    assert repr(KEY) == "S3Key(AKIAIOSFODNN7EXAMPLE)"
