{{/* penstock.yaml and Serve's configuration, out of values. Times and sizes pass as they are: toYaml keeps whole numbers whole. */}}

{{- define "penstock.adaptersFolder" -}}/var/lib/penstock/adapters{{- end }}
{{- define "penstock.adapterImportFolder" -}}/var/lib/penstock/import{{- end }}
{{- define "penstock.adapterCaFolder" -}}/etc/penstock/tls/adapters{{- end }}
{{- define "penstock.batchesFolder" -}}/var/lib/penstock/batches{{- end }}

{{/* A pool as penstock.yaml has it: list of root and pool. Its model is divided among the GPUs of its pods. */}}
{{- define "penstock.pool" -}}
{{- $pool := omit (deepCopy (index . 1)) "pod" -}}
{{- $gpus := int (include "penstock.pod" . | fromYaml).gpus -}}
{{- if gt $gpus 1 -}}
{{- $_ := set $pool "engine" (merge (dict "tensor_parallel_size" $gpus) (default dict $pool.engine)) -}}
{{- end -}}
{{- toYaml $pool -}}
{{- end }}

{{- define "penstock.gatewayConfig" -}}
{{- $own := dict "host" "0.0.0.0" "port" .Values.gateway.port "admin_port" .Values.gateway.adminPort -}}
{{- if .Values.tls.gateway -}}{{- $_ := set $own "tls" (include "penstock.gatewayTls" . | fromYaml) -}}{{- end -}}
{{- toYaml (merge $own .Values.gateway.config) -}}
{{- end }}

{{- define "penstock.adapters" -}}
{{- $own := dict "folder" (include "penstock.adaptersFolder" .) -}}
{{- if .Values.adapters.importClaim -}}{{- $_ := set $own "import_folder" (include "penstock.adapterImportFolder" .) -}}{{- end -}}
{{- if .Values.adapters.caSecret -}}{{- $_ := set $own "sources" (dict "ca_file" (printf "%s/ca.crt" (include "penstock.adapterCaFolder" .))) -}}{{- end -}}
{{- toYaml (merge $own (deepCopy .Values.adapters.config)) -}}
{{- end }}

{{- define "penstock.batches" -}}
{{- toYaml (merge (dict "folder" (include "penstock.batchesFolder" .)) .Values.batches.config) -}}
{{- end }}

{{/* Without redis: its URL is a secret and comes by the environment. */}}
{{- define "penstock.yaml" -}}
gateway: {{- include "penstock.gatewayConfig" . | nindent 2 }}
{{- with include "penstock.stream" . }}
stream: {{- . | nindent 2 }}
{{- end }}
telemetry: {{- toYaml .Values.telemetry | nindent 2 }}
targets: {{- toYaml .Values.targets | nindent 2 }}
{{- if .Values.adapters.enabled }}
adapters: {{- include "penstock.adapters" . | nindent 2 }}
{{- end }}
{{- if .Values.batches.enabled }}
batches: {{- include "penstock.batches" . | nindent 2 }}
{{- end }}
{{- with .Values.autoscaler.budget }}
autoscale_budget: {{- toYaml . | nindent 2 }}
{{- end }}
pools:
{{- range .Values.pools }}
  - {{ include "penstock.pool" (list $ .) | indent 4 | trim }}
{{- end }}
providers: {{- toYaml .Values.providers | nindent 2 }}
{{- with .Values.tariffs }}
tariffs: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Serve's declarative configuration: an application for the gateways, one for the autoscaler's agent in Ray, one for each pool. No proxy: gateways listen for themselves. */}}
{{- define "penstock.serveConfig" -}}
proxy_location: Disabled
applications:
  - name: gateway
    import_path: penstock.cli.serve_apps:gateway
    route_prefix: null
    args:
      replicas: {{ .Values.gateway.replicas }}
      drain_s: {{ include "penstock.gatewayDrainSeconds" . }}
      config: {{- include "penstock.yaml" . | nindent 8 }}
  # What the autoscaler asks of Serve goes through Redis to this one: so nobody but KubeRay needs Ray's dashboard.
  - name: serve-agent
    import_path: penstock.cli.serve_apps:serve_agent
    route_prefix: null
    args:
      config: {{- include "penstock.yaml" . | nindent 8 }}
{{- range .Values.pools }}
  - name: pool-{{ .name }}
    import_path: penstock.cli.serve_apps:pool
    route_prefix: null
    external_scaler_enabled: true
    args:
      drain_s: {{ (include "penstock.pod" (list $ .) | fromYaml).drainSeconds | int }}
      pool: {{- include "penstock.pool" (list $ .) | nindent 8 }}
      {{- if $.Values.adapters.enabled }}
      adapters: {{- include "penstock.adapters" $ | nindent 8 }}
      {{- end }}
      {{- with include "penstock.stream" $ }}
      stream: {{- . | nindent 8 }}
      {{- end }}
      targets: {{- toYaml $.Values.targets | nindent 8 }}
{{- end }}
{{- end }}
