"""What is kept while there is no Redis; what is in Redis: tests/integration/test_limits."""

from penstock.base.redis import connect
from penstock.tenancy.usage import MAX_ROWS, UsageLog, Used, day_name, last_days


def test_days_are_named_in_utc_oldest_first() -> None:
    assert last_days(3, 1_709_251_199.0) == ["2024-02-27", "2024-02-28", "2024-02-29"]
    assert day_name(int(1_709_251_199.0) // 86400) == "2024-02-29"


async def test_without_redis_sums_are_kept_and_their_number_is_bounded() -> None:
    log = UsageLog(connect("unix:///nonexistent/redis.sock"), "gateway-1", now=lambda: 0.0)
    for _ in range(2):
        for number in range(MAX_ROWS + 5):
            log.add(f"tenant-{number}", "demo", "", Used(1, 10, 0, 5))
        assert not await log.flush()

    assert log.num_rows == MAX_ROWS
