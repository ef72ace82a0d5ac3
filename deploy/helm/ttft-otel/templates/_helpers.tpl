{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* Names and labels that the templates share. */}}

{{- define "ttft.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* 40 characters, so that the longest suffix stays within the 63 of a label. */}}
{{- define "ttft.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "ttft.name" . }}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "ttft.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: ttft-otel
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Call with (list . "component"). */}}
{{- define "ttft.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "ttft.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "ttft.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Call with the numeric user. */}}
{{- define "ttft.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ttft.serviceAccount" -}}
{{- default (printf "%s-router" (include "ttft.fullname" .)) .Values.router.serviceAccount.name }}
{{- end }}

{{/* Where a container sends OTLP: the values, this release's collector, or nothing. */}}
{{- define "ttft.otlpEndpoint" -}}
{{- if .Values.router.otlpEndpoint }}
{{- .Values.router.otlpEndpoint }}
{{- else if .Values.collector.enabled }}
{{- printf "http://%s-collector.%s.svc:4318" (include "ttft.fullname" .) .Release.Namespace }}
{{- end }}
{{- end }}

{{- define "ttft.tempoEndpoint" -}}
{{- if .Values.collector.tempoEndpoint }}{{ .Values.collector.tempoEndpoint }}
{{- else if .Values.trial.enabled }}{{ include "ttft.fullname" . }}-tempo:4317
{{- else }}{{ fail "collector.tempoEndpoint is empty: name your Tempo, like tempo.monitoring:4317, or set trial.enabled" }}
{{- end }}
{{- end }}

{{- define "ttft.prometheusUrl" -}}
{{- if .Values.collector.prometheusUrl }}{{ .Values.collector.prometheusUrl }}
{{- else if .Values.trial.enabled }}http://{{ include "ttft.fullname" . }}-prometheus:9090
{{- else }}{{ fail "collector.prometheusUrl is empty: name your Prometheus, like http://prometheus.monitoring:9090, or set trial.enabled" }}
{{- end }}
{{- end }}

{{/* Namespaces in which discovery watches EndpointSlices, each once, as JSON. */}}
{{- define "ttft.watchedNamespaces" -}}
{{- $namespaces := list }}
{{- range .Values.router.discover }}
{{- if hasPrefix "k8s://" . }}
{{- $namespaces = append $namespaces (index (splitList "/" (trimPrefix "k8s://" .)) 0) }}
{{- end }}
{{- end }}
{{- uniq $namespaces | toJson }}
{{- end }}
