"""What comes by environment variables: secrets, where Redis is (its address may hold a password) and vLLM; and what Ray must find there.

Read by composition roots only.
"""

import os

from penstock.base.errors import ConfigError

CLUSTER_SECRET = "PENSTOCK_CLUSTER_SECRET"
"""Hex digits of 16 to 64 bytes, the same on every gateway and replica."""
REDIS_URL = "PENSTOCK_REDIS_URL"
"""redis://, rediss:// or unix://; may be missing on a replica."""
VLLM_PYTHON = "PENSTOCK_VLLM_PYTHON"
"""Where this machine keeps vLLM."""


def cluster_secret() -> bytes:
    """Raises ConfigError when it is missing or malformed; the sentence does not hold it."""
    try:
        secret = bytes.fromhex(os.environ[CLUSTER_SECRET])
    except KeyError:
        raise ConfigError(f"{CLUSTER_SECRET} is not set") from None
    except ValueError:
        raise ConfigError(f"{CLUSTER_SECRET} does not hold hex digits") from None
    if not 16 <= len(secret) <= 64:
        raise ConfigError(f"{CLUSTER_SECRET} must hold 16 to 64 bytes in hex digits, not {len(secret)}")
    return secret


def redis_url() -> str | None:
    return os.environ.get(REDIS_URL) or None


def provider_key(provider: str, variable: str) -> str:
    """Raises ConfigError when it is missing."""
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"{variable} is not set: the provider {provider} takes its API key from there (api_key_env)")
    return key


def vllm_python() -> str | None:
    """Interpreter of an environment that has vLLM, for pools that name none."""
    return os.environ.get(VLLM_PYTHON) or None


def serve_environment() -> dict[str, str]:
    """What Ray and Serve must find in the environment before they are imported, here and in every process they start."""
    return {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # no request comes through Serve: a second event loop would only cost
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
