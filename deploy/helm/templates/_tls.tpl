{{/* TLS inside the cluster: certificates of cert-manager's or of Helm's own, as Secrets with tls.crt, tls.key and ca.crt. */}}

{{- define "penstock.tlsFolder" -}}/etc/penstock/tls{{- end }}

{{/* Every certificate by name: its DNS names, and the group that shares a CA. */}}
{{- define "penstock.tlsCertificates" -}}
{{- $full := include "penstock.fullname" . -}}
{{- $host := printf "%s.%s" $full .Release.Namespace -}}
{{- $found := dict -}}
{{- if .Values.tls.stream -}}
{{- $_ := set $found "gateway" (dict "names" (list "gateway.penstock") "group" "stream") -}}
{{- $_ := set $found "replica" (dict "names" (list "replica.penstock") "group" "stream") -}}
{{- end -}}
{{- if .Values.tls.gateway -}}
{{- $_ := set $found "http" (dict "names" (list $full $host (printf "%s.svc" $host) (printf "%s-admin.%s.svc" $full .Release.Namespace)) "group" "http") -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{- define "penstock.tlsSecret" -}}
{{ include "penstock.fullname" (index . 0) }}-tls-{{ index . 1 }}
{{- end }}

{{/* A certificate's data: what is there while its whole group is, else a new one of the CA. List of root, name, certificate and CA. */}}
{{- define "penstock.tlsData" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $wanted := index . 2 -}}{{- $ca := index . 3 -}}
{{- $there := true -}}
{{- range $each, $other := include "penstock.tlsCertificates" $root | fromJson -}}
{{- if and (eq $other.group $wanted.group) (not (lookup "v1" "Secret" $root.Release.Namespace (include "penstock.tlsSecret" (list $root $each)))) -}}
{{- $there = false -}}
{{- end -}}
{{- end -}}
{{- if $there -}}
{{- toYaml (lookup "v1" "Secret" $root.Release.Namespace (include "penstock.tlsSecret" (list $root $name))).data -}}
{{- else -}}
{{- $certificate := genSignedCert (first $wanted.names) nil $wanted.names 3650 $ca -}}
{{- toYaml (dict "tls.crt" ($certificate.Cert | b64enc) "tls.key" ($certificate.Key | b64enc) "ca.crt" ($ca.Cert | b64enc)) -}}
{{- end -}}
{{- end }}

{{/* penstock.yaml's stream, with its certificates. */}}
{{- define "penstock.stream" -}}
{{- $folder := printf "%s/stream" (include "penstock.tlsFolder" .) -}}
{{- $files := dict "ca" (print $folder "/ca.crt") "certificate" (print $folder "/tls.crt") "key" (print $folder "/tls.key") -}}
{{- $stream := deepCopy .Values.stream -}}
{{- if .Values.tls.stream -}}{{- $_ := set $stream "tls" $files -}}{{- end -}}
{{- if $stream -}}{{- toYaml $stream -}}{{- end -}}
{{- end }}

{{/* penstock.yaml's gateway.tls. */}}
{{- define "penstock.gatewayTls" -}}
{{- $folder := printf "%s/http" (include "penstock.tlsFolder" .) -}}
certificate: {{ $folder }}/tls.crt
key: {{ $folder }}/tls.key
{{- end }}

{{/* Volumes of certificates, as a list: root and pairs of a certificate's name and the folder it lies in. */}}
{{- define "penstock.tlsVolumes" -}}
{{- $root := index . 0 -}}
{{- range rest . }}
- name: tls-{{ index . 1 }}
  secret: {secretName: {{ include "penstock.tlsSecret" (list $root (index . 0)) | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "penstock.tlsMounts" -}}
{{- $root := index . 0 -}}
{{- range rest . }}
- {name: tls-{{ index . 1 }}, mountPath: {{ include "penstock.tlsFolder" $root }}/{{ index . 1 }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "penstock.tlsOfGateway" -}}
{{- $found := list -}}
{{- if .Values.tls.stream -}}{{- $found = append $found (list "gateway" "stream") -}}{{- end -}}
{{- if .Values.tls.gateway -}}{{- $found = append $found (list "http" "http") -}}{{- end -}}
{{- toJson $found -}}
{{- end }}

{{- define "penstock.tlsOfPool" -}}
{{- toJson (ternary (list (list "replica" "stream")) list .Values.tls.stream) -}}
{{- end }}

{{/* Files by which a rediss:// of yours is spoken to, in every pod that does. */}}
{{- define "penstock.redisTlsVolume" -}}
{{- with .Values.redis.tlsSecret }}
- name: tls-redis
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "penstock.redisTlsMount" -}}
{{- if .Values.redis.tlsSecret }}
- {name: tls-redis, mountPath: {{ include "penstock.tlsFolder" . }}/redis, readOnly: true}
{{- end }}
{{- end }}

{{- define "penstock.scheme" -}}{{ ternary "https" "http" .Values.tls.gateway }}{{- end }}
