"""One model cut over several ranks, as a runner like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shared.config import EngineConfig
from shared.engine.batch import Batch
from shared.engine.model_runner import ModelRunner, StepHandle
from shared.engine.resolve import resolve_device
from shared.engine.result import StepResult
from shared.models.config import ModelConfig
from shared.models.files import ModelFiles
from shared.models.registry import MODELS

from .worker_group import WorkerGroup


class TensorParallelHandle:
    """A step in flight on all ranks."""

    def __init__(self, handle: StepHandle, group: WorkerGroup) -> None:
        self.used_graph = handle.used_graph
        self._handle = handle
        self._group = group

    def result(self) -> StepResult:
        try:
            return self._handle.result()
        except Exception as error:
            self._group.lose(error)


class TensorParallelRunner:
    """Implements shared.engine.result.Runner: a ModelRunner as rank 0, which publishes each step to
    the workers of a group; theirs follow it.

    An error in a step leaves the ranks out of step with each other, and no later one could be
    right: the group ends, and where this process can go on, RunnerLost is raised.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path | None,
        decodes_in_front: bool = False,
        owns_group: bool = False,
    ) -> None:
        """`owns_group`: it is closed with this runner. Otherwise as ModelRunner."""
        self._group = group
        self._owns_group = owns_group
        self._is_closed = False
        try:
            group.make(config, model_config, directory, decodes_in_front)
            self._first = ModelRunner(
                config, model_config, directory, decodes_in_front, group.tp, group.publish
            )
            group.wait_until_made()
        except Exception as error:
            group.fail(error)
        self.limits = self._first.limits

    def submit(self, batch: Batch) -> TensorParallelHandle:
        """Raises RunnerLost if any rank cannot go on."""
        self._group.check()
        try:
            return TensorParallelHandle(self._first.submit(batch), self._group)
        except Exception as error:
            self._group.lose(error)

    def describe(self) -> dict[str, object]:
        return self._first.describe()

    def close(self) -> None:
        """Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._first.close()
        if self._owns_group:
            self._group.close()
        elif self._group.is_alive:
            self._group.drop()


def start_group(
    config: EngineConfig, decodes_in_front: bool, end: Callable[[Exception], None]
) -> TensorParallelRunner:
    """The runner of a config, over a group of its own. `end` is WorkerGroup's. Raises ValueError
    naming the sizes, before a process is started, if the model cannot be cut like that."""
    size = config.tensor_parallel_size
    files = ModelFiles.find(config.model, config.load_format)
    MODELS[files.config.architecture].check_parallel_size(files.config, size)
    group = WorkerGroup(size, resolve_device(config).type, end)
    try:
        return TensorParallelRunner(
            group, config, files.config, files.weights, decodes_in_front, owns_group=True
        )
    except BaseException:
        group.close()
        raise
