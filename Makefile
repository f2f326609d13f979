# Everything runs in .venv, which is made once from constraints.txt; only Python >= 3.10 is needed beforehand.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo demo-vision test lint docs clean

demo: $(STAMP)
	$(VENV)/bin/python benchmarks/assets.py assets smollm2 text
	$(VENV)/bin/python examples/demo.py --assets assets --out demo-out

demo-vision: $(STAMP)
	$(VENV)/bin/python benchmarks/assets.py assets fmnist
	$(VENV)/bin/python examples/demo_vision.py --assets assets --out demo-vision-out

test: $(STAMP)
	$(VENV)/bin/python benchmarks/assets.py assets smollm2 text
	FIPS_REQUIRE_ASSETS=1 $(VENV)/bin/python -m pytest

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

docs: $(STAMP)
	$(VENV)/bin/python docs/generate_cli.py

clean:
	rm -rf $(VENV) demo-out demo-vision-out build dist .pytest_cache .ruff_cache .mypy_cache

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("fips needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	touch $@
