{{/* What penstock.yaml's structs refuse of several fields together, said before anything is created; a single field's bounds are in values.schema.json. */}}

{{/* As workers/config.py and cli/config.py have it: list of the place and a pool. */}}
{{- define "penstock.checkEngine" -}}
{{- $where := index . 0 -}}{{- $pool := index . 1 -}}
{{- $defaults := include "penstock.defaults" . | fromJson -}}{{- $own := deepCopy (default dict $pool.engine) -}}
{{- if eq (default "cpu" $own.device) "cuda" }}{{ $own = merge $own $defaults.gpu }}{{ end -}}
{{- $engine := merge $own $defaults.engine -}}
{{- $speculation := $engine.speculation -}}{{- $args := default dict (default dict $engine.vllm).args -}}
{{- $isDivided := gt (int $engine.tensor_parallel_size) 1 -}}{{- $isGpu := ne $engine.device "cpu" -}}{{- $isVllm := eq $engine.runner "vllm" -}}{{- $isDraft := eq $speculation.method "draft" -}}{{- $isHead := eq $speculation.method "head" -}}
{{- $wrong := list
  (list (and (eq (toString (default dict $pool.engine).max_batched_tokens) "auto") (or (not $isGpu) $isVllm)) "max_batched_tokens is auto, which is for our own engine (runner torch) on device cuda: give a number")
  (list (and (ne (toString $engine.max_batched_tokens) "auto") (lt (int $engine.max_batched_tokens) (int $engine.max_num_seqs))) (printf "max_batched_tokens is %d: it must be at least max_num_seqs (%d)" (int $engine.max_batched_tokens) (int $engine.max_num_seqs)))
  (list (and $isGpu (eq $engine.runner "timed")) "runner is timed, which computes nothing: device must be cpu")
  (list (and $engine.exact (or $isGpu $isVllm (eq $engine.runner "timed"))) "exact is true, which only our own engine (runner torch) on device cpu can be")
  (list (and $isDivided (eq $engine.runner "timed")) (printf "tensor_parallel_size is %d, but runner timed computes nothing" (int $engine.tensor_parallel_size)))
  (list (and $isDivided (or $engine.exact (ne $engine.activations "auto"))) (printf "tensor_parallel_size is %d: neither exact nor activations can be set for a model in parts" (int $engine.tensor_parallel_size)))
  (list (and $isGpu (eq $engine.runner "torch") (or (lt (int $engine.block_size) 8) (gt (int $engine.block_size) 128))) (printf "block_size is %d: on GPUs it must be from 8 to 128" (int $engine.block_size)))
  (list (eq $engine.kv_dtype ($isGpu | ternary "int8" "fp8")) (printf "kv_dtype is %s, which is not for device %s: 8-bit keys and values are int8 on the CPU, fp8 on a GPU" $engine.kv_dtype $engine.device))
  (list (and (ne $engine.kv_dtype "auto") $isVllm) (printf "kv_dtype is %s, which is for our own engine: vllm.args can set vLLM's" $engine.kv_dtype))
  (list (and (has $engine.activations (list "int8" "int16")) (or $isGpu $isVllm $engine.exact (eq $engine.dtype "float32"))) (printf "activations is %s, which is for our own engine on device cpu, and neither for exact nor for dtype float32" $engine.activations))
  (list (and (eq $engine.activations "bf16") $isVllm) "activations is bf16, which is for our own engine: vllm.args can set vLLM's")
  (list (and $isVllm (hasKey (default dict $pool.engine) "overlap") (not (default dict $pool.engine).overlap)) "overlap is false, which is for our own engine: vllm.args can set vLLM's")
  (list (and (has $engine.lm_head (list "int8" "int4")) $isVllm) (printf "lm_head is %s, which is for our own engine: vLLM takes the checkpoint as it is" $engine.lm_head))
  (list (and (ne $speculation.method "none") $isVllm) (printf "speculation.method is %s, which is for our own engine: vllm.args can set vLLM's" $speculation.method))
  (list (and $isVllm (hasKey $args "tensor_parallel_size")) "vllm.args.tensor_parallel_size is set: say engine.tensor_parallel_size, by which GPUs are reserved too")
  (list (and $isVllm (or (hasKey $args "pipeline_parallel_size") (hasKey $args "data_parallel_size"))) "vllm.args has pipeline_parallel_size or data_parallel_size: a replica takes tensor_parallel_size GPUs, and no more than those are reserved")
  (list (and $isDraft (not $speculation.model)) "speculation.method is draft: speculation.model must name the draft model")
  (list (and $speculation.model (not $isDraft)) "speculation.model is that of method draft, which is not set")
  (list (and $speculation.draft_layers (not $isDraft)) "speculation.draft_layers is of method draft, which is not set")
  (list (and $isHead (not $speculation.head)) "speculation.method is head: speculation.head must name its file")
  (list (and $speculation.head (not $isHead)) "speculation.head is that of method head, which is not set")
  (list (and $isHead (or $isGpu $engine.exact (eq $engine.dtype "float32"))) "speculation.method is head, which is for the kernels of device cpu, and neither for exact nor for dtype float32")
-}}
{{- range $wrong }}
{{- if index . 0 }}{{ fail (printf "%s.engine.%s" $where (index . 1)) }}{{ end }}
{{- end }}
{{- end }}

{{/* Names of the API: in a tier each means one model, and a provider's are served by a pool too. */}}
{{- define "penstock.checkServedNames" -}}
{{- $places := dict -}}{{- $served := dict -}}{{- $parsers := dict -}}{{- $thinking := dict -}}
{{- range $index, $pool := .Values.pools }}
{{- $_ := set $places $pool.name "a pool" }}
{{- $model := default "demo" $pool.model }}
{{- $engine := merge (deepCopy (default dict $pool.engine)) (include "penstock.defaults" $ | fromJson).engine }}
{{- $what := printf "model %s with engine.block_size %d" $model (int $engine.block_size) }}
{{- range default (list $model) $pool.served_names }}
{{- $key := printf "%s %s" (default "cloud" $pool.tier) . }}
{{- with get $served $key }}
{{- if ne . $what }}{{ fail (printf "pools[%d] serves in its tier what another pool calls the same: %s, and there %s; choose another of pools[%d].served_names" $index $what . $index) }}{{ end }}
{{- end }}
{{- $_ := set $served $key $what }}
{{- $parser := default "auto" $pool.tool_parser }}
{{- $parsed := printf "%s of %s" . $model }}
{{- with get $parsers $parsed }}
{{- if ne . $parser }}{{ fail (printf "pools[%d].tool_parser is %s, and another pool that serves %s has %s; pools of one model and name must agree" $index $parser $parsed .) }}{{ end }}
{{- end }}
{{- $_ := set $parsers $parsed $parser }}
{{- $reasoning := default "auto" $pool.reasoning_parser }}
{{- with get $thinking $parsed }}
{{- if ne . $reasoning }}{{ fail (printf "pools[%d].reasoning_parser is %s, and another pool that serves %s has %s; pools of one model and name must agree" $index $reasoning $parsed .) }}{{ end }}
{{- end }}
{{- $_ := set $thinking $parsed $reasoning }}
{{- $_ := set $served . $what }}
{{- end }}
{{- end }}
{{- range $index, $provider := .Values.providers }}
{{- with get $places $provider.name }}{{ fail (printf "providers[%d].name is %s, which %s has already" $index $provider.name .) }}{{ end }}
{{- $_ := set $places $provider.name "another provider" }}
{{- range $provider.served_names }}
{{- if not (hasKey $served .) }}{{ fail (printf "providers[%d].served_names has %s, which no pool serves" $index .) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Each has its key in one Secret, by its name. */}}
{{- define "penstock.checkTenants" -}}
{{- $names := list "tenants.yaml" -}}
{{- range $index, $tenant := .Values.tenants.first }}
{{- if has $tenant.name $names }}{{ fail (printf "tenants.first[%d].name is %s, which is taken" $index $tenant.name) }}{{ end }}
{{- $names = append $names $tenant.name }}
{{- end }}
{{- end }}
