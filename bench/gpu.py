"""The GPUs this process may use, and how busy they are, through NVML (nvidia-ml-py, optional).

NVML numbers the machine's GPUs by bus address and knows nothing of CUDA_VISIBLE_DEVICES, which CUDA
renumbers by (and, unless CUDA_DEVICE_ORDER says otherwise, fastest first). An index of one means
nothing to the other, so devices are looked up by UUID.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import Any

from bench.result import Gpu, GpuUse, Hardware, cpu_count, cpu_name

SAMPLE_SECONDS = 0.25


def load_nvml() -> ModuleType | None:
    """The initialised NVML module, or None where it or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def visible_gpus() -> list[Gpu]:
    """Every GPU CUDA shows this process, in CUDA's order."""
    import torch  # here: a client of some other machine's engine has no use for it

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(properties.name, f"GPU-{properties.uuid}", properties.total_memory))
    return gpus


def hardware(device: str) -> Hardware:
    """This machine; the GPUs only when `device` is cuda, because asking starts a CUDA context."""
    if device != "cuda":
        return Hardware(cpu_name(), cpu_count())
    nvml = load_nvml()
    driver = None if nvml is None else nvml.nvmlSystemGetDriverVersion()
    return Hardware(cpu_name(), cpu_count(), visible_gpus(), driver)


def installed_gpus(nvml: Any, environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """GPUs by way of NVML alone: starts no CUDA context beside a server that owns the memory.

    Those that CUDA_VISIBLE_DEVICES names. Its indices are CUDA's; they are taken for NVML's when
    the two must agree (CUDA_DEVICE_ORDER says so, or all GPUs are of one model). Where they may
    differ, all GPUs are listed: too many are better than the wrong ones.
    """
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        gpus.append(Gpu(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle), memory))
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    entries = [entry.strip() for entry in named.split(",") if entry.strip()]
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    same_order = by_bus or len({gpu.name for gpu in gpus}) <= 1
    if all(entry.isdecimal() for entry in entries):
        if not same_order:
            return gpus
        return [gpus[int(entry)] for entry in entries if int(entry) < len(gpus)]
    found = [gpu for entry in entries for gpu in gpus if gpu.uuid.startswith(entry)]
    return found or gpus


def device_handles(nvml: Any, uuids: list[str]) -> dict[str, Any]:
    """NVML's handle of each GPU; those it does not know (a MIG slice, say) are left out."""
    handles = {}
    for uuid in uuids:
        try:
            handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            continue
    return handles


class GpuMonitor:
    """Samples memory, utilisation and power of all visible GPUs while its `with` block runs."""

    def __init__(self, nvml: Any, uuids: list[str], interval: float = SAMPLE_SECONDS) -> None:
        self.nvml = nvml
        self.handles = {} if nvml is None else device_handles(nvml, uuids)
        self.interval = interval
        self.samples: dict[str, list[tuple[int, float, float]]] = {u: [] for u in self.handles}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def __enter__(self) -> GpuMonitor:
        if self.handles:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self.handles:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._sample()
            if self._stop.wait(self.interval):
                return

    def _sample(self) -> None:
        for uuid, handle in self.handles.items():
            try:
                memory = self.nvml.nvmlDeviceGetMemoryInfo(handle).used
                busy = self.nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                watts = self.nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            except self.nvml.NVMLError:  # not every board reports everything
                continue
            self.samples[uuid].append((int(memory), float(busy), watts))

    def use(self) -> list[GpuUse]:
        """Peak memory, mean utilisation and power of each GPU that could be sampled."""
        return [
            GpuUse(
                uuid=uuid,
                memory_peak_bytes=max(memory for memory, _, _ in samples),
                utilization_percent=sum(busy for _, busy, _ in samples) / len(samples),
                power_watts=sum(watts for _, _, watts in samples) / len(samples),
            )
            for uuid, samples in self.samples.items()
            if samples
        ]
