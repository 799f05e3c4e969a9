# make demo   install if needed, compare the reference encoders on the embedded images, leave a report
# make test   install if needed, run the gate (format, lint, types, tests); make fast: the unit tier alone; make test-all: all of it
# make docs   the site, from docs/ and the docstrings: site/index.html
# make wheel  the package as files, dist/; scripts/try_wheel.py installs it into a new environment and tries it
# make zoo    train the encoders of drawn images again (hours; what is interrupted goes on); make zoo CIFAR10=FOLDER: those of CIFAR-10
PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/ready

.PHONY: demo test test-all fast docs wheel zoo install bench clean

demo: $(READY)
	$(VENV)/bin/sightline demo -o runs/demo

test: $(READY)
	scripts/check

test-all: $(READY)
	scripts/check --all

fast: $(READY)
	scripts/check --fast

docs: $(READY)
	$(VENV)/bin/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(VENV)/bin/mkdocs serve"

wheel: $(READY)
	$(VENV)/bin/python -m build --no-isolation

zoo: $(READY)
	$(VENV)/bin/python scripts/zoo.py $(if $(CIFAR10),all --cifar10 $(CIFAR10))

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sightline needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Against the bare forward pass and the peers, in turn; nothing else should run on the machine meanwhile.
bench: $(READY)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(VENV)/bin/python benchmarks/battery.py
	$(VENV)/bin/python benchmarks/cka.py
	$(VENV)/bin/python benchmarks/knn.py
	$(VENV)/bin/python benchmarks/shapes.py
	$(VENV)/bin/python benchmarks/augment.py
	$(VENV)/bin/python benchmarks/pretrain.py

clean:
	rm -rf $(VENV) runs site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage* *.egg-info
