{{/* Defaults of penstock.yaml, generated from the structs that read it by `python -m deploy.chart_defaults`; use fromJson. */}}

{{- define "penstock.defaults" -}}
{
 "adapters": {
  "max_bytes": 536870912,
  "max_per_tenant": 64
 },
 "batches": {
  "max_tenant_bytes": 1073741824
 },
 "gateway": {
  "request_timeout_s": 600.0
 },
 "autoscale": {
  "min_replicas": 1,
  "max_replicas": 4
 },
 "engine": {
  "runner": "torch",
  "device": "cpu",
  "tensor_parallel_size": 1,
  "dtype": "auto",
  "lm_head": "auto",
  "activations": "auto",
  "kv_dtype": "auto",
  "exact": false,
  "block_size": 16,
  "max_num_seqs": 64,
  "max_batched_tokens": 512,
  "speculation": {
   "method": "none",
   "model": null,
   "head": null,
   "draft_layers": null,
   "max_draft_tokens": 4,
   "adaptive": true
  }
 },
 "gpu": {
  "max_num_seqs": 256,
  "max_batched_tokens": "auto"
 }
}
{{- end }}
