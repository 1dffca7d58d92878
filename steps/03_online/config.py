"""Which engine to serve, and the options of all engines that there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pydantic

from shared.config import EngineConfig
from steps import engines, load

if TYPE_CHECKING:
    from shared.engine.protocol import Engine

# The one that measures best online: bench/results/online_engines_h200.json.
DEFAULT_ENGINE = "05_async_scheduling"


class OnlineConfig(EngineConfig):
    """An engine by its stage's name, and its options. An option that only other engines have is
    refused."""

    own_fields: ClassVar[frozenset[str]] = frozenset({"engine", "step_timeout"})
    """What the front end alone has to know."""

    engine: str = DEFAULT_ENGINE
    """The stage whose engine runs behind the front end."""
    step_timeout: Annotated[float, pydantic.Field(gt=0)] | None = None
    """Seconds that a step may take: an engine that has requests and says nothing for so long hangs,
    and is ended. Default: 60, on a CPU 600. inf: any."""

    @pydantic.model_validator(mode="after")
    def _check_engine(self) -> OnlineConfig:
        if self.engine not in engines():
            raise ValueError(
                f"engine={self.engine!r} is no engine; there are: {', '.join(engines())}"
            )
        foreign = self._options().keys() - load(self.engine).Config.model_fields.keys()
        if foreign:
            raise ValueError(f"engine {self.engine} has no option {', '.join(sorted(foreign))}")
        return self

    def replace(self, **changes: Any) -> OnlineConfig:
        # Only what was given: another engine may lack options that still have their defaults.
        return type(self)(**{**self.model_dump(include=self.model_fields_set), **changes})

    @property
    def wrapped(self) -> EngineConfig:
        """The engine's own Config."""
        config: EngineConfig = load(self.engine).Config(**self._options())
        return config

    def _options(self) -> dict[str, Any]:
        """What was given for the engine itself."""
        return self.model_dump(include=self.model_fields_set - self.own_fields)


def _config_classes() -> list[type[Any]]:
    """Of all engines, the default one first: where two differ in a default, its own is shown."""
    names = sorted(engines(), key=lambda name: name != DEFAULT_ENGINE)
    classes = dict.fromkeys(load(name).Config for name in names)
    return [c for c in classes if not any(c is not d and issubclass(d, c) for d in classes)]


# Made, not written: an engine that is added brings its options and their checks with it.
Config: type[OnlineConfig] = pydantic.create_model(
    "Config", __base__=(OnlineConfig, *_config_classes()), __doc__=OnlineConfig.__doc__
)


# Ends the engine's process at once, saying why: for faults that another thread than the engine's
# notices. It returns only where the engine is a thread of a process that goes on.
End = Callable[[Exception], None]
# From given fields of a Config to the engine.
Build = Callable[[dict[str, Any], End], "Engine"]


def build_engine(options: dict[str, Any], end: End) -> Engine:
    """The engine that the options name. Raises ValueError or OSError."""
    config = Config(**options)
    engine: Engine = load(config.engine).Engine(config.wrapped)
    return engine
