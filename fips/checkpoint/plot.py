"""A picture of the groups: error and sparsity. Made when matplotlib is installed (the extra `plot`)."""

from pathlib import Path
from typing import Any

PLOT_NAME = "fips_groups.png"


def draw_groups(folder: Path, groups: list[dict[str, Any]]) -> bool:
    """Draws `fips_groups.png`: every group's error, before and after, and the share of zeros of its projections.

    Args:
        folder: Where to write.
        groups: The groups of a report, as JSON values.

    Returns:
        Whether it was drawn; False without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return False
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the same picture whatever the user's style is
        figure = Figure(figsize=(8, 5), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        places = range(len(groups))
        for shift, key, label in ((-0.2, "error_before", "truncated SVD"), (0.2, "error_after", "stored")):
            upper.bar([x + shift for x in places], [mean(g[key]) for g in groups], 0.4, label=label)
        upper.set_ylabel("relative squared error")
        upper.legend()
        lower.bar(places, [mean(g["sparsity"]) for g in groups], 0.6, color="gray")
        lower.set_ylabel("share of zeros")
        lower.set_ylim(0, 1)
        labels = [f"{g['first']}-{g['last']}" for g in groups]
        lower.set_xticks(places, labels, rotation=90 if len(groups) > 16 else 0)
        lower.set_xlabel("blocks")
        figure.savefig(folder / PLOT_NAME, dpi=100, metadata={"Software": None})
    return True


def mean(values: dict[str, float]) -> float:
    """Mean of a group's values, one per matrix or output."""
    return sum(values.values()) / max(len(values), 1)
