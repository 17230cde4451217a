{{/* The RayCluster's groups. Counts are the autoscaler's affair: it puts them into the active RayCluster, so KubeRay's bounds are wide. */}}

{{- define "penstock.headGroup" -}}
{{- $head := .Values.head -}}
{{- $volumes := dict "root" . "tmpSize" $head.tmpSize "shmSize" $head.shmSize "adapters" false -}}
rayStartParams:
  num-cpus: "0"
  object-store-memory: "100663296"
template:
  metadata:
    labels: {{- include "penstock.selector" (list . "head") | nindent 6 }}
    {{- with $head.annotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    {{- include "penstock.rayPodSpec" . | nindent 4 }}
    {{- with include "penstock.placement" $head | trim }}{{ . | nindent 4 }}{{ end }}
    containers:
      - name: ray-head
        image: {{ include "penstock.image" . }}
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        securityContext: {{- include "penstock.containerSecurity" . | nindent 10 }}
        resources: {{- toYaml $head.resources | nindent 10 }}
        env:
          {{- include "penstock.rayEnv" . | nindent 10 }}
          # Serve builds its applications here; a pool's asks how many replicas it had.
          {{- include "penstock.redisEnv" (list . "autoscaler") | nindent 10 }}
          {{- if .Values.redis.tlsSecret }}
          - {name: RAY_REDIS_CA_CERT, value: {{ include "penstock.tlsFolder" . }}/redis/ca.crt}
          {{- end }}
        ports:
          - {name: gcs-server, containerPort: 6379}
          - {name: dashboard, containerPort: 8265}
          # KubeRay asks for a port of this name and makes NAME-serve-svc of it, with every worker inside. Better closed on all than on some of them.
          - {name: serve, containerPort: 9}
          - {name: metrics, containerPort: 8080}
        startupProbe:
          {{- include "penstock.rayletProbe" . | nindent 10 }}
          periodSeconds: 2
          timeoutSeconds: 2
          failureThreshold: 90
        readinessProbe:
          {{- include "penstock.rayletProbe" . | nindent 10 }}
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 3
        livenessProbe:
          {{- include "penstock.rayletProbe" . | nindent 10 }}
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 12
        volumeMounts: {{- include "penstock.volumeMounts" $volumes | nindent 10 }}
    volumes: {{- include "penstock.volumes" $volumes | nindent 6 }}
{{- end }}

{{- define "penstock.gatewayGroup" -}}
{{- $gateway := .Values.gateway -}}
{{- $drain := include "penstock.gatewayDrainSeconds" . -}}
{{- $volumes := dict "root" . "tmpSize" $gateway.tmpSize "shmSize" $gateway.shmSize "adapters" true "adapterSources" true "batches" true -}}
{{- $tls := concat (list .) (include "penstock.tlsOfGateway" . | fromJsonArray) -}}
groupName: gateway
replicas: {{ $gateway.replicas }}
minReplicas: 0
maxReplicas: 1000
rayStartParams: {{- include "penstock.rayStartParams" (dict "gateway" 1 "serve_agent" 1) | nindent 2 }}
template:
  metadata:
    labels: {{- include "penstock.selector" (list . "gateway") | nindent 6 }}
    {{- with $gateway.annotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    {{- include "penstock.rayPodSpec" . | nindent 4 }}
    {{- with include "penstock.placement" $gateway | trim }}{{ . | nindent 4 }}{{ end }}
    {{- with include "penstock.spread" (list $gateway (include "penstock.selector" (list . "gateway"))) | trim }}{{ . | nindent 4 }}{{ end }}
    terminationGracePeriodSeconds: {{ add $drain 45 }}
    containers:
      - name: ray-worker
        image: {{ include "penstock.image" . }}
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        securityContext: {{- include "penstock.containerSecurity" . | nindent 10 }}
        resources: {{- toYaml $gateway.resources | nindent 10 }}
        env:
          {{- include "penstock.workerEnv" (list . $drain) | nindent 10 }}
          {{- include "penstock.gatewayEnv" . | nindent 10 }}
          {{- with include "penstock.providerEnv" . | trim }}{{ . | nindent 10 }}{{ end }}
        ports:
          - {name: http, containerPort: {{ $gateway.port }}}
          - {name: admin, containerPort: {{ $gateway.adminPort }}}
          - {name: metrics, containerPort: 8080}
        # The raylet answers as long as the pod is well; whether the gateway serves is what readiness says.
        startupProbe:
          {{- include "penstock.rayletProbe" . | nindent 10 }}
          periodSeconds: 2
          timeoutSeconds: 2
          failureThreshold: 90
        # Quick, for a gateway that leaves listens on only so long (SPREAD_S in platform/base/pod.py).
        readinessProbe:
          httpGet: {path: /readyz, port: http, scheme: {{ include "penstock.scheme" . | upper }}}
          periodSeconds: 1
          timeoutSeconds: 2
          failureThreshold: 2
        livenessProbe:
          {{- include "penstock.rayletProbe" . | nindent 10 }}
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 6
        lifecycle: {preStop: {exec: {command: [penstock, drain]}}}
        volumeMounts:
          {{- include "penstock.volumeMounts" $volumes | nindent 10 }}
          {{- include "penstock.tlsMounts" $tls | nindent 10 }}
    volumes:
      {{- include "penstock.volumes" $volumes | nindent 6 }}
      {{- include "penstock.tlsVolumes" $tls | nindent 6 }}
{{- end }}

{{/* List of root and pool. */}}
{{- define "penstock.poolGroup" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
{{- $pod := include "penstock.pod" . | fromYaml -}}
{{- $drain := int $pod.drainSeconds -}}
{{- $group := printf "pool-%s" $pool.name -}}
{{- $volumes := dict "root" $root "tmpSize" $pod.tmpSize "shmSize" $pod.shmSize "adapters" true "adaptersReadOnly" true "cacheClaim" $pod.cacheClaim -}}
{{- $tls := concat (list $root) (include "penstock.tlsOfPool" $root | fromJsonArray) -}}
groupName: {{ $group }}
replicas: {{ default 1 $pool.replicas | int }}
minReplicas: 0
maxReplicas: 1000
rayStartParams: {{- include "penstock.rayStartParams" (dict $group 1) | nindent 2 }}
template:
  metadata:
    labels: {{- include "penstock.selector" (list $root "pool") | nindent 6 }}
    {{- with $pod.annotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    {{- include "penstock.rayPodSpec" $root | nindent 4 }}
    {{- with include "penstock.placement" $pod | trim }}{{ . | nindent 4 }}{{ end }}
    {{- $spread := printf "%s\nray.io/group: %s" (include "penstock.selector" (list $root "pool")) $group }}
    {{- with include "penstock.spread" (list $pod $spread) | trim }}{{ . | nindent 4 }}{{ end }}
    terminationGracePeriodSeconds: {{ add $drain 45 }}
    initContainers:
      {{- include "penstock.replicaSecretsContainer" (list $root (default (include "penstock.image" $root) $pod.image)) | nindent 6 }}
    containers:
      - name: ray-worker
        image: {{ default (include "penstock.image" $root) $pod.image }}
        imagePullPolicy: {{ $root.Values.image.pullPolicy }}
        securityContext: {{- include "penstock.containerSecurity" . | nindent 10 }}
        resources: {{- include "penstock.poolResources" $pod | nindent 10 }}
        env:
          {{- include "penstock.workerEnv" (list $root $drain) | nindent 10 }}
          {{- include "penstock.replicaEnv" $root | nindent 10 }}
          {{- if $pod.cacheClaim }}
          - {name: XDG_CACHE_HOME, value: {{ include "penstock.cacheFolder" . }}}
          - {name: TRITON_CACHE_DIR, value: {{ include "penstock.cacheFolder" . }}/triton}
          {{- end }}
        ports:
          - {name: metrics, containerPort: 8080}
        # The raylet answers long before the model is loaded; ready is the pod whose replica serves.
        startupProbe:
          {{- include "penstock.rayletProbe" . | nindent 10 }}
          periodSeconds: 2
          timeoutSeconds: 2
          failureThreshold: 90
        readinessProbe:
          exec: {command: [bash, -c, '[ -e "$PENSTOCK_POD_DIR/ready" ] && [ ! -e "$PENSTOCK_POD_DIR/drain" ]']}
          periodSeconds: 2
          timeoutSeconds: 5
          failureThreshold: 2
        livenessProbe:
          {{- include "penstock.rayletProbe" . | nindent 10 }}
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 6
        lifecycle: {preStop: {exec: {command: [penstock, drain]}}}
        volumeMounts:
          {{- include "penstock.volumeMounts" $volumes | nindent 10 }}
          - {name: secrets, mountPath: {{ include "penstock.replicaSecretsFolder" $root }}, readOnly: true}
          {{- include "penstock.tlsMounts" $tls | nindent 10 }}
    volumes:
      {{- include "penstock.volumes" $volumes | nindent 6 }}
      {{- include "penstock.tlsVolumes" $tls | nindent 6 }}
      - name: secrets
        emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}

{{/* Resources of a pool's container, GPUs among them. */}}
{{- define "penstock.poolResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if int .gpus -}}
{{- $_ := set $resources "limits" (merge (dict .gpuResource (int .gpus | toString)) (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
