"""The environment variables that are read: secrets, the address of Redis (it may hold a password), vLLM's Python; and
those that Ray must find.

Read by composition roots only.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.base.redis_roles import RoleName
from penstock.base.subsecrets import ReplicaSecrets, parse_replica_secrets
from penstock.base.subsecrets import replica_secrets as derive_replica_secrets

CLUSTER_SECRET = "PENSTOCK_CLUSTER_SECRET"
"""Hex digits of 16 to 64 bytes, the same for every gateway and whoever makes keys. Replicas do without."""
REPLICA_SECRETS = "PENSTOCK_REPLICA_SECRETS"
"""Path of a replica's file of secrets, which `penstock replica-secrets` makes of the cluster secret."""
REDIS_URL = "PENSTOCK_REDIS_URL"
"""An address as `base.redis_url` reads it; may be missing on a replica. With _GATEWAY, _REPLICA, _AUTOSCALER or
_OPERATOR behind it: the address for that role, which wins."""
VLLM_PYTHON = "PENSTOCK_VLLM_PYTHON"
"""Path of the Python interpreter that has vLLM, on this machine."""
RAY_CLUSTER = "RAY_CLUSTER_NAME"
"""KubeRay sets it in every pod of a Ray cluster."""


def cluster_secret() -> bytes:
    """The secret from which all others derive. Raises ConfigError when it is missing or malformed; the error's text
    does not hold it."""
    try:
        secret = bytes.fromhex(os.environ[CLUSTER_SECRET])
    except KeyError:
        raise ConfigError(f"{CLUSTER_SECRET} is not set") from None
    except ValueError:
        raise ConfigError(f"{CLUSTER_SECRET} does not hold hex digits") from None
    if not 16 <= len(secret) <= 64:
        raise ConfigError(f"{CLUSTER_SECRET} must hold 16 to 64 bytes in hex digits, not {len(secret)}")
    return secret


def replica_secrets() -> ReplicaSecrets:
    """A replica's secrets: of its file, where the environment names one, else derived from the cluster secret. Raises
    ConfigError; its text holds none."""
    path = os.environ.get(REPLICA_SECRETS)
    if not path:
        return derive_replica_secrets(cluster_secret())
    try:
        return parse_replica_secrets(Path(path).read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{REPLICA_SECRETS} names {path}, which can't be read: {type(error).__name__}") from error


def redis_variable(role: RoleName) -> str:
    """Name of the variable with the role's own address of Redis."""
    return f"{REDIS_URL}_{role.upper()}"


def redis_url(role: RoleName) -> str | None:
    """Address of Redis for a role, where the environment names one."""
    return os.environ.get(redis_variable(role)) or os.environ.get(REDIS_URL) or None


def provider_key(provider: str, variable: str) -> str:
    """API key of a provider, without the line end that a key read from a file has. Raises ConfigError when it is
    missing, or could not stand in a header; the error's text does not hold it."""
    return _credential(variable, f"the provider {provider} takes its API key from there (api_key_env)")


def source_credential(variable: str, setting: str) -> str:
    """A credential for a place that adapters come from. setting: where the variable is named. Raises ConfigError as
    `provider_key` does."""
    return _credential(variable, f"{setting} names it")


def _credential(variable: str, why: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(f"{variable} is not set: {why}")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{variable} holds characters that no key has (line ends, or letters beyond ASCII): {why}")
    return value


def vllm_python() -> str | None:
    """Interpreter of an environment that has vLLM, for pools that name none."""
    return os.environ.get(VLLM_PYTHON) or None


def ray_cluster(environment: Mapping[str, str]) -> str:
    """Name of the Ray cluster that this process is part of; `local` where it has none."""
    return environment.get(RAY_CLUSTER) or "local"


def serve_environment() -> dict[str, str]:
    """What Ray and Serve must find in the environment before they are imported, here and in every process they
    start."""
    return {
        # no request comes through Serve: a second event loop would only cost
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
