import pytest

from penstock.base.errors import ConfigError
from penstock.router.batches.config import BatchesConfig


@pytest.mark.parametrize(
    "field", ["max_file_bytes", "max_lines", "max_tenant_bytes", "max_tenant_lines", "max_parallel", "keep_days"]
)
def test_impossible_settings_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"batches.{field}"):
        BatchesConfig(**{field: 0})


def test_nothing_is_kept_for_longer_than_clients_may_ask() -> None:
    assert BatchesConfig(keep_days=30).keep_s == 30 * 86400
    with pytest.raises(ConfigError, match=r"keep_days must be .* 30, not 31"):
        BatchesConfig(keep_days=31)
