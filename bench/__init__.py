"""Measuring the stages: frozen workloads, drivers, the physical floor, results and comparisons."""
