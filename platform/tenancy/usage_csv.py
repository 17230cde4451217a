"""Usage as CSV (RFC 4180): a line of names, then one for each tenant, day, model and adapter. Pure.

Not the reading (`usage`). Money stands to the last digit, so that the sums of a spreadsheet are those of the platform.
"""

import csv
import io
from collections.abc import Mapping, Sequence

from penstock.tenancy.usage import UsageRow
from penstock.wire.money import exact

COLUMNS = (
    "tenant",
    "day",
    "model",
    "adapter",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost",
    "charge",
)
CONTENT_TYPE = b"text/csv; charset=utf-8"


def usage_csv(usage: Mapping[str, Sequence[UsageRow]]) -> str:
    """The rows of each tenant, by tenant; a row without an adapter has nothing in its column."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for tenant, rows in usage.items():
        for row in rows:
            *counts, cost_nano, charge_nano = row.used
            writer.writerow([tenant, row.day, row.model, row.adapter, *counts, exact(cost_nano), exact(charge_nano)])
    return text.getvalue()
