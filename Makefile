# SPDX-License-Identifier: Apache-2.0
# `make help` lists what there is. Variables that may be set on the command line:
#   CLANG, STRIP, CLANG_FORMAT  other binaries than Debian's clang-19, llvm-strip-19, clang-format-19
#   FUZZTIME                    seconds for each fuzz target (make fuzz: 60, make test: 5)
#   LAB_FLAGS                   go test flags for packages that use the kernel, e.g. -race
#   KERNEL_TEST_PACKAGES        what make test-kernels runs on other kernels
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

export CLANG ?= clang-19
export STRIP ?= llvm-strip-19
export CLANG_FORMAT ?= clang-format-19
# bpf2go's own names for the same two.
export BPF2GO_CC := $(CLANG)
export BPF2GO_STRIP := $(STRIP)

GO ?= go
MODULE := github.com/metaroce/metaroce
# Packages whose tests load BPF programs or make namespaces: one at a time, as root.
LAB_PATTERN := ^$(MODULE)/(bpf|loader|transport/xdp|fabric/lab|e2e|cmd|bench)(/|$$)
LAB_TIMEOUT ?= 10m
LAB_FLAGS ?= -shuffle=on
UNIT_FLAGS ?= -race -shuffle=on
UNIT_TIMEOUT ?= 4m

unit_packages = $$($(GO) list ./... | grep -vE '$(LAB_PATTERN)')
lab_packages = $$($(GO) list ./... | grep -E '$(LAB_PATTERN)')
c_sources = $$(git ls-files -co --exclude-standard -- 'bpf/*.c' 'bpf/*.h' 'fabric/*.c' 'fabric/*.h')

.PHONY: help
help: ## What can be made (this list)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Two hosts, four planes, loss, TCP beside it: the whole story in 90 s (root)
	@scripts/deps.sh run
	@$(MAKE) --no-print-directory build
	@if [[ $$(id -u) != 0 ]]; then echo "demo: it makes namespaces and loads XDP programs: run it as root, e.g. sudo bin/metaroce demo" >&2; exit 1; fi
	bin/metaroce demo $(DEMO_FLAGS)

.PHONY: build
build: ## bin/metaroce, a static binary; needs nothing but Go
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/metaroce ./cmd/metaroce

.PHONY: test
test: ## Everything that must hold, at most 25 minutes (root); installs what is missing
	@scripts/deps.sh run build test
	@scripts/steps.sh lint check-arm64 check-generated test-unit test-native test-lab fuzz-short

.PHONY: lint
lint: ## gofumpt, go vet, staticcheck, clang-format, shellcheck
	@out=$$($(GO) tool gofumpt -l $$(git ls-files -co --exclude-standard -- '*.go' | grep -v '_bpfe[lb]\.go$$')) || exit 1; \
		if [[ -n $$out ]]; then echo "gofumpt: not formatted (make fmt):"; echo "$$out"; exit 1; fi
	$(CLANG_FORMAT) --dry-run -Werror $(c_sources)
	shellcheck -x $$(git ls-files -co --exclude-standard -- '*.sh') .ci/run
	$(GO) vet ./...
	$(GO) tool staticcheck ./...

.PHONY: check-arm64
check-arm64: ## Everything, tests too, compiles and passes go vet for arm64
	CGO_ENABLED=0 GOARCH=arm64 $(GO) build ./...
	CGO_ENABLED=0 GOARCH=arm64 $(GO) vet ./...

.PHONY: fmt
fmt: ## Format Go and C in place
	$(GO) tool gofumpt -w $$(git ls-files -co --exclude-standard -- '*.go' | grep -v '_bpfe[lb]\.go$$')
	$(CLANG_FORMAT) -i $(c_sources)

.PHONY: generate
generate: ## BPF objects, Go bindings and vectors anew (needs clang-19)
	$(GO) generate ./...
	python3 scripts/make_vectors.py

.PHONY: check-generated
check-generated: ## Regenerate: nothing may differ from what is committed
	@scripts/check-generated.sh

.PHONY: test-unit
test-unit: ## Go tests that need no privilege, with the race detector
	$(GO) test $(UNIT_FLAGS) -timeout $(UNIT_TIMEOUT) $(unit_packages)

.PHONY: test-native
test-native: ## The decisions of bpf/ compiled natively, under ASan and UBSan
	@scripts/native.sh test

.PHONY: test-lab
test-lab: ## BPF programs and end-to-end tests in namespaces (root), one package at a time
	$(GO) test $(LAB_FLAGS) -p 1 -timeout $(LAB_TIMEOUT) $(lab_packages)

.PHONY: test-race
test-race: ## Every Go test with the race detector, those of test-lab too (slow)
	$(GO) test -race -shuffle=on -timeout $(UNIT_TIMEOUT) $(unit_packages)
	$(GO) test -race -shuffle=on -p 1 -timeout 20m $(lab_packages)

.PHONY: soak
soak: ## The end-to-end tests with those that take too long for make test (root)
	METAROCE_SOAK=1 $(GO) test $(LAB_FLAGS) -count=1 -timeout 20m ./e2e

.PHONY: fuzz
fuzz: ## Fuzz every parser, Go and C, FUZZTIME seconds each (60)
	@scripts/fuzz.sh $(or $(FUZZTIME),60)
	@scripts/native.sh fuzz $(or $(FUZZTIME),60)

.PHONY: fuzz-short
fuzz-short:
	@scripts/fuzz.sh $(or $(FUZZTIME),5)
	@scripts/native.sh fuzz $(or $(FUZZTIME),5)

.PHONY: test-kernels
test-kernels: ## The short end-to-end set on Debian's 6.1 and 6.12 kernels in QEMU
	@scripts/deps.sh kernels
	@scripts/test-kernels.sh

.PHONY: bench
bench: ## Every figure of docs/performance.md in one run (root)
	@scripts/deps.sh run
	@$(MAKE) --no-print-directory build
	bin/metaroce bench $(BENCH_FLAGS)

.PHONY: clean
clean: ## Remove what was built here; kernels in the cache stay
	rm -rf bin build
	$(GO) clean -testcache
