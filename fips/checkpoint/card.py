"""The model card: facts of the report, nothing else."""

from pathlib import Path

from fips.report import CompressionReport

_CARD = """\
---
library_name: transformers
base_model: {source}
tags:
- fips
---

# {name}

{source}, its MLP matrices compressed by [fips](https://arxiv.org/abs/2411.09816): a sparse projection per matrix, and a
dense basis per group of blocks where the table says `shared`.

```python
import fips
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
```

Without `import fips` loading fails with a size mismatch; it never gives a silently wrong model.

```text
{table}
```

Settings, calibration, versions and checksums are in `fips_report.json`.
"""


def write_card(folder: Path, report: CompressionReport) -> None:
    """Writes README.md of a compressed checkpoint."""
    source = Path(report.source).resolve().name if Path(report.source).exists() else report.source
    name = f"{source.split('/')[-1]}-fips"
    card = _CARD.format(source=source, name=name, table=report.table())
    (folder / "README.md").write_text(card, encoding="utf-8")
