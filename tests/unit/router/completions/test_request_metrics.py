import re

from deploy.dashboards.alerts import ALERTS
from penstock.base.metrics import Metrics
from penstock.router.completions.request_metrics import RequestMetrics

ALERTED = re.compile(r'penstock_requests_total\{code=~?"([^"]+)"\}')


def test_each_code_that_an_alert_is_of_has_a_series_before_its_first_request() -> None:
    metrics = Metrics()
    requests = RequestMetrics(metrics, ["m"])
    codes = {code for alert in ALERTS for found in ALERTED.findall(alert.expression) for code in found.split("|")}
    before = metrics.render().decode()
    requests.for_model("m").record_response("500", 0.1)

    assert codes == {"500", "502", "503", "504"}
    for model in ("m", "none"):
        assert all(f'penstock_requests_total{{code="{code}",model="{model}"}} 0.0' in before for code in codes)
    assert 'penstock_requests_total{code="500",model="m"} 1.0' in metrics.render().decode()
