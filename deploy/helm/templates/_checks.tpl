{{/* What values.schema.json can't see, as sentences that say what to do. Run before anything is rendered. */}}

{{- define "penstock.checks" -}}
{{- if not .Values.image.repository }}
{{- fail "image.repository is not set: build an image with `make image`, push it to a registry that the cluster can reach, and name it by --set image.repository=REGISTRY/penstock" }}
{{- end }}
{{- if not (.Capabilities.APIVersions.Has "ray.io/v1/RayService") }}
{{- fail "this cluster has no ray.io/v1 RayService: install KubeRay 1.6 or newer first (helm repo add kuberay https://ray-project.github.io/kuberay-helm; helm install kuberay-operator kuberay/kuberay-operator). With `helm template` add --api-versions ray.io/v1/RayService" }}
{{- end }}
{{- include "penstock.checkName" . }}
{{- include "penstock.checkPorts" . }}
{{- include "penstock.checkPools" . }}
{{- include "penstock.checkBudget" . }}
{{- include "penstock.checkServedNames" . }}
{{- include "penstock.checkTenants" . }}
{{- include "penstock.checkOutside" . }}
{{- if and .Values.tls.issuer.name (not (.Capabilities.APIVersions.Has "cert-manager.io/v1/Certificate")) }}
{{- fail (printf "tls.issuer.name is %s, and the cluster has no cert-manager (no API cert-manager.io/v1): install it, or leave the name empty, and Helm makes the certificates" .Values.tls.issuer.name) }}
{{- end }}
{{- include "penstock.checkSecrets" . }}
{{- include "penstock.checkAdapters" . }}
{{- include "penstock.checkBatches" . }}
{{- if and .Values.httpRoute.enabled (not (.Capabilities.APIVersions.Has "gateway.networking.k8s.io/v1/HTTPRoute")) }}
{{- fail "httpRoute.enabled is true, but this cluster has no Gateway API: install its custom resources, or use ingress.enabled. With `helm template` add --api-versions gateway.networking.k8s.io/v1/HTTPRoute" }}
{{- end }}
{{- include "penstock.checkMonitoring" . }}
{{- end }}

{{- define "penstock.checkMonitoring" -}}
{{- $kinds := dict "serviceMonitor" (list "ServiceMonitor" "PodMonitor") "rules" (list "PrometheusRule") }}
{{- range $name, $wanted := $kinds }}
{{- if (index $.Values.monitoring $name).enabled }}
{{- range $wanted }}
{{- if not ($.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .)) }}
{{- fail (printf "monitoring.%s.enabled is true, but this cluster has no %s: install the Prometheus operator. With `helm template` add --api-versions monitoring.coreos.com/v1/%s" $name . .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.checkName" -}}
{{- $name := include "penstock.fullname" . }}
{{- if or (gt (len $name) 40) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) }}
{{- fail (printf "the name %q does not do: KubeRay needs at most 40 characters, lower case letters, digits and dashes, a letter first; set fullnameOverride" $name) }}
{{- end }}
{{- end }}

{{/* KubeRay's custom resources key ports by their number, and are made last: the API server would refuse a port twice in the middle of an install. */}}
{{- define "penstock.checkPorts" -}}
{{- $taken := dict "8080" "metrics" "52365" "Ray's health" }}
{{- range $name := list "port" "adminPort" }}
{{- $port := index $.Values.gateway $name | int | toString }}
{{- with index $taken $port }}
{{- fail (printf "gateway.%s is %s, which is the port of %s in the same pod: choose another (service.port is what clients see)" $name $port .) }}
{{- end }}
{{- $_ := set $taken $port (printf "gateway.%s" $name) }}
{{- end }}
{{- if and .Values.service.nodePort (eq .Values.service.type "ClusterIP") }}
{{- fail (printf "service.nodePort is %d, but service.type is ClusterIP, which has none: set it to NodePort or LoadBalancer" (int .Values.service.nodePort)) }}
{{- end }}
{{- end }}

{{- define "penstock.checkPools" -}}
{{- $names := list }}
{{- range $index, $pool := .Values.pools }}
{{- $where := printf "pools[%d]" $index }}
{{- if has $pool.name $names }}
{{- fail (printf "%s.name: two pools are named %q" $where $pool.name) }}
{{- end }}
{{- $names = append $names $pool.name }}
{{- $pod := include "penstock.pod" (list $ $pool) | fromYaml }}
{{- $device := default "cpu" (default dict $pool.engine).device }}
{{- if and (eq $device "cuda") (lt (int $pod.gpus) 1) }}
{{- fail (printf "%s.pod.gpus is 0, but engine.device is cuda: a replica needs a GPU of its own" $where) }}
{{- end }}
{{- if and (eq $device "cpu") (gt (int $pod.gpus) 0) }}
{{- fail (printf "%s.pod.gpus is %d, but engine.device is cpu: set engine.device to cuda, or gpus to 0" $where (int $pod.gpus)) }}
{{- end }}
{{- with (default dict $pool.engine).tensor_parallel_size }}
{{- if and (eq $device "cuda") (ne (int .) (int $pod.gpus)) }}
{{- fail (printf "%s.pod.gpus is %d, but engine.tensor_parallel_size is %d: each part of a model takes one GPU; leave one of the two out" $where (int $pod.gpus) (int .)) }}
{{- end }}
{{- end }}
{{- $model := default "demo" $pool.model }}
{{- if and (contains "/" $model) (not (hasPrefix "/" $model)) (not $.Values.models.download) }}
{{- fail (printf "%s.model is %q, from the hub: set models.download=true, or put it on a volume (models.existingClaim) and name its path below %s" $where $model $.Values.models.mountPath) }}
{{- end }}
{{- if and (hasPrefix "/" $model) (not $.Values.models.existingClaim) }}
{{- fail (printf "%s.model is the path %s, but models.existingClaim names no volume with checkpoints" $where $model) }}
{{- end }}
{{- with (default dict (default dict $pool.engine).speculation).model }}
{{- if and (contains "/" .) (not (hasPrefix "/" .)) (not $.Values.models.download) }}
{{- fail (printf "%s.engine.speculation.model is %q, from the hub: set models.download=true, or name a path below %s" $where . $.Values.models.mountPath) }}
{{- end }}
{{- end }}
{{- include "penstock.checkEngine" (list $where $pool) }}
{{- with $pool.autoscale }}
{{- $bounds := merge (deepCopy .) (include "penstock.defaults" $ | fromJson).autoscale }}
{{- $least := int $bounds.min_replicas }}
{{- $most := int $bounds.max_replicas }}
{{- if lt $most $least }}
{{- fail (printf "%s.autoscale.max_replicas (%d) is below autoscale.min_replicas (%d)" $where $most $least) }}
{{- end }}
{{- $first := default 1 $pool.replicas | int }}
{{- if or (lt $first $least) (gt $first $most) }}
{{- fail (printf "%s.replicas is %d: it must lie between autoscale.min_replicas (%d) and autoscale.max_replicas (%d)" $where $first $least $most) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.checkBudget" -}}
{{- with .Values.autoscaler.budget }}
{{- $least := 0 }}
{{- $first := 0 }}
{{- $scaled := 0 }}
{{- range $pool := $.Values.pools }}
{{- with $pool.autoscale }}
{{- $gpus := (include "penstock.pod" (list $ $pool) | fromYaml).gpus | int }}
{{- if not (kindIs "invalid" .gpus) }}{{- $gpus = int .gpus }}{{- end }}
{{- $bounds := merge (deepCopy .) (include "penstock.defaults" $ | fromJson).autoscale }}
{{- $least = add $least (mul $gpus (int $bounds.min_replicas)) }}
{{- $first = add $first (mul $gpus (default 1 $pool.replicas | int)) }}
{{- $scaled = add $scaled $gpus }}
{{- end }}
{{- end }}
{{- if not $scaled }}
{{- fail "autoscaler.budget is set, but no pool with autoscale takes a GPU (pod.gpus, autoscale.gpus)" }}
{{- end }}
{{- if gt (max $least $first | int) (int .gpus) }}
{{- fail (printf "autoscaler.budget.gpus is %d, but the scaled pools take %d GPUs by autoscale.min_replicas and %d by replicas" (int .gpus) (int $least) (int $first)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Secrets that are made are kept over upgrades by looking at those in the cluster. Where nothing can be looked at, each rendering makes others: with
GitOps salts and keys would change under the tenants, and the CA under running pods. Every namespace has the account `default`. */}}
{{- define "penstock.checkSecrets" -}}
{{- $made := list }}
{{- range $kind := list "cluster" "ray" "redis" "rayRedis" "tenants" }}
{{- $is := dict "rayRedis" $.Values.rayRedis.enabled "tenants" (not (empty $.Values.tenants.first)) }}
{{- if and (not (index $.Values.secrets $kind)) (dig $kind true $is) }}{{ $made = append $made (printf "secrets.%s" $kind) }}{{ end }}
{{- end }}
{{- if and (or .Values.tls.stream .Values.tls.gateway) (not .Values.tls.issuer.name) }}{{ $made = append $made "tls.issuer.name (certificates)" }}{{ end }}
{{- if and $made (not .Values.secrets.makeWithoutCluster) (not (lookup "v1" "ServiceAccount" .Release.Namespace "default")) }}
{{- fail (printf "nothing can be seen of a cluster with the namespace %s here (helm template, GitOps, --dry-run=client, --create-namespace), so the Secrets of %s would be made anew with each rendering, which ends tenants' keys and connections: name Secrets of your own there (and an issuer of cert-manager's), create the namespace before the install, or set secrets.makeWithoutCluster=true for a rendering that is thrown away" .Release.Namespace (join ", " $made)) }}
{{- end }}
{{- end }}

{{/* One tenant must not fill the volume of all. */}}
{{- define "penstock.checkAdapters" -}}
{{- if .Values.adapters.enabled }}
{{- $config := merge (deepCopy .Values.adapters.config) (include "penstock.defaults" . | fromJson).adapters }}
{{- $share := mul (int64 $config.max_bytes) (int64 $config.max_per_tenant) }}
{{- $size := include "penstock.bytes" .Values.adapters.size | int64 }}
{{- if ge $share $size }}
{{- fail (printf "one tenant may bring %d bytes of adapters (adapters.config.max_per_tenant times max_bytes), but the volume has %d (adapters.size): make it larger, or the quota smaller" $share $size) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.checkBatches" -}}
{{- if .Values.batches.enabled }}
{{- $config := merge (deepCopy .Values.batches.config) (include "penstock.defaults" . | fromJson).batches }}
{{- $size := include "penstock.bytes" .Values.batches.size | int64 }}
{{- if ge (int64 $config.max_tenant_bytes) $size }}
{{- fail (printf "one tenant may have %d bytes of files (batches.config.max_tenant_bytes), but the volume has %d (batches.size): make it larger, or the quota smaller" (int64 $config.max_tenant_bytes) $size) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.checkOutside" -}}
{{- if not .Values.redis.enabled }}
{{- if and (not .Values.redis.address) (not .Values.rayRedis.enabled) }}
{{- fail "redis.enabled is false, and redis.address names no other one: set it to redis://HOST:PORT or rediss://HOST:PORT, or give Ray one of its own (rayRedis.enabled)" }}
{{- end }}
{{- if not .Values.secrets.redis }}
{{- fail "redis.enabled is false: secrets.redis must name a Secret with the keys url (the whole URL, with its password) and password" }}
{{- end }}
{{- end }}
{{- $set := list }}
{{- range concat (include "penstock.workerEnv" (list . 1) | fromYamlArray) (include "penstock.gatewayEnv" . | fromYamlArray) }}{{ $set = append $set .name }}{{ end }}
{{- range $index, $provider := .Values.providers }}
{{- if and $provider.api_key_env (not $.Values.secrets.providers) }}
{{- fail (printf "providers[%d].api_key_env is %s: secrets.providers must name a Secret that has it as a key" $index $provider.api_key_env) }}
{{- end }}
{{- if has $provider.api_key_env $set }}
{{- fail (printf "providers[%d].api_key_env is %s, which the chart sets itself: name the variable, and its key in secrets.providers, otherwise" $index $provider.api_key_env) }}
{{- end }}
{{- end }}
{{- range $setting, $name := include "penstock.adapterSourceEnv" . | fromJson }}
{{- if and $name (not $.Values.secrets.providers) }}
{{- fail (printf "adapters.config.sources.%s is %s: secrets.providers must name a Secret that has it as a key" $setting $name) }}
{{- end }}
{{- if and $name (has $name $set) }}
{{- fail (printf "adapters.config.sources.%s is %s, which the chart sets itself: name the variable, and its key in secrets.providers, otherwise" $setting $name) }}
{{- end }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled is true, and httpRoute.parentRefs is empty: name the Gateway that it belongs to" }}
{{- end }}
{{- end }}
