{{- /* What would render and then fail, or do nothing, on the cluster. */ -}}
{{- define "vitwire.check" -}}
{{- $values := .Values }}
{{- $beside := $values.beside.enabled }}
{{- with $values.model }}
{{- $needed := get (dict "hub" "id" "claim" "claim" "image" "image") .source }}
{{- if not (get . $needed) }}
{{- fail (printf "model.%s is empty: model.source %s needs it" $needed .source) }}
{{- end }}
{{- end }}
{{- if and $values.tls.clientCertificates (not $values.tls.secret) }}
{{- fail "tls.clientCertificates needs tls.secret" }}
{{- end }}
{{- if $beside }}
{{- if ne $values.model.source "hub" }}
{{- fail "beside.enabled needs model.source hub: vLLM loads the whole model" }}
{{- end }}
{{- if or $values.tls.secret $values.tokens.secret (ne $values.autoscaling.kind "none") }}
{{- fail "beside.enabled excludes tls, tokens and autoscaling: only vLLM of the pod reaches the encoder" }}
{{- end }}
{{- end }}
{{- if and $values.tokens.secret (not $values.tls.secret) }}
{{- fail "tokens.secret needs tls.secret: without TLS, tokens cross the network in the clear" }}
{{- end }}
{{- if ne $values.autoscaling.kind "none" }}
{{- include "vitwire.check.replicas" (dict "name" "autoscaling" "values" $values.autoscaling) }}
{{- end }}
{{- range $values.extraEnv }}
{{- if regexMatch "^(VITWIRE_.*|MODEL_ID|MODEL_REVISION|HF_TOKEN|HF_HUB_OFFLINE|TRITON_CACHE_DIR)$" .name }}
{{- fail (printf "extraEnv sets %s, which the chart sets; flags belong into settings" .name) }}
{{- end }}
{{- end }}
{{- $ports := "probes, Service and NetworkPolicy rely on it" }}
{{- $http := "the Service has no such port; set embeddings.enabled" }}
{{- $chosen := dict "MODEL" "set model.source and model.id" "HOST" $ports "PORT" $ports "METRICS" $ports
  "METRICS_HOST" $ports "METRICS_PORT" $ports "TLS_CERT" "set tls.secret" "TLS_KEY" "set tls.secret"
  "HTTP_HOST" $http "HTTP_PORT" $http
  "TLS_CLIENT_CA" "set tls.clientCertificates" "AUTH_TOKENS_FILE" "set tokens.secret"
  "OTLP_ENDPOINT" "set tracing.endpoint" "DEVICES" "a pod has one GPU; for several use overlays/multi-gpu" }}
{{- if $beside }}
{{- $_ := set $chosen "DEVICE_MEMORY" "set beside.encoderMemory" }}
{{- end }}
{{- include "vitwire.check.settings" (dict "name" "settings" "settings" $values.settings "fixed" $chosen
  "command" "vitwire-server serve" "flags" (include "vitwire.flags.server" .)) }}
{{- if $values.embeddings.enabled }}
{{- include "vitwire.embeddings.check" . }}
{{- end }}
{{- $lame := get $values.settings "LAME_DUCK_SECONDS" | toString | default "5" | float64 }}
{{- $drain := get $values.settings "DRAIN_SECONDS" | toString | default "30" | float64 }}
{{- if le (include "vitwire.grace" . | float64) (addf 5 $lame $drain) }}
{{- fail (printf "terminationGracePeriodSeconds %s must exceed preStop 5 + %s %v + %s %v"
  (include "vitwire.grace" .) "settings.LAME_DUCK_SECONDS" $lame "settings.DRAIN_SECONDS" $drain) }}
{{- end }}
{{- end }}

{{- define "vitwire.check.replicas" -}}
{{- if gt (int .values.minReplicas) (int .values.maxReplicas) }}
{{- fail (printf "%s.minReplicas %v is above %s.maxReplicas %v"
  .name .values.minReplicas .name .values.maxReplicas) }}
{{- end }}
{{- end }}

{{- define "vitwire.check.settings" -}}
{{- $check := . }}
{{- range $name, $_ := .settings }}
{{- if hasKey $check.fixed $name }}
{{- fail (printf "%s.%s is fixed by the chart: %s" $check.name $name (get $check.fixed $name)) }}
{{- end }}
{{- if not (has $name (regexSplit "\\s+" $check.flags -1)) }}
{{- fail (printf "%s.%s: %s has no such flag" $check.name $name $check.command) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Compared with the commands by tests/contract/test_deploy_helm.py. */ -}}
{{- define "vitwire.flags.server" -}}
ATTENTION_BACKEND AUTH_TOKENS_FILE BUDGETS CACHE_BYTES CANARY_SECONDS CONFIG DECODE DECODE_PROCESSES
DECODE_SECONDS DEVICE DEVICES DEVICE_MEMORY DRAIN_SECONDS DTYPE GRAPHS GRAPH_MEMORY HOST HTTP_HOST HTTP_PORT
IDLE_SECONDS
LAME_DUCK_SECONDS LOG_FORMAT LOG_LEVEL LORA MAX_BUDGET_TOKENS MAX_CONNECTION_AGE_SECONDS MAX_ENCODED_BYTES
MAX_FRAMES_PER_BATCH MAX_IMAGE_PIXELS MAX_ITEMS_PER_BATCH MAX_ITEMS_PER_REQUEST MAX_PATCHES_PER_ITEM
MAX_QUEUED_BYTES MAX_QUEUED_ITEMS MAX_REQUEST_BYTES METRICS METRICS_HOST METRICS_PORT MODEL NIXL NIXL_SECONDS
OTLP_ENDPOINT POOLING PORT PREPARE RECORD_TRACE REFLECTION RPC_PROCESSES STATE_DIR STORE_BYTES STRICT_CONFIG
TLS_CERT TLS_CLIENT_CA TLS_KEY UNIX_SOCKET UNRESPONSIVE_SECONDS WEDGE_SECONDS
{{- end }}

{{- define "vitwire.flags.router" -}}
ALLOW_CALLER_EMBEDS ALLOW_IMAGE_HOST ALLOW_IMAGE_NETWORK API_KEYS_FILE BODY_SECONDS CA CERT CLIPS
CONTENT_KEY_FILE DRAIN_SECONDS ENCODER_RETRIES ENCODER_WAIT ENCODE_SECONDS ENGINE_API_KEY_FILE
ENGINE_CA ENGINE_CONNECT_SECONDS ENGINE_HEALTH_PATH ENGINE_SECONDS ENGINE_URL FETCH_SECONDS HOST KEY
LAME_DUCK_SECONDS LOG_FORMAT LOG_LEVEL MAX_BODY_BYTES MAX_BUFFERED_BYTES MAX_ENCODING MAX_HEADER_BYTES
MAX_IMAGES MAX_IMAGE_BYTES MAX_IMAGE_PIXELS MAX_REQUESTS MODE NO_ENGINE ON_ENCODER_FAILURE PORT
STALL_SECONDS TARGET TLS TOKEN
{{- end }}
