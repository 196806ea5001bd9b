# make finetune   set up what is missing, build, and fine-tune a real Mixture-of-Experts on real text (minutes on two cores)
# make test       set up what is missing, build, and run all tests and checks
# make build | lint | fuzz | clean
BUILD ?= build
JOBS ?= $(shell nproc)
RECIPE ?= recipes/smollm2_upcycled.yaml
PYTHON_VENV = $(CURDIR)/.venv/bin/python

.PHONY: setup configure build finetune test lint fuzz clean

setup:
	@tools/setup.sh

$(BUILD)/build.ninja: | setup
	@cmake -G Ninja -S . -B $(BUILD) -DHEADRACE_PYTHON=$(PYTHON_VENV) >$(BUILD).cmake.log 2>&1 || { cat $(BUILD).cmake.log; exit 1; }
	@grep -- '^-- \(torch\|CUDA\|no nvcc\)' $(BUILD).cmake.log; rm $(BUILD).cmake.log

build: setup $(BUILD)/build.ninja
	@ninja -C $(BUILD) -j $(JOBS) --quiet

# The program alone: the default run needs no test built.
$(BUILD)/headrace: setup $(BUILD)/build.ninja
	@ninja -C $(BUILD) -j $(JOBS) --quiet headrace
.PHONY: $(BUILD)/headrace

models/SmolLM2-135M-Instruct/config.json: | setup
	@$(PYTHON_VENV) tools/make_smollm2.py models/SmolLM2-135M-Instruct

models/smollm2-135m-moe/config.json: models/SmolLM2-135M-Instruct/config.json | $(BUILD)/headrace
	@$(BUILD)/headrace upcycle models/SmolLM2-135M-Instruct models/smollm2-135m-moe --num-experts 4 --top-k 2

finetune: $(BUILD)/headrace models/smollm2-135m-moe/config.json
	@$(BUILD)/headrace finetune $(RECIPE) $(ARGS)

test: build lint
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=error

lint: setup
	@tools/lint.sh $(BUILD)

fuzz: build
	@ninja -C $(BUILD) fuzz

clean:
	rm -rf $(BUILD)
