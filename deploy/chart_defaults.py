"""Defaults of penstock.yaml's structs as a template of the chart, for its checks and deadlines: written once, in the
structs.

python -m deploy.chart_defaults      # writes deploy/helm/templates/_defaults.tpl
"""

import json
from pathlib import Path

import msgspec

from penstock.adapters.config import AdaptersConfig
from penstock.autoscale.config import AutoscaleConfig
from penstock.router.batches.config import BatchesConfig
from penstock.router.config import GatewayConfig
from penstock.workers.config import DEVICE_DEFAULTS, EngineConfig

TARGET = Path(__file__).parent / "helm" / "templates" / "_defaults.tpl"
HEAD = """{{/* Defaults of penstock.yaml, generated from the structs that read it by `python -m \
deploy.chart_defaults`; use fromJson. */}}

{{- define "penstock.defaults" -}}
"""
WANTED = {
    "adapters": (AdaptersConfig, ("max_bytes", "max_per_tenant")),
    "batches": (BatchesConfig, ("max_tenant_bytes",)),
    "gateway": (GatewayConfig, ("request_timeout_s",)),
    "autoscale": (AutoscaleConfig, ("min_replicas", "max_replicas")),
    "engine": (
        EngineConfig,
        (
            "runner",
            "device",
            "tensor_parallel_size",
            "dtype",
            "lm_head",
            "activations",
            "kv_dtype",
            "exact",
            "block_size",
            "max_num_seqs",
            "max_batched_tokens",
            "speculation",
        ),
    ),
}


def render() -> str:
    found = {
        name: {field: msgspec.to_builtins(getattr(struct(), field)) for field in fields}
        for name, (struct, fields) in WANTED.items()
    }
    found["gpu"] = {field: DEVICE_DEFAULTS["cuda"][field] for field in ("max_num_seqs", "max_batched_tokens")}
    return f"{HEAD}{json.dumps(found, indent=1)}\n{{{{- end }}}}\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
