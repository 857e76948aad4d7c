{{- define "vitwire.embeddings.name" -}}
{{ printf "%s-embeddings" (.Release.Name | trunc 52 | trimSuffix "-") }}
{{- end }}

{{- /* The name is that of the scrape job, which must contain `router` (deploy/monitoring/rules.yaml). */ -}}
{{- define "vitwire.embeddings.selector" -}}
app.kubernetes.io/name: vitwire-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vitwire.embeddings.labels" -}}
{{ include "vitwire.embeddings.selector" . }}
app.kubernetes.io/component: router
app.kubernetes.io/part-of: vitwire
app.kubernetes.io/version: {{ .Chart.AppVersion }}
{{- end }}

{{- define "vitwire.embeddings.metadata" -}}
name: {{ include "vitwire.embeddings.name" . }}
labels:
  {{- include "vitwire.embeddings.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "vitwire.embeddings.variables" -}}
{{- $target := printf "dns:///%s:50051" .Release.Name }}
{{- $fixed := dict "HOST" "0.0.0.0" "PORT" "8080" "NO_ENGINE" "true" "TARGET" $target }}
{{- $settings := merge $fixed .Values.embeddings.settings }}
{{- include "vitwire.environment" (dict "prefix" "VITWIRE_ROUTER_" "settings" $settings) }}
{{- end }}

{{- define "vitwire.embeddings.grace" -}}
{{- $settings := .Values.embeddings.settings }}
{{- $lame := get $settings "LAME_DUCK_SECONDS" | toString | default "0" | float64 }}
{{- $drain := get $settings "DRAIN_SECONDS" | toString | default "60" | float64 }}
{{- addf 25 $lame $drain | ceil | int }}
{{- end }}

{{- define "vitwire.embeddings.check" -}}
{{- $values := .Values }}
{{- with $values.embeddings }}
{{- if or $values.beside.enabled $values.tls.secret $values.tokens.secret }}
{{- fail "embeddings.enabled excludes beside, tls and tokens: use apiKeysSecret and ingress" }}
{{- end }}
{{- $fixed := dict "HOST" "the Service relies on it" "PORT" "the Service relies on it"
  "TARGET" "it is this release's encoder" "API_KEYS_FILE" "set embeddings.apiKeysSecret"
  "CONTENT_KEY_FILE" "set embeddings.keySecret" }}
{{- range list "NO_ENGINE" "ENGINE_URL" "ENGINE_API_KEY_FILE" "ENGINE_CA" "MODE" "ON_ENCODER_FAILURE" }}
{{- $_ := set $fixed . "the front end has no engine" }}
{{- end }}
{{- range list "TLS" "CA" "CERT" "KEY" "TOKEN" }}
{{- $_ := set $fixed . "the encoder has neither TLS nor tokens" }}
{{- end }}
{{- include "vitwire.check.settings" (dict "name" "embeddings.settings" "settings" .settings "fixed" $fixed
  "command" "vitwire router" "flags" (include "vitwire.flags.router" $)) }}
{{- if .autoscaling.enabled }}
{{- include "vitwire.check.replicas" (dict "name" "embeddings.autoscaling" "values" .autoscaling) }}
{{- end }}
{{- if and .ingress.enabled (not .ingress.host) }}
{{- fail "embeddings.ingress.enabled needs embeddings.ingress.host" }}
{{- end }}
{{- end }}
{{- end }}
