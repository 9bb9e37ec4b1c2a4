# The commands of this repository; `make` lists them. CLUSTER=current uses the current kubectl context instead of a cluster of our own.
SHELL := /bin/bash
.DEFAULT_GOAL := help
export CLUSTER ?= local
cluster := e2e/cluster/cluster

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

.PHONY: prerequisites
prerequisites: ## Install what is missing on Debian 12; elsewhere name it
	@scripts/prerequisites

.PHONY: build
build: ## Release binaries in target/release
	cargo build --release --workspace --bins

.PHONY: demo
demo: prerequisites ## Watch a real cluster calibrate, roll out, refuse and roll back; leaves it running to look around
	@scripts/demo

.PHONY: clean-demo
clean-demo: ## Remove everything that the demo made
	@scripts/demo clean

.PHONY: check
check: ## Format, lints, unit tests, properties, simulator, chart: no cluster needed
	@scripts/test check

.PHONY: test
test: prerequisites ## Everything: check, a real apiserver, the scenarios on a real cluster
	@scripts/test all

.PHONY: e2e
e2e: prerequisites ## Only the scenarios on a real cluster
	@scripts/test cluster

.PHONY: e2e-repeat
e2e-repeat: prerequisites ## The scenarios five times in a row, none rerun
	@scripts/test cluster 5

.PHONY: images
images: build ## Container images in target/images
	@images/build

.PHONY: cluster-up
cluster-up: prerequisites ## Start the cluster
	@$(cluster) up

.PHONY: cluster-down
cluster-down: ## Stop the cluster and remove everything it made
	@$(cluster) down

.PHONY: rest
rest: prerequisites ## The operator at rest, watched for ten minutes
	@MIXQUANT_REST_SECONDS=600 SCENARIOS=rest scripts/test cluster

.PHONY: gateway
gateway: prerequisites ## Exact weights by a real Gateway (Contour and Envoy): promoted and rolled back under load
	@MIXQUANT_GATEWAY_API=true SCENARIOS="gateway used_rights" scripts/test cluster

.PHONY: soak
soak: prerequisites ## One service under load through 10 promotions and 10 rollbacks
	@MIXQUANT_SOAK_ROUNDS=10 SCENARIOS=soak scripts/test cluster

.PHONY: rollouts
rollouts: prerequisites ## The same, 100 times: two services at a time, each under its own load (about an hour)
	@MIXQUANT_SOAK_ROUNDS=50 MIXQUANT_SOAK_SERVICES=2 SCENARIOS=soak scripts/test cluster

.PHONY: traces
traces: prerequisites ## Record the time per token of healthy pods, quiet and disturbed, for the test of false rollbacks
	@MIXQUANT_TRACES=$(CURDIR)/operator/tests/traces SCENARIOS=traces scripts/test cluster

.PHONY: many
many: prerequisites ## 1,000 services under one operator, on an apiserver alone
	e2e/cluster/build kubernetes
	cargo build --release -p mixquant-operator --bins
	MIXQUANT_REQUIRE_CLUSTER=1 MIXQUANT_SERVICES=1000 cargo test --release -p mixquant-e2e --test many -- --nocapture

.PHONY: simulate
simulate: ## The operator's core in 100,000 seeded lives of a simulated cluster
	MIXQUANT_SEEDS=100000 cargo test --release -p mixquant-operator --test simulate -- --nocapture

.PHONY: sieve
sieve: prerequisites ## The operator killed at every write of a service's life, three times each, against a real apiserver
	@e2e/cluster/build kubernetes
	cargo build -q -p mixquant-operator --bins
	MIXQUANT_SIEVE=all MIXQUANT_REQUIRE_CLUSTER=1 cargo test -q -p mixquant-e2e --test sieve -- --nocapture

.PHONY: test-long
test-long: ## The long forms of the engine's tests: whole reference files, slow clients
	cargo test --release -p mixquant-engine -- --ignored

.PHONY: deny
deny: ## Licences, sources and advisories of all dependencies (needs cargo-deny)
	cargo deny check

.PHONY: check-generated
check-generated: ## The committed CRD is what the types say; UPDATE_EXPECT=1 rewrites it
	cargo test -q -p mixquant-crds --features kube --test generated

.PHONY: golden
golden: ## Remake the engine's goldens with torch and transformers from PyPI; not for CI
	@scripts/golden

.PHONY: fuzz
fuzz: ## cargo-fuzz on everything that the engine loads, FUZZ_SECONDS (1800) a target; needs a nightly toolchain
	@scripts/fuzz

.PHONY: bench
bench: ## Prefill and decode by scheme beside this machine's roofs and beside other programs, memory, time to load (docs/benchmarks.md)
	@scripts/bench

.PHONY: quality
quality: ## The quality table of docs/quantisation.md: every scheme and quantiser on the shipped model
	@scripts/quality

.PHONY: export-check
export-check: ## Read exported checkpoints back with packages from PyPI and compare every weight; not for CI
	@scripts/export-check
