# The parts of the one-node cluster: its network, cgroup, certificates and configuration files. Sourced by `cluster`; starts no process by itself.
# Uses: $run $state $bin $socket $netns $cgroup $node $address $inside.
# shellcheck shell=bash disable=SC2154

network() {
  ip netns add "$netns"
  "${inside[@]}" ip link set lo up
  # Not every kernel has dummy devices: the node's address sits on a bridge that nothing is attached to.
  "${inside[@]}" ip link add node0 type bridge
  "${inside[@]}" ip addr add "$address/32" dev node0
  "${inside[@]}" ip link set node0 up
  "${inside[@]}" ip route add default dev node0 # kubelet and kube-proxy look for a default route; nothing answers on it
  "${inside[@]}" sysctl -qw net.ipv4.ip_forward=1
}

# Every process of the cluster lives below one cgroup, so that `down` finds all of them without trusting any pid file.
cgroup_roots() { # prints the cgroup's directory in each hierarchy
  local controllers
  if [ -f /sys/fs/cgroup/cgroup.controllers ]; then echo "/sys/fs/cgroup/$cgroup"; return; fi
  for controllers in /sys/fs/cgroup/*/; do [ -f "${controllers}cgroup.procs" ] && echo "$controllers$cgroup"; done
}

cgroup_create() {
  local root
  for root in $(cgroup_roots); do
    mkdir -p "$root"
    if [ -f "$root/cpuset.cpus" ] && [ ! -f "$root/cgroup.controllers" ]; then # version 1 starts a cpuset empty
      cat "${root%/*}/cpuset.cpus" >"$root/cpuset.cpus"
      cat "${root%/*}/cpuset.mems" >"$root/cpuset.mems"
    fi
  done
  if [ -f "/sys/fs/cgroup/$cgroup/cgroup.controllers" ]; then
    sed 's/\</+/g' "/sys/fs/cgroup/$cgroup/cgroup.controllers" >"/sys/fs/cgroup/$cgroup/cgroup.subtree_control"
  fi
  daemons_find
  mkdir -p "$daemons"
}

daemons_find() { # where the cgroup of the daemons is
  daemons=/sys/fs/cgroup/pids/$cgroup/daemons
  [ ! -f "/sys/fs/cgroup/$cgroup/cgroup.controllers" ] || daemons=/sys/fs/cgroup/$cgroup/daemons
}

cgroup_processes() { # every process in the cluster's cgroups, once
  local root
  for root in $(cgroup_roots); do
    [ -d "$root" ] && find "$root" -name cgroup.procs -exec cat {} + 2>/dev/null
  done | sort -un
}

cgroup_remove() {
  local root
  for root in $(cgroup_roots); do
    [ -d "$root" ] && find "$root" -depth -type d -exec rmdir {} + 2>/dev/null
  done
  return 0
}

certificate() { # NAME SUBJECT [EXTENSIONS]
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "$2" -keyout "$run/pki/$1.key" -out "$run/pki/$1.csr" 2>/dev/null
  openssl x509 -req -in "$run/pki/$1.csr" -CA "$run/pki/ca.crt" -CAkey "$run/pki/ca.key" -set_serial "0x$(openssl rand -hex 8)" \
    -days 365 -out "$run/pki/$1.crt" -extfile <(printf '%s' "${3:-extendedKeyUsage=clientAuth}") 2>/dev/null
}

kubeconfig() { # USER
  cat >"$run/$1.kubeconfig" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: mixquant, cluster: {server: "https://$address:6443", certificate-authority: $run/pki/ca.crt}}]
users: [{name: $1, user: {client-certificate: $run/pki/$1.crt, client-key: $run/pki/$1.key}}]
contexts: [{name: mixquant, context: {cluster: mixquant, user: $1}}]
current-context: mixquant
YAML
}

credentials() {
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=mixquant-cluster \
    -keyout "$run/pki/ca.key" -out "$run/pki/ca.crt" 2>/dev/null
  certificate apiserver /CN=kube-apiserver "subjectAltName=DNS:kubernetes.default.svc,DNS:localhost,IP:127.0.0.1,IP:$address,IP:10.96.0.1"
  certificate kubelet-server "/CN=$node" "subjectAltName=DNS:$node,IP:$address"
  certificate apiserver-kubelet /O=system:masters/CN=apiserver-kubelet
  certificate admin /O=system:masters/CN=admin
  certificate kubelet "/O=system:nodes/CN=system:node:$node"
  local user
  for user in controller-manager:kube-controller-manager scheduler:kube-scheduler proxy:kube-proxy; do
    certificate "${user%%:*}" "/CN=system:${user##*:}"
  done
  for user in admin kubelet controller-manager scheduler proxy; do kubeconfig "$user"; done
  openssl ecparam -name prime256v1 -genkey -noout -out "$run/pki/sa.key" 2>/dev/null
  openssl ec -in "$run/pki/sa.key" -pubout -out "$run/pki/sa.pub" 2>/dev/null
}

configuration() {
  cat >"$run/containerd.toml" <<TOML
version = 2
root = "$run/containerd"
state = "$state"
[grpc]
  address = "$socket"
[plugins."io.containerd.internal.v1.opt"]
  path = "$run/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true # without CAP_SYS_RESOURCE runc cannot lower the score and dies
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$run/cni"
TOML
  cat >"$run/cni/10-bridge.conflist" <<JSON
{"cniVersion": "1.0.0", "name": "$netns", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$run/cni-data", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
  cat >"$run/audit.yaml" <<YAML
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
YAML
  cat >"$run/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $run/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $run/pki/kubelet-server.crt
tlsPrivateKeyFile: $run/pki/kubelet-server.key
cgroupDriver: cgroupfs
cgroupRoot: /$cgroup
failCgroupV1: false
enforceNodeAllocatable: []
failSwapOn: false
featureGates: {KubeletCrashLoopBackOffMax: true}
crashLoopBackOff: {maxContainerRestartPeriod: 1s} # tests kill programs on purpose, again and again
containerRuntimeEndpoint: unix://$socket
resolvConf: ""
podLogsDir: $run/pods
volumePluginDir: $run/volume-plugins
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100 # images were loaded by hand and cannot be pulled again
nodeStatusUpdateFrequency: 5s
YAML
}

pause_image() { # OUT.tar: an archive of one layer with one program, as `ctr images import` reads it
  local work layer config
  work=$(mktemp -d "$run/pause.XXXXXX")
  mkdir "$work/files" "$work/archive"
  cp "$bin/pause" "$work/files/pause"
  tar -C "$work/files" --owner=0 --group=0 -cf "$work/archive/layer.tar" .
  layer=$(sha256sum "$work/archive/layer.tar" | cut -d' ' -f1)
  printf '{"architecture":"amd64","os":"linux","config":{"Entrypoint":["/pause"],"User":"65535:65535"},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{}]}' \
    "$layer" >"$work/config.json"
  config=$(sha256sum "$work/config.json" | cut -d' ' -f1).json
  mv "$work/config.json" "$work/archive/$config"
  printf '[{"Config":"%s","RepoTags":["localhost/pause:1"],"Layers":["layer.tar"]}]' "$config" >"$work/archive/manifest.json"
  tar -C "$work/archive" -cf "$1" .
  rm -r "$work"
}
