{{/* The name of every object of this release. */}}
{{- define "mixquant-operator.name" -}}
{{- if contains "mixquant-operator" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-mixquant-operator" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "mixquant-operator.selector" -}}
app.kubernetes.io/name: mixquant-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mixquant-operator.labels" -}}
{{ include "mixquant-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "mixquant-operator.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- if .Values.image.digest -}}
{{- printf "%s:%s@%s" .Values.image.repository $tag .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}
{{- end -}}

{{/* What the operator may do where services live: exactly the calls that it makes. */}}
{{- define "mixquant-operator.rules" -}}
- apiGroups: [mixquant.io]
  resources: [mixquantservices]
  verbs: [get, list, watch]
- apiGroups: [mixquant.io]
  resources: [mixquantservices/status]
  verbs: [patch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
# Only where the Prometheus operator is installed; of no use elsewhere.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, create, patch]
{{- if .Values.gatewayAPI.enabled }}
# The routes of services that a gateway splits the traffic of; of a user's route only the weights are changed.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Does a canary fit? Nodes are looked at only where this is a ClusterRole, or with `readNodes`.
- apiGroups: [""]
  resources: [resourcequotas]
  verbs: [list]
{{- if not .Values.watchNamespace }}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
{{- end }}
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
