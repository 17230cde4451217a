"""Step costs of a running platform, as its gateway's /metrics shows them, so that a plan needs no roofline.

What the page has is the mean of a pool's connected replicas (`penstock_step_cost`), fitted by each at its start and
corrected since.
"""

from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from penstock.base.errors import ConfigError
from penstock.perf.costs_page import read_costs
from penstock.wire.frames import StepCosts

TIMEOUT_S = 10.0
METRIC = "penstock_step_cost"


class Measured(NamedTuple):
    pool: str
    costs: StepCosts
    kv_blocks: int
    """KV blocks of one replica, a mean."""
    replicas: int


def fetch_measured(url: str, pool: str | None, client: httpx.Client | None = None) -> Measured:
    """Ask a gateway, by its address or that of its /metrics. pool: which; None: the only one. Raises ConfigError."""
    page = url if url.endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with client or httpx.Client(timeout=TIMEOUT_S) as asking:
            answer = asking.get(page)
            answer.raise_for_status()
            return read_page(answer.text, pool)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--measured: {page} does not answer: {error}") from error


def read_page(text: str, pool: str | None) -> Measured:
    """Read the page of metrics. Raises ConfigError where it has no costs, or those of several pools."""
    found: dict[str, dict[str, float]] = {}
    sums: dict[str, dict[str, float]] = {"penstock_kv_blocks": {}, "penstock_replicas": {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.labels.get("pool", "")
            if sample.name == METRIC:
                found.setdefault(name, {})[sample.labels["coefficient"]] = sample.value
            elif sample.name in sums:
                sums[sample.name][name] = sums[sample.name].get(name, 0.0) + sample.value
    if not found:
        raise ConfigError(f"--measured: the page has no {METRIC}: no replica is connected, or the platform is older")
    if pool is None and len(found) > 1:
        raise ConfigError(f"--measured: the platform has the pools {', '.join(sorted(found))}; name one by --pool")
    name = pool if pool is not None else next(iter(found))
    if name not in found:
        raise ConfigError(
            f"--measured: the platform has no costs of a pool {name}; of {', '.join(sorted(found))} it has"
        )
    replicas = max(1, round(sums["penstock_replicas"].get(name, 1.0)))
    blocks = round(sums["penstock_kv_blocks"].get(name, 0.0) / replicas)
    return Measured(name, read_costs(found[name]), blocks, replicas)
