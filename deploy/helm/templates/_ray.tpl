{{/* Ray's pods: the head, gateways and pools. Nothing here may hold what changes without need: any change but a count builds a second Ray cluster. */}}

{{- define "penstock.podDir" -}}/tmp/penstock-pod{{- end }}

{{/* A worker group's start parameters, from its custom resources. Cores are divided by us, so Ray's count must never be what refuses a replica. */}}
{{- define "penstock.rayStartParams" -}}
num-cpus: "64"
object-store-memory: "100663296"
resources: {{ printf "'%s'" (toJson .) | quote }}
{{- end }}

{{/* The raylet answers there, whatever runs in the pod. */}}
{{- define "penstock.rayletProbe" -}}
httpGet: {path: /api/healthz, port: 52365}
{{- end }}

{{/* Where downloads go, all of it within models.cacheSize: below models.mountPath, which a claim makes read-only; then a folder beside it. */}}
{{- define "penstock.hubFolder" -}}
{{- if include "penstock.ownHubFolder" . -}}
/var/cache/huggingface
{{- else -}}
{{ empty .Values.models.existingClaim | ternary (printf "%s/.huggingface" .Values.models.mountPath) "/tmp/.cache/huggingface" }}
{{- end -}}
{{- end }}

{{- define "penstock.ownHubFolder" -}}
{{- if and .Values.models.existingClaim .Values.models.download }}true{{ end -}}
{{- end }}

{{/* What Serve's processes must find before they are imported (base/environment.py: serve_environment), and where files go. */}}
{{- define "penstock.rayEnv" -}}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_FREEZE_GC_ON_STARTUP, value: "1"}
- {name: RAY_SERVE_LOG_TO_STDERR, value: "0"}
- {name: HF_HOME, value: {{ include "penstock.hubFolder" . | quote }}}
{{- if not .Values.models.download }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with .Values.models.tokenSecret }}
{{ include "penstock.secretEnv" (list "HF_TOKEN" . "token") }}
{{- end }}
{{- end }}

{{/* Of gateways and pools: list of root and drain deadline. */}}
{{- define "penstock.workerEnv" -}}
{{ include "penstock.rayEnv" (index . 0) }}
- {name: PENSTOCK_POD_DIR, value: {{ include "penstock.podDir" . }}}
# The preStop hook's patience: draining, and what comes before and after it.
- {name: PENSTOCK_DRAIN_S, value: {{ add (index . 1) 15 | quote }}}
{{- end }}

{{- define "penstock.replicaSecretsFolder" -}}/run/penstock/secrets{{- end }}

{{/* What a replica has of secrets: Redis, and the file that the init container made. The cluster secret only for gateways of the version before. */}}
{{- define "penstock.replicaEnv" -}}
{{ include "penstock.redisEnv" (list . "replica") }}
- {name: PENSTOCK_REPLICA_SECRETS, value: {{ include "penstock.replicaSecretsFolder" . }}/replica}
{{- if .Values.stream.accept_previous_hello }}
{{ include "penstock.clusterSecretEnv" . }}
{{- end }}
{{- end }}

{{/* Derives a replica's secrets; the container that serves never has the cluster secret. List of root and image. */}}
{{- define "penstock.replicaSecretsContainer" -}}
{{- $root := index . 0 -}}
- name: secrets
  image: {{ index . 1 }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [penstock, replica-secrets, {{ include "penstock.replicaSecretsFolder" $root }}/replica]
  securityContext: {{- include "penstock.containerSecurity" $root | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 256Mi}
    limits: {memory: 512Mi}
  env: {{- include "penstock.clusterSecretEnv" $root | nindent 4 }}
  volumeMounts:
    - {name: secrets, mountPath: {{ include "penstock.replicaSecretsFolder" $root }}}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* Places that adapters come from, as penstock.yaml has them; none without adapters. */}}
{{- define "penstock.adapterSources" -}}
{{- if .Values.adapters.enabled }}{{ default dict .Values.adapters.config.sources | toJson }}{{ else }}{}{{ end -}}
{{- end }}

{{/* Settings that name a variable with a credential of such a place, by setting. */}}
{{- define "penstock.adapterSourceEnv" -}}
{{- $sources := include "penstock.adapterSources" . | fromJson -}}
{{- $s3 := default dict $sources.s3 -}}
{{- $hub := default dict $sources.hub -}}
{{- dict "s3.access_key_env" $s3.access_key_env "s3.secret_key_env" $s3.secret_key_env "s3.session_token_env" $s3.session_token_env "hub.token_env" $hub.token_env | toJson -}}
{{- end }}

{{/* Providers may share a key; a variable stands there once. */}}
{{- define "penstock.providerEnv" -}}
{{- $names := list -}}
{{- range .Values.providers }}{{ $names = append $names .api_key_env }}{{ end }}
{{- range (include "penstock.adapterSourceEnv" . | fromJson) }}{{ $names = append $names . }}{{ end }}
{{- range $names | compact | uniq }}
{{ include "penstock.secretEnv" (list . $.Values.secrets.providers .) }}
{{- end }}
{{- end }}

{{/* What replicas have compiled and measured: Triton's kernels and ours, the choices among them, what vLLM keeps. */}}
{{- define "penstock.cacheFolder" -}}/var/cache/penstock{{- end }}

{{/* Volumes: dict of root, tmpSize, shmSize, adapters (bool), adaptersReadOnly (bool, none: false), adapterSources (bool, none: false), batches (bool, none: false), cacheClaim (none: no such volume). */}}
{{- define "penstock.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .tmpSize }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .shmSize }}}
- name: models
  {{- if .root.Values.models.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .root.Values.models.existingClaim | quote }}, readOnly: true}
  {{- else }}
  emptyDir: {sizeLimit: {{ .root.Values.models.cacheSize }}}
  {{- end }}
{{- if include "penstock.ownHubFolder" .root }}
- name: hub
  emptyDir: {sizeLimit: {{ .root.Values.models.cacheSize }}}
{{- end }}
{{- if and .adapters .root.Values.adapters.enabled }}
- name: adapters
  persistentVolumeClaim: {claimName: {{ default (printf "%s-adapters" (include "penstock.fullname" .root)) .root.Values.adapters.existingClaim | quote }}{{ if .adaptersReadOnly }}, readOnly: true{{ end }}}
{{- end }}
{{- if and .adapterSources .root.Values.adapters.enabled }}
{{- with .root.Values.adapters.importClaim }}
- name: adapter-import
  persistentVolumeClaim: {claimName: {{ . | quote }}, readOnly: true}
{{- end }}
{{- with .root.Values.adapters.caSecret }}
- name: adapter-ca
  secret: {secretName: {{ . | quote }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}
{{- if and .batches .root.Values.batches.enabled }}
- name: batches
  persistentVolumeClaim: {claimName: {{ default (printf "%s-batches" (include "penstock.fullname" .root)) .root.Values.batches.existingClaim | quote }}}
{{- end }}
{{- with .cacheClaim }}
- name: cache
  persistentVolumeClaim: {claimName: {{ . | quote }}}
{{- end }}
{{- include "penstock.redisTlsVolume" .root }}
{{- end }}

{{- define "penstock.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
- name: models
  mountPath: {{ .root.Values.models.mountPath }}
  {{- if .root.Values.models.existingClaim }}
  readOnly: true
  {{- end }}
{{- if include "penstock.ownHubFolder" .root }}
- {name: hub, mountPath: {{ include "penstock.hubFolder" .root }}}
{{- end }}
{{- if and .adapters .root.Values.adapters.enabled }}
- {name: adapters, mountPath: {{ include "penstock.adaptersFolder" .root }}{{ if .adaptersReadOnly }}, readOnly: true{{ end }}}
{{- end }}
{{- if and .adapterSources .root.Values.adapters.enabled }}
{{- if .root.Values.adapters.importClaim }}
- {name: adapter-import, mountPath: {{ include "penstock.adapterImportFolder" .root }}, readOnly: true}
{{- end }}
{{- if .root.Values.adapters.caSecret }}
- {name: adapter-ca, mountPath: {{ include "penstock.adapterCaFolder" .root }}, readOnly: true}
{{- end }}
{{- end }}
{{- if and .batches .root.Values.batches.enabled }}
- {name: batches, mountPath: {{ include "penstock.batchesFolder" .root }}}
{{- end }}
{{- if .cacheClaim }}
- {name: cache, mountPath: {{ include "penstock.cacheFolder" .root }}}
{{- end }}
{{- include "penstock.redisTlsMount" .root }}
{{- end }}

{{/* What all of Ray's pods say of themselves before their containers. */}}
{{- define "penstock.rayPodSpec" -}}
serviceAccountName: {{ include "penstock.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "penstock.pullSecrets" . }}
securityContext: {{- include "penstock.podSecurity" 1000 | nindent 2 }}
{{- end }}
