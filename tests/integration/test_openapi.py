"""A thousand requests that schemathesis makes of a running platform's /openapi.json; `python -m tests.fuzz openapi`
makes thousands."""

import random
from pathlib import Path

import httpx
import pytest

from bench.support.platform_process import running_platform
from tests.fuzz.openapi import CASE_S, CONFIG, GROWTH_BYTES, MODEL, ApiFuzz, Mode, fuzz
from tests.integration.sizes import full

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_CASES = full(1080, 360)
SEED = 15
FOUND: list[tuple[str, Mode, int]] = [("POST /v1/chat/completions", "supported", 3)]
"""Seeds that found something once: a top_k that no message on the stream can hold."""


def test_no_request_of_the_document_gets_an_error_of_the_servers_or_none(tmp_path: Path) -> None:
    with running_platform(tmp_path, CONFIG) as platform:
        api, gateways = ApiFuzz(platform), platform.gateways
        again = [fault for seed in FOUND if (fault := api.try_seed(*seed, 40)) is not None]
        found = {} if again else fuzz(api, NUM_CASES, random.Random(SEED))
        headers = {"authorization": f"Bearer {platform.key}"}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4}
        after = httpx.post(f"{platform.url}/v1/completions", json=body, headers=headers, timeout=30, trust_env=False)
        api.close()

        assert again == []
        assert found == {}
        assert api.tally.num_cases == NUM_CASES
        assert api.tally.statuses[200] > NUM_CASES / 20, "requests must also be served, else little is tried"
        assert api.tally.slowest_s < CASE_S
        assert api.tally.peak_bytes - api.tally.start_bytes < GROWTH_BYTES
        assert after.status_code == 200
        assert platform.gateways == gateways
