{{- define "novainfer.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "novainfer.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "novainfer.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "novainfer.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* A name of at most 44 characters (KubeRay appends up to 19): what would be longer is told apart by its hash.
     Takes a dict of root and suffix. */}}
{{- define "novainfer.objectName" -}}
{{- $whole := printf "%s-%s" (include "novainfer.fullname" .root) .suffix -}}
{{- if gt (len $whole) 44 -}}
{{- printf "%s-%s" ($whole | trunc 35 | trimSuffix "-") ($whole | sha256sum | trunc 8) -}}
{{- else -}}
{{- $whole -}}
{{- end -}}
{{- end -}}

{{/* All models with their defaults filled in, as JSON: {"models": [...]}. */}}
{{- define "novainfer.models" -}}
{{- $models := list -}}
{{- $names := dict -}}
{{- range .Values.models -}}
{{- if hasKey $names .name -}}{{- fail (printf "models: two are named %s" .name) -}}{{- end -}}
{{- $_ := set $names .name true -}}
{{- $models = append $models (mergeOverwrite (deepCopy $.Values.modelDefaults) (deepCopy .)) -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{- define "novainfer.modelName" -}}
{{- include "novainfer.objectName" (dict "root" .root "suffix" .model.name) -}}
{{- end -}}

{{/* What metrics call it. */}}
{{- define "novainfer.servedName" -}}
{{- if .servedModelName -}}{{- first .servedModelName -}}{{- else -}}{{- .model -}}{{- end -}}
{{- end -}}

{{/* Takes a dict of root and model, whose image goes before the chart's. */}}
{{- define "novainfer.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (deepCopy .model.image) -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}

{{- define "novainfer.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "novainfer.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Of every object. */}}
{{- define "novainfer.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "novainfer.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: novainfer
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* By which a model's pods are found: never changed by an upgrade. */}}
{{- define "novainfer.selector" -}}
app.kubernetes.io/name: {{ include "novainfer.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ include "novainfer.component" . }}
{{- end -}}

{{- define "novainfer.component" -}}
{{- .model.name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* preStop, then the drain, then the end of gateways, scheduler and ranks. */}}
{{- define "novainfer.gracePeriod" -}}
{{- $least := add .Values.preStopSeconds .Values.drainTimeout 50 -}}
{{- $given := .Values.terminationGracePeriodSeconds -}}
{{- if kindIs "invalid" $given -}}
{{- $least -}}
{{- else if lt (int $given) (int $least) -}}
{{- fail (printf "terminationGracePeriodSeconds must be at least %d: preStopSeconds + drainTimeout + 50" $least) -}}
{{- else -}}
{{- int $given -}}
{{- end -}}
{{- end -}}

{{/* Flags of `novainfer serve`, as a YAML list. */}}
{{- define "novainfer.args" -}}
{{- $m := .model -}}
- serve
- {{ printf "--model=%s" $m.model | quote }}
{{- range $m.servedModelName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
- --host=0.0.0.0
- --port=8000
- --device={{ $m.device }}
- --tensor-parallel-size={{ $m.tensorParallelSize }}
{{- if $m.engineReplicas }}
- --replicas={{ $m.engineReplicas }}
{{- end }}
- --num-gateways={{ $m.gateways }}
- --drain-timeout={{ .root.Values.drainTimeout }}
- --start-timeout={{ $m.startTimeout }}
{{- if $m.apiKeys.existingSecret }}
- --api-key-file=/etc/novainfer/keys/{{ $m.apiKeys.key }}
{{- end }}
{{- range $m.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "novainfer.env" -}}
{{- $m := .model -}}
- name: HF_HOME
  value: /data/huggingface
- name: NOVAINFER_CACHE_DIR
  value: /data/cache
- name: TRITON_CACHE_DIR
  value: /data/triton
- name: HOME
  value: /tmp
{{- if $m.config }}
- name: NOVAINFER_CONFIG
  value: /etc/novainfer/config/config.yaml
{{- end }}
{{- if $m.hfToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $m.hfToken.existingSecret }}
      key: {{ $m.hfToken.key }}
{{- end }}
{{- with $m.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "novainfer.volumeMounts" -}}
{{- $m := .model -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
- {name: data, mountPath: /data}
{{- if $m.config }}
- {name: config, mountPath: /etc/novainfer/config, readOnly: true}
{{- end }}
{{- if $m.apiKeys.existingSecret }}
- {name: keys, mountPath: /etc/novainfer/keys, readOnly: true}
{{- end }}
{{- end -}}

{{- define "novainfer.volumes" -}}
{{- $m := .model -}}
- name: tmp
  emptyDir: {sizeLimit: 4Gi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $m.shm.size }}}
- name: data
{{- if $m.cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ $m.cache.existingClaim }}}
{{- else if $m.cache.size }}
  persistentVolumeClaim: {claimName: {{ include "novainfer.modelName" . }}}
{{- else }}
  emptyDir: {sizeLimit: {{ $m.cache.emptyDirLimit }}}
{{- end }}
{{- if $m.config }}
- name: config
  configMap: {name: {{ include "novainfer.modelName" . }}}
{{- end }}
{{- if $m.apiKeys.existingSecret }}
- name: keys
  secret: {secretName: {{ $m.apiKeys.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Probes and end of the container that serves. */}}
{{- define "novainfer.life" -}}
startupProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div (add .model.startTimeout 9) 10 }}
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  preStop:
    sleep: {seconds: {{ .root.Values.preStopSeconds }}}
{{- end -}}

{{/* What pods of a server and of ranks have in common. */}}
{{- define "novainfer.pod" -}}
{{- $m := .model -}}
serviceAccountName: {{ include "novainfer.serviceAccountName" .root }}
automountServiceAccountToken: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
terminationGracePeriodSeconds: {{ include "novainfer.gracePeriod" .root }}
{{- with $m.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $m.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $m.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $m.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $m.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
{{- if $m.topologySpreadConstraints }}
  {{- toYaml $m.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "novainfer.selector" . | nindent 8 }}
{{- end }}
volumes:
  {{- include "novainfer.volumes" . | nindent 2 }}
{{- end -}}

{{/* Image, environment and mounts of every container. */}}
{{- define "novainfer.container" -}}
image: {{ include "novainfer.image" . }}
imagePullPolicy: {{ default .root.Values.image.pullPolicy .model.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
env:
  {{- include "novainfer.env" . | nindent 2 }}
{{- with .model.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "novainfer.volumeMounts" . | nindent 2 }}
{{- end -}}

{{- define "novainfer.podAnnotations" -}}
{{- if .model.config }}
checksum/config: {{ toYaml .model.config | sha256sum }}
{{- end }}
{{- with .model.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "novainfer.podLabels" -}}
{{ include "novainfer.labels" .root }}
app.kubernetes.io/component: {{ include "novainfer.component" . }}
{{- with .model.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The service behind a model's name in ingress.hosts and httpRoute.hosts. */}}
{{- define "novainfer.backend" -}}
{{- $found := "" -}}
{{- range (include "novainfer.models" .root | fromJson).models -}}
{{- if eq .name $.wanted -}}{{- $found = include "novainfer.modelName" (dict "root" $.root "model" .) -}}{{- end -}}
{{- end -}}
{{- if not $found -}}{{- fail (printf "hosts: there is no model named %s" .wanted) -}}{{- end -}}
{{- $found -}}
{{- end -}}
