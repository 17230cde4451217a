{{/* Names, labels and what every pod has in common. */}}

{{- define "penstock.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride -}}
{{- end }}

{{/* Selects all that belong to this release; with a component (a list of root and component) the pods of that one. */}}
{{- define "penstock.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/part-of: penstock
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Of objects, not of pods: a changed pod label would build a second Ray cluster. */}}
{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{- define "penstock.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}
{{- end }}
{{- end }}

{{- define "penstock.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . | quote }}}
  {{- end }}
{{- end }}
{{- end }}

{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Where a pod may run, from a part's values. */}}
{{- define "penstock.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Over nodes and zones, each Ray cluster's pods for themselves: list of a part's values and labels. Nodes whose taints the part can't stand don't count. */}}
{{- define "penstock.spread" -}}
{{- $labels := index . 1 -}}
{{- $over := list (list "kubernetes.io/hostname" (index . 0).spread) (list "topology.kubernetes.io/zone" (index . 0).zoneSpread) -}}
{{- if not (and (eq (index . 0).spread "None") (eq (index . 0).zoneSpread "None")) }}
topologySpreadConstraints:
  {{- range $over }}
  {{- if ne (index . 1) "None" }}
  - maxSkew: 1
    topologyKey: {{ index . 0 }}
    whenUnsatisfiable: {{ index . 1 }}
    nodeTaintsPolicy: Honor
    labelSelector:
      matchLabels: {{- $labels | nindent 8 }}
    matchLabelKeys: [ray.io/cluster]
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "penstock.secretName" -}}
{{- $root := index . 0 -}}{{- $kind := index . 1 -}}
{{- default (printf "%s-%s" (include "penstock.fullname" $root) $kind) (index $root.Values.secrets $kind) -}}
{{- end }}

{{/* A value of a Secret that is there already, else the given one: list of root, Secret, key, new value. Base64. */}}
{{- define "penstock.kept" -}}
{{- $found := lookup "v1" "Secret" (index . 0).Release.Namespace (index . 1) -}}
{{- $data := default dict $found.data -}}
{{- if hasKey $data (index . 2) -}}
{{ index $data (index . 2) }}
{{- else -}}
{{ index . 3 | b64enc }}
{{- end -}}
{{- end }}

{{/* Whose key `helm test` uses and the notes name; empty where nobody is known by name. What a Secret of your own holds can't be seen from here. */}}
{{- define "penstock.testTenant" -}}
{{- $first := (first (default (list (dict "name" "")) .Values.tenants.first)).name -}}
{{- default (empty .Values.secrets.tenants | ternary $first "") .Values.test.tenant -}}
{{- end }}

{{/* Not empty: Redis' data outlives an uninstall, as the claim of our own or in a Redis that isn't ours. */}}
{{- define "penstock.tenantsStay" -}}
{{- $persistence := .Values.redis.persistence -}}
{{- if or (not .Values.redis.enabled) (and $persistence.enabled (eq $persistence.whenDeleted "Retain")) -}}
true
{{- end -}}
{{- end }}

{{/* Not empty: keys may be wanted after an uninstall, from Redis' data or from a backup, and open nothing without the cluster secret. */}}
{{- define "penstock.keysStay" -}}
{{- if or (include "penstock.tenantsStay" .) .Values.backups.enabled -}}
true
{{- end -}}
{{- end }}

{{- define "penstock.redisHost" -}}
{{ include "penstock.fullname" . }}-redis.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "penstock.redisAddress" -}}
{{- if .Values.redis.enabled -}}
redis://{{ include "penstock.redisHost" . }}:6379
{{- else -}}
{{ .Values.redis.address }}
{{- end -}}
{{- end }}

{{/* Where Ray's own state is: in a Redis of its own, or in the one with tenants. */}}
{{- define "penstock.rayRedisAddress" -}}
{{- if .Values.rayRedis.enabled -}}
redis://{{ include "penstock.fullname" . }}-ray-redis.{{ .Release.Namespace }}.svc:6379
{{- else -}}
{{ include "penstock.redisAddress" . }}
{{- end -}}
{{- end }}

{{- define "penstock.rayRedisSecret" -}}
{{- if .Values.rayRedis.enabled -}}
{{ default (printf "%s-ray-redis" (include "penstock.fullname" .)) .Values.secrets.rayRedis }}
{{- else -}}
{{ include "penstock.secretName" (list . "redis") }}
{{- end -}}
{{- end }}

{{/* A quantity as Kubernetes writes it, in bytes. */}}
{{- define "penstock.bytes" -}}
{{- $units := dict "" 1 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (index $units (regexReplaceAll "^[0-9.]+" . "")) | int64 -}}
{{- end }}

{{- define "penstock.secretEnv" -}}
- name: {{ index . 0 | quote }}
  valueFrom:
    secretKeyRef: {name: {{ index . 1 | quote }}, key: {{ index . 2 | quote }}}
{{- end }}

{{/* Redis' address with a role's user: list of root, role and, where it is not the pod's only one, the variable's name. A Secret of your own may have one user for all. */}}
{{- define "penstock.redisEnv" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- $variable := ternary (index . (sub (len .) 1)) "PENSTOCK_REDIS_URL" (gt (len .) 2) -}}
{{- $key := ternary (printf "%s-url" $role) "url" (or $root.Values.redis.roles (empty $root.Values.secrets.redis)) -}}
{{ include "penstock.secretEnv" (list $variable (include "penstock.secretName" (list $root "redis")) $key) }}
{{- end }}

{{- define "penstock.clusterSecretEnv" -}}
{{ include "penstock.secretEnv" (list "PENSTOCK_CLUSTER_SECRET" (include "penstock.secretName" (list . "cluster")) "cluster-secret") }}
{{- end }}

{{/* What gateways need; with what `penstock tenant` does in their pods. */}}
{{- define "penstock.gatewayEnv" -}}
{{ include "penstock.redisEnv" (list . "gateway") }}
{{ include "penstock.redisEnv" (list . "operator" "PENSTOCK_REDIS_URL_OPERATOR") }}
{{ include "penstock.clusterSecretEnv" . }}
{{- end }}

{{/* Deadline of the longest request, whole seconds. */}}
{{- define "penstock.requestSeconds" -}}
{{- (merge (deepCopy .Values.gateway.config) (include "penstock.defaults" . | fromJson).gateway).request_timeout_s | ceil | int -}}
{{- end }}

{{- define "penstock.gatewayDrainSeconds" -}}
{{- default (include "penstock.requestSeconds" .) .Values.gateway.drainSeconds | int -}}
{{- end }}

{{/* pools[].pod over podDefaults, as YAML: list of root and pool. Each field replaces the default's as a whole. */}}
{{- define "penstock.pod" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
{{- $pod := deepCopy $root.Values.podDefaults -}}
{{- range $field, $value := $pool.pod -}}{{- $_ := set $pod $field $value -}}{{- end -}}
{{- $engine := default dict $pool.engine -}}
{{- if kindIs "invalid" $pod.gpus -}}
{{- $_ := set $pod "gpus" (eq (default "cpu" $engine.device) "cuda" | ternary (default 1 $engine.tensor_parallel_size | int) 0) -}}
{{- end -}}
{{- if kindIs "invalid" $pod.shmSize -}}
{{- $parts := max 1 (int $pod.gpus) (int $engine.tensor_parallel_size) -}}
{{- $_ := set $pod "shmSize" (gt (int $parts) 1 | ternary (printf "%dGi" $parts) "256Mi") -}}
{{- end -}}
{{- $_ := set $pod "drainSeconds" (default (include "penstock.gatewayDrainSeconds" $root) $pod.drainSeconds | int) -}}
{{- toYaml $pod -}}
{{- end }}
