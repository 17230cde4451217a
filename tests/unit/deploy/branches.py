"""Values that together take every branch of the chart's templates, beside the presets (test_branches.py measures it):
name to YAML."""

BRANCHES = {
    "numbers as names": """
image: {pullSecrets: ['1']}
nameOverride: penstock
secrets: {redis: '2', ray: '3', providers: '4', cluster: '5'}
redis: {enabled: false, address: 'redis://10.0.0.1', username: '123'}
tenants: {first: [{name: '2024'}, {name: 'true'}, {name: '1e3'}]}
providers: [{name: up, base_url: 'https://api.example.com/v1', model: m, served_names: [demo], api_key_env: 'NO'}]
models: {existingClaim: '6', tokenSecret: '7'}
adapters: {enabled: true, existingClaim: '8'}
batches: {enabled: true, existingClaim: '15'}
head: {priorityClassName: '9'}
podDefaults: {runtimeClassName: '10', cacheClaim: '16', nodeSelector: {a: '11'}, annotations: {a: 'true'}}
ingress: {enabled: true, className: '12', host: '13', tlsSecret: '14', annotations: {}}
""",
    "names": "{nameOverride: gate, image: {tag: '1', digest: 'sha256:" + 64 * "a" + "', pullSecrets: [registry]}}",
    "full name": "{fullnameOverride: gate}",
    "outer redis": """
redis:
  {enabled: false, address: 'rediss://redis.example.com:6380', username: penstock, roles: true, tlsSecret: redis-ca}
secrets: {redis: outer-redis, cluster: own, ray: own, tenants: own, providers: own}
test: {tenant: acme}
backups: {enabled: true, existingClaim: backups}
telemetry: {otlp_endpoint: 'http://collector.telemetry:4318'}
networkPolicy:
  operator:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kuberay}}
      podSelector: {matchLabels: {app.kubernetes.io/name: kuberay-operator}}
  dns:
    - {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: openshift-dns}}}
    - {ipBlock: {cidr: 169.254.20.10/32}}
  dnsPorts: [53, 5353]
  redis: [{ipBlock: {cidr: 192.0.2.0/24}}]
  telemetry: [{namespaceSelector: {}}]
""",
    "outer redis, anybody": """
redis: {enabled: false, address: 'redis://redis.example.com'}
secrets: {redis: outer-redis}
networkPolicy: {dns: []}
telemetry: {otlp_endpoint: 'https://collector.example.com'}
""",
    "no persistence": (
        "{redis: {persistence: {enabled: false}}, "
        "rayRedis: {enabled: true, persistence: {enabled: false}}, secrets: {rayRedis: own}}"
    ),
    "outer redis of many, and one for Ray": """
redis: {enabled: false}
rayRedis: {enabled: true}
secrets: {redis: sentinels}
networkPolicy: {redisPorts: [26379], otherClients: Deny}
""",
    "storage classes": """
redis: {persistence: {storageClass: fast, whenDeleted: Delete}}
adapters: {enabled: true, storageClass: shared, config: {max_per_tenant: 8}}
batches: {enabled: true, storageClass: shared}
rayRedis: {enabled: true, nodeSelector: {a: b}, annotations: {a: b}, persistence: {storageClass: fast}}
image: {pullSecrets: [registry]}
""",
    "backups": (
        "{backups: {enabled: true, existingClaim: backups, keep: 3}, image: {pullSecrets: [registry]}, "
        "autoscaler: {nodeSelector: {a: b}}}"
    ),
    "backups on a claim that is made": "{backups: {enabled: true, storageClass: slow}}",
    "no autoscaler": (
        "{autoscaler: {enabled: false}, networkPolicy: {enabled: false}, "
        "podDisruptionBudgets: false, tenants: {first: []}}"
    ),
    "tariffs": (
        "tariffs: [{model: demo, input: 1.0, cached: 0.5, output: 4.0}, "
        "{model: demo, adapter: 'a*', input: 2.0, output: 8.0}]"
    ),
    "one of each": "{gateway: {replicas: 1}, autoscaler: {replicas: 1}}",
    "a budget": """
autoscaler: {budget: {gpus: 3}}
pools:
  - {name: a, engine: {device: cuda}, pod: {gpus: 2}, autoscale: {priority: 1}}
  - {name: b, autoscale: {gpus: 1}}
""",
    "providers": """
secrets: {providers: keys}
providers:
  - {name: up, base_url: 'https://api.example.com/v1', model: m, served_names: [demo], api_key_env: UP_KEY}
  - {name: cheap, base_url: 'https://api.example.com/v1', model: small, served_names: [demo], api_key_env: UP_KEY}
  - {name: near, base_url: 'http://llm.other.svc:8080/v1', model: m, served_names: [demo]}
networkPolicy: {providers: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: other}}}]}
""",
    "places of adapters": """
secrets: {providers: keys}
adapters:
  enabled: true
  config:
    sources:
      https: public
      hosts: ['files.inner.svc:8080', '[fd00::1]:8081', plain.inner.svc]
      s3: {endpoint: 'http://minio.other.svc:9000', access_key_env: S3_KEY, secret_key_env: S3_SECRET, allow: [a]}
      hub: {}
networkPolicy: {providers: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: other}}}]}
""",
    "adapters from a claim, and places with CAs of one's own": (
        "{adapters: {enabled: true, importClaim: imports, caSecret: cas, config: {sources: {https: listed, "
        "hosts: ['files.inner.svc']}}}}"
    ),
    "a hub of adapters": "{adapters: {enabled: true, config: {sources: {hub: {}}}}}",
    "ingress and route": """
ingress:
  enabled: true
  className: nginx
  host: llm.example.com
  tlsSecret: tls
  annotations: {nginx.ingress.kubernetes.io/proxy-body-size: 1g}
httpRoute: {enabled: true, parentRefs: [{name: public, namespace: gateways}], hostnames: [llm.example.com]}
service: {type: NodePort, nodePort: 30080, annotations: {a: b}}
""",
    "an ingress of any host, with TLS": """
ingress: {enabled: true, tlsSecret: tls}
httpRoute: {enabled: true, parentRefs: [{name: public, port: 443}], timeoutSeconds: 70}
""",
    "plain ingress": "{ingress: {enabled: true, controller: other}, networkPolicy: {monitoring: []}}",
    "monitored": """
monitoring:
  serviceMonitor: {enabled: true, interval: 30s, labels: {release: prometheus}}
  rules: {enabled: true, labels: {release: prometheus}, runbooks: 'https://docs.example.com/alerts'}
  dashboards: {enabled: true, labels: {grafana_dashboard: 'yes'}, folder: Serving}
tls: {gateway: true}
""",
    "monitored without an operator's labels": """
monitoring: {serviceMonitor: {enabled: true}, rules: {enabled: true}, dashboards: {enabled: true}}
autoscaler: {enabled: false}
""",
    "an upgrade in place": "{stream: {accept_previous_hello: true}}",
    "tls of Helm's": "{tls: {stream: true, gateway: true}, ingress: {enabled: true}}",
    "tls of cert-manager's": "{tls: {stream: true, gateway: true, issuer: {name: ca, kind: ClusterIssuer}}}",
    "placed": """
head:
  nodeSelector: {a: b}
  tolerations: [{key: k, operator: Exists}]
  affinity: {nodeAffinity: {}}
  priorityClassName: high
  annotations: {a: b}
gateway: {nodeSelector: {a: b}, spread: None, zoneSpread: DoNotSchedule, annotations: {a: b}, drainSeconds: 45}
autoscaler: {nodeSelector: {a: b}, annotations: {a: b}}
redis: {nodeSelector: {a: b}, annotations: {a: b}}
podDefaults:
  annotations: {a: b}
  spread: None
  runtimeClassName: nvidia
  image: 'registry.example.com/penstock:cuda'
  cacheClaim: kernels
  drainSeconds: 50
pools:
  - name: big
    replicas: 2
    engine: {device: cuda}
    pod: {gpus: 2, gpuResource: amd.com/gpu, drainSeconds: 70}
""",
    "models": """
models: {existingClaim: checkpoints, mountPath: /srv/models, tokenSecret: hub}
adapters: {enabled: true, existingClaim: adapters}
pools: [{name: a, model: /srv/models/a.gguf, served_names: [a]}]
""",
    "downloads beside a claim": (
        "{models: {existingClaim: checkpoints, download: true, cacheSize: 30Gi}, pools: [{name: a, model: org/name}]}"
    ),
    "downloads": "{models: {download: true}, pools: [{name: a, model: org/name}], test: {model: org/name}}",
}
