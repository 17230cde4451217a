"""Wrong values are refused before anything is created, and the message says where they stand."""

from concurrent.futures import ThreadPoolExecutor

from tests.unit.deploy.charts import Rendered, template

POOL = "name: demo, model: demo"
PROVIDER = "name: up, base_url: 'http://x', model: m, served_names: [demo]"
WRONG = {
    # typing errors
    "{imagee: {tag: x}}": "imagee",
    "{image: {repo: x}}": "repo",
    "{gateway: {replica: 3}}": "gateway",
    "{gateway: {config: {max_quue: 5}}}": "gateway.config",
    f"{{pools: [{{{POOL}, replcas: 2}}]}}": "pools.0",
    f"{{pools: [{{{POOL}, engine: {{devise: cpu}}}}]}}": "pools.0.engine",
    f"{{pools: [{{{POOL}, engine: {{speculation: {{methd: none}}}}}}]}}": "pools.0.engine.speculation",
    f"{{pools: [{{{POOL}, autoscale: {{max: 3}}}}]}}": "pools.0.autoscale",
    f"{{pools: [{{{POOL}, pod: {{resource: {{}}}}}}]}}": "pools.0.pod",
    f"{{pools: [{{{POOL}, pod: {{resources: {{limit: {{}}}}}}}}]}}": "pools.0.pod.resources",
    "{providers: [{name: up, url: 'http://x', model: m, served_names: [demo]}]}": "providers.0",
    "{telemetry: {endpoint: x}}": "telemetry",
    "{adapters: {config: {folder: /x}}}": "adapters.config",
    "{adapters: {config: {import_folder: /x}}}": "adapters.config",
    "{adapters: {config: {sources: {ca_file: /x}}}}": "adapters.config.sources",
    "{batches: {config: {folder: /x}}}": "batches.config",
    "{redis: {persistence: {sise: 8Gi}}}": "redis.persistence",
    "{autoscaler: {tolerations: [{kay: a}]}}": "autoscaler.tolerations.0",
    "{networkPolicy: {clients: [{podselector: {}}]}}": "networkPolicy.clients.0",
    "{monitoring: {servicemonitor: {enabled: true}}}": "monitoring",
    "{monitoring: {serviceMonitor: {interval: 15}}}": "monitoring.serviceMonitor.interval",
    "{monitoring: {rules: {runbooks: ''}}}": "monitoring.rules.runbooks",
    "{tenants: {first: [{name: a, tokens: 5}]}}": "tenants.first.0",
    "{tenants: {first: [{name: a, weight: 0}]}}": "tenants.first.0.weight",
    "{tenants: {defaults: {max_parallel: -1}}}": "tenants.defaults.max_parallel",
    "{secrets: {reddis: x}}": "secrets",
    # Kubernetes reads an empty list of peers as everybody
    "{networkPolicy: {operator: []}}": "networkPolicy.operator",
    # what the gateway would listen on is the chart's affair
    "{gateway: {config: {host: 127.0.0.1}}}": "gateway.config",
    # wrong types and impossible values
    "{gateway: {replicas: '2'}}": "gateway.replicas",
    "{gateway: {replicas: 0}}": "gateway.replicas",
    "{gateway: {port: 80000}}": "gateway.port",
    "{gateway: {resources: {requests: {memory: 2 GB}}}}": "gateway.resources.requests.memory",
    "{image: {pullPolicy: always}}": "image.pullPolicy",
    "{image: {digest: latest}}": "image.digest",
    "{pools: []}": "pools",
    "{pools: [{model: demo}]}": "pools.0",
    "{pools: [{name: Demo}]}": "pools.0.name",
    f"{{pools: [{{{POOL}, tier: middle}}]}}": "pools.0.tier",
    f"{{pools: [{{{POOL}, tool_parser: qwen}}]}}": "pools.0.tool_parser",
    f"{{pools: [{{{POOL}, reasoning_parser: gpt}}]}}": "pools.0.reasoning_parser",
    f"{{pools: [{{{POOL}, pod: {{spread: Always}}}}]}}": "pools.0.pod.spread",
    "{redis: {address: 'redis://:password@host:6379'}}": "redis.address",
    "{redis: {maxMemory: 1Gi}}": "redis.maxMemory",
    "{service: {type: ExternalName}}": "service.type",
    "{service: {type: NodePort, nodePort: 80}}": "service.nodePort",
    "{adapters: {accessModes: [ReadOnlyMany]}}": "adapters.accessModes.0",
    # what penstock.yaml's structs would refuse, in a pod
    "{gateway: {config: {max_queue: -5}}}": "gateway.config.max_queue",
    "{gateway: {config: {request_timeout_s: 0}}}": "gateway.config.request_timeout_s",
    "{gateway: {config: {ttft_target_s: 0.0}}}": "gateway.config.ttft_target_s",
    "{targets: {batch: {ttft_s: 0.0}}}": "targets.batch.ttft_s",
    "{targets: {premium: {ttft_s: 1.0}}}": "targets",
    "{targets: {objective: 1.0}}": "targets.objective",
    "pools: [{name: a, targets: {batch: {tpot_s: 0}}}]": "pools.0.targets.batch.tpot_s",
    "{telemetry: {otlp_endpoint: 'ftp://x'}}": "telemetry.otlp_endpoint",
    "{telemetry: {sample_ratio: 2}}": "telemetry.sample_ratio",
    "{adapters: {config: {max_per_tenant: 0}}}": "adapters.config.max_per_tenant",
    "{adapters: {config: {load_timeout_s: -1}}}": "adapters.config.load_timeout_s",
    "{batches: {config: {max_lines: 0}}}": "batches.config.max_lines",
    "{batches: {config: {keep_days: 31}}}": "batches.config.keep_days",
    f"{{pools: [{{{POOL}, autoscale: {{min_replicas: -1}}}}]}}": "pools.0.autoscale.min_replicas",
    f"{{pools: [{{{POOL}, autoscale: {{target_utilisation: 1.5}}}}]}}": "pools.0.autoscale.target_utilisation",
    f"{{pools: [{{{POOL}, autoscale: {{scale_down_margin: 1}}}}]}}": "pools.0.autoscale.scale_down_margin",
    f"{{pools: [{{{POOL}, autoscale: {{window_s: 0}}}}]}}": "pools.0.autoscale.window_s",
    f"{{pools: [{{{POOL}, autoscale: {{scale_down_delay_s: -1}}}}]}}": "pools.0.autoscale.scale_down_delay_s",
    f"{{pools: [{{{POOL}, served_names: [a, a]}}]}}": "pools.0.served_names",
    f"{{pools: [{{{POOL}, served_names: ['']}}]}}": "pools.0.served_names.0",
    f"{{pools: [{{{POOL}, engine: {{kv_memory_bytes: 0}}}}]}}": "pools.0.engine.kv_memory_bytes",
    f"{{pools: [{{{POOL}, engine: {{kv_memory_bytes: most}}}}]}}": "pools.0.engine.kv_memory_bytes",
    f"{{pools: [{{{POOL}, engine: {{memory_share: 1.5}}}}]}}": "pools.0.engine.memory_share",
    f"{{pools: [{{{POOL}, engine: {{block_size: 24}}}}]}}": "pools.0.engine.block_size",
    f"{{pools: [{{{POOL}, engine: {{threads: 0}}}}]}}": "pools.0.engine.threads",
    f"{{pools: [{{{POOL}, engine: {{speculation: {{max_draft_tokens: 17}}}}}}]}}": (
        "pools.0.engine.speculation.max_draft_tokens"
    ),
    f"{{pools: [{{{POOL}, engine: {{speculation: {{draft_layers: 0}}}}}}]}}": "pools.0.engine.speculation.draft_layers",
    f"{{pools: [{{{POOL}, engine: {{timed: {{draft_acceptance: 2}}}}}}]}}": "pools.0.engine.timed.draft_acceptance",
    f"{{pools: [{{{POOL}, engine: {{adapters: {{slots: -1}}}}}}]}}": "pools.0.engine.adapters.slots",
    f"{{pools: [{{{POOL}, engine: {{adapters: {{max_rank: 0}}}}}}]}}": "pools.0.engine.adapters.max_rank",
    f"{{pools: [{{{POOL}, engine: {{vllm: {{start_timeout_s: 0}}}}}}]}}": "pools.0.engine.vllm.start_timeout_s",
    "{providers: [{name: up, base_url: 'ftp://x', model: m, served_names: [demo]}]}": "providers.0.base_url",
    "{providers: [{name: a b, base_url: 'http://x', model: m, served_names: [demo]}]}": "providers.0.name",
    "{providers: [{name: up, base_url: 'http://x', model: m, served_names: []}]}": "providers.0.served_names",
    f"{{providers: [{{{PROVIDER}, ttft_s: 0}}]}}": "providers.0.ttft_s",
    f"{{providers: [{{{PROVIDER}, max_concurrency: 0}}]}}": "providers.0.max_concurrency",
    f"{{providers: [{{{PROVIDER}, extra_fields: [seed]}}]}}": "providers.0.extra_fields.0",
    f"{{providers: [{{{PROVIDER}, input_price: 1}}]}}": "providers.0",
    "{tenants: {first: [{name: a, tier_policy: edge}]}}": "tenants.first.0.tier_policy",
    # what can't work together
    f"{{pools: [{{{POOL}, autoscale: {{min_replicas: 5}}}}]}}": "pools[0].autoscale.max_replicas (4) is below",
    f"{{pools: [{{{POOL}, engine: {{max_batched_tokens: 8}}}}]}}": "pools[0].engine.max_batched_tokens is 8",
    f"{{pools: [{{{POOL}, engine: {{device: cuda, max_batched_tokens: 128}}}}]}}": "at least max_num_seqs (256)",
    f"{{pools: [{{{POOL}, engine: {{max_batched_tokens: auto}}}}]}}": "pools[0].engine.max_batched_tokens is auto",
    f"{{pools: [{{{POOL}, engine: {{max_batched_tokens: auto, device: cuda, runner: vllm}}}}]}}": (
        "pools[0].engine.max_batched_tokens is auto"
    ),
    f"{{pools: [{{{POOL}, engine: {{overlap: false, device: cuda, runner: vllm}}}}]}}": (
        "pools[0].engine.overlap is false"
    ),
    f"{{pools: [{{{POOL}, engine: {{runner: timed, exact: true}}}}]}}": "pools[0].engine.exact is true",
    f"{{pools: [{{{POOL}, engine: {{runner: timed, device: cuda}}}}]}}": "pools[0].engine.runner is timed",
    f"{{pools: [{{{POOL}, engine: {{exact: true, device: cuda}}}}]}}": "pools[0].engine.exact is true",
    f"{{pools: [{{{POOL}, engine: {{exact: true, runner: vllm}}}}]}}": "pools[0].engine.exact is true",
    f"{{pools: [{{{POOL}, engine: {{kv_dtype: int8, device: cuda}}}}]}}": "pools[0].engine.kv_dtype is int8",
    f"{{pools: [{{{POOL}, engine: {{kv_dtype: bf16, runner: vllm}}}}]}}": "pools[0].engine.kv_dtype is bf16",
    f"{{pools: [{{{POOL}, engine: {{activations: int8, dtype: float32}}}}]}}": "pools[0].engine.activations is int8",
    f"{{pools: [{{{POOL}, engine: {{activations: int16, exact: true}}}}]}}": "pools[0].engine.activations is int16",
    f"{{pools: [{{{POOL}, engine: {{activations: int16, device: cuda}}}}]}}": "pools[0].engine.activations is int16",
    f"{{pools: [{{{POOL}, engine: {{activations: bf16, runner: vllm}}}}]}}": "pools[0].engine.activations is bf16",
    f"{{pools: [{{{POOL}, engine: {{lm_head: int4, runner: vllm}}}}]}}": "pools[0].engine.lm_head is int4",
    f"{{pools: [{{{POOL}, engine: {{speculation: {{method: ngram}}, runner: vllm}}}}]}}": (
        "pools[0].engine.speculation.method is ngram"
    ),
    f"{{pools: [{{{POOL}, engine: {{speculation: {{method: head}}}}}}]}}": (
        "pools[0].engine.speculation.method is head: speculation.head must name its file"
    ),
    f"{{pools: [{{{POOL}, engine: {{speculation: {{head: h.safetensors}}}}}}]}}": (
        "pools[0].engine.speculation.head is that of method head"
    ),
    f"{{pools: [{{{POOL}, engine: {{exact: true, speculation: {{method: head, head: h.safetensors}}}}}}]}}": (
        "pools[0].engine.speculation.method is head, which is for the kernels of device cpu"
    ),
    f"{{pools: [{{{POOL}, engine: {{speculation: {{method: draft}}}}}}]}}": (
        "pools[0].engine.speculation.method is draft"
    ),
    f"{{pools: [{{{POOL}, engine: {{speculation: {{model: demo}}}}}}]}}": (
        "pools[0].engine.speculation.model is that of method draft"
    ),
    f"{{pools: [{{{POOL}, engine: {{speculation: {{draft_layers: 2}}}}}}]}}": (
        "pools[0].engine.speculation.draft_layers is of method draft"
    ),
    f"{{models: {{download: true}}, pools: [{{{POOL}}}, {{name: b, model: org/name, served_names: [demo]}}]}}": (
        "pools[1] serves in its tier what another pool"
    ),
    f"{{pools: [{{{POOL}}}, {{name: b, served_names: [demo], engine: {{block_size: 32}}}}]}}": (
        "pools[1] serves in its tier what another pool"
    ),
    f"{{pools: [{{{POOL}}}, {{name: b, tier: edge, served_names: [demo], tool_parser: text}}]}}": (
        "pools[1].tool_parser is text, and another pool that serves demo of demo has auto"
    ),
    f"{{pools: [{{{POOL}}}, {{name: b, tier: edge, served_names: [demo], reasoning_parser: none}}]}}": (
        "pools[1].reasoning_parser is none, and another pool that serves demo of demo has auto"
    ),
    "{providers: [{name: up, base_url: 'http://x', model: m, served_names: [other]}]}": (
        "providers[0].served_names has other"
    ),
    f"{{providers: [{{{PROVIDER}}}, {{{PROVIDER}}}]}}": "providers[1].name is up, which another provider has",
    "{providers: [{name: demo, base_url: 'http://x', model: m, served_names: [demo]}]}": (
        "providers[0].name is demo, which a pool has"
    ),
    "{tenants: {first: [{name: a}, {name: a}]}}": "tenants.first[1].name is a, which is taken",
    "{tenants: {first: [{name: tenants.yaml}]}}": "tenants.first[0].name is tenants.yaml, which is taken",
    "{gateway: {port: 8080}}": "gateway.port is 8080, which is the port of metrics",
    "{gateway: {adminPort: 52365}}": "gateway.adminPort is 52365, which is the port of Ray's health",
    "{gateway: {adminPort: 8000}}": "gateway.adminPort is 8000, which is the port of gateway.port",
    "{service: {nodePort: 30080}}": "service.nodePort is 30080, but service.type is ClusterIP",
    "{pools: [{name: a}, {name: a}]}": "pools[1].name: two pools are named",
    "{pools: [{name: a, engine: {device: cuda}, pod: {gpus: 0}}]}": "pools[0].pod.gpus is 0",
    "{pools: [{name: a, pod: {gpus: 1}}]}": "pools[0].pod.gpus is 1",
    "{pools: [{name: a, engine: {device: cuda, block_size: 256}}]}": "pools[0].engine.block_size is 256",
    "{pools: [{name: a, engine: {device: cuda, block_size: 4}}]}": "pools[0].engine.block_size is 4",
    "{pools: [{name: a, engine: {device: cuda, tensor_parallel_size: 2}, pod: {gpus: 4}}]}": (
        "pools[0].pod.gpus is 4, but engine.tensor_parallel_size is 2"
    ),
    "{pools: [{name: a, engine: {device: cuda, tensor_parallel_size: 2}, pod: {gpus: 1}}]}": (
        "pools[0].pod.gpus is 1, but engine.tensor_parallel_size is 2"
    ),
    "{pools: [{name: a, engine: {device: cuda, tensor_parallel_size: 1}, pod: {gpus: 2}}]}": (
        "pools[0].pod.gpus is 2, but engine.tensor_parallel_size is 1"
    ),
    "{pools: [{name: a, engine: {device: cuda, runner: vllm, tensor_parallel_size: 2}, pod: {gpus: 4}}]}": (
        "pools[0].pod.gpus is 4, but engine.tensor_parallel_size is 2"
    ),
    "{podDefaults: {gpus: 4}, pools: [{name: a, engine: {device: cuda, tensor_parallel_size: 2}}]}": (
        "pools[0].pod.gpus is 4, but engine.tensor_parallel_size is 2"
    ),
    "{podDefaults: {gpus: 2}, pools: [{name: a}]}": "pools[0].pod.gpus is 2, but engine.device is cpu",
    "{pools: [{name: a, engine: {runner: vllm, tensor_parallel_size: 2}, pod: {gpus: 2}}]}": (
        "pools[0].pod.gpus is 2, but engine.device is cpu"
    ),
    "{pools: [{name: a, engine: {device: cuda}, pod: {gpus: 0.5}}]}": "pools.0.pod.gpus",
    "{pools: [{name: a, engine: {device: cuda}, pod: {gpus: -1}}]}": "pools.0.pod.gpus",
    "{pools: [{name: a, engine: {device: cuda, runner: vllm, vllm: {args: {tensor_parallel_size: 2}}}}]}": (
        "pools[0].engine.vllm.args.tensor_parallel_size is set"
    ),
    "{pools: [{name: a, engine: {device: cuda, runner: vllm, vllm: {args: {pipeline_parallel_size: 2}}}}]}": (
        "pools[0].engine.vllm.args has pipeline_parallel_size"
    ),
    "{pools: [{name: a, engine: {device: cuda, runner: vllm, vllm: {args: {data_parallel_size: 2}}}}]}": (
        "pools[0].engine.vllm.args has pipeline_parallel_size or data_parallel_size"
    ),
    "{pools: [{name: a, engine: {kv_dtype: fp8}}]}": "pools[0].engine.kv_dtype is fp8, which is not for device cpu",
    "{pools: [{name: a, engine: {speculation: {method: draft, model: org/small}}}]}": (
        "from the hub: set models.download=true, or name a path below"
    ),
    "{pools: [{name: a, engine: {exact: true, tensor_parallel_size: 2}}]}": "pools[0].engine.tensor_parallel_size is 2",
    "{pools: [{name: a, engine: {runner: timed, tensor_parallel_size: 2}}]}": (
        "pools[0].engine.tensor_parallel_size is 2, but runner timed"
    ),
    "{pools: [{name: a, model: org/name}]}": "pools[0].model is",
    "{pools: [{name: a, model: /models/x}]}": "pools[0].model is the path /models/x",
    "{autoscaler: {budget: {gpus: 0}}}": "autoscaler.budget",
    "{autoscaler: {budget: {gpus: 2}}, pools: [{name: a, autoscale: {}}]}": "no pool with autoscale takes a GPU",
    "{autoscaler: {budget: {gpus: 2}}, pools: [{name: a, autoscale: {gpus: 1, min_replicas: 3}, replicas: 3}]}": (
        "take 3 GPUs by autoscale.min_replicas and 3 by replicas"
    ),
    "{pools: [{name: a, replicas: 9, autoscale: {max_replicas: 4}}]}": "pools[0].replicas is 9",
    "{redis: {enabled: false}}": "redis.address names no other one",
    "{redis: {enabled: false, address: 'redis://h:1'}}": "secrets.redis must name",
    "{providers: [{name: up, base_url: 'http://x', model: m, served_names: [demo], api_key_env: K}]}": (
        "providers[0].api_key_env is K"
    ),
    f"{{secrets: {{providers: keys}}, providers: [{{{PROVIDER}, api_key_env: PENSTOCK_REDIS_URL}}]}}": (
        "providers[0].api_key_env is PENSTOCK_REDIS_URL, which"
    ),
    "{adapters: {enabled: true, config: {sources: {s3: {access_key_env: A, secret_key_env: B, allow: [b]}}}}}": (
        "adapters.config.sources.s3.access_key_env is A"
    ),
    "{adapters: {enabled: true, config: {sources: {hub: {token_env: PENSTOCK_REDIS_URL, allow: [o]}}}}, "
    "secrets: {providers: keys}}": "adapters.config.sources.hub.token_env is PENSTOCK_REDIS_URL, which",
    "{adapters: {enabled: true, size: 16Gi}}": "one tenant may bring 17179869184 bytes of adapters",
    "{adapters: {enabled: true, size: 8G, config: {max_bytes: 1000000000, max_per_tenant: 8}}}": (
        "one tenant may bring 8000000000 bytes of adapters"
    ),
    "{batches: {enabled: true, size: 1Gi}}": "one tenant may have 1073741824 bytes of files",
    "{httpRoute: {enabled: true}}": "httpRoute.parentRefs is empty",
}


def place(message: str) -> str:
    """The path with dots that either of Helm's validators writes."""
    return message.replace("'/", "'").replace("/", ".")


def test_every_wrong_values_file_is_refused_with_its_place() -> None:
    with ThreadPoolExecutor(2) as threads:
        done: dict[str, Rendered] = dict(
            zip(WRONG, threads.map(lambda values: template("", values), WRONG), strict=True)
        )

    assert len(WRONG) >= 30
    assert {values for values, rendered in done.items() if rendered.returncode == 0} == set()
    assert {
        values: rendered.stderr
        for values, rendered in done.items()
        if WRONG[values] not in place(rendered.stderr) and WRONG[values] not in rendered.stderr
    } == {}


def test_the_same_values_spelled_right_are_taken() -> None:
    right = f"""
image: {{tag: x, pullPolicy: Always}}
gateway: {{replicas: 3, port: 8090, config: {{max_queue: 5}}}}
pools:
  - {{{POOL}, replicas: 2, tier: edge, engine: {{device: cpu, speculation: {{method: none}}}},
     autoscale: {{max_replicas: 3}}, pod: {{spread: None}}}}
redis: {{persistence: {{size: 8Gi}}, maxMemory: 1gb}}
tenants: {{first: [{{name: a, tokens_per_minute: 5}}]}}
"""

    assert template("", right).returncode == 0
