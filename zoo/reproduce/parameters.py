"""Table 2 of Gomez et al. 2017: parameters of the networks."""

from __future__ import annotations

from zoo.reproduce.networks import build, count_parameters
from zoo.reproduce.schema import Figure, Published, Section

# Millions of parameters, all printed: with 10 and with 100 classes, or with 1000.
PUBLISHED = {
    "resnet32_cifar": (0.46, 0.47), "revnet38_cifar": (0.46, 0.48), "resnet110_cifar": (1.73, 1.73),
    "revnet110_cifar": (1.73, 1.74), "resnet164_cifar": (1.70, 1.73), "revnet164_cifar": (1.75, 1.79),
    "resnet101_preact": (44.5,), "revnet104": (45.2,),
}  # fmt: skip
CLASSES = {1: (1000,), 2: (10, 100)}
REVNET104 = (
    "RevNet-104: neither the paper's text nor its public code explains 45.2 M; the code's layers have the 45,428,072 "
    "counted here, and a last stage 826 wide instead of 832 would have 45.22 M"
)


def measure_parameters() -> Section:
    """Return the counts beside the printed ones, equal if they are when rounded as the paper rounds."""
    section = Section("table2", "Table 2: parameters", "Trainable parameters, counted.", notes=[REVNET104])
    for name, millions in PUBLISHED.items():
        for classes, published in zip(CLASSES[len(millions)], millions, strict=True):
            count = count_parameters(build(name, "meta", classes=classes))
            section.figures.append(_figure(f"{name}, {classes} classes", published, count))
    return section


def _figure(what: str, published: float, count: int) -> Figure:
    digits = 2 if published < 10 else 1
    equal = round(count / 1e6, digits) == published
    difference = 100 * (count / 1e6 / published - 1)
    verdict = "equal as printed" if equal else f"off by {difference:+.1f} %"
    printed = Published(f"{published:.{digits}f} M", "printed", "Table 2")
    return Figure(what, printed, count, "parameters", verdict)
