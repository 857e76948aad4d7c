"""Snapshots of the metrics of a registry."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

Labels = Mapping[str, str]


class Readings:
    """A snapshot of all samples of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in registry.collect():
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels; 0 without any."""
        return sum(value for found, value in self._samples.get(name, []) if labels.items() <= found.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of a label, in the order of their first appearance."""
        sums: dict[str, float] = {}
        for found, value in self._samples.get(name, []):
            if labels.items() <= found.items():
                sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums
