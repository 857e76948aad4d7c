{{- /* vLLM beside the encoder: what overlays/beside adds to a pod. deploy/overlays/beside says why. */ -}}
{{- define "vitwire.beside.client" -}}
- name: client
  image: {{ include "vitwire.image" . }}
  command: [sh, -c]
  args: ["cd /opt/vitwire/lib/python3*/site-packages && cp -r vitwire vitwire-*.dist-info /client/"]
  resources:
    requests:
      cpu: 100m
      memory: 64Mi
    limits:
      memory: 128Mi
  securityContext:
    {{- include "vitwire.restricted" . | nindent 4 }}
  volumeMounts:
    - name: client
      mountPath: /client
{{- end }}

{{- define "vitwire.beside.engine" -}}
{{- $beside := .Values.beside }}
- name: vllm
  image: {{ $beside.image }}
  args:
    - --model=$(MODEL_ID)
    - --revision=$(MODEL_REVISION)
    - --host=0.0.0.0
    - --port=8000
    - --gpu-memory-utilization={{ $beside.memoryUtilization }}
    - >-
      --ec-transfer-config={"ec_connector": "VitwireECConnector",
      "ec_connector_module_path": "vitwire.integrations.vllm", "ec_role": "ec_consumer",
      "ec_connector_extra_config": {"target": "127.0.0.1:50051", "delivery_bytes": {{ int64 $beside.deliveryBytes }},
      "content_key_file": "/run/vitwire/key"}}
    {{- with $beside.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: USER
      value: vllm
    - name: HOME
      value: /home/vllm
    - name: MODEL_ID
      value: {{ .Values.model.id | quote }}
    - name: MODEL_REVISION
      value: {{ .Values.model.revision | quote }}
    - name: PYTHONPATH
      value: /client
    - name: HF_HOME
      value: /models
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .Values.model.tokenSecret }}
          key: token
          optional: true
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: http
      containerPort: 8000
  lifecycle:
    preStop:
      sleep:
        seconds: 5
  startupProbe:
    {{- include "vitwire.beside.asks" . | nindent 4 }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 180
  readinessProbe:
    {{- include "vitwire.beside.asks" . | nindent 4 }}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 2
  livenessProbe:
    {{- include "vitwire.beside.asks" . | nindent 4 }}
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 6
  resources:
    {{- toYaml $beside.resources | nindent 4 }}
    claims:
      - name: gpu
  securityContext:
    allowPrivilegeEscalation: false
    capabilities:
      drop: [ALL]
  volumeMounts:
    - name: home
      mountPath: /home/vllm
    - name: client
      mountPath: /client
      readOnly: true
    - name: content-key
      mountPath: /run/vitwire
      readOnly: true
    - name: models
      mountPath: /models
    - name: shm
      mountPath: /dev/shm
{{- end }}

{{- define "vitwire.beside.asks" -}}
httpGet:
  port: http
  path: /health
{{- end }}

{{- define "vitwire.beside.volumes" -}}
- name: client
  emptyDir:
    sizeLimit: 64Mi
- name: home
  emptyDir:
    sizeLimit: 8Gi
- name: content-key
  secret:
    secretName: {{ .Values.beside.keySecret }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: 8Gi
{{- end }}
