# A Gateway in the one-node cluster: Contour reads routes, a real Envoy serves them on port 8080 of the node. Sourced by `cluster`.
# Uses: $here $home $bin $run $address start wait_for kubectl. `cluster down` ends both with everything else.
# shellcheck shell=bash disable=SC2154

gateway_is_programmed() {
  kubectl -n mixquant-gateway get gateway edge -o 'jsonpath={.status.conditions[?(@.type=="Programmed")].status}' 2>/dev/null | grep -q True
}

envoy_is_live() { # it has what its xDS server says
  printf 'GET /ready HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n' | socat - "UNIX-CONNECT:$run/envoy.sock" 2>/dev/null | grep -q LIVE
}

gateway() {
  running
  "$here/build" gateway
  lock
  if [ -f "$run/gateway-ready" ]; then echo "the gateway is up: $address:8080"; return; fi
  daemons_find
  kubectl apply --server-side -f "$home/gateway/gateway-api.yaml" -f "$home/gateway/contour.yaml" >/dev/null
  local kind
  for kind in gatewayclasses gateways httproutes; do
    kubectl wait --for=condition=Established --timeout=30s "customresourcedefinition/$kind.gateway.networking.k8s.io" >/dev/null
  done
  kubectl apply -f - >/dev/null <<YAML
apiVersion: v1
kind: Namespace
metadata: {name: mixquant-gateway}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {name: contour}
spec: {controllerName: projectcontour.io/gateway-controller}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: edge, namespace: mixquant-gateway}
spec:
  gatewayClassName: contour
  listeners: [{name: http, protocol: HTTP, port: 80, allowedRoutes: {namespaces: {from: All}}}]
YAML
  echo 'gateway: {gatewayRef: {name: edge, namespace: mixquant-gateway}}' >"$run/contour.yaml"
  start contour "$bin/contour" serve --kubeconfig=admin.kubeconfig --config-path=contour.yaml --insecure --disable-leader-election \
    --xds-address=127.0.0.1 --xds-port=8001 --envoy-service-http-port=8080
  "$bin/contour" bootstrap "$run/envoy.json" --xds-address=127.0.0.1 --xds-port=8001 --admin-address="$run/envoy.sock"
  start envoy "$bin/envoy" -c envoy.json --service-cluster mixquant --service-node "$node" --concurrency 1
  wait_for 60 "the gateway" contour gateway_is_programmed
  wait_for 30 Envoy envoy envoy_is_live
  touch "$run/gateway-ready"
  echo "the gateway is up: $address:8080"
}
