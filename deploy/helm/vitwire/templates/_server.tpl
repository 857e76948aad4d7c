{{- /* The container of vitwire-server; beside vLLM it is a sidecar, as in deploy/overlays/beside. */ -}}
{{- define "vitwire.server" -}}
{{- $beside := .Values.beside.enabled }}
- name: vitwire
  image: {{ include "vitwire.image" . }}
  {{- if $beside }}
  restartPolicy: Always
  {{- end }}
  args: [serve]
  envFrom:
    - configMapRef:
        name: {{ .Release.Name }}
  env:
    - name: TRITON_CACHE_DIR
      value: /cache/triton
    - name: HF_HUB_OFFLINE
      value: "1"
    {{- if $beside }}
    - name: TINI_SUBREAPER
      value: "1"
    {{- end }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- if not $beside }}
    - name: grpc
      containerPort: 50051
    {{- end }}
    - name: metrics
      containerPort: 9464
  {{- if not $beside }}
  lifecycle:
    preStop:
      sleep:
        seconds: 5
  {{- end }}
  startupProbe:
    {{- include "vitwire.asks" (dict "root" . "path" "/healthz" "service" "vitwire.v1.EncoderService") | nindent 4 }}
    {{- toYaml .Values.startup | nindent 4 }}
    timeoutSeconds: 3
  {{- if not $beside }}
  readinessProbe:
    {{- include "vitwire.asks" (dict "root" . "path" "/healthz" "service" "vitwire.v1.EncoderService") | nindent 4 }}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  {{- end }}
  livenessProbe:
    {{- include "vitwire.asks" (dict "root" . "path" "/livez" "service" "liveness") | nindent 4 }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: {{ ternary 6 3 $beside }}
  resources:
    {{- if $beside }}
    requests:
      {{- toYaml .Values.resources.requests | nindent 6 }}
    limits:
      {{- omit .Values.resources.limits "nvidia.com/gpu" | toYaml | nindent 6 }}
    claims:
      - name: gpu
    {{- else }}
    {{- toYaml .Values.resources | nindent 4 }}
    {{- end }}
  securityContext:
    {{- include "vitwire.restricted" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: cache
      mountPath: /cache
    - name: models
      mountPath: /models
      readOnly: true
    {{- if $beside }}
    - name: shm
      mountPath: /dev/shm
    {{- end }}
    {{- if .Values.tls.secret }}
    - name: tls
      mountPath: /secrets/tls
      readOnly: true
    {{- end }}
    {{- if .Values.tokens.secret }}
    - name: tokens
      mountPath: /secrets/tokens
      readOnly: true
    {{- end }}
{{- end }}
