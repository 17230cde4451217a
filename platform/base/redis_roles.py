"""Roles in Redis: an ACL user each, with the commands and keys that its calls need and no others.

Not enforced here: Redis does it, of the lines that the embedded server and the chart are given. They say nothing that
Redis 6.2 doesn't know, where a key pattern holds for reading and writing alike. `tests/unit/base/test_redis_roles.py`
holds the table against every call in the tree, and every refusal against a real server.

Decisions: docs/decisions/secrets.md
"""

import hashlib
from typing import Literal, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from penstock.base.subsecrets import derive

RoleName = Literal["gateway", "replica", "autoscaler", "operator"]
USER_PREFIX = "penstock-"
COMMON = ("ping", "select", "client|setname", "cluster|slots", "cluster|shards", "cluster|nodes", "command", "readonly")
"""What a client of any role sends by itself, on a Cluster too."""


class Role(NamedTuple):
    """What a role's processes do in Redis."""

    keys: tuple[str, ...]
    """Patterns of the keys."""
    commands: tuple[str, ...]
    """ACL rules of commands, without their sign where they allow one."""


ROLES: dict[RoleName, Role] = {
    "gateway": Role(
        # keys of tenants, limits, usage, adapters, files, batches, the index' copies, its reports; the autoscaler's
        # agent is beside it
        ("penstock:*",),
        (
            "get",
            "set",
            "getdel",
            "getrange",
            "setrange",
            "expire",
            "pexpire",
            "hget",
            "hset",
            "hsetnx",
            "hdel",
            "hexists",
            "hincrby",
            "hgetall",
            "hmget",
            "hlen",
            "hvals",
            "sadd",
            "smembers",
            "zadd",
            "zrem",
            "zcard",
            "zrangebyscore",
            "zremrangebyscore",
            "rpush",
            "blpop",
            "time",
            "multi",
            "exec",
            "evalsha",
            "script|load",
        ),
    ),
    "replica": Role(
        # its copy of the index
        ("penstock:prefix:*",),
        (
            "del",
            "sadd",
            "srem",
            "scard",
            "hset",
            "hmget",
            "pexpire",
            "multi",
            "exec",
            "evalsha",
            "script|load",
        ),
    ),
    "autoscaler": Role(
        # the gateways' reports, its targets, its calls to the agent in Ray
        ("penstock:scaling:*", "penstock:hand:*"),
        ("get", "set", "smembers", "srem", "rpush", "ltrim", "pexpire", "blpop", "multi", "exec"),
    ),
    "operator": Role(
        # `penstock tenant`, `key`, `prefix`, `usage`: all that reads or writes, but what is dangerous to a server.
        # CONFIG GET is: it shows the default user's password
        ("penstock:*",),
        ("@read", "@write", "@transaction", "@connection", "evalsha", "script|load", "-@dangerous", "info"),
    ),
}


def user_of(role: RoleName) -> str:
    return f"{USER_PREFIX}{role}"


def acl_rules(role: RoleName) -> str:
    """The role's keys and commands, as Redis's ACL has them."""
    keys, commands = ROLES[role]
    rules = [command if command.startswith("-") else f"+{command}" for command in (*commands, *COMMON)]
    return " ".join(["resetkeys", *(f"~{pattern}" for pattern in keys), "-@all", *rules])


def acl_line(role: RoleName, password: str) -> str:
    """The role's line of a users.acl, or of a redis.conf. It has the password's SHA-256 only."""
    return f"user {user_of(role)} on #{hashlib.sha256(password.encode()).hexdigest()} {acl_rules(role)}"


def make_password(secret: bytes, role: RoleName) -> str:
    """The role's password where nobody has chosen one. secret: the cluster's."""
    return derive(secret, f"redis {role}").hex()


def url_of(url: str, role: RoleName, password: str) -> str:
    """The URL with the role's user and password instead of those that it had."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user_of(role)}:{password}@{host}"))
