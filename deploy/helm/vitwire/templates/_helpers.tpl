{{- define "vitwire.selector" -}}
app.kubernetes.io/name: vitwire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vitwire.labels" -}}
{{ include "vitwire.selector" . }}
app.kubernetes.io/component: encoder
app.kubernetes.io/part-of: vitwire
app.kubernetes.io/version: {{ .Chart.AppVersion }}
{{- end }}

{{- define "vitwire.metadata" -}}
name: {{ .Release.Name }}
labels:
  {{- include "vitwire.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "vitwire.account" -}}
{{ .Values.serviceAccount.name | default (ternary .Release.Name "default" .Values.serviceAccount.create) }}
{{- end }}

{{- /* vLLM needs two minutes to end. */ -}}
{{- define "vitwire.grace" -}}
{{- $grace := int .Values.terminationGracePeriodSeconds }}
{{- ternary (max 120 $grace) $grace .Values.beside.enabled }}
{{- end }}

{{- define "vitwire.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "vitwire.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* A probe's way to ask: gRPC, or HTTP with TLS, which the kubelet's gRPC probes do not support, and on loopback. */ -}}
{{- define "vitwire.asks" -}}
{{- if or .root.Values.tls.secret .root.Values.beside.enabled -}}
httpGet:
  port: metrics
  path: {{ .path }}
{{- else -}}
grpc:
  port: 50051
  service: {{ .service }}
{{- end }}
{{- end }}

{{- define "vitwire.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - type: Percent
      value: 100
      periodSeconds: 60
scaleDown:
  stabilizationWindowSeconds: 900
  policies:
    - type: Pods
      value: 1
      periodSeconds: 300
{{- end }}

{{- define "vitwire.model" -}}
{{ ternary "/models/encoder" "/models" .Values.beside.enabled }}
{{- end }}

{{- define "vitwire.variables" -}}
{{- $settings := deepCopy .Values.settings }}
{{- $fixed := dict "MODEL" (include "vitwire.model" .) "HOST" "0.0.0.0" "PORT" "50051" "METRICS_HOST" "0.0.0.0" "METRICS_PORT" "9464" }}
{{- if .Values.tls.secret }}
{{- $_ := set $fixed "TLS_CERT" "/secrets/tls/tls.crt" }}
{{- $_ := set $fixed "TLS_KEY" "/secrets/tls/tls.key" }}
{{- $_ := set $fixed "REFLECTION" "false" }}
{{- if .Values.tls.clientCertificates }}
{{- $_ := set $fixed "TLS_CLIENT_CA" "/secrets/tls/ca.crt" }}
{{- end }}
{{- end }}
{{- if .Values.tokens.secret }}
{{- $_ := set $fixed "AUTH_TOKENS_FILE" "/secrets/tokens/tokens" }}
{{- end }}
{{- if .Values.tracing.endpoint }}
{{- $_ := set $fixed "OTLP_ENDPOINT" .Values.tracing.endpoint }}
{{- end }}
{{- if .Values.beside.enabled }}
{{- $settings = omit $settings "DEVICE" }}
{{- $_ := set $fixed "HOST" "127.0.0.1" }}
{{- $_ := set $fixed "DEVICES" "cuda:0" }}
{{- $_ := set $fixed "CACHE_BYTES" "8000000000" }}
{{- $_ := set $fixed "NIXL" "true" }}
{{- $_ := set $fixed "RPC_PROCESSES" "1" }}
{{- $_ := set $fixed "DEVICE_MEMORY" .Values.beside.encoderMemory }}
{{- end }}
{{- include "vitwire.environment" (dict "prefix" "VITWIRE_" "settings" (merge $settings $fixed)) }}
{{- end }}

{{- define "vitwire.environment" }}
{{- $prefix := .prefix }}
{{- range $name, $value := .settings }}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) }}
{{- $value = printf "%.0f" $value }}
{{- end }}
{{ $prefix }}{{ $name }}: {{ $value | toString | quote }}
{{- end }}
{{- end }}
