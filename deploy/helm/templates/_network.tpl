{{/* Peers and ports of the NetworkPolicies. */}}

{{/* Pods of this release by component: list of root and components. */}}
{{- define "penstock.peers" -}}
{{- $root := index . 0 -}}
{{- range $index, $component := (index . 1) }}
{{- if $index }}{{ "\n" }}{{ end -}}
- podSelector: {matchLabels: {app.kubernetes.io/instance: {{ $root.Release.Name | quote }}, app.kubernetes.io/part-of: penstock, app.kubernetes.io/component: {{ $component }}}}
{{- end }}
{{- end }}

{{/* Ray's own pods talk to each other on ports that they choose. */}}
{{- define "penstock.rayPeers" -}}
{{- include "penstock.peers" (list . (list "head" "gateway" "pool")) -}}
{{- end }}

{{- define "penstock.egressDns" -}}
- ports:
    {{- range .Values.networkPolicy.dnsPorts }}
    - {protocol: UDP, port: {{ . }}}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- with .Values.networkPolicy.dns }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "penstock.egressRedis" -}}
{{- if .Values.redis.enabled }}
- to: {{- include "penstock.peers" (list . (list "redis")) | nindent 4 }}
  ports: [{protocol: TCP, port: 6379}]
{{- else }}
- ports:
    - {protocol: TCP, port: {{ include "penstock.portOf" (list .Values.redis.address 6379) }}}
    {{- range .Values.networkPolicy.redisPorts }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- with .Values.networkPolicy.redis }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The collector of traces. */}}
{{- define "penstock.egressTelemetry" -}}
{{- with .Values.telemetry.otlp_endpoint }}
- ports: [{protocol: TCP, port: {{ include "penstock.portOf" (list . (hasPrefix "https:" . | ternary 443 80)) }}}]
  {{- with $.Values.networkPolicy.telemetry }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The internet, without the cluster's own addresses: list of root and ports. */}}
{{- define "penstock.egressInternet" -}}
{{- $root := index . 0 -}}
{{- with index . 1 }}
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except: {{- toYaml $root.Values.networkPolicy.internetExcept | nindent 10 }}
  ports:
    {{- range . }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}
{{- end }}

{{/* Of a URL: list of URL and default. */}}
{{- define "penstock.portOf" -}}
{{- $port := regexFind ":[0-9]+$" (urlParse (index . 0)).host -}}
{{- default (index . 1) (trimPrefix ":" $port) | int -}}
{{- end }}

{{/* Ports of the providers, as a list in JSON. */}}
{{- define "penstock.providerPorts" -}}
{{- $ports := list -}}
{{- range .Values.providers -}}
{{- $ports = append $ports (include "penstock.portOf" (list .base_url (hasPrefix "https:" .base_url | ternary 443 80)) | int) -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end }}

{{/* Ports of the places that adapters come from, as a list in JSON: of listed hosts, the store, the hub; and 443, where a hub redirects to and any other host answers. */}}
{{- define "penstock.adapterSourcePorts" -}}
{{- $sources := include "penstock.adapterSources" . | fromJson -}}
{{- $ports := list -}}
{{- $hasHub := kindIs "map" $sources.hub -}}
{{- if or $hasHub (eq (default "none" $sources.https) "public") }}{{ $ports = append $ports 443 }}{{ end -}}
{{- if or $hasHub (ne (default "none" $sources.https) "none") -}}
{{- range $sources.hosts -}}
{{- $port := trimPrefix ":" (regexFind ":[0-9]+$" (regexReplaceAll "^\\[.*\\]" . "")) -}}
{{- if $port }}{{ $ports = append $ports (int $port) }}{{ else }}{{ $ports = concat $ports (list 443 80) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "s3" "hub" -}}
{{- if kindIs "map" (index $sources $kind) -}}
{{- $url := default "https://" (index $sources $kind).endpoint -}}
{{- $ports = append $ports (include "penstock.portOf" (list $url (hasPrefix "https:" $url | ternary 443 80)) | int) -}}
{{- end -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end }}

{{/* Providers and places of adapters: those of networkPolicy.providers inside the cluster, else the internet. And the hub. */}}
{{- define "penstock.egressGateway" -}}
{{- $ports := concat (include "penstock.providerPorts" . | fromJsonArray) (include "penstock.adapterSourcePorts" . | fromJsonArray) | uniq -}}
{{- if and $ports .Values.networkPolicy.providers }}
- to: {{- toYaml .Values.networkPolicy.providers | nindent 4 }}
  ports:
    {{- range $ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}
{{- if .Values.models.download }}{{ $ports = append $ports 443 | uniq }}{{ end }}
{{- include "penstock.egressInternet" (list . $ports) }}
{{- end }}
