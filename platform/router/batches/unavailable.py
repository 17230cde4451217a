"""Redis that does not answer, as the error that a request gets."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError

from penstock.wire.errors import Overloaded

RETRY_AFTER_S = 1.0


@contextmanager
def raising_overloaded() -> Iterator[None]:
    """Turn what a call of Redis raises into Overloaded."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise Overloaded("Files and batches can't be reached at the moment.", retry_after_s=RETRY_AFTER_S) from error
