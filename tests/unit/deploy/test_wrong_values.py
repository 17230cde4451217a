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
    "{redis: {persistence: {sise: 8Gi}}}": "redis.persistence",
    "{autoscaler: {tolerations: [{kay: a}]}}": "autoscaler.tolerations.0",
    "{networkPolicy: {clients: [{podselector: {}}]}}": "networkPolicy.clients.0",
    "{tenants: {first: [{name: a, tokens: 5}]}}": "tenants.first.0",
    "{secrets: {reddis: x}}": "secrets",
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
    f"{{pools: [{{{POOL}, pod: {{spread: Always}}}}]}}": "pools.0.pod.spread",
    "{redis: {address: 'redis://:password@host:6379'}}": "redis.address",
    "{redis: {maxMemory: 1Gi}}": "redis.maxMemory",
    "{service: {type: ExternalName}}": "service.type",
    "{service: {type: NodePort, nodePort: 80}}": "service.nodePort",
    "{adapters: {accessModes: [ReadOnlyMany]}}": "adapters.accessModes.0",
    # what can't work together
    "{gateway: {port: 8080}}": "gateway.port is 8080, which is the port of metrics",
    "{gateway: {adminPort: 52365}}": "gateway.adminPort is 52365, which is the port of Ray's health",
    "{gateway: {adminPort: 8000}}": "gateway.adminPort is 8000, which is the port of gateway.port",
    "{service: {nodePort: 30080}}": "service.nodePort is 30080, but service.type is ClusterIP",
    "{pools: [{name: a}, {name: a}]}": "pools[1].name: two pools are named",
    "{pools: [{name: a, engine: {device: cuda}, pod: {gpus: 0}}]}": "pools[0].pod.gpus is 0",
    "{pools: [{name: a, pod: {gpus: 1}}]}": "pools[0].pod.gpus is 1",
    "{pools: [{name: a, model: org/name}]}": "pools[0].model is",
    "{pools: [{name: a, model: /models/x}]}": "pools[0].model is the path /models/x",
    "{pools: [{name: a, replicas: 9, autoscale: {max_replicas: 4}}]}": "pools[0].replicas is 9",
    "{redis: {enabled: false}}": "redis.address names no other one",
    "{redis: {enabled: false, address: 'redis://h:1'}}": "secrets.redis must name",
    "{providers: [{name: up, base_url: 'http://x', model: m, served_names: [demo], api_key_env: K}]}": "providers[0].api_key_env is K",
    f"{{secrets: {{providers: keys}}, providers: [{{{PROVIDER}, api_key_env: PENSTOCK_REDIS_URL}}]}}": "providers[0].api_key_env is PENSTOCK_REDIS_URL, which",
    "{httpRoute: {enabled: true}}": "httpRoute.parentRefs is empty",
}


def place(message: str) -> str:
    """As either of Helm's validators writes a path, with dots."""
    return message.replace("'/", "'").replace("/", ".")


def test_every_wrong_values_file_is_refused_with_its_place() -> None:
    with ThreadPoolExecutor(2) as threads:
        done: dict[str, Rendered] = dict(zip(WRONG, threads.map(lambda values: template("", values), WRONG), strict=True))

    assert len(WRONG) >= 30
    assert {values for values, rendered in done.items() if rendered.returncode == 0} == set()
    assert {
        values: rendered.stderr for values, rendered in done.items() if WRONG[values] not in place(rendered.stderr) and WRONG[values] not in rendered.stderr
    } == {}


def test_the_same_values_spelled_right_are_taken() -> None:
    right = f"""
image: {{tag: x, pullPolicy: Always}}
gateway: {{replicas: 3, port: 8090, config: {{max_queue: 5}}}}
pools: [{{{POOL}, replicas: 2, tier: edge, engine: {{device: cpu, speculation: {{method: none}}}}, autoscale: {{max_replicas: 3}}, pod: {{spread: None}}}}]
redis: {{persistence: {{size: 8Gi}}, maxMemory: 1gb}}
tenants: {{first: [{{name: a, tokens_per_minute: 5}}]}}
"""

    assert template("", right).returncode == 0
