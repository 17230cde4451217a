"""Writes Prometheus' rules, Grafana's dashboards and the table of docs/alerts.md from the table of metrics:
`make dashboards`."""

from deploy.dashboards.outputs import written


def main() -> None:
    for path, text in written().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
