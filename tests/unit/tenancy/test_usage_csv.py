import csv
import io
from decimal import Decimal

from penstock.tenancy.usage import UsageRow, Used
from penstock.tenancy.usage_csv import COLUMNS, usage_csv


def test_usage_as_csv_has_a_line_for_each_row_and_money_to_the_last_digit() -> None:
    usage = {
        "acme": [
            UsageRow("2026-11-21", "demo", "", Used(2, 30, 8, 12, 1_000_000_001, 2)),
            UsageRow("2026-11-22", "demo", 'odd, "name"', Used(1, 3, 0, 1, -5, 0)),
        ],
        "other": [],
    }

    header, first, second = csv.reader(io.StringIO(usage_csv(usage)))

    assert tuple(header) == COLUMNS
    assert first == ["acme", "2026-11-21", "demo", "", "2", "30", "8", "12", "1.000000001", "0.000000002"]
    assert second[3] == 'odd, "name"'
    assert Decimal(second[8]) == Decimal("-5e-9")
